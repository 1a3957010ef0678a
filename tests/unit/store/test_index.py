"""The index of a dataset in a bucket is used only while it agrees with the ledgers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from tests.fakes.gcs import FakeGcs

import spile
from spile.errors import Damaged
from spile.objects import Folder, open_folder
from spile.store import index, layout
from spile.store.cleanup import clear_stream
from spile.store.index import read_index, write_entry
from spile.store.layout import scan_streams
from spile.store.writer import join_stream
from world import produce, run_identity, stream_identity

STREAMS = 3


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    monkeypatch.setattr(index, "_MIN_STREAMS", 1)
    with FakeGcs() as fake:
        fake.add_bucket("b")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


@pytest.fixture
def root(gcs: FakeGcs) -> Folder:
    folder = open_folder("gs://b/run")
    for number in range(STREAMS):
        produce(folder, 45, worker_id=number)
        write_entry(folder, number)
    return folder


def entries(root: Folder) -> set[int]:
    return set(read_index(root, scan_streams(root)))


def described(root: Folder) -> list[tuple[object, ...]]:
    streams = spile.open(root).streams
    return [(each.record, each.commits, each.samples, each.tokens, each.skipped) for each in streams]


def test_a_dataset_with_an_index_is_opened_with_few_requests(
    root: Folder, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entries(root) == {0, 1, 2}
    before = gcs.faults.requests
    indexed = described(root)
    requests = gcs.faults.requests - before
    assert requests <= 5, "run.json, two listings and the index"
    monkeypatch.setattr(index, "_MIN_STREAMS", 99)
    assert described(root) == indexed
    assert gcs.faults.requests - before - requests > 15


def test_a_new_commit_makes_the_entry_of_its_stream_stale(root: Folder) -> None:
    join_stream(root, 1, stream_identity(45), run_identity()).commit([], [])
    assert entries(root) == {0, 2}
    assert [len(stream.commits) for stream in spile.open(root).streams] == [5, 6, 5]
    write_entry(root, 1)
    assert entries(root) == {0, 1, 2}


def test_a_stream_that_was_started_again_is_not_read_from_the_index(root: Folder) -> None:
    old = spile.open(root).stream(1).record.id
    clear_stream(root, 1)
    assert [stream.number for stream in spile.open(root).streams] == [0, 2]
    produce(root, 45, worker_id=1)
    assert entries(root) == {0, 2}
    assert spile.open(root).stream(1).record.id != old


def test_a_missing_commit_is_not_hidden_by_the_index(root: Folder) -> None:
    root.delete("tpu_1/commits/0002.json")
    with pytest.raises(Damaged, match="has a gap"):
        described(root)


@pytest.mark.parametrize("content", [b"", b"half", zlib.compress(b"[]"), zlib.compress(b'{"0": {}}')])
def test_a_damaged_index_is_ignored_and_replaced(root: Folder, content: bytes) -> None:
    expected = described(root)
    root.put("index/0000.json.z", content)
    assert entries(root) == set()
    assert described(root) == expected
    write_entry(root, 2)
    assert entries(root) == {2}


def test_a_bomb_is_not_unpacked(root: Folder) -> None:
    root.put("index/0000.json.z", zlib.compress(b" " * (index._MAX_GROUP + 1) + b"{}"))
    assert entries(root) == set()


def test_the_ledger_of_a_long_stream_is_not_copied(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = described(root)
    monkeypatch.setattr(index, "_MAX_LEDGER", 100)
    write_entry(root, 1)
    found = read_index(root, scan_streams(root))
    assert [found[number].commits is None for number in range(STREAMS)] == [False, True, False]
    assert described(root) == expected


def test_a_folder_on_disk_has_no_index(tmp_path: object) -> None:
    folder = open_folder(str(tmp_path))
    produce(folder, 45)
    write_entry(folder, 0)
    assert not list(folder.list("index/"))


def test_the_listing_by_digits_is_the_plain_listing(gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder("gs://b/many")
    for number in (0, 1, 2, 9, 10, 19, 20, 99, 100, 12345):
        for key in ("stream.json", "commits/0001.json", "zz"):
            folder.put(f"stream_{number}/{key}", b"x")
    plain = [info.key for info in layout.list_stream_files(folder)]
    assert len(plain) == 30
    monkeypatch.setattr(layout, "_PAGE", 5)
    assert [info.key for info in layout.list_stream_files(folder)] == plain
    assert [info.key for info in folder.list("stream_1")] == [key for key in plain if key.startswith("stream_1")]
