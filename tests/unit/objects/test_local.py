"""What only a disk does: errors of the file system, temporary files, durability."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spile.errors import SpecError, StoreError, UserError
from spile.objects import Unwritable, open_folder, split
from spile.objects.local import LocalFolder


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
    ],
)
def test_the_owners_business_is_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    folder = LocalFolder(tmp_path)
    failing(monkeypatch, "pwrite", number)
    for write in (lambda: folder.put("x", b"1"), lambda: folder.create("x", b"1")):
        with pytest.raises(Unwritable, match=words) as caught:
            write()
        assert caught.value.exit_code == 2
        assert isinstance(caught.value, UserError)
        assert isinstance(caught.value, StoreError)
        assert str(tmp_path / "x") in str(caught.value)
        assert "expected a folder with room, found" in str(caught.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "a full disk"), (errno.EDQUOT, "a used up quota")])
def test_a_disk_that_fills_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    failing(monkeypatch, "pwrite", number)
    with pytest.raises(StoreError, match=rf"found {words}\. Free some room") as caught:
        LocalFolder(tmp_path).put("x", b"1")
    assert caught.value.exit_code == 1
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        LocalFolder(tmp_path).put("x", b"1")
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(Unwritable, match="a file where a folder should be"):
        LocalFolder(tmp_path / "root").put("x", b"1")


_LIMITED = """
import resource, signal, sys
from spile.objects import open_folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    open_folder(sys.argv[1]).writer("shard", 2 << 20)
except Exception as error:
    print(type(error).__name__, error, error.exit_code)
"""


def test_no_room_shows_when_the_writer_begins(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "Unwritable" in result.stdout, result
    assert "larger than this file system allows" in result.stdout
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys
from spile.objects import open_folder
folder = open_folder(sys.argv[1])
writer = folder.writer("tpu_0/shard", 1000)
writer.write_at(0, b"x" * 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_leaves_is_garbage(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = LocalFolder(tmp_path)
    assert list(folder.list()) == []
    (remains,) = folder.unfinished()
    assert (remains.key, remains.size) == ("tpu_0/shard", 1000)
    assert [r.key for r in folder.unfinished("tpu_0/sh")] == ["tpu_0/shard"]
    assert list(folder.unfinished("tpu_1")) == []
    assert [r.key for r in folder.child("tpu_0").unfinished()] == ["shard"]
    folder.discard(remains)
    folder.discard(remains)
    assert list(folder.unfinished()) == []
    assert list((tmp_path / "tpu_0").iterdir()) == []


_RACER = """
import sys
from spile.objects import open_folder
folder = open_folder(sys.argv[1])
sys.stdin.readline()
print(sum(folder.create(f"k{n}", sys.argv[2].encode()) for n in range(50)))
"""


def test_processes_race(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(tmp_path), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert sum([int(racer.communicate()[0]) for racer in racers]) == 50


def test_everything_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut cannot be tested here, but the order of the calls can."""
    steps: list[str] = []
    fsync, link, rename = os.fsync, os.link, Path.rename

    def spy_fsync(handle: int) -> None:
        steps.append("folder" if Path(f"/proc/self/fd/{handle}").is_dir() else "file")
        fsync(handle)

    def spy_link(*arguments: str) -> None:
        steps.append("link")
        link(*arguments)

    def spy_rename(self: Path, target: Path) -> None:
        steps.append("rename")
        rename(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "link", spy_link)
    monkeypatch.setattr(Path, "rename", spy_rename)
    folder = LocalFolder(tmp_path)
    folder.put("a", b"")
    folder.create("b", b"")
    writer = folder.writer("c", 10)
    writer.write_at(0, b"0123456789")
    writer.finish(10)
    assert steps == ["file", "rename", "folder", "file", "link", "folder", "file", "rename", "folder"]
    steps.clear()
    folder.put("new/d", b"")
    assert steps == ["folder", "file", "rename", "folder"]


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(StoreError, match="no such file"):
        LocalFolder(tmp_path).get("x")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no folder was named"),
        ("http://x/y", "expected a path, gs://, s3://, az:// or hf://, found http://"),
        ("gs://", "no bucket in gs://"),
        ("s3:///x", "no bucket"),
    ],
)
def test_bad_urls(url: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        open_folder(url)


def test_file_urls_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder(f"file://{tmp_path}").put("x", b"1")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = open_folder("~")
    assert folder.url == "~"
    assert folder.get("x") == b"1"


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("gs://b/data/x.jsonl", ("gs://b/data", "x.jsonl")),
        ("s3://b/x", ("s3://b", "x")),
        ("x.jsonl", (".", "x.jsonl")),
        ("a/b/x", ("a/b", "x")),
        ("/x", ("/", "x")),
        ("file:///tmp/x", ("file:///tmp", "x")),
    ],
)
def test_split(url: str, parts: tuple[str, str]) -> None:
    assert split(url) == parts


@pytest.mark.parametrize("url", ["", "gs://b", "gs://b/", "a/", "s3://b/x/"])
def test_split_needs_a_name(url: str) -> None:
    with pytest.raises(UserError, match="names no file"):
        split(url)


def test_a_disk_that_becomes_read_only_is_still_one_line_when_the_file_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the write counts, not that of the clean-up after it."""
    writer = open_folder(str(tmp_path)).writer("x", 10)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("pwrite", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(Unwritable, match="a read-only file system"):
        writer.write_at(0, b"0123456789")
    writer.abort()
