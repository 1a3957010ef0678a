"""Shards of a bucket are opened several at a time, once each, and a failure to open one names it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from backends import Clouds
from spile.errors import SpileError
from spile.objects import Folder
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.store import shard_reader
from spile.store.shard_reader import ShardReader
from world import produce

SHARDS = 30
TAP = "attn.1"


@pytest.fixture
def dataset(cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Of small shards that are read as large ones are: header, tail, and rows each by themselves."""
    produce(cloud_folder, 2 * SHARDS, shard=2)
    monkeypatch.setattr(shard_reader, "SMALL_SHARD", 0)
    return open_dataset(cloud_folder.url)


def in_order(dataset: Dataset) -> Iterator[Any]:
    return dataset.rows(TAP, 64)


def permuted(dataset: Dataset) -> Iterator[Any]:
    return dataset.shuffled(TAP, 64)


def in_two_levels(dataset: Dataset) -> Iterator[Any]:
    return dataset.shuffled(TAP, 64, memory=16 << 10)


WAYS: list[Callable[[Dataset], Iterator[Any]]] = [in_order, permuted, in_two_levels]


@pytest.mark.parametrize("read", WAYS)
def test_every_row_comes_once(dataset: Dataset, read: Callable[[Dataset], Iterator[Any]]) -> None:
    found = Counter(row.tobytes() for batch in read(dataset) for row in np.asarray(batch))
    wanted = Counter(
        row.tobytes() for ref in dataset.samples for row in dataset.sample(ref.stream, ref.index).rows(TAP)
    )
    assert found == wanted


@pytest.mark.parametrize("read", WAYS)
def test_each_shard_takes_two_requests_besides_its_rows(
    dataset: Dataset, read: Callable[[Dataset], Iterator[Any]]
) -> None:
    (stream,) = dataset.streams
    count = len(stream.shards)
    assert count >= SHARDS - 3  # some samples of the world are skipped
    before = stream.folder.stats.requests
    for _ in read(dataset):
        pass
    # A block of the two-level shuffle is one sample, and neighbours are read together.
    most = len(dataset.samples) if read is in_two_levels else count
    requests = stream.folder.stats.requests - before
    assert 3 * count <= requests <= 2 * count + most


@pytest.mark.parametrize("read", [in_order, permuted])
def test_many_are_open_before_rows_of_the_first_come(
    dataset: Dataset, read: Callable[[Dataset], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, enough = set[str](), threading.Event()
    chunks = ShardReader.chunks

    def held_back(self: ShardReader, *words: Any) -> Any:
        opened.add(self.record.name)
        if len(opened) >= 8:
            enough.set()
        assert enough.wait(30), f"{len(opened)} shards were opened while rows of the first were waited for"
        return chunks(self, *words)

    monkeypatch.setattr(ShardReader, "chunks", held_back)
    assert len(next(read(dataset))) > 0


@pytest.mark.parametrize("read", WAYS)
def test_a_shard_that_cannot_be_opened_is_named(
    dataset: Dataset, read: Callable[[Dataset], Iterator[Any]], clouds: Clouds
) -> None:
    (stream,) = dataset.streams
    name = stream.shards[-1].name
    clouds.faults(stream.folder.url).add("status", status=403, target=name, count=-1)
    with pytest.raises(SpileError, match=name):
        for _ in read(dataset):
            pass


_ENDLESS = """
import sys
import spile
import spile.store.shard_reader as shard_reader
shard_reader.SMALL_SHARD = 0
rows = spile.open(sys.argv[1]).shuffled(sys.argv[2], 8, epochs=None, memory=16 << 10)
for _ in range(int(sys.argv[3])):
    next(rows)
assert "obstore" in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_a_program_that_ends_while_ranges_are_read_says_nothing(dataset: Dataset, clouds: Clouds, batches: int) -> None:
    clouds.faults(dataset.streams[0].folder.url).add("slow", method="GET", count=-1, seconds=0.05)
    command = [sys.executable, "-c", _ENDLESS, dataset.root.url, TAP, str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
