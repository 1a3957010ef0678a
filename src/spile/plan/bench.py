"""The loop that people write today: transformers, batches as they come, padded, every hidden state to the host, saved.

Run beside spile in the same process or machine, on the same weights, prompts and threads, counted in real tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from spile.models.safetensors_files import LocalSource
from spile.objects import open_folder
from spile.plan.limits import Limits, bare_forward, device_to_host, host_copy, matmul, sequential_write
from spile.plan.whole import WholeRun, cold_and_warm
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.store.stream import join_run, join_stream
from spile.worker.batches import Batch, batches
from spile.worker.device import DeviceProducer
from spile.worker.parts import Parts, bytes_per_token, find, sizes_for
from spile.worker.progress import Progress, peak_memory
from spile.worker.startup import make_producer
from spile.worker.worker import LocalControl, run_worker

__all__ = [
    "BenchResult",
    "Naive",
    "bench",
    "emptied",
    "run",
]


class Naive(NamedTuple):
    """What it came to."""

    tokens: int
    computed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


def run(
    model_folder: Path,
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    device: str,
    dtype: str,
    batch_size: int,
    output: Path | None,
    attention: str = "sdpa",
    warm: int = 2,
) -> Naive:
    """``output_hidden_states`` over padded batches; ``.cpu()`` of each layer; ``torch.save`` of each batch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).to(device)
    model.eval()
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    with torch.inference_mode():
        for batch in batches[:warm]:
            _step(model, batch, device, output)
        began = time.perf_counter()
        computed = sum(_step(model, batch, device, output) for batch in batches)
        seconds = time.perf_counter() - began  # each step ends with its rows on the host: nothing is left to wait for
    return Naive(sum(map(len, prompts)), computed, seconds)


def _step(model: Any, batch: Sequence[npt.NDArray[np.int32]], device: str, output: Path | None) -> int:
    """One padded batch: how many tokens were computed."""
    import torch

    longest = max(map(len, batch))
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        ids[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, : len(prompt)] = 1
    result = model(input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False)
    states = [state.cpu() for state in result.hidden_states[1:]]
    if output is not None:
        torch.save(states, output / "naive.pt")
    return int(ids.numel())


_MATMUL = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
_LIMIT_BATCHES = 48
_SWEEPERS = 4
_NAIVE_SAMPLES = {"cpu": 16, "gpu": 192, "tpu": 16}


