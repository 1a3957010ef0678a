"""Measure how long a new machine takes to read the ledger of a run: ``python -m bench.ledger [COMMITS]``.

A ledger of 10,000 commits, each with one shard of 24 taps, is read from the fake GCS (a separate process) as by a
worker that resumes. The fake is Python on the same cores. A real bucket is limited by its latency instead: with 48
concurrent requests of 30 ms each, 10,000 commits would take 6 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from spile.objects import Folder, open_folder
from spile.spec.ranges import Ranges
from spile.store.layout import commit_key
from spile.store.ledger import Commit, ShardRecord, read_ledger

__all__ = ["LedgerTimes", "fake_gcs", "main", "measure"]

_SAMPLES = 120


@dataclass(frozen=True)
class LedgerTimes:
    """Seconds."""

    commits: int
    listed: float
    read: float
    """Seconds to list, fetch, check and sum the commits."""


@contextmanager
def fake_gcs(bucket: str = "bench") -> Iterator[str]:
    """Start a fake GCS in a separate process, set the environment for it, and yield its URL."""
    command = [sys.executable, "-m", "tests.fakes.gcs", "--bucket", bucket, "--with-parent"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        os.environ["STORAGE_EMULATOR_HOST"] = url
        yield url
    finally:
        process.terminate()
        process.wait()
        os.environ.pop("STORAGE_EMULATOR_HOST", None)
        if before is not None:
            os.environ["STORAGE_EMULATOR_HOST"] = before


def _commit(number: int) -> Commit:
    """Return a realistic commit: its samples are a few ranges, because batches are sorted by length."""
    first = (number - 1) * _SAMPLES
    record = ShardRecord(
        name=f"shard_{number:04d}-0123456789abcdef.safetensors",
        size=10**9,
        crc32c=number,
        header=(8192, number),
        tensors={f"residual.{layer}": number * layer for layer in range(24)},
        samples=Ranges([(first, first + _SAMPLES)]),
        count=_SAMPLES,
        tokens=_SAMPLES * 1500,
    )
    return Commit(number, "0123456789abcdef", "bench", (record,), (), None)


def measure(folder: Folder, commits: int) -> LedgerTimes:
    """Fill the folder with commits, then read them."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: folder.put(commit_key(n), _commit(n).to_bytes()), range(1, commits + 1)))
    began = time.perf_counter()
    found = sum(1 for _ in folder.list("commits/"))
    listed = time.perf_counter() - began
    began = time.perf_counter()
    ledger = read_ledger(folder, "bench")
    read = time.perf_counter() - began
    if not found == ledger.commits == commits or ledger.samples != commits * _SAMPLES:
        raise AssertionError(f"{found} listed and {ledger.commits} read of {commits}")
    return LedgerTimes(commits, listed, read)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    commits = int((arguments if arguments is not None else sys.argv[1:] or ["10000"])[0])
    with fake_gcs() as _:
        times = measure(open_folder("gs://bench/run/tpu_0"), commits)
    Console().print(
        f"ledger of {times.commits:,} commits on the fake GCS: listed in {times.listed:.2f} s, "
        f"read and added up in {times.read:.1f} s ({times.commits / times.read:,.0f} commits/s)",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
