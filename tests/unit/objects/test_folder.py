"""Every operation of a folder, on every backend."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spile.errors import SpecError, StoreError
from spile.objects import Folder, NotFound, Writer, open_folder, read_chunks


def keys(folder: Folder, prefix: str = "") -> list[str]:
    return [item.key for item in folder.list(prefix)]


def test_put_get_replace_delete(folder: Folder) -> None:
    folder.put("a/b.json", b"one")
    assert folder.get("a/b.json") == b"one"
    folder.put("a/b.json", b"two!")
    assert folder.get("a/b.json") == b"two!"
    assert folder.child("a").get("b.json") == b"two!"
    folder.delete("a/b.json")
    folder.delete("a/b.json")
    with pytest.raises(NotFound, match=r"a/b\.json"):
        folder.get("a/b.json")


def test_empty_and_odd_names(folder: Folder) -> None:
    for key in ("empty", "with space/and#hash?.json", "ünï/+&=%20"):
        folder.put(key, b"")
        assert folder.get(key) == b""
        assert folder.info(key).size == 0
    assert keys(folder) == sorted(("empty", "with space/and#hash?.json", "ünï/+&=%20"))


def test_create_once(folder: Folder) -> None:
    assert folder.create("commits/0001.json", b"mine")
    assert not folder.create("commits/0001.json", b"other")
    assert folder.get("commits/0001.json") == b"mine"
    assert keys(folder) == ["commits/0001.json"]
    assert list(folder.unfinished()) == []


def assert_one_winner(folder: Folder) -> None:
    """Create from sixteen threads at once: one wins, and its content is stored."""
    start = threading.Barrier(16)

    def create(author: int) -> bool:
        start.wait()
        return folder.create("one", f"author {author}".encode())

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert folder.get("one") == f"author {won.index(True)}".encode()


def test_sixteen_creators_one_winner(folder: Folder) -> None:
    assert_one_winner(folder)


@pytest.mark.parametrize("cloud_url", ["s3"], indirect=True)
def test_sixteen_creators_one_winner_though_moto_looks_before_it_writes(
    cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy before moto makes its conditional create what Amazon's is: one step."""
    from moto.s3.responses import S3Response

    real = S3Response._get_checksum  # called between the look and the write

    def late(*args: object) -> object:
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(S3Response, "_get_checksum", late)
    assert_one_winner(cloud_folder)


def test_ranges(folder: Folder) -> None:
    folder.put("x", bytes(range(100)))
    assert folder.get_range("x", 10, 5) == bytes(range(10, 15))
    assert folder.get_range("x", 0, 100) == bytes(range(100))
    assert folder.get_range("x", 7, 0) == b""
    with pytest.raises(StoreError, match="x"):
        folder.get_range("x", 90, 11)
    with pytest.raises(StoreError, match="x"):
        folder.get_range("x", 200, 1)
    with pytest.raises(NotFound, match="nothing"):
        folder.get_range("nothing", 0, 1)


def test_info(folder: Folder) -> None:
    before = time.time()
    folder.put("d/x", b"12345")
    info = folder.info("d/x")
    assert (info.key, info.size) == ("d/x", 5)
    assert before - 5 < info.updated < time.time() + 5
    with pytest.raises(NotFound, match="nothing"):
        folder.info("nothing")
    with pytest.raises(NotFound):
        folder.info("d")


def test_list_is_sorted_and_exact(folder: Folder) -> None:
    names = ["a-b", "a.b", "a/1", "a/2/3", "a0", "commits/0001.json", "commits/0002.json", "commits2/x"]
    for name in reversed(names):
        folder.put(name, name.encode())
    assert keys(folder.child("nowhere")) == []
    assert keys(folder) == sorted(n for n in names)
    assert keys(folder, "commits/") == ["commits/0001.json", "commits/0002.json"]
    assert keys(folder, "commits") == ["commits/0001.json", "commits/0002.json", "commits2/x"]
    assert keys(folder, "commits/0002") == ["commits/0002.json"]
    assert keys(folder.child("a"), "") == ["1", "2/3"]
    assert keys(folder, "zzz") == []
    folder.put(".-x/1", b"")
    folder.put("..y", b"")
    assert keys(folder, ".-") == [".-x/1"]
    assert keys(folder, "..y") == ["..y"]
    assert [item.size for item in folder.list("a")] == [len(n) for n in sorted(names) if n.startswith("a")]


