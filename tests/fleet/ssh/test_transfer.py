"""Files over a real sshd, by rsync and by tar: a tree arrives complete, stale files go, files of the host stay."""

from __future__ import annotations

import getpass
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fleet.ssh.loopback import Hosts
from spile.errors import SpileError, UserError
from spile.hosts import files as transfer
from spile.hosts.files import LocalFiles, Transferred, pull, push
from spile.hosts.hosts import Access, Host, parse_hosts

NAMES = st.text("ab.é '\n", min_size=1, max_size=3).filter(lambda name: name not in (".", "..") and name.strip())
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
TREES = st.dictionaries(PATHS, st.binary(max_size=300), min_size=1, max_size=6)
OURS = {transfer._MANIFEST}


def clash_free(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Drop files that would have to be folders too."""
    return {path: data for path, data in tree.items() if not any(other.startswith(path + "/") for other in tree)}


def write(root: Path, tree: dict[str, bytes]) -> None:
    for path, data in clash_free(tree).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def read(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.name not in OURS}


@pytest.fixture(params=["rsync", "tar"])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tar":
        monkeypatch.setattr(transfer, "_both_have_rsync", lambda _: False)
    elif shutil.which("rsync") is None:
        pytest.skip("rsync is not installed (apt-get install rsync)")
    return str(request.param)


class World:
    """One host behind a real sshd."""

    def __init__(self, hosts: Hosts) -> None:
        self.home = hosts.start(0).home
        (self.host,) = parse_hosts([hosts.named(0)])
        self.access = Access(getpass.getuser(), hosts.key, hosts.options)

    def push(self, root: Path, target: str) -> Transferred:
        links = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
        names = sorted(str(path.relative_to(root)) for path in links)
        files = LocalFiles(root, tuple(names), sum(path.lstat().st_size for path in links))
        (moved,) = transfer.transfer([self.host], self.access, lambda host: push(host, self.access, files, target))
        return moved

    def pull(self, source: str, into: Path) -> Transferred:
        (moved,) = transfer.transfer([self.host], self.access, lambda host: pull(host, self.access, source, into))
        return moved


@pytest.fixture
def world(empty_hosts: Hosts) -> World:
    return World(empty_hosts)


@pytest.mark.slow
# Not shrunk: each example is a dozen logins.
@settings(
    max_examples=5,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(first=TREES, second=TREES, made=TREES)
def test_a_copy_is_a_mirror_that_keeps_what_the_host_made(
    world: World, tool: str, first: dict[str, bytes], second: dict[str, bytes], made: dict[str, bytes]
) -> None:
    made = {f"made/{path}": data for path, data in made.items()}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=world.home) as below:
        one, two, target = Path(folder, "one"), Path(folder, "two"), Path(below, "it's a copy")
        write(one, first)
        write(two, second)
        where = f"~/{target.relative_to(world.home)}"
        world.push(one, where)
        assert read(target) == clash_free(first)
        write(target, made)
        moved = world.push(two, where)  # also where a file was a folder before, or the other way round
        assert read(target) == clash_free(second) | clash_free(made)
        assert moved.files == len(clash_free(second))
        if tool == "rsync":
            assert world.push(two, where).sent == 0
        back = Path(folder, "back")
        assert world.pull(where, back).files == len(clash_free(second) | clash_free(made)) + len(OURS)
        assert read(back) == read(target)


def test_modes_times_and_links_come_along_but_no_setuid(world: World, tool: str, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    write(source, {"tool": b"#!/bin/sh\n", "sly": b"x"})
    (source / "tool").chmod(0o750)
    (source / "sly").chmod(0o4755)
    os.utime(source / "tool", (10**9, 10**9))
    (source / "link").symlink_to("tool")
    world.push(source, "~/copy")
    world.pull("~/copy", back)
    for place in (world.home / "copy", back):
        facts = (place / "tool").stat()
        assert (facts.st_mode & 0o777, int(facts.st_mtime)) == (0o750, 10**9)
        assert not (place / "sly").stat().st_mode & stat.S_ISUID
        assert (place / "link").readlink() == Path("tool")
    (world.home / "copy" / "sly").chmod(0o4755)
    world.pull("~/copy", back)
    assert not (back / "sly").stat().st_mode & stat.S_ISUID


def test_a_file_that_is_here_and_damaged_is_brought_again(world: World, tool: str, tmp_path: Path) -> None:
    back = tmp_path / "back"
    write(world.home / "kept", {"a/shard": os.urandom(100_000)})
    world.pull("~/kept", back)
    facts = (back / "a" / "shard").stat()
    (back / "a" / "shard").write_bytes(bytes(100_000))
    os.utime(back / "a" / "shard", ns=(facts.st_mtime_ns, facts.st_mtime_ns))  # the same size and time
    world.pull("~/kept", back)
    assert read(back) == read(world.home / "kept")


def test_no_link_of_a_host_leads_a_file_out_of_the_folder(world: World, tool: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (world.home / "kept").mkdir()
    (world.home / "kept" / "door").symlink_to(outside)
    try:
        world.pull("~/kept", tmp_path / "back")
    except SpileError:
        assert tool == "tar"  # which refuses; rsync leaves the link out
    assert not (tmp_path / "back" / "door").exists()
    (world.home / "kept" / "door").unlink()
    write(world.home / "kept", {"door/file": b"x"})
    world.pull("~/kept", tmp_path / "back")
    assert read(tmp_path / "back") == {"door/file": b"x"}
    assert read(outside) == {}


def test_a_folder_that_is_not_there(world: World, tool: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r": no such folder: ~/nowhere$"):
        world.pull("~/nowhere", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_one_host_that_fails_ends_all(world: World, tmp_path: Path) -> None:
    write(tmp_path, {"a": b"x"})
    nobody = Host("nobody", "", 0, "127.0.0.1", 0, port=1)
    files = LocalFiles(tmp_path, ("a",), 1)
    with pytest.raises(SpileError, match="nobody: nothing listens there"):
        transfer.copy_to([world.host, nobody], files, "~/x", world.access)
