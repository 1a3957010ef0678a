"""Compare spile with a transformers loop on a CPU: ``python -m bench.cpu [TASKS.jsonl] [--shape qwen2.5-0.5b]``.

Both use the same weights, prompts, dtype and threads. The loop calls transformers with ``output_hidden_states`` on
padded batches in the order of the data. Both write the rows of every layer to the disk, and both are measured in real
tokens. They take turns in one run, because the speed of machines varies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.limits import run_transformers
from bench.shapes import SHAPES, make_model
from spile.compute.device import DeviceProducer
from spile.compute.producer import Control
from spile.compute.progress import Progress
from spile.run.pipeline import Sink, run_pipeline
from spile.run.resolve import resolve
from spile.run.worker import make_device_producer
from spile.spec.ranges import Ranges
from spile.spec.run import EMBEDDED, ComputeDtype, DataSpec, RunSpec
from spile.spec.sample import Sample
from spile.store.run import join_run
from spile.store.writer import join_stream

_DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")


class Turn(NamedTuple):
    """One run of spile."""

    rate: float
    padding: float


def ours(spec: RunSpec, samples: Sequence[Sample], producer: DeviceProducer) -> Turn:
    """Run spile on these samples."""
    parts = resolve(spec)
    join_run(parts.root, parts.identity)
    stream = join_stream(parts.root, 0, parts.stream_identity, parts.identity)
    sizes = parts.sizes
    progress = Progress()
    began = time.perf_counter()
    run_pipeline(samples, producer, Sink(stream), sizes, progress=progress, control=Control())
    seconds = time.perf_counter() - began
    now = progress.snapshot()
    return Turn(now.tokens / seconds, now.padding)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="?", default=EMBEDDED)
    parser.add_argument("--shape", default="small", choices=sorted(SHAPES))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8, help="batch size of the transformers loop")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="spile-bench-"))
    try:
        _compare(args, folder)
    finally:
        shutil.rmtree(folder)


def _compare(args: argparse.Namespace, folder: Path) -> None:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    model = make_model(args.shape, folder / "model")
    data = DataSpec(dataset=args.tasks, max_samples=args.samples)

    def spec(dtype: ComputeDtype, turn: int) -> RunSpec:
        output = str(folder / f"run-{dtype}-{turn}")
        return RunSpec(model=str(model), data=data, output=output, dtype=dtype)

    samples = [item for item in resolve(spec("float32", 0)).samples.read(Ranges()) if isinstance(item, Sample)]
    prompts = [sample.tokens for sample in samples]
    found = {dtype: resolve(spec(dtype, 0)) for dtype in _DTYPES}
    producers = {
        dtype: make_device_producer(parts, Progress(), parts.samples.read(Ranges())) for dtype, parts in found.items()
    }
    mine: dict[ComputeDtype, list[Turn]] = {dtype: [] for dtype in _DTYPES}
    theirs = []
    for turn in range(args.turns + 1):
        for dtype, producer in producers.items():
            mine[dtype].append(ours(spec(dtype, turn), samples, producer))
        theirs.append(
            run_transformers(model, prompts, device="cpu", dtype="float32", batch_size=args.batch_size, output=folder)
        )
    # the first turn compiled
    best = {dtype: max(turn.rate for turn in turns[1:]) for dtype, turns in mine.items()}
    other = max(loop.rate for loop in theirs[1:])
    waste = 1 - theirs[0].tokens / theirs[0].computed
    print(
        f"extract on a CPU {args.shape}, {len(prompts)} prompts, {sum(map(len, prompts)):,} tokens: "
        f"spile {best['float32']:,.0f} tokens/s in float32 ({mine['float32'][0].padding:.1%} padding), "
        f"{best['bfloat16']:,.0f} in bfloat16; "
        f"transformers {other:,.0f} in float32 ({waste:.1%} padding): {best['float32'] / other:.2f}×"
    )


if __name__ == "__main__":
    main()
