"""Measure a run, the limits of this machine, and a plain loop around transformers.

    python -m bench.limits --model Qwen/Qwen2.5-0.5B --dataset tasks.jsonl --output /dev/shm/bench --tokens 1000000

A limit is what the hardware gives to a loop that does nothing else: matrix products, the bare forward pass, the copy
from the device, checksum and write, and the disk. A run is compared with the slowest of them. Shards are written to a
temporary folder in --output and removed afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from spile.compute.batches import Batch, batches
from spile.compute.device import DeviceProducer
from spile.compute.producer import Control, pack
from spile.compute.progress import Progress, ProgressSnapshot, WallTime, peak_memory
from spile.compute.resolved import ResolvedRun
from spile.data.samples import open_stream
from spile.models import model_files
from spile.models.architecture import flops_per_token
from spile.models.decoder import TapCollector, TokenInfo, layers_needed, residual_stream
from spile.objects import open_folder
from spile.objects.crc import ChunkedCrc
from spile.reading.dataset import stored_tokens
from spile.run.pipeline import Sink, run_pipeline
from spile.run.resolve import prompt_tokenizer, resolve
from spile.run.worker import make_device_producer, run_stream
from spile.spec.amounts import amount, counted, duration, size
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, RunSpec
from spile.spec.sample import Sample
from spile.store.run import join_run
from spile.store.writer import join_stream

_MATRIX_SIZE = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
_LIMIT_BATCHES = 48
"""Batches of the bare forward pass."""
_REMOVERS = 4
"""Threads that remove shards."""
_LOOP_SAMPLES = {"cpu": 16, "gpu": 192, "tpu": 16}
_WRITE_BYTES = 4 << 20
"""Bytes per write."""
_COMPILERS = max(2, (os.cpu_count() or 2) // 4)


@dataclass(frozen=True)
class BenchResult:
    """The limits, the measured rate, and its fraction of the slowest limit."""

    device: str
    model: str
    taps: int
    bytes_per_token: int
    limits: Limits
    limit_tokens: dict[str, float]
    """Each limit in tokens/s of this run."""
    slowest: str
    tokens: int
    seconds: float
    tokens_per_second: float
    padding: float
    fraction: float
    """Of the rate of the slowest limit."""
    of_forward: float
    """Of the rate of the bare forward pass."""
    forward_of_matmul: float
    limited_by: str | None
    compile_seconds: float
    shapes: int
    peak_memory: int
    naive_tokens_per_second: float | None
    """A plain loop around transformers, on the same weights and prompts; None without torch."""
    cold: TimedRun
    """The whole command, with no program cached."""
    warm: TimedRun
    """The whole command again, with the programs of the first."""

    def record(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return asdict(self)


def bench(spec: RunSpec, *, tokens: int, compare: bool = True, limit_bytes: int = 1 << 30) -> BenchResult:
    """Measure the whole command twice, the limits, and the steady rate once everything is compiled and tokenized.

    Args:
        spec: The run to measure.
        tokens: How many tokens to compute; the samples are repeated.
        compare: Also measure a plain loop around transformers.
        limit_bytes: Bytes written to each file to measure the disk.

    """
    Path(spec.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=spec.output, prefix="bench-") as folder:
        cold, warm = _cold_and_warm(spec, tokens, folder)  # first: this process has not used the device yet
        run = resolve(replace(spec, output=folder))
        progress = Progress()
        producer = make_device_producer(run, progress, run.samples.read(Ranges()))
        samples = _repeat_samples(run, tokens)
        planned = list(batches(samples, replace(run.sizes, groups=producer.groups)))
        spread = planned[:: max(1, len(planned) // _LIMIT_BATCHES)]
        limits = _measure_limits(producer, spread, Path(folder), run.sizes.writers, limit_bytes)
        _warm_up(producer, planned, run.sizes.in_flight or 1)
        compiled, steady = progress.snapshot(), _run_compiled(run, producer, samples)
        loop_rate = _transformers_rate(run, Path(folder)) if compare else None
    rates = limits.tokens(run.bytes_per_token)
    slowest, rate = min(rates, key=rates.__getitem__), steady.tokens / steady.seconds
    return BenchResult(
        device=producer.describe(),
        model=spec.model,
        taps=len(run.taps),
        bytes_per_token=run.bytes_per_token,
        limits=limits,
        limit_tokens=rates,
        slowest=slowest,
        tokens=steady.tokens,
        seconds=steady.seconds,
        tokens_per_second=rate,
        padding=steady.padding,
        fraction=rate / rates[slowest],
        of_forward=rate / limits.forward_tokens,
        forward_of_matmul=limits.forward_flops / limits.matmul_flops,
        limited_by=steady.limit,
        compile_seconds=compiled.compile_seconds,
        shapes=compiled.shapes,
        peak_memory=peak_memory(),
        naive_tokens_per_second=loop_rate,
        cold=cold,
        warm=warm,
    )


# -- the whole command -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedRun:
    """How long one process took, and for what."""

    seconds: float
    """From the start of the process to its end."""
    tokens: int
    programs: int
    wall: WallTime

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def first_batch(self) -> float:
        """Seconds from the start of the process to the first batch on the device."""
        return self.wall.start + self.wall.compile


def _cold_and_warm(spec: RunSpec, tokens: int, folder: str) -> list[TimedRun]:
    """Time a run over the first ``tokens`` tokens twice: without cached programs, and with those of the first."""
    data = replace(spec.data, max_samples=_count_samples(spec, tokens))
    runs = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="cache-") as cache:
        for name in ("cold", "warm"):
            limited = replace(spec, data=data, commit_every=None, output=f"{folder}/{name}")
            began = time.perf_counter()
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                done = process.submit(_run_command, limited, cache).result()
            runs.append(TimedRun(time.perf_counter() - began, done.tokens, done.shapes, done.wall))
    return runs


def _count_samples(spec: RunSpec, tokens: int) -> int:
    """Return how many samples hold that many tokens: at least one, and all if the dataset has fewer."""
    files = model_files.find(spec.model, spec.revision)
    data = stored_tokens(spec.data)
    stream = open_stream(data, prompt_tokenizer(files, data.prompt, optional=True), files.config.vocab_size)
    total = count = 0
    for item in stream.read(Ranges()):
        count = item.index + 1
        total += len(item) if isinstance(item, Sample) else 0
        if total >= tokens:
            break
    return max(1, count)


def _run_command(spec: RunSpec, cache: str) -> ProgressSnapshot:
    """Run a stream in a new process, from its first import to its last commit."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    jax.config.update("jax_compilation_cache_dir", cache)
    return run_stream(spec, progress=Progress.of_process()).progress


