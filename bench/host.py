"""Measure the host's part of a run without a device: ``python -m bench.host [--folder /dev/shm] [--writers 1,2,4,8]``.

Rows in memory go through the real pipeline and store into a folder, with one shard per writer at the same time. The
same run also measures plain threads that checksum and write one file each. ``--statistics`` repeats the measurement
with the statistics of every tap.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.limits import host_copy, removing_shards
from bench.overlap import A_TOKEN, D_MODEL, TAPS, run_identity
from spile.compute.batches import Batch, Sizes
from spile.compute.producer import Control, Producer, RowBlock
from spile.compute.progress import Progress
from spile.compute.sizes import in_flight
from spile.objects import open_folder
from spile.run.pipeline import Sink, run_pipeline
from spile.spec.identity import StreamIdentity
from spile.spec.sample import Sample
from spile.store.run import join_run
from spile.store.writer import join_stream

_SETS = 6
"""The number of sets of rows that are used in turn, more than fit in the processor's cache."""
_LIMIT_BYTES = 1 << 28


class ReadyProducer(Producer):
    """A producer that returns prepared rows."""

    groups = 1
    owned = (0,)

    def __init__(self, tokens: int) -> None:
        one = np.random.default_rng(0).standard_normal((tokens, D_MODEL), np.float32).astype(ml_dtypes.bfloat16)
        self._sets = [np.stack([one] * len(TAPS)) for _ in range(_SETS)]
        self._next = 0

    def start(self, batch: Batch) -> Sequence[Sequence[RowBlock]]:
        """Return the next set."""
        self._next = (self._next + 1) % _SETS
        return [[RowBlock(0, rows[: batch.real_tokens])] for rows in self._sets[self._next]]

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """Return the rows unchanged."""
        return pending  # type: ignore[return-value]

    def describe(self) -> str:
        """Return a description for logs."""
        return "rows that are ready"


def samples(tokens: int) -> Iterator[Sample]:
    """Return samples with the lengths of ARC prompts."""
    lengths = np.random.default_rng(1).integers(300, 1700, 1 + tokens // 900)
    for index, length in enumerate(lengths.tolist()):
        yield Sample(index, f"task-{index}", np.zeros(length, np.int32), np.zeros(length, np.uint8), "", None, 0)


def measure(
    folder: Path, producer: ReadyProducer, writers: int, size: float, batch_tokens: int, statistics: bool = False
) -> float:
    """Return the bytes/s of the worker's loop."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root, run, items = open_folder(name), run_identity(), list(samples(int(size / A_TOKEN)))
        join_run(root, run)
        stream = join_stream(root, 0, StreamIdentity("bench", "", len(items), len(items), TAPS), run)
        stream.statistics = statistics
        sizes = Sizes(batch_tokens, None, 2048, 1e9, writers, in_flight=in_flight(writers, 1, 1 << 60))
        with removing_shards(Path(stream.folder.url)):
            began = time.perf_counter()
            run_pipeline(
                items,
                producer,
                Sink(stream),
                sizes,
                progress=Progress(),
                control=Control(),
            )
            return stream.ledger.bytes / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--writers", default="1,2,4,8")
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--statistics", action="store_true")
    args = parser.parse_args()
    producer = ReadyProducer(args.batch_tokens)
    columns = ["writers", "plain threads", "pipeline", "fraction", *(["with statistics"] if args.statistics else [])]
    table = Table(*columns, title=f"checksum and write, {args.folder}")
    for writers in map(int, args.writers.split(",")):
        limit = host_copy(args.folder, writers, _LIMIT_BYTES)
        rate = measure(args.folder, producer, writers, args.gigabytes * 1e9, args.batch_tokens)
        row = [str(writers), f"{limit / 1e9:.2f} GB/s", f"{rate / 1e9:.2f} GB/s", f"{rate / limit:.0%}"]
        if args.statistics:
            taken = measure(args.folder, producer, writers, args.gigabytes * 1e9, args.batch_tokens, statistics=True)
            row.append(f"{taken / 1e9:.2f} GB/s ({taken / rate:.2f})")
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