def test_get_many_keeps_the_order(folder: Folder) -> None:
    names = [f"c/{n:04d}" for n in range(60)]
    for name in names:
        folder.put(name, name.encode())
    assert list(folder.get_many(reversed(names))) == [name.encode() for name in reversed(names)]
    assert list(folder.get_many([])) == []
    with pytest.raises(NotFound, match="c/9999"):
        list(folder.get_many([*names, "c/9999"]))


def test_writer_writes_anywhere_and_is_seen_at_once(folder: Folder) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8)
    writer = folder.writer("big/shard", data.nbytes)
    assert isinstance(writer, Writer)
    with ThreadPoolExecutor(4) as pool:
        pieces = [(at, data[at : at + 99_991]) for at in range(0, data.nbytes, 99_991)]
        list(pool.map(lambda piece: writer.write_at(*piece), reversed(pieces)))
    assert keys(folder) == []
    writer.finish(data.nbytes)
    assert folder.get("big/shard") == data.tobytes()
    writer.abort()
    assert keys(folder) == ["big/shard"]
    assert list(folder.unfinished()) == []
    with pytest.raises(StoreError, match="finished"):
        writer.write_at(0, b"x")


def test_writer_shrinks_with_moves(folder: Folder) -> None:
    data = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    writer = folder.writer("s", data.nbytes)
    writer.write_at(0, data)
    writer.move(50_000, 40_000, 30_000)
    writer.finish(70_000)
    assert folder.get("s") == data[:40_000].tobytes() + data[50_000:80_000].tobytes()


def test_aborted_writer_leaves_nothing(folder: Folder) -> None:
    writer = folder.writer("s", 100)
    writer.write_at(0, b"x" * 100)
    writer.abort()
    writer.abort()
    assert keys(folder) == []
    assert list(folder.unfinished()) == []
    with pytest.raises(StoreError, match="aborted"):
        writer.finish(100)


def test_empty_writer(folder: Folder) -> None:
    folder.writer("nothing", 0).finish(0)
    assert folder.get("nothing") == b""


def test_read_chunks(folder: Folder) -> None:
    data = np.random.default_rng(2).bytes(10_001)
    folder.put("x", data)
    folder.put("empty", b"")
    pieces = list(read_chunks(folder, "x", 1000))
    assert [len(p) for p in pieces] == [1000] * 10 + [1]
    assert b"".join(pieces) == data
    assert list(read_chunks(folder, "empty")) == []
    with pytest.raises(NotFound):
        list(read_chunks(folder, "nothing"))
    reader = read_chunks(folder, "x", 10)
    next(reader)
    reader.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["", "/x", "a//b", "../x", "a/../b", "a/", "."])
def test_bad_keys(folder: Folder, key: str) -> None:
    for verb in (folder.get, folder.info, folder.delete):
        with pytest.raises(SpecError, match="not an object's name"):
            verb(key)
    with pytest.raises(SpecError):
        folder.put(key, b"")


def test_child_urls_reopen(folder: Folder) -> None:
    folder.child("tpu_5").put("commits/0001.json", b"x")
    assert open_folder(folder.child("tpu_5").url).get("commits/0001.json") == b"x"
    assert open_folder(folder.url + "/").get("tpu_5/commits/0001.json") == b"x"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.text("ab/-.0", min_size=1, max_size=6).filter(lambda k: all(p not in ("", ".", "..") for p in k.split("/"))),
        unique=True,
        max_size=8,
    ),
    st.text("ab/-0.", max_size=3),
)
def test_listing_is_filter_and_sort(folder: Folder, names: list[str], prefix: str) -> None:
    # A disk cannot hold both a file and a folder of one name; a dataset never asks it to.
    names = [n for n in names if not any(m.startswith(n + "/") or n.startswith(m + "/") for m in names)]
    root = folder.child(f"case-{next(_cases)}")
    for name in names:
        root.put(name, b"")
    assert keys(root, prefix) == sorted(n for n in names if n.startswith(prefix))


_cases = iter(range(10**9))
