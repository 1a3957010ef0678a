"""Check that shards are uploaded while the model computes: ``python -m bench.overlap [GB]``.

A producer returns rows at a fixed rate, as an accelerator does while the host waits for it. The pipeline, store and
uploads are real; the bandwidth of the fake GCS is limited to the same rate. Computing and uploading one after the other
would take twice the time of either; in parallel they take little more than the slower one. The slower of the two must
take at least 0.88 of the total time. On the real disk, the rate of the producer is that of a plain write and sync.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.console import Console

from bench import SCRATCH
from bench.ledger import fake_gcs
from spile.compute.batches import Batch, Sizes
from spile.compute.producer import Control, Producer, RowBlock
from spile.compute.progress import Progress
from spile.objects import open_folder
from spile.run.pipeline import Sink, run_pipeline
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.run import PromptSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap, TapRows, row_bytes
from spile.store.run import join_run
from spile.store.writer import join_stream

__all__ = ["A_TOKEN", "D_MODEL", "TAPS", "Overlap", "main", "measure", "run_identity"]

MUST = 0.88
D_MODEL = 896
TAPS = tuple(Tap("residual", layer) for layer in range(24))
_LENGTH = 512
A_TOKEN = row_bytes(TapRows(str(tap), (D_MODEL,), "bfloat16") for tap in TAPS)
_SHARD = 32e6
_RATE = 50e6


@dataclass(frozen=True)
class Overlap:
    """The result of one run."""

    where: str
    bytes: int
    rate: float
    """The bytes per second of the producer, and of the store if it is limited."""
    seconds: float
    retries: int

    @property
    def fraction(self) -> float:
        """The time of the slower part divided by the total time."""
        return self.bytes / self.rate / self.seconds


class PacedProducer(Producer):
    """A producer of constant rows at a fixed rate."""

    groups = 1
    owned = (0,)

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._ready = 0.0
        source = np.random.default_rng(0)
        self._rows = source.standard_normal((16 * _LENGTH, D_MODEL), np.float32).astype(ml_dtypes.bfloat16)

    def start(self, batch: Batch) -> tuple[float, Batch]:
        """Start a batch after the previous ones."""
        self._ready = max(self._ready, time.perf_counter()) + batch.real_tokens * A_TOKEN / self._rate
        return self._ready, batch

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """Return the rows when their time has come."""
        assert isinstance(pending, tuple)
        ready, batch = pending
        time.sleep(max(0.0, ready - time.perf_counter()))
        return [[RowBlock(0, self._rows[: batch.real_tokens])] for _ in TAPS]

    def describe(self) -> str:
        """Return a description for logs."""
        return f"rows at {self._rate / 1e6:.0f} MB/s"


def _samples(count: int) -> Iterator[Sample]:
    tokens, roles = np.zeros(_LENGTH, np.int32), np.zeros(_LENGTH, np.uint8)
    for index in range(count):
        yield Sample(index, f"task-{index}", tokens, roles, "", None, 0)


def run_identity() -> RunIdentity:
    """Return the identity of a run without a model."""
    return RunIdentity(
        model="bench", revision=None, architecture="none", d_model=D_MODEL, n_layers=len(TAPS), weights="",
        tokenizer="", prompt=PromptSpec(kind="text"), seed=0, max_seq_length=_LENGTH, long="truncate", dtype="bfloat16",
        store_dtype="bfloat16",
    )  # fmt: skip


def measure(url: str, size: float, rate: float) -> Overlap:
    """Send about this many bytes through the worker's loop into a folder."""
    count = int(size / (_LENGTH * A_TOKEN))
    root = open_folder(url)
    run = run_identity()
    join_run(root, run)
    stream = join_stream(root, 0, StreamIdentity("bench", "", count, count, TAPS), run)
    sizes = Sizes(
        batch_tokens=2 * _LENGTH,
        batch_size=None,
        longest=_LENGTH,
        shard_bytes=_SHARD,
        finishers=2 if "://" in url else None,
    )
    control = Control()
    began = time.perf_counter()
    run_pipeline(_samples(count), PacedProducer(rate), Sink(stream), sizes, progress=Progress(), control=control)
    seconds = time.perf_counter() - began
    return Overlap(url.partition("://")[0], stream.ledger.bytes, rate, seconds, root.stats.retries)


def _cap(url: str, rate: float) -> None:
    body = json.dumps({"bytes_per_second": rate}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(f"{url}/_fake/bandwidth", body, timeout=10).close()


def _disk_rate(folder: Path, size: int = 256 << 20) -> float:
    """Return the rate of a plain write with sync."""
    data = np.random.default_rng(0).bytes(size)
    began = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    (folder / "plain").unlink()
    return size / seconds


def main(arguments: list[str] | None = None) -> int:
    """Print a line for the limited bucket and one for the disk; return 1 if the first is too slow."""
    given = arguments if arguments is not None else sys.argv[1:]
    size = float(given[0] if given else "1") * 1e9
    console = Console()
    with fake_gcs() as url:
        _cap(url, _RATE)
        capped = measure("gs://bench/run", size, _RATE)
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        rate = _disk_rate(Path(name))
        disk = measure(str(Path(name) / "run"), size, rate)
    for result, words in ((capped, "a bucket capped to the compute's rate"), (disk, "the disk, compute at its rate")):
        console.print(
            f"overlap, {words}: {result.bytes / 1e9:.2f} GB at {result.rate / 1e6:.0f} MB/s in {result.seconds:.1f} s, "
            f"the slower alone is {result.fraction:.2f} of it (retries: {result.retries})",
            soft_wrap=True,
        )
    console.print(f"must hold on the capped bucket: at least {MUST}: {'yes' if capped.fraction >= MUST else 'NO'}")
    return 0 if capped.fraction >= MUST else 1


if __name__ == "__main__":
    sys.exit(main())
