"""Shared parts of the reading benchmarks: a dataset of random rows, and rates that are medians of several turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from bench.overlap import run_identity
from spile.objects import Folder
from spile.spec.identity import StreamIdentity
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.store.run import join_run
from spile.store.writer import join_stream

D = 896
BATCH = 4096
SHARD_ROWS = 131_072
_SAMPLE = 512


def make(root: Folder, rows: int, shard_rows: int = SHARD_ROWS, d: int = D) -> None:
    """Create a dataset of random rows with one tap."""
    run = replace(run_identity(), d_model=d)
    join_run(root, run)
    samples = rows // _SAMPLE if shard_rows >= _SAMPLE else rows // shard_rows
    length = min(_SAMPLE, shard_rows)
    store = join_stream(root, 0, StreamIdentity("none", "0", samples, samples, (Tap("residual", 0),)), run)
    block = np.random.default_rng(0).standard_normal((shard_rows, d), np.float32).astype(ml_dtypes.bfloat16)
    per = shard_rows // length
    for first in range(0, samples, per):
        count = min(per, samples - first)
        made = [
            Sample(first + n, f"t{first + n}", np.arange(length, dtype=np.int32), np.zeros(length, np.uint8))
            for n in range(count)
        ]
        builder = store.begin(made)
        builder.write(0, 0, block[: count * length])
        store.commit([builder.finish()])
    store.finish()


class Rate(NamedTuple):
    """A speed and its CPU cost. On a busy machine only the cost is meaningful."""

    rows: float
    """Rows per second."""
    cpu: float
    """CPU seconds per row."""


def rate(read: Callable[[], Iterator[int]]) -> Rate:
    """Return the rate of reading everything."""
    began, used = time.perf_counter(), time.process_time()
    rows = sum(read())
    return Rate(rows / (time.perf_counter() - began), (time.process_time() - used) / rows)


Read = Callable[[], Iterator[int]]


class Twice(NamedTuple):
    """The rates of the first and the second read of a turn."""

    first: Rate
    second: Rate


def in_turns(reads: dict[str, Read], turns: int, before: Callable[[str], None] = lambda _: None) -> dict[str, Twice]:
    """Return the median rate of each reader. They take turns, because the speed of a machine varies."""
    found: dict[str, list[list[Rate]]] = {name: [[], []] for name in reads}
    for _ in range(turns):
        for name, read in reads.items():
            for time_of in found[name]:
                before(name)
                time_of.append(rate(read))
    return {name: Twice(*map(_median, both)) for name, both in found.items()}


def _median(rates: list[Rate]) -> Rate:
    return Rate(*map(statistics.median, zip(*rates, strict=True)))


def show(found: dict[str, Twice], base: Twice, ours: Sequence[str] = ()) -> None:
    """Print the rates next to the required ones and to the slowest of ``ours``."""
    print(f"  {'':44} {'first, GB/s':>12} {'of base':>8} {'CPU s/GB':>9}   {'again':>6} {'of base':>8} {'CPU s/GB':>9}")
    width = 2 * D
    for name, both in found.items():
        cells = [
            f"{each.rows * width / 1e9:{room}.2f} {each.rows / against.rows:8.2f} {each.cpu / width * 1e9:9.2f}"
            for each, against, room in zip(both, base, (12, 6), strict=True)
        ]
        slowest = [min(found[label][time_of].rows for label in ours) if ours else 0.0 for time_of in range(2)]
        behind = [f"{slow / each.rows:.1f}" for slow, each in zip(slowest, both, strict=True)]
        suffix = f"   spile's slowest: {' and '.join(behind)} ×" if ours and name not in ours else ""
        print(f"  {name:44} {'   '.join(cells)}{suffix}", flush=True)
