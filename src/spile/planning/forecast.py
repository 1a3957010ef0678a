"""``spile plan``: read the model's config and the data, count the tokens of some samples, and derive sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spile.data.stream import SampleStream, open_stream
from spile.models import model_files
from spile.models.architecture import ModelConfig, flops_per_token, parameter_count
from spile.models.decoder import head_needed, layers_needed
from spile.planning.cost import Estimate, Lengths, Rates, Volume, estimate
from spile.planning.machines import Machine, Price, Prices
from spile.planning.tpu_compiler import Program
from spile.reading.dataset import stored_tokens
from spile.spec.amounts import counted, duration, size
from spile.spec.positions import ALL
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap, row_bytes, tap_rows
from spile.worker.producer import refuse_no_answers, with_positions
from spile.worker.resolve import prompt_tokenizer


@dataclass(frozen=True, repr=False)
class Forecast:
    """The sizes of a run, independent of a machine."""

    spec: ExtractSpec
    model: str
    config: ModelConfig
    taps: tuple[Tap, ...]
    location: str
    lengths: Lengths
    skipped: int
    """Counted samples without rows."""
    rows: Lengths | None = None
    """Stored rows of the same samples; None means that all tokens are stored."""
    estimate: Estimate | None = None
    """Hours and dollars on the machine that was asked for."""

    def __repr__(self) -> str:
        volume, taps = self.volume, counted(len(self.taps), "tap")
        text = f"{counted(volume.samples, 'sample')}, {counted(volume.tokens, 'token')}, {size(volume.bytes)} at {taps}"
        if self.estimate is not None:
            price = self.estimate.dollars
            text += f"; {duration(self.estimate.hours * 3600)} on {self.estimate.machine.name}"
            text += f", ${price.on_demand:,.2f} on demand, ${price.preemptible:,.2f} preemptible"
        return f"<plan for {self.model}: {text}>"

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
    def volume(self) -> Volume:
        """What the run will store."""
        return Volume(
            samples=self.lengths.samples,
            tokens=self.lengths.tokens,
            bytes_per_token=row_bytes(
                tap_rows(tap, self.config.sizes(tap.layer), self.spec.store_dtype) for tap in self.taps
            ),
            shard_bytes=self.spec.shard_size_gb * 1e9,
            rows=None if self.rows is None else self.rows.tokens,
        )

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token at the mean length, up to the last tapped layer."""
        mean = max(1, round(self.lengths.mean))
        last, head = layers_needed(self.taps, self.config.n_layers) - 1, head_needed(self.taps)
        return flops_per_token(self.config, mean, last, head=head)

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
        longest = min(self.spec.data.max_seq_length, max(self.lengths.counted, default=1))
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
            "samples_skipped_of_counted": self.skipped,
            "tokens": volume.tokens,
            "tokens_standard_error": self.lengths.error,
            "tokens_per_sample": self.lengths.mean,
            "rows": volume.tokens if volume.rows is None else volume.rows,
            "bytes_per_token": volume.bytes_per_token,
            "bytes": volume.bytes,
            "shards": volume.shards,
            "flops_per_token": self.flops_per_token,
        }


def plan(spec: ExtractSpec, count: int = 1000) -> Forecast:
    """Forecast a run: tokenize ``count`` samples, evenly spread over the stream, and count their tokens."""
    files = model_files.find(spec.model, spec.revision, weights=False)
    taps = spec.selected_taps(files.config.n_layers)
    spec = replace(spec, data=stored_tokens(spec.data))
    tokenizer = prompt_tokenizer(files, spec.data.prompt, optional=True)
    stream = open_stream(spec.data, tokenizer, files.config.vocab_size, whole=True)
    refuse_no_answers(spec, stream.prompt.kind)
    lengths, rows = _count(stream, spec, count)
    skipped = sum(not length for length in lengths.counted)
    stored = None if spec.positions == ALL else rows
    return Forecast(spec, files.name, files.config, taps, stream.location, lengths, skipped, stored)


def _count(stream: SampleStream, spec: ExtractSpec, count: int) -> tuple[Lengths, Lengths]:
    """Return the lengths of the counted samples, and their stored rows."""
    most = spec.data.max_samples
    total = stream.samples if most is None or stream.samples is None else min(most, stream.samples)
    done = Ranges() if total is None else _all_except(total, count)
    items = with_positions(stream.read(done), spec)
    found = [(len(item), item.rows) if isinstance(item, Sample) else (0, 0) for item in items]
    samples = len(found) if total is None else total
    return Lengths([tokens for tokens, _ in found], samples), Lengths([rows for _, rows in found], samples)


def _all_except(total: int, count: int) -> Ranges:
    """Return all samples except ``count`` of them, evenly spread."""
    kept: Sequence[int] = range(total) if count >= total else [place * total // count for place in range(count)]
    return Ranges([(0, total)]) - Ranges.of(kept)
