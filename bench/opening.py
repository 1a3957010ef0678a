"""Measure how long a dataset of many streams takes to open in a bucket: ``python -m bench.opening [STREAMS SHARDS]``.

The fake GCS is another process and answers each request after 50 ms. The dataset has 10,000 streams of 10 shards by
default; the shards themselves are one byte, because opening does not read them. It is opened without its index,
which is how a run without one, or with a stale one, is opened, and with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from tests.fakes.gcs import FakeGcs

import spile
from bench.scale import run_identity
from bench.virtual import VirtualBucket, VirtualFolder
from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.spec.identity import StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.taps import Tap
from spile.store.index import IndexEntry, copy_ledger, group_key, pack_group
from spile.store.layout import STREAM, commit_key
from spile.store.ledger import Commit, ShardRecord, iso_time
from spile.store.run import join_run
from spile.store.writer import StreamRecord, stream_bytes

_LATENCY = 0.05
_SAMPLES = 100
_TENSORS = ("residual.12", "offsets", "sample_index", "tokens", "roles", "chunks")


def fill(bucket: VirtualBucket, streams: int, shards: int) -> None:
    """Write the records of a finished dataset of one layer, without its index."""
    root, run = VirtualFolder(bucket, "run"), run_identity()
    join_run(root, run)
    for number in range(streams):
        identity = StreamIdentity(
            f"gs://bucket/streams/stream_{number:03d}.jsonl",
            f"{number:064x}",
            shards * _SAMPLES,
            shards * _SAMPLES,
            (Tap("residual", 12),),
            streams=streams,
            split="5" * 32,
        )
        record = StreamRecord(f"{number:016x}", number, run.fingerprint(), identity)
        folder = f"run/stream_{number}"
        bucket.store(f"{folder}/{STREAM}", stream_bytes(record))
        for name in ("metadata.json", "progress.json"):
            bucket.store(f"{folder}/{name}", b"{}")
        for place in range(shards):
            commit = _commit(record.id, place)
            bucket.store(f"{folder}/{commit.shards[0].name}", b"x")
            bucket.store(f"{folder}/{commit_key(commit.number)}", commit.to_bytes())


def _index(bucket: VirtualBucket, streams: int) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and contents of the objects of the index."""
    root = VirtualFolder(bucket, "run")
    groups: dict[str, dict[int, IndexEntry]] = {}
    for number in range(streams):
        groups.setdefault(group_key(number), {})[number] = copy_ledger(root, number)
    for key, group in groups.items():
        yield f"run/{key}", pack_group(group)


def _commit(stream: str, place: int) -> Commit:
    shard = ShardRecord(
        name=f"shard_{place + 1:04d}-0123456789ab.safetensors",
        size=10**9,
        crc32c=place,
        header=(8192, place),
        tensors=dict.fromkeys(_TENSORS, place),
        samples=Ranges([(place * _SAMPLES, (place + 1) * _SAMPLES)]),
        count=_SAMPLES,
        tokens=_SAMPLES * 1500,
    )
    return Commit(place + 1, "0123456789ab", stream, (shard,), (), None, created=iso_time(), version="0")


def _serve(streams: int, shards: int) -> None:
    """Serve the dataset until the parent process ends, with its index in one bucket and without it in another."""
    made = VirtualBucket()
    fill(made, streams, shards)
    with FakeGcs() as fake:
        for name in ("plain", "indexed"):
            fake.add_bucket(name)
            for key, stored in made.objects.items():
                version = fake.buckets.store(name, key, stored.data)
                made.objects[key] = replace(stored, etag=version.etag)
        for key, data in _index(made, streams):
            fake.buckets.store("indexed", key, data)
        print(fake.url, flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.2)


@contextmanager
def _server(streams: int, shards: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.opening", str(streams), str(shards), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            os.environ["STORAGE_EMULATOR_HOST"] = url
            rule = {"kind": "slow", "count": -1, "seconds": _LATENCY}
            urllib.request.urlopen(f"{url}/_fake/faults", json.dumps([rule]).encode()).close()
            yield url
        finally:
            process.terminate()


def _timed(what: str, address: str, call: Callable[[Dataset], object], console: Console) -> None:
    folder = open_folder(address)
    began, cpu = time.perf_counter(), time.process_time()
    call(spile.open(folder))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    requests = folder.stats.requests
    console.print(
        f"{what}: {seconds:.1f} s, {cpu:.1f} s of CPU here, {requests:,} requests ({requests / seconds:,.0f}/s)",
        soft_wrap=True,
    )


def _count(dataset: Dataset) -> int:
    return len(dataset.samples)


def main() -> int:
    """Print a line for each operation."""
    parser = argparse.ArgumentParser(prog="python -m bench.opening", description=__doc__)
    parser.add_argument("streams", type=int, nargs="?", default=10_000)
    parser.add_argument("shards", type=int, nargs="?", default=10)
    parser.add_argument("--serve", action="store_true", help="serve the dataset; used by the benchmark itself")
    parser.add_argument("--plain", action="store_true", help="also open it without its index")
    options = parser.parse_args()
    if options.serve:
        _serve(options.streams, options.shards)
        return 0
    console = Console()
    with _server(options.streams, options.shards):
        console.print(f"{options.streams:,} streams of {options.shards} shards, {_LATENCY * 1000:.0f} ms a request")
        for bucket in ("indexed", "plain")[: 2 if options.plain else 1]:
            address = f"gs://{bucket}/run"
            _timed(f"{bucket}: open", address, lambda dataset: dataset, console)
            _timed(f"{bucket}: open and count the samples", address, _count, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