@dataclass(frozen=True)
class BenchResult:
    """The limits, what was reached, and how much of the slowest limit that is."""

    device: str
    model: str
    taps: int
    bytes_per_token: int
    limits: Limits
    limit_tokens: dict[str, float]
    """Each limit as tokens/s of this run."""
    slowest: str
    tokens: int
    seconds: float
    tokens_per_second: float
    padding: float
    fraction: float
    """Of the slowest limit."""
    of_forward: float
    """Of the bare forward's rate."""
    forward_of_matmul: float
    limited_by: str | None
    compile_seconds: float
    shapes: int
    tenths: list[float]
    """Tokens/s of each tenth of the run's time."""
    steady_after: float
    """Batches written before the rate was that of the whole run, or 90 % of it."""
    peak_memory: int
    grown_memory: int
    """Host memory held at the end above that at half time."""
    naive_tokens_per_second: float | None = None
    """The loop that people write with transformers, on the same weights and prompts; None without torch."""
    cold: WholeRun | None = None
    """The command that people start, with no program cached."""
    warm: WholeRun | None = None
    """The same again."""

    def record(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def bench(
    spec: ExtractSpec, *, tokens: int, empty_behind: bool = True, compare: bool = True, limit_bytes: int = 1 << 30
) -> BenchResult:
    """Measure the run as people start it, twice, each a process of its own; then the limits, and in this process what
    is reached once everything is compiled, pinned and tokenized.

    ``empty_behind`` removes shards soon after their commit, so that a small RAM disk carries a long run;
    ``limit_bytes`` are written into each file to learn what the sink takes.
    """
    Path(spec.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=spec.output, prefix="bench-") as folder:
        cold, warm = cold_and_warm(spec, tokens, Path(folder))  # first: this process has not taken the device yet
        parts = find(replace(spec, output=folder))
        progress = Progress()
        producer = make_producer(parts, progress, parts.samples.read(Ranges()))
        samples = _samples(parts, tokens)
        sizes = sizes_for(parts)
        made = list(batches(samples, sizes.batch_plan(producer.groups)))
        some = made[:: max(1, len(made) // _LIMIT_BATCHES)]
        limits = _limits(producer, some, Path(folder), sizes.lanes, limit_bytes)
        _warm(producer, made, sizes.in_flight or 1)
        result = replace(_run(parts, producer, samples, limits, progress, empty_behind), cold=cold, warm=warm)
        return replace(result, naive_tokens_per_second=_naive(parts, Path(folder))) if compare else result


def _samples(parts: Parts, tokens: int) -> list[Sample]:
    """The stream's samples over and over, each with a number of its own, until there are enough tokens."""
    once = [item for item in parts.samples.read(Ranges()) if isinstance(item, Sample)]
    many: list[Sample] = []
    total = 0
    while total < tokens:
        for sample in once:
            many.append(replace(sample, index=len(many)))
            total += len(sample)
            if total >= tokens:
                break
    return many


def _limits(producer: DeviceProducer, made: Sequence[Batch], folder: Path, lanes: int, size: int) -> Limits:
    forward_tokens, forward_flops = bare_forward(producer, made)
    return Limits(
        matmul_flops=matmul(_MATMUL[jax.default_backend()], producer.dtype),
        forward_flops=forward_flops,
        forward_tokens=forward_tokens,
        device_to_host=device_to_host(producer),
        host_copy=host_copy(folder, lanes, size // 2),
        sink=sequential_write(folder, lanes, size),
        one_file=sequential_write(folder, 1, size),
    )


def _warm(producer: DeviceProducer, made: Sequence[Batch], in_flight: int) -> None:
    """Compile and run each shape once, and take the pinned memory of a full pipeline: what a long run does but once."""
    shapes = {(batch.rows, batch.length): batch for batch in made}
    for batch in shapes.values():
        producer.prepare(batch.shape)
    for batch in shapes.values():
        producer.fetch(producer.start(batch))
    largest = max(shapes.values(), key=lambda batch: batch.rows * batch.length)
    for pending in [producer.start(largest) for _ in range(in_flight)]:
        producer.fetch(pending)


def _run(
    parts: Parts,
    producer: DeviceProducer,
    samples: Sequence[Sample],
    limits: Limits,
    progress: Progress,
    empty_behind: bool,
) -> BenchResult:
    spec, sizes = parts.spec, sizes_for(parts)
    compiled = progress.snapshot()
    root = open_folder(parts.root.url)
    join_run(root, parts.identity)
    stream = join_stream(root, 0, replace(parts.stream_identity, samples=len(samples)), parts.identity)
    measured = Progress()
    with emptied(Path(stream.folder.url), empty_behind), _watched(measured) as series:
        control = LocalControl(threading.Event(), None)
        run_worker(samples, producer, stream, sizes, progress=measured, control=control)
        now = measured.snapshot()
    rates = limits.tokens(bytes_per_token(parts))
    slowest = min(rates, key=rates.__getitem__)
    rate = now.tokens / now.seconds
    return BenchResult(
        device=producer.describe(),
        model=spec.model,
        taps=len(parts.taps),
        bytes_per_token=bytes_per_token(parts),
        limits=limits,
        limit_tokens=rates,
        slowest=slowest,
        tokens=now.tokens,
        seconds=now.seconds,
        tokens_per_second=rate,
        padding=now.padding,
        fraction=rate / rates[slowest],
        of_forward=rate / limits.forward_tokens,
        forward_of_matmul=limits.forward_flops / limits.matmul_flops,
        limited_by=now.limit,
        compile_seconds=compiled.compile_seconds,
        shapes=compiled.shapes,
        tenths=_tenths(series),
        steady_after=_steady(series, rate) / (sizes.batch_tokens * producer.groups),
        peak_memory=peak_memory(),
        grown_memory=_growth(series),
    )


def _naive(parts: Parts, folder: Path) -> float | None:
    """What transformers gives on the stream's first prompts, where it can run the model."""
    lacking = any(importlib.util.find_spec(name) is None for name in ("torch", "transformers"))
    if lacking or not isinstance(parts.files.source, LocalSource):
        return None
    import torch

    items = itertools.islice(parts.samples.read(Ranges()), _NAIVE_SAMPLES[jax.default_backend()])
    prompts = [item.tokens for item in items if isinstance(item, Sample)]
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    size = 16 if device == "cuda" else 8
    model = parts.files.source.folder
    return run(model, prompts, device=device, dtype=parts.spec.dtype, batch_size=size, output=folder).rate


@contextlib.contextmanager
def emptied(folder: Path, wanted: bool = True) -> Iterator[None]:
    """Remove shards as they are finished, so that the folder never holds more than a few."""
    over = threading.Event()

    def sweep(pool: ThreadPoolExecutor) -> None:
        while not over.wait(0.02):
            list(pool.map(lambda shard: shard.unlink(missing_ok=True), folder.glob("shard_*")))

    with ThreadPoolExecutor(_SWEEPERS) as pool:
        thread = threading.Thread(target=sweep, args=(pool,), daemon=True)
        if wanted:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if wanted:
                thread.join()


_Point = tuple[float, int, int]
"""Seconds, tokens, bytes of host memory."""


@contextlib.contextmanager
def _watched(progress: Progress) -> Iterator[list[_Point]]:
    """Tokens and host memory over time, ten times a second."""
    over = threading.Event()
    series: list[_Point] = []

    def look() -> None:
        while not over.wait(0.1):
            series.append((time.perf_counter(), progress.snapshot().tokens, _resident()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield series
    finally:
        over.set()
        thread.join()


def _resident() -> int:
    """Anonymous host memory that this process holds now: RAM disks and page cache are not its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _tenths(series: Sequence[_Point]) -> list[float]:
    """Tokens/s of each tenth of the time."""
    marks = [series[place] for place in range(0, len(series), max(1, len(series) // 10))]
    pairs = itertools.pairwise(marks)
    return [round((now[1] - before[1]) / (now[0] - before[0])) for before, now in pairs]


def _steady(series: Sequence[_Point], rate: float) -> int:
    """Tokens written before a tenth of the time began whose rate is that of the run, or 90 % of it."""
    tenth = max(1, len(series) // 10)
    for before, after in zip(series, series[tenth:], strict=False):
        if after[1] - before[1] >= 0.9 * rate * (after[0] - before[0]):
            return before[1]
    return series[-1][1] if series else 0


def _growth(series: Sequence[_Point]) -> int:
    """Host memory of the last tenth above that of the tenth after half time."""
    tenth = max(1, len(series) // 10)
    middle, end = series[len(series) // 2 :][:tenth], series[-tenth:]
    if not middle:
        return 0
    return max(point[2] for point in end) - max(point[2] for point in middle)
