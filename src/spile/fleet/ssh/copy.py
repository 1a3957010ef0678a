"""The current directory, onto every host: what git would keep, and only what a host lacks."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spile.errors import UserError
from spile.fleet.ssh.ferrying import ferry_all
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.remote import ferry

__all__ = ["RESULTS", "Cargo", "Copied", "copy_to", "list_files", "load"]

RESULTS = "spile-run-"
"""How the folders begin that hold what came back; they never travel."""


@dataclass(frozen=True)
class Cargo:
    """The files to copy."""

    root: Path
    entries: tuple[Any, ...]

    @property
    def size(self) -> int:
        """All their bytes."""
        return sum(int(entry["size"]) for entry in self.entries)


@dataclass(frozen=True)
class Copied:
    """What was sent to how many hosts."""

    files: int
    sent: int
    hosts: int


def list_files(folder: Path) -> list[str]:
    """The folder's files that git does not ignore, in a repository or not; without .git and earlier results."""
    git = shutil.which("git")
    if git is None:
        if (folder / ".gitignore").exists():
            raise UserError("no git here", expected="git, to read .gitignore", fix="install git")
        names = ferry.walk(str(folder), lambda path: path.rpartition("/")[2] == ".git")
    else:
        names = _git_files(git, folder)
    return sorted(name for name in names if not name.startswith(RESULTS))


def _git_files(git: str, folder: Path) -> list[str]:
    inside = subprocess.run([git, "rev-parse", "--git-dir"], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if inside.returncode == 0:
        found = _ls_files(git, folder, ["--cached", "--others", "--exclude-standard"])
    elif "not a git repository" in inside.stderr:
        with tempfile.TemporaryDirectory() as empty:  # no repository: git still knows how to read .gitignore
            _git([git, "init", "--quiet", "--bare", empty], folder)
            place = [f"--git-dir={empty}", f"--work-tree={folder}"]
            found = _ls_files(git, folder, ["--others", "--exclude-per-directory=.gitignore"], place)
    else:
        raise UserError("git cannot read this directory", found=inside.stderr.strip().splitlines()[0])
    names: list[str] = []
    for name in found:
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # a repository within the repository
            names += [f"{name.rstrip('/')}/{inner}" for inner in _git_files(git, path)]
        else:
            names.append(name)
    return names


def _ls_files(git: str, folder: Path, flags: Sequence[str], place: Sequence[str] = ()) -> list[str]:
    listed = _git([git, *place, "ls-files", "-z", *flags], folder)
    return sorted({name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name})


def _git(words: Sequence[str], folder: Path) -> bytes:
    done = subprocess.run(words, cwd=folder, capture_output=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise UserError("git cannot list this directory", found=done.stderr.decode("utf-8", "replace").strip())
    return done.stdout


def load(folder: Path, limit: int) -> Cargo:
    """Look at what would be copied; too much is more likely a mistake than a wish."""
    described = (ferry.describe(str(folder), name) for name in list_files(folder))
    cargo = Cargo(folder, tuple(entry for entry in described if entry is not None))
    if not cargo.entries:
        raise UserError(f"nothing to copy in {folder}", fix="run it where the code is, or with --no-copy")
    if cargo.size > limit:
        raise UserError(
            f"{folder} is large",
            expected=f"at most {limit / 1e9:g} GB to copy",
            found=f"{cargo.size / 1e9:.1f} GB",
            fix="ignore data in .gitignore, or raise --copy-limit-gb",
        )
    return cargo


def copy_to(hosts: Sequence[Host], cargo: Cargo, target: str, access: Access) -> Copied:
    """Make ``target`` on every host hold these files. What an earlier copy left over goes; what the host made stays."""

    def talk(host: Host, source: BinaryIO, sink: BinaryIO) -> ferry.Tally:  # noqa: ARG001
        return ferry.give(str(cargo.root), cargo.entries, source, sink)

    tallies = ferry_all(hosts, access, lambda _: f"main('take', {target!r})", talk, compress=True)
    return Copied(len(cargo.entries), sum(tally.moved for tally in tallies), len(hosts))
