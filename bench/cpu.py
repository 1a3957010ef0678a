"""spile beside the loop that people write, on this CPU: ``python -m bench.cpu [TASKS.jsonl] [--shape qwen2.5-0.5b]``.

The same weights, prompts, dtype and threads; transformers with ``output_hidden_states`` over padded batches as they
come; both counted in real tokens, both with every layer's rows on the disk, turn about in one run because machines are
noisy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.shapes import SHAPES, make_model
from spile.plan.ranges import Ranges
from spile.runtime import naive
from spile.runtime.extract import find, make_producer, sizes_for
from spile.runtime.progress import Progress
from spile.runtime.worker import LocalControl, work
from spile.spec.run import EMBEDDED, DataSpec, ExtractSpec
from spile.spec.sample import Sample
from spile.store.run import join_run
from spile.store.stream import join_stream


class Turn(NamedTuple):
    """One run of ours."""

    rate: float
    padding: float


def ours(spec: ExtractSpec, samples: Sequence[Sample], prepared: dict[str, object]) -> Turn:
    """Extract these samples; programs are compiled once, before the first turn is timed."""
    parts = find(spec)
    producer = prepared.setdefault("producer", None) or make_producer(parts, Progress())
    prepared["producer"] = producer
    join_run(parts.root, parts.identity)
    stream = join_stream(parts.root, 0, parts.stream_identity, parts.identity)
    sizes = sizes_for(parts)
    progress = Progress()
    began = time.perf_counter()
    work(samples, producer, stream, sizes, progress=progress, control=LocalControl(threading.Event(), None))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    now = progress.snapshot()
    return Turn(now.tokens / seconds, now.padding)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="?", default=EMBEDDED)
    parser.add_argument("--shape", default="small", choices=sorted(SHAPES))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8, help="of the loop beside us")
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

    def spec(turn: int) -> ExtractSpec:
        return ExtractSpec(model=str(model), data=data, output=str(folder / f"run-{turn}"), dtype="float32")

    samples = [item for item in find(spec(0)).samples.read(Ranges()) if isinstance(item, Sample)]
    prompts = [sample.tokens for sample in samples]
    prepared: dict[str, object] = {}
    ours(spec(0), samples, prepared)
    mine, theirs = [], []
    for turn in range(1, args.turns + 1):
        mine.append(ours(spec(turn), samples, prepared))
        theirs.append(
            naive.run(model, prompts, device="cpu", dtype="float32", batch_size=args.batch_size, output=folder, warm=1)
        )
    best, other = max(turn.rate for turn in mine), max(loop.rate for loop in theirs)
    tokens = sum(map(len, prompts))
    waste = 1 - theirs[0].tokens / theirs[0].computed
    print(
        f"extract on a CPU {args.shape}, {len(prompts)} prompts, {tokens:,} tokens, float32: "
        f"spile {best:,.0f} tokens/s ({mine[0].padding:.1%} padding), "
        f"transformers {other:,.0f} tokens/s ({waste:.1%} padding): {best / other:.2f}×"
    )


if __name__ == "__main__":
    main()
