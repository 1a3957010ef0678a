"""The ferry over plain pipes: any tree arrives whole, only what lacks is sent, nothing leaves the folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.fleet.ssh.remote import ferry

NAMES = st.text("ab.é ", min_size=1, max_size=3).filter(lambda name: name not in (".", "..") and name.strip())
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=3000) | st.just(b"x" * 70_000), max_size=8
)


def clash_free(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Drop files that would have to be folders too."""
    return {path: data for path, data in tree.items() if not any(other.startswith(path + "/") for other in tree)}


def write(root: Path, tree: dict[str, bytes]) -> None:
    for path, data in clash_free(tree).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def read(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in ferry.walk(str(root))}


def cross(source: Path, target: Path, *, mirror: bool, cut: int | None = None) -> ferry.Tally:
    """Give and take, in two threads; ``cut`` breaks the wire after so many bytes."""
    there, back = os.pipe(), os.pipe()
    failed: list[BaseException] = []

    def taker() -> None:
        with os.fdopen(there[0], "rb") as incoming, os.fdopen(back[1], "wb") as outgoing:
            try:
                wire: BinaryIO = incoming if cut is None else Cut(incoming, cut)  # type: ignore[assignment]
                ferry.take(str(target), wire, outgoing, mirror)
            except ferry.FerryError as error:
                failed.append(error)

    thread = threading.Thread(target=taker)
    thread.start()
    entries = [ferry.describe(str(source), path) for path in ferry.walk(str(source))]
    try:
        with os.fdopen(there[1], "wb", buffering=0) as outgoing, os.fdopen(back[0], "rb") as incoming:
            tally = ferry.give(str(source), entries, incoming, outgoing)  # type: ignore[arg-type]
    except (ferry.FerryError, BrokenPipeError) as error:
        failed.append(error)
    thread.join()
    if failed:
        raise ferry.FerryError(str(failed[0]))
    return tally


class Cut:
    """A wire that ends early."""

    def __init__(self, wire: BinaryIO, size: int) -> None:
        self.wire, self.left = wire, size

    def read(self, size: int) -> bytes:
        data = self.wire.read(min(size, self.left))
        self.left -= len(data)
        return data


@settings(max_examples=30, deadline=None)
@given(TREES, TREES, TREES)
def test_a_mirror_holds_the_last_copy_and_what_the_host_made(
    first: dict[str, bytes], second: dict[str, bytes], made: dict[str, bytes]
) -> None:
    made = {f"made/{path}": data for path, data in made.items()}
    with tempfile.TemporaryDirectory() as folder:
        one, two, target = (Path(folder, name) for name in ("one", "two", "target"))
        for root in (one, two, target):
            root.mkdir()
        write(one, first)
        write(two, second)
        cross(one, target, mirror=True)
        assert read(target) == clash_free(first)
        write(target, made)
        cross(two, target, mirror=True)  # also where a file was a folder before, or the other way round
        assert read(target) == clash_free(second) | clash_free(made)
        assert cross(two, target, mirror=True).moved == 0


@settings(max_examples=25, deadline=None)
@given(TREES, st.integers(0, 100_000))
def test_a_crossing_that_broke_off_goes_on(tree: dict[str, bytes], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.mkdir()
        target.mkdir()
        write(source, tree)
        try:
            cross(source, target, mirror=False, cut=cut)
        except ferry.FerryError:
            arrived = read(target)
            assert all(clash_free(tree)[path] == data for path, data in arrived.items())  # never half a file
        tally = cross(source, target, mirror=False)
        assert read(target) == clash_free(tree)
        assert tally.moved <= tally.size
        assert not (target / ferry.STORE).exists()


def test_what_came_before_the_break_is_not_sent_again(tmp_path: Path) -> None:
    write(tmp_path / "source", {"big": os.urandom(8 << 20)})
    with pytest.raises(ferry.FerryError):
        cross(tmp_path / "source", tmp_path / "target", mirror=False, cut=5 << 20)
    assert read(tmp_path / "target") == {}
    assert cross(tmp_path / "source", tmp_path / "target", mirror=False).moved <= 4 << 20
    assert read(tmp_path / "target") == read(tmp_path / "source")


def test_a_part_of_another_file_is_not_taken_for_ours(tmp_path: Path) -> None:
    write(tmp_path / "source", {"big": os.urandom(4 << 20)})
    with pytest.raises(ferry.FerryError):
        cross(tmp_path / "source", tmp_path / "target", mirror=False, cut=3 << 20)
    write(tmp_path / "source", {"big": os.urandom(4 << 20)})
    cross(tmp_path / "source", tmp_path / "target", mirror=False)
    assert read(tmp_path / "target") == read(tmp_path / "source")


def test_a_mirror_that_breaks_off_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "source", {"a": b"old", "b": b"old"})
    cross(tmp_path / "source", tmp_path / "target", mirror=True)
    write(tmp_path / "source", {"a": b"new", "b": os.urandom(4 << 20)})
    with pytest.raises(ferry.FerryError):
        cross(tmp_path / "source", tmp_path / "target", mirror=True, cut=1 << 20)
    assert read(tmp_path / "target") == {"a": b"old", "b": b"old"}


def test_modes_times_and_links_come_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, {"tool": b"#!/bin/sh\n"})
    (source / "tool").chmod(0o750)
    os.utime(source / "tool", ns=(10**18, 10**18 + 1))
    (source / "link").symlink_to("tool")
    (source / "nowhere").symlink_to("/no/such")
    cross(source, target, mirror=True)
    facts = (target / "tool").stat()
    assert (facts.st_mode & 0o777, facts.st_mtime_ns) == (0o750, 10**18 + 1)
    assert (target / "link").readlink() == Path("tool")
    assert (target / "nowhere").readlink() == Path("/no/such")


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", f"{ferry.STORE}/copied.json"])
def test_no_file_leaves_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(ferry.FerryError, match="would leave the folder"):
        ferry.Taker(str(tmp_path / "target"), mirror=False).place(path)


def test_no_file_goes_through_a_link(tmp_path: Path) -> None:
    write(tmp_path / "source", {"door/file": b"x"})
    for name in ("outside", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "target" / "door").symlink_to(tmp_path / "outside")
    with pytest.raises(ferry.FerryError):
        cross(tmp_path / "source", tmp_path / "target", mirror=True)
    assert read(tmp_path / "outside") == {}


def test_a_link_that_became_a_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, {"real/file": b"x"})
    (source / "door").symlink_to("real")
    cross(source, target, mirror=True)
    (source / "door").unlink()
    write(source, {"door/file": b"y"})
    cross(source, target, mirror=True)
    assert read(target) == {"real/file": b"x", "door/file": b"y"}


def test_a_damaged_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "source", {"a": b"good"})
    real = ferry.read_exactly
    monkeypatch.setattr(ferry, "read_exactly", lambda wire, size: real(wire, size).replace(b"good", b"evil"))
    with pytest.raises(ferry.FerryError, match="the checksum differs: a"):
        cross(tmp_path / "source", tmp_path / "target", mirror=False)
    assert read(tmp_path / "target") == {}
    monkeypatch.undo()
    cross(tmp_path / "source", tmp_path / "target", mirror=False)
    shutil.rmtree(tmp_path / "source")
    assert read(tmp_path / "target") == {"a": b"good"}
