"""Measure a remote dataset of many streams and a ledger of scattered samples: ``python -m bench.scale``.

The remote dataset is a local folder that answers each request after 50 ms, so the result shows how many requests wait
for one another. The scattered ledger has 20,000 commits of 50 samples each, and no two of these samples are adjacent,
as in a stream whose samples finish in any order.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console

import spile
from spile.objects import Folder, ObjectInfo, Stats, Unfinished, Writer, open_folder
from spile.proof.verification import verify
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import PromptSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.store.layout import commit_key
from spile.store.ledger import Commit, ShardRecord, read_ledger
from spile.store.run import join_run
from spile.store.writer import join_stream

__all__ = ["Distant", "main"]

_STREAMS, _SHARDS, _LATENCY = 100, 3, 0.05
_COMMITS, _SAMPLES = 20_000, 50

Result = TypeVar("Result")


@dataclass
class Traffic:
    """Counts requests and how many were concurrent."""

    requests: int = 0
    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def over(self, call: Callable[[], Result]) -> Result:
        """Simulate one request."""
        with self.lock:
            self.requests += 1
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(_LATENCY)
        try:
            return call()
        finally:
            with self.lock:
                self.now -= 1


class Distant:
    """A folder with a delay for every request, like a bucket."""

    local_path = None

    def __init__(self, inner: Folder, traffic: Traffic) -> None:
        self._inner, self.traffic = inner, traffic
        self._pool = ThreadPoolExecutor(48)

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def stats(self) -> Stats:
        return self._inner.stats

    def child(self, path: str) -> Distant:
        return Distant(self._inner.child(path), self.traffic)

    def get(self, key: str) -> bytes:
        return self.traffic.over(lambda: self._inner.get(key))

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        return self._pool.map(self.get, keys)

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        return self.traffic.over(lambda: self._inner.get_range(key, start, length))

    def info(self, key: str) -> ObjectInfo:
        return self.traffic.over(lambda: self._inner.info(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self.traffic.over(lambda: [*self._inner.list(prefix)]))

    def put(self, key: str, data: bytes) -> None:
        self.traffic.over(lambda: self._inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return self.traffic.over(lambda: self._inner.create(key, data))

    def delete(self, key: str) -> None:
        self.traffic.over(lambda: self._inner.delete(key))

    def writer(self, key: str, size: int) -> Writer:
        return self._inner.writer(key, size)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return self._inner.unfinished(prefix)

    def discard(self, remains: Unfinished) -> None:
        self._inner.discard(remains)


def run_identity() -> RunIdentity:
    return RunIdentity(
        model="bench",
        revision=None,
        architecture="none",
        d_model=8,
        n_layers=1,
        weights="0" * 8,
        tokenizer="0" * 8,
        prompt=PromptSpec(kind="text"),
        seed=0,
        max_seq_length=64,
        long="truncate",
        dtype="float32",
        store_dtype="float32",
    )


def _fill(root: Folder) -> None:
    run = run_identity()
    join_run(root, run)
    for number in range(_STREAMS):
        identity = StreamIdentity("bench.jsonl", "0" * 64, _SHARDS, _SHARDS, (Tap("residual", 0),))
        store = join_stream(root, number, identity, run)
        for index in range(_SHARDS):
            builder = store.begin([Sample(index, "t", np.zeros(4, np.int32), np.zeros(4, np.uint8))])
            builder.write(0, 0, np.ones((4, 8), np.float32))
            store.commit([builder.finish()])


def _timed(what: str, root: Folder, call: Callable[[Distant], object], console: Console) -> None:
    traffic = Traffic()
    began = time.perf_counter()
    call(Distant(root, traffic))
    seconds = time.perf_counter() - began
    console.print(
        f"{what}: {seconds:.2f} s, {traffic.requests} requests, at most {traffic.most} at a time", soft_wrap=True
    )


def _scattered(folder: Path) -> None:
    (folder / "commits").mkdir(parents=True)
    for number in range(1, _COMMITS + 1):
        samples = Ranges.of(range(number - 1, _COMMITS * _SAMPLES * 2, _COMMITS * 2))
        tensors = {f"residual.{layer}": number * layer for layer in range(4)}
        shard = ShardRecord(f"shard_{number:04d}-bench.safetensors", 10**9, 1, (8192, 1), tensors, samples, _SAMPLES, 1)
        (folder / commit_key(number)).write_bytes(Commit(number, "bench", "bench", (shard,), (), None).to_bytes())


def main() -> int:
    """Print the seconds of each operation."""
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        root = open_folder(f"{scratch}/run")
        _fill(root)
        far = f"{_STREAMS} streams of {_SHARDS} shards, {_LATENCY * 1000:.0f} ms a request"
        _timed(f"{far}: open", root, spile.open, console)
        _timed(f"{far}: open and count the samples", root, lambda at: len(spile.open(at).samples), console)
        _timed(f"{far}: verify", root, verify, console)
        _scattered(Path(scratch) / "scattered")
        began, cpu = time.perf_counter(), time.process_time()
        ledger = read_ledger(open_folder(f"{scratch}/scattered"), "bench")
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        if ledger.samples != _COMMITS * _SAMPLES or ledger.doubled:
            raise AssertionError(f"{ledger.samples} samples read")
        console.print(
            f"ledger of {_COMMITS:,} commits of {_SAMPLES} scattered samples: {cpu:.1f} s of CPU, {seconds:.1f} s",
            soft_wrap=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