# -- the steady rate ---------------------------------------------------------------------------------------------------


def _repeat_samples(run: ResolvedRun, tokens: int) -> list[Sample]:
    """Repeat the samples of the stream, with new numbers, until there are enough tokens."""
    once = [item for item in run.samples.read(Ranges()) if isinstance(item, Sample)]
    many: list[Sample] = []
    total = 0
    for sample in itertools.cycle(once):
        many.append(replace(sample, index=len(many)))
        total += len(sample)
        if total >= tokens:
            break
    return many


def _measure_limits(
    producer: DeviceProducer, batches: Sequence[Batch], folder: Path, writers: int, size: int
) -> Limits:
    forward_tokens, forward_flops = bare_forward(producer, batches)
    return Limits(
        matmul_flops=matmul(_MATRIX_SIZE[jax.default_backend()], producer.dtype),
        forward_flops=forward_flops,
        forward_tokens=forward_tokens,
        device_to_host=device_to_host(producer),
        host_copy=host_copy(folder, writers, size // 2),
        sink=sequential_write(folder, writers, size),
        one_file=sequential_write(folder, 1, size),
    )


def _warm_up(producer: DeviceProducer, planned: Sequence[Batch], in_flight: int) -> None:
    """Compile and run each shape once, and allocate the pinned memory of a full pipeline."""
    shapes = {(batch.rows, batch.length): batch for batch in planned}
    for batch in shapes.values():
        producer.prepare(batch)
    for batch in shapes.values():
        producer.fetch(producer.start(batch))
    largest = max(shapes.values(), key=lambda batch: batch.rows * batch.length)
    for pending in [producer.start(largest) for _ in range(in_flight)]:
        producer.fetch(pending)


def _run_compiled(run: ResolvedRun, producer: DeviceProducer, samples: Sequence[Sample]) -> ProgressSnapshot:
    """Run the pipeline with a producer whose programs are compiled."""
    root = open_folder(run.root.url)
    join_run(root, run.identity)
    stream = join_stream(root, 0, replace(run.stream_identity, samples=len(samples)), run.identity)
    progress = Progress()
    with removing_shards(Path(stream.folder.url)):
        run_pipeline(samples, producer, Sink(stream), run.sizes, progress=progress, control=Control())
        return progress.snapshot()


@contextlib.contextmanager
def removing_shards(folder: Path) -> Iterator[None]:
    """Remove finished shards while the context is open, so that a small RAM disk is enough for a long run."""
    ended = threading.Event()

    def remove(pool: ThreadPoolExecutor) -> None:
        while not ended.wait(0.02):
            list(pool.map(lambda shard: shard.unlink(missing_ok=True), folder.glob("shard_*")))

    with ThreadPoolExecutor(_REMOVERS) as pool:
        thread = threading.Thread(target=remove, args=(pool,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


# -- limits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Rates in FLOP/s, tokens/s and bytes/s."""

    matmul_flops: float
    forward_flops: float
    """Model FLOP/s of the bare forward pass, with attention and without the LM head."""
    forward_tokens: float
    device_to_host: float | None
    """None if rows are on the host already."""
    host_copy: float
    """Copy, checksum and write together, in threads, because they share the memory bandwidth."""
    sink: float
    """Written and synced, as many files at once as the run has writers."""
    one_file: float
    """Written in sequence to one file and synced."""

    def tokens(self, bytes_per_token: int) -> dict[str, float]:
        """Return each limit in real tokens per second."""
        rates = {
            "model": self.forward_tokens,
            "host copy": self.host_copy / bytes_per_token,
            "sink": self.sink / bytes_per_token,
        }
        if self.device_to_host is not None:
            rates["device to host"] = self.device_to_host / bytes_per_token
        return rates


def _shortest_time(run: Callable[[], object], repeat: int = 3) -> float:
    """Return the shortest of several times, which other load disturbs least."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def matmul(size: int, dtype: str, times: int = 8) -> float:
    """Return the FLOP/s of a chain of square matrix products, on all local devices together."""
    key = jax.random.key(0)

    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(times):
            a = jnp.matmul(a, b, precision=jax.lax.Precision.DEFAULT)
        return a

    a = jax.random.normal(key, (size, size), jnp.dtype(dtype)) / size**0.5
    step = jax.jit(chain)
    jax.block_until_ready(step(a, a))
    seconds = _shortest_time(lambda: jax.block_until_ready(step(a, a)))
    return jax.local_device_count() * times * 2 * size**3 / seconds


def bare_forward(producer: DeviceProducer, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return real tokens/s and model FLOP/s of these batches up to the last tapped layer, storing nothing."""
    config, layers = producer.config, layers_needed(producer.taps, producer.config.n_layers)

    def step(params: Any, batch: jax.Array) -> jax.Array:
        # The maximum: the compiler could move a sum inside the products and remove them.
        tokens, positions, segments = (batch[:, part] for part in range(3))
        info, attend, mix = TokenInfo(tokens, positions), producer.attend, producer.mixture
        x = residual_stream(params, info, segments, config, producer.runs, attend, mix, TapCollector())
        return jnp.max(jnp.abs(x))

    inputs = [jax.device_put(pack(batch)[0], producer.rows_sharding) for batch in batches]
    shapes = {array.shape: array for array in inputs}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        compiled = pool.map(lambda array: jax.jit(step).lower(producer.params, array).compile(), shapes.values())
        programs = dict(zip(shapes, compiled, strict=True))

    def run() -> None:
        jax.block_until_ready([programs[array.shape](producer.params, array) for array in inputs])

    run()
    seconds = _shortest_time(run, 2)
    lengths = [len(sample) for batch in batches for sample in batch.samples]
    flops = sum(flops_per_token(config, length, layers - 1) * length for length in lengths)
    return sum(lengths) / seconds, flops / seconds


def device_to_host(producer: DeviceProducer) -> float | None:
    """Return the bytes/s into pinned host memory, from all local devices together."""
    if producer.host_sharding.memory_kind != "pinned_host":
        return None
    rows, size = producer.groups, 1 << 29
    array = jax.device_put(jnp.ones((rows, size // 2), jnp.bfloat16), producer.rows_sharding)
    pinned = producer.rows_sharding.with_memory_kind("pinned_host")
    step = jax.jit(lambda x: jax.device_put(x * 1, pinned))
    jax.block_until_ready(step(array))
    seconds = _shortest_time(lambda: jax.block_until_ready([step(array) for _ in range(4)]))
    return 4 * rows * size / seconds


def host_copy(folder: Path, files: int, size: int) -> float:
    """Return the bytes/s of checksum and write to new files, one thread each, from uncached memory."""
    source = np.resize(np.random.default_rng(0).integers(0, 256, 16 * _WRITE_BYTES, np.uint8), files * size)

    def write(number: int, handle: int) -> None:
        own, crc = source[number * size : (number + 1) * size].data, ChunkedCrc()
        for start in range(0, size, _WRITE_BYTES):
            piece = own[start : start + _WRITE_BYTES]
            crc.extend(piece)
            os.pwrite(handle, piece, start)

    return files * size / _time_writers(folder, files, write)


def sequential_write(folder: Path, files: int, size: int) -> float:
    """Return the bytes/s written in sequence to new files, one thread each, and synced at the end."""
    source = np.random.default_rng(0).integers(0, 256, 4 * _WRITE_BYTES, np.uint8)

    def write(_: int, handle: int) -> None:
        for start in range(0, size, source.nbytes):
            os.pwrite(handle, source.data, start)
        os.fsync(handle)

    return files * size / _time_writers(folder, files, write)


def _time_writers(folder: Path, files: int, write: Callable[[int, int], None]) -> float:
    """Return the shortest of several times, without creating and removing the files."""
    times = []
    for _ in range(3):
        with ExitStack() as stack, ThreadPoolExecutor(files) as pool:
            handles = [stack.enter_context(tempfile.TemporaryFile(dir=folder)).fileno() for _ in range(files)]
            began = time.perf_counter()
            list(pool.map(write, range(files), handles))
            times.append(time.perf_counter() - began)
    return min(times)


# -- a plain loop around transformers ----------------------------------------------------------------------------------


def _transformers_rate(run: ResolvedRun, folder: Path) -> float | None:
    """Return the rate of transformers on the first prompts, or None if it cannot run the model."""
    missing = any(importlib.util.find_spec(name) is None for name in ("torch", "transformers"))
    model = run.files.folder.local_path
    if missing or model is None:
        return None
    import torch

    items = itertools.islice(run.samples.read(Ranges()), _LOOP_SAMPLES[jax.default_backend()])
    prompts = [item.tokens for item in items if isinstance(item, Sample)]
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    size = 16 if device == "cuda" else 8
    return run_transformers(model, prompts, device=device, dtype=run.spec.dtype, batch_size=size, output=folder).rate


class LoopResult(NamedTuple):
    """The result of a plain loop around transformers."""

    tokens: int
    computed: int
    """Tokens with padding."""
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run_transformers(
    model_folder: Path,
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    device: str,
    dtype: str,
    batch_size: int,
    output: Path,
) -> LoopResult:
    """Run transformers over padded batches with ``output_hidden_states``; copy and save each batch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.to(device).eval()
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    with torch.inference_mode():
        for batch in batches[:2]:  # the first calls are slower
            _run_padded(model, batch, device, output)
        began = time.perf_counter()
        computed = sum(_run_padded(model, batch, device, output) for batch in batches)
        seconds = time.perf_counter() - began  # each step ends with its rows on the host
    return LoopResult(sum(map(len, prompts)), computed, seconds)


def _run_padded(model: Any, batch: Sequence[npt.NDArray[np.int32]], device: str, output: Path) -> int:
    """Run one padded batch; return how many tokens were computed."""
    import torch

    tokens = [torch.from_numpy(prompt.astype(np.int64)) for prompt in batch]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
    result = model(input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False)
    torch.save([state.cpu() for state in result.hidden_states[1:]], output / "hidden_states.pt")
    return int(ids.numel())


def show(result: BenchResult, console: Console) -> None:
    """Print the limits, and what fraction of the lowest one the run reached."""
    table = Table(
        "limit", "rate", "tokens/s of this run", title=f"{result.model} on {result.device}", title_style="bold"
    )
    rates, limits = result.limit_tokens, result.limits
    table.add_row("matrix products", f"{amount(limits.matmul_flops / 1e9)} GFLOP/s", "")
    table.add_row("bare forward", f"{result.forward_of_matmul:.0%} of the products' rate", amount(rates["model"]))
    if limits.device_to_host is not None:
        table.add_row("device to host", f"{size(limits.device_to_host)}/s", amount(rates["device to host"]))
    table.add_row("copy, checksum, write", f"{size(limits.host_copy)}/s", amount(rates["host copy"]))
    rate = f"{size(limits.sink)}/s ({size(limits.one_file)}/s into one file)"
    table.add_row("write and sync", rate, amount(rates["sink"]))
    console.print(table)
    for name, run in (("cold, no program cached", result.cold), ("again, programs cached", result.warm)):
        end = run.seconds - run.first_batch - run.wall.run
        console.print(
            f"the command, {name}: {duration(run.seconds)} for {amount(run.tokens)} tokens, "
            f"{amount(run.tokens_per_second)} tokens/s of it all; first batch after {duration(run.first_batch)}, "
            f"run {duration(run.wall.run)}, end {duration(end)}; {counted(run.programs, 'program')}",
            soft_wrap=True,
        )
    console.print(
        "steady state, with programs compiled and samples tokenized beforehand: "
        f"reached {amount(result.tokens_per_second)} tokens/s over {duration(result.seconds)}: "
        f"{result.fraction:.0%} of the slowest limit ({result.slowest}), {result.of_forward:.0%} of the bare forward; "
        f"{result.padding:.1%} padding; {result.shapes} programs compiled in {duration(result.compile_seconds)}; "
        f"host memory {size(result.peak_memory)} at most",
        soft_wrap=True,
    )
    naive = result.naive_tokens_per_second
    if naive is not None:
        console.print(
            f"transformers, padded batches, every hidden state to the host and saved: {amount(naive)} tokens/s; "
            f"spile is {result.tokens_per_second / naive:.1f}× that",
            soft_wrap=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dataset", default="embedded")
    parser.add_argument("--output", default="./.bench")
    parser.add_argument("--layers", type=int, nargs="*", help="default: all")
    parser.add_argument("--store-dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--no-compare", action="store_true", help="do not run the loop with transformers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    layers = None if args.layers is None else tuple(args.layers)
    spec = RunSpec(
        model=args.model, data=DataSpec(dataset=args.dataset), output=args.output, layers=layers,
        store_dtype=args.store_dtype,
    )  # fmt: skip
    result = bench(spec, tokens=args.tokens, compare=not args.no_compare)
    if args.json:
        print(json.dumps(result.record()))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
