"""``spile plan``: read the model's config and the data, count the tokens of some samples, and derive sizes."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spile.compute.length import Room, automatic_length
from spile.compute.producer import check_answer_positions, with_positions
from spile.compute.sizes import host_memory
from spile.data.samples import MAX_INDEX, SampleStream, open_stream
from spile.data.sources import estimate_rows
from spile.data.tokens import Tokenizer
from spile.models import model_files
from spile.models.architecture import ModelConfig, flops_per_token, parameter_count
from spile.models.decoder import head_needed, layers_needed
from spile.objects import is_remote
from spile.planning.cost import Estimate, Lengths, Rates, Volume, estimate
from spile.planning.machines import Machine, Price, Prices, gpus_here, processors_here
from spile.planning.tpu_compiler import Program
from spile.reading.dataset import stored_tokens
from spile.run.resolve import prompt_tokenizer
from spile.spec.amounts import counted, duration, size
from spile.spec.identity import RunIdentity
from spile.spec.lengths import PromptLengths
from spile.spec.positions import ALL
from spile.spec.ranges import Ranges
from spile.spec.run import AUTO, RunSpec
from spile.spec.sample import Sample, prompt_length
from spile.spec.taps import Tap, row_bytes, tap_rows


@dataclass(frozen=True, repr=False)
class Forecast:
    """The sizes of a run, independent of a machine."""

    spec: RunSpec
    model: str
    config: ModelConfig
    taps: tuple[Tap, ...]
    location: str
    lengths: Lengths
    skipped: int
    """Counted samples without rows."""
    bytes_per_token: int
    """What one token takes in a shard."""
    kind: str = "text"
    """What a row of the dataset is."""
    estimate: Estimate | None = None
    """Hours and dollars on the machine that was asked for."""

    def __repr__(self) -> str:
        volume, taps = self.volume, counted(len(self.taps), "tap")
        samples, tokens = counted(volume.samples, "sample"), counted(volume.tokens, "token")
        text = f"{'about ' if self.lengths.head else ''}{samples}, {tokens}, {size(volume.bytes)} at {taps}"
        if self.estimate is not None:
            price = self.estimate.dollars
            text += f"; {duration(self.estimate.hours * 3600)} on {self.estimate.machine.name}"
            if price.on_demand:
                text += f", ${price.on_demand:,.2f} on demand, ${price.preemptible:,.2f} preemptible"
        return f"<plan for {self.model}: {text}>"

    @property
    def volume(self) -> Volume:
        """What the run will store."""
        lengths, shard_bytes = self.lengths, self.spec.shard_size_gb * 1e9
        rows = None if self.spec.positions == ALL else lengths.rows
        return Volume(lengths.samples, lengths.tokens, self.bytes_per_token, shard_bytes, rows)

    @property
    def samples(self) -> int:
        return self.volume.samples

    @property
    def tokens(self) -> int:
        return self.volume.tokens

    @property
    def bytes(self) -> int:
        """The size of the stored activations."""
        return self.volume.bytes

    @property
    def hours(self) -> float | None:
        """Hours on the machine that was asked for; None without one."""
        return None if self.estimate is None else self.estimate.hours

    @property
    def dollars(self) -> Price | None:
        """The price on demand and preemptible of the machine that was asked for; None without one."""
        return None if self.estimate is None else self.estimate.dollars

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token at the mean length, up to the last tapped layer."""
        mean = max(1, round(self.lengths.mean))
        last, head = layers_needed(self.taps, self.config.n_layers) - 1, head_needed(self.taps)
        return flops_per_token(self.config, mean, last, head=head)

    @property
    def limit(self) -> PromptLengths | None:
        """What the limit of length does to the counted prompts; None for packed sequences."""
        data, exact = self.spec.data, self.lengths.exact
        skips = data.long_policy(self.kind) == "skip"
        return PromptLengths(self.lengths.prompts, data.longest, skips, exact) if self.lengths.prompts else None

    def on(self, machine: Machine, prices: Prices, *, rates: Rates, workers: int) -> Estimate:
        """Estimate the run on several machines of one type."""
        return estimate(
            self.volume,
            machine,
            flops_per_token=self.flops_per_token,
            rates=rates,
            workers=workers,
            storage_gb_month=prices.storage_gb_month,
        )

    def program(self, machine: Machine) -> Program:
        """Return the program for the TPU compiler: that of the longest samples, which takes the most memory."""
        dtype = "bfloat16" if self.spec.dtype == "auto" else self.spec.dtype
        longest = min(self.spec.data.longest, max(self.lengths.counted, default=1))
        length = -(-longest // 128) * 128
        return Program(self.config, self.taps, machine.name, length, dtype, self.spec.store_dtype, self.spec.mesh_shape)

    def record(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        volume = self.volume
        return {
            "model": self.model,
            "architecture": self.config.architecture,
            "parameters": parameter_count(self.config),
            "taps": [str(tap) for tap in self.taps],
            "data": self.location,
            "samples": volume.samples,
            "samples_counted": len(self.lengths.counted),
            "samples_estimated_from": self.lengths.head,
            "samples_skipped_of_counted": self.skipped,
            "tokens": volume.tokens,
            "tokens_standard_error": self.lengths.error,
            "tokens_per_sample": self.lengths.mean,
            "max_seq_length": self.spec.data.longest,
            "length": None if self.limit is None else self.limit.record(),
            "rows": volume.tokens if volume.rows is None else volume.rows,
            "bytes_per_token": volume.bytes_per_token,
            "bytes": volume.bytes,
            "shards": volume.shards,
            "flops_per_token": self.flops_per_token,
        }


def plan(
    spec: RunSpec, count: int = 1000, *, machines: Iterable[Machine] = (), existing: RunIdentity | None = None
) -> Forecast:
    """Forecast a run: tokenize ``count`` samples and count their tokens.

    They are evenly spread over a small dataset, and over the beginning of a large one, which is not read to its end.

    Args:
        spec: The run.
        count: The number of samples to tokenize.
        machines: The machines of the run, whose memory limits the length of samples; by default this one.
        existing: The run that is continued, if there is one.

    """
    files = model_files.find(spec.model, spec.revision, weights=False)
    taps = spec.selected_taps(files.config.n_layers)
    spec = replace(spec, data=stored_tokens(spec.data))
    tokenizer = prompt_tokenizer(files, spec.data.prompt, optional=True)
    whole = spec.data.location.endswith(".json")  # one document, which is read as a whole in any case
    stream = open_stream(spec.data, tokenizer, files.config.vocab_size, read_all=whole)
    check_answer_positions(spec, stream.prompt.kind)
    token_bytes = row_bytes(tap_rows(tap, files.config.sizes(tap.layer), spec.store_dtype) for tap in taps)
    spec = _with_length(spec, files.config, taps, token_bytes, machines, existing)
    stream = stream.with_spec(spec.data)
    if stream.identity.head is None:
        lengths = _count(stream, spec, count, stream.identity.samples)
    else:
        lengths = _estimate(spec, stream, tokenizer, count)
    limit = spec.data.token_limit(token_bytes)
    if limit is not None and lengths.rows > limit:
        lengths = lengths.first(max(1, math.ceil(limit * lengths.samples / lengths.rows)))
    skipped = sum(not length for length in lengths.counted)
    kind = stream.prompt.kind
    return Forecast(spec, files.name, files.config, taps, stream.identity.data, lengths, skipped, token_bytes, kind)


def _with_length(
    spec: RunSpec,
    config: ModelConfig,
    taps: Sequence[Tap],
    token_bytes: int,
    machines: Iterable[Machine],
    existing: RunIdentity | None,
) -> RunSpec:
    """Return the spec with its automatic limit of length: that of the existing run, else of the smallest machine."""
    data = spec.data
    if data.max_seq_length != AUTO:
        return spec
    if existing is not None:
        return replace(spec, data=data.of_run(existing.max_seq_length, existing.long))
    rooms = [Room(machine.hbm_per_device, machine.devices) for machine in machines] or [_room_here()]
    length = automatic_length(spec, config, taps, token_bytes, rooms, config.learned_positions)
    return replace(spec, data=replace(data, resolved_length=length))


def _room_here() -> Room:
    """Return the room on this machine, without initialising its devices."""
    gpu = gpus_here(tuple(_gpu_names()))
    return Room(host_memory(), host=True) if gpu is None else Room(gpu.hbm_per_device, gpu.devices)


def _count(stream: SampleStream, spec: RunSpec, count: int, samples: int | None) -> Lengths:
    """Return the lengths of ``count`` of the first ``samples`` samples; None counts all."""
    most = spec.data.sample_limit
    total = samples if most is None or samples is None else min(most, samples)
    done = Ranges() if total is None else _all_except(total, count)
    items = list(with_positions(stream.read(done), spec))
    prompts = [length for item in items if (length := prompt_length(item)) is not None]
    found = [(len(item), item.rows) if isinstance(item, Sample) else (0, 0) for item in items]
    samples = len(found) if total is None else total
    rows = [rows for _, rows in found]
    return Lengths([tokens for tokens, _ in found], samples, counted_rows=rows, prompts=prompts)


def _estimate(spec: RunSpec, stream: SampleStream, tokenizer: Tokenizer, count: int) -> Lengths:
    """Return the lengths of samples at the beginning of a large dataset, and an estimate of the number of samples."""
    head, total, limit = stream.identity.head or 0, estimate_rows(spec.data), spec.data.sample_limit
    total = head if total is None else max(head, total)
    if spec.data.prompt.pack:  # documents are counted one by one, and then cut into full sequences
        prompt = replace(stream.prompt, pack=False)
        single = replace(
            spec,
            data=replace(
                spec.data, prompt=prompt, max_seq_length=1 << 20, max_samples=None, max_samples_per_stream=None
            ),
        )
        documents = open_stream(single.data, tokenizer, read_all=False)
        tokens = replace(_count(documents, single, count, head), samples=total, head=head).tokens
        length = spec.data.longest
        most = min(MAX_INDEX if limit is None else limit, max(1, tokens // length))
        return Lengths([length], most, head)
    each = stream.prompt.predictions_per_task
    lengths = _count(stream, spec, count, head * each)
    if limit is not None and limit <= head * each:
        return lengths
    return replace(lengths, samples=min(total * each, MAX_INDEX if limit is None else limit), head=head)


def _all_except(total: int, count: int) -> Ranges:
    """Return all samples except ``count`` of the first ``total``, evenly spread."""
    kept: Sequence[int] = range(total) if count >= total else [place * total // count for place in range(count)]
    return Ranges([(0, MAX_INDEX)]) - Ranges.of(kept)


# -- this machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThisMachine:
    """What this machine has: processors, memory, space in the output folder and GPUs."""

    cores: int
    memory: int
    disk: int | None
    """Free bytes; None if the output is a bucket."""
    gpus: tuple[str, ...]
    machine: Machine
    """Its GPUs if all of them are known, otherwise its processors."""

    def record(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {"cores": self.cores, "memory": self.memory, "disk": self.disk, "gpus": self.gpus}

    def line(self) -> str:
        """Return the facts as one line of text."""
        gpus = ", ".join(f"{number} × {name}" for name, number in Counter(self.gpus).items()) or "no GPU"
        disk = "" if self.disk is None else f", {size(self.disk)} free on the disk"
        return f"{counted(self.cores, 'CPU core')}, {size(self.memory)} of memory{disk}, {gpus}"


def this_machine(output: str) -> ThisMachine:
    """Look at this machine, in less than a second and without initialising JAX."""
    cores, memory = len(os.sched_getaffinity(0)), host_memory()
    place = Path(output).expanduser().absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    disk = None if is_remote(output) else shutil.disk_usage(existing).free
    gpus = tuple(_gpu_names())
    machine = gpus_here(gpus)
    if machine is None:
        machine = processors_here(memory, _matmul_flops())
    return ThisMachine(cores, memory, disk, gpus, machine)


def _gpu_names() -> list[str]:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def _matmul_flops() -> float:
    """Return the rate of NumPy's matrix product on all processors: the best of a few short ones."""
    side = 768
    matrix = np.ones((side, side), np.float32)
    rates = []
    for _ in range(4):
        began = time.perf_counter()
        matrix @ matrix
        rates.append(2 * side**3 / (time.perf_counter() - began))
    return max(rates)
