"""The current directory, onto every host: what git would keep, and only what a host lacks."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spile.errors import UserError
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.transfer import Transfers, push

__all__ = ["RESULTS", "Copied", "CopyList", "copy_to", "list_files", "load"]

RESULTS = "spile-run-"
"""How the folders begin that hold what came back; they never travel."""


@dataclass(frozen=True)
class CopyList:
    """The files to copy."""

    root: Path
    names: tuple[str, ...]
    size: int


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
        names = _walk(folder)
    else:
        names = _git_files(git, folder)
    return sorted(name for name in names if not name.startswith(RESULTS))


def _walk(folder: Path) -> list[str]:
    below = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [str(path) for path in below if ".git" not in path.parts]


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


def load(folder: Path, limit: int) -> CopyList:
    """Look at what would be copied; too much is more likely a mistake than a wish."""
    names = [name for name in list_files(folder) if (folder / name).is_symlink() or (folder / name).is_file()]
    size = sum((folder / name).lstat().st_size for name in names)
    if not names:
        raise UserError(f"nothing to copy in {folder}", fix="run it where the code is, or with --no-copy")
    if size > limit:
        raise UserError(
            f"{folder} is large",
            expected=f"at most {limit / 1e9:g} GB to copy",
            found=f"{size / 1e9:.1f} GB",
            fix="ignore data in .gitignore, or raise --copy-limit-gb",
        )
    return CopyList(folder, tuple(names), size)


def copy_to(hosts: Sequence[Host], files: CopyList, target: str, access: Access) -> Copied:
    """Make ``target`` on every host hold these files. What an earlier copy left over goes; what the host made stays."""
    moved = Transfers(access).on_all(hosts, lambda all_, host: push(all_, host, files.root, files.names, target))
    return Copied(len(files.names), sum(each.sent for each in moved), len(hosts))
