"""Copy files between this machine and many hosts with rsync or tar, sending only what is missing."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from spile.errors import Damaged, Failure, UserError, untrusted
from spile.hosts.hosts import Access, Host
from spile.hosts.run import kill, raise_errors, run_interruptible, ssh_error
from spile.objects import open_folder
from spile.store.layout import RUN, STREAM, parse_key, stream_number
from spile.store.writer import read_stream

RESULTS = "spile-run-"
"""The prefix of the names of result folders, which are never copied to hosts."""


@dataclass(frozen=True)
class LocalFiles:
    """The files to copy."""

    root: Path
    names: tuple[str, ...]
    size: int


def list_files(folder: Path) -> list[str]:
    """Return the folder's files that git would not ignore, in a repository or not, without .git and earlier results."""
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
        with tempfile.TemporaryDirectory() as empty:  # Without a repository git can still apply .gitignore.
            _git([git, "init", "--quiet", "--bare", empty], folder)
            place = [f"--git-dir={empty}", f"--work-tree={folder}"]
            found = _ls_files(git, folder, ["--others", "--exclude-per-directory=.gitignore"], place)
    else:
        raise UserError("git cannot read this directory", found=inside.stderr.strip().splitlines()[0])
    names: list[str] = []
    for name in found:
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # A repository inside the repository.
            names += [f"{name.rstrip('/')}/{inner}" for inner in _git_files(git, path)]
        else:
            names.append(name)
    return names


def _ls_files(git: str, folder: Path, flags: Sequence[str], place: Sequence[str] = ()) -> list[str]:
    listed = _git([git, *place, "ls-files", "-z", *flags], folder)
    return sorted({name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name})


def _git(command: Sequence[str], folder: Path) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise UserError("git cannot list this directory", found=done.stderr.decode("utf-8", "replace").strip())
    return done.stdout


def files_to_copy(folder: Path, limit: int) -> LocalFiles:
    """List the files to copy; raise if they exceed ``limit``, which is more likely a mistake than intended."""
    names = [name for name in list_files(folder) if (folder / name).is_symlink() or (folder / name).is_file()]
    size = sum((folder / name).lstat().st_size for name in names)
    if not names:
        raise UserError(
            f"nothing to copy in {folder}", fix="run the command in the folder of your code, or add --no-copy"
        )
    if size > limit:
        raise UserError(
            f"{folder} is large",
            expected=f"at most {limit / 1e9:g} GB to copy",
            found=f"{size / 1e9:.1f} GB",
            fix="ignore data in .gitignore, or raise --copy-limit-gb",
        )
    return LocalFiles(folder, tuple(names), size)


def copy_to(hosts: Sequence[Host], files: LocalFiles, target: str, access: Access) -> int:
    """Copy files to ``target`` on every host, as :func:`push` does; return the number of bytes that were sent."""
    transferred = transfer(hosts, access, lambda host: push(host, access, files, target))
    return sum(each.sent for each in transferred)


_MANIFEST = ".spile-copied"
"""A file in the target folder on a host with the names of the last copy, so that the next copy can find stale files."""
_PARTIAL = ".spile-partial"
_INCOMING = ".spile-incoming"
_SILENCE = 300
"""Seconds without data after which rsync ends, in case the connection is lost without an error."""
_RSYNC = (
    "--links", "--perms", "--times", "--checksum", "--chmod=u-s,g-s", f"--partial-dir={_PARTIAL}", "--delay-updates",
    "--stats", "--no-human-readable", f"--timeout={_SILENCE}",
)  # fmt: skip


@dataclass(frozen=True)
class Transferred:
    """The result of a transfer."""

    files: int
    size: int
    """The size of all files in bytes."""
    sent: int
    """The number of bytes that had to be sent."""


def transfer(
    hosts: Sequence[Host], access: Access, copy_one: Callable[[Host], Coroutine[Any, Any, Transferred]]
) -> list[Transferred]:
    """Call ``copy_one`` for all hosts at once. The first failure, or Ctrl+C, ends the transfers of all hosts."""
    access.check(hosts)

    async def main() -> list[Transferred]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(copy_one(host)) for host in hosts]
        return [task.result() for task in tasks]

    try:
        return run_interruptible(main())
    except BaseExceptionGroup as failed:
        raise_errors(failed.exceptions, len(hosts))
        raise


async def _run(
    host: Host, command: Sequence[str], stdin: bytes | IO[bytes] = b"", output: IO[bytes] | None = None
) -> bytes:
    """Run a command with this input; return its output, or write it to ``output``. Raise a one-line error if it fails.

    If the transfer is cancelled, the command is killed.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe if isinstance(stdin, bytes) else stdin,
        stdout=output or pipe,
        stderr=pipe,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate(stdin if isinstance(stdin, bytes) else None)
    finally:
        kill(process)
        await process.wait()
    if process.returncode != 0:
        raise ssh_error(host, process.returncode, err.decode("utf-8", "replace"))
    return out


async def _shell(host: Host, access: Access, script: str, stdin: bytes = b"") -> bytes:
    return await _run(host, access.command(host, script), stdin)


async def push(host: Host, access: Access, files: LocalFiles, target: str) -> Transferred:
    """Copy files to ``target``. Stale files of an earlier copy are deleted; the host's own files stay."""
    place = _quote_path(target)
    script = f"{_PROBE}; mkdir -p {place} && {{ cat {place}/{_MANIFEST} 2>/dev/null || true; }}"
    tool, home, manifest = _parse_probe(host, await _shell(host, access, script))
    listed = [name.encode("utf-8", "surrogateescape") for name in files.names]
    stale = sorted({name for name in manifest.split(b"\0") if name}.difference(listed))
    folders = {parent for name in listed for parent in _parents(name)}
    # A file that has become a folder, or the reverse, is removed first; other stale files are removed after the copy.
    clashing = [name for name in stale if name in folders or not _parents(name).isdisjoint(listed)]
    await _remove(host, access, place, clashing)
    if _both_have_rsync(tool):
        command = [*_rsync(access, host), "--compress", "--from0", "--files-from=-"]
        command += [f"{files.root}/", f"{_rsync_address(host, home, target)}/"]
        transferred = replace(_parse_rsync_stats(await _run(host, command, b"\0".join(listed))), files=len(listed))
    else:
        transferred = await _push_tar(host, access, files, place)
    await _remove(host, access, place, sorted(set(stale).difference(clashing)))
    await _shell(host, access, f"cat > {place}/{_MANIFEST}", b"\0".join(listed))
    return transferred


async def pull(host: Host, access: Access, source: str, into: Path) -> Transferred:
    """Copy the host's folder ``source`` to ``into``. rsync skips files that are already here and equal."""
    place = _quote_path(source)
    there = await _shell(host, access, f"if [ -d {place} ]; then {_PROBE}; fi")
    if not there:
        raise UserError(f"{host.label}: no such folder: {source}")
    tool, home, _ = _parse_probe(host, there)
    into.mkdir(parents=True, exist_ok=True)
    if not _both_have_rsync(tool):
        return await _pull_tar(host, access, place, into)
    command = [
        *_rsync(access, host),
        "--recursive",
        "--safe-links",
        f"{_rsync_address(host, home, source)}/",
        f"{into}/",
    ]
    return _parse_rsync_stats(await _run(host, command))


_PROBE = 'if command -v rsync >/dev/null; then echo rsync; else echo tar; fi; echo "$HOME"'


def _parse_probe(host: Host, reply: bytes) -> tuple[bytes, str, bytes]:
    """Return the tool, the home folder, and what follows in the reply to :data:`_PROBE`."""
    fix = "check that its shell prints nothing when it starts"
    with untrusted(Failure, f"{host.label} sent an unexpected reply", expected="a program and a folder", fix=fix):
        tool, home, rest = reply.split(b"\n", 2)
        return tool, home.decode(), rest


def _both_have_rsync(tool: bytes) -> bool:
    return tool == b"rsync" and shutil.which("rsync") is not None


def _rsync(access: Access, host: Host) -> list[str]:
    ssh = access.command(host, "")
    return ["rsync", *_RSYNC, "-e", shlex.join(ssh[: ssh.index("--")])]


async def _remove(host: Host, access: Access, place: str, names: Sequence[bytes]) -> None:
    """Remove these files and the folders that become empty."""
    if names:
        gone = b"\0".join(b"./" + name for name in names)
        await _shell(host, access, f"cd {place} && xargs -0 rm -f --", gone)
        folders = sorted({parent for name in names for parent in _parents(name)}, key=len, reverse=True)
        script = f"cd {place} && xargs -0 -n 1 rmdir -- 2>/dev/null; true"
        await _shell(host, access, script, b"\0".join(b"./" + folder for folder in folders))


def _parents(name: bytes) -> set[bytes]:
    parts = name.split(b"/")
    return {b"/".join(parts[:count]) for count in range(1, len(parts))}


async def _push_tar(host: Host, access: Access, files: LocalFiles, place: str) -> Transferred:
    unpack = f"cd {place} && rm -rf {_INCOMING} && mkdir {_INCOMING} && tar -xzf - -C {_INCOMING}"
    replace_all = f"cp -a {_INCOMING}/. . && rm -rf {_INCOMING}"
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name in files.names:
                archive.add(files.root / name, name, recursive=False, filter=_without_owner)
        packed.seek(0)
        await _run(host, access.command(host, f"{unpack} && {replace_all}"), packed)
    return Transferred(len(files.names), files.size, files.size)


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mode &= 0o777
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


async def _pull_tar(host: Host, access: Access, place: str, into: Path) -> Transferred:
    incoming = into / _INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    with tempfile.TemporaryFile(dir=into) as packed:
        await _run(host, access.command(host, f"cd {place} && tar -cf - ."), output=packed)
        packed.seek(0)
        with (
            untrusted(Failure, f"{host.label} sent an archive that cannot be unpacked"),
            tarfile.open(fileobj=packed) as archive,
        ):
            archive.extractall(incoming, filter="data")  # No file leaves the folder; no setuid bits.
    files = [path for path in sorted(incoming.rglob("*")) if path.is_symlink() or path.is_file()]
    size = sum(path.lstat().st_size for path in files)
    for path in files:
        final = into / path.relative_to(incoming)
        final.parent.mkdir(parents=True, exist_ok=True)
        path.replace(final)
    shutil.rmtree(incoming)
    return Transferred(len(files), size, size)


def _quote_path(path: str) -> str:
    """Quote a path for the host's shell; a leading ~ stays the user's home."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def _rsync_address(host: Host, home: str, path: str) -> str:
    """Return an absolute address for rsync, because versions differ in what they let the host's shell expand."""
    whole = f"{home}{path[1:]}" if path == "~" or path.startswith("~/") else path
    return f"[{host.address}]:{whole.rstrip('/')}" if ":" in host.address else f"{host.address}:{whole.rstrip('/')}"


def _parse_rsync_stats(stats: bytes) -> Transferred:
    text = stats.decode("utf-8", "replace")

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    files = number(r"Number of files: .*\breg: (\d+)") + number(r"Number of files: .*\blink: (\d+)")
    return Transferred(files, number(r"Total file size: (\d+)"), number(r"Literal data: (\d+)"))


def local_folder_of(host: Host, hosts: Sequence[Host]) -> str:
    """Return ``worker_2`` for one slice, or ``tpu-a-1/worker_2`` for several."""
    many = len({other.slice for other in hosts}) > 1
    return f"{host.node.replace('/', '-')}/worker_{host.worker}" if many else f"worker_{host.worker}"


def collect_from(hosts: Sequence[Host], remote: str, into: Path, access: Access) -> dict[Path, Transferred]:
    """Copy the folder ``remote`` of every host here, and return what was copied to each folder, in the hosts' order."""
    folders = {host: into / local_folder_of(host, hosts) for host in hosts}
    transferred = transfer(hosts, access, lambda host: pull(host, access, remote, folders[host]))
    return dict(zip(folders.values(), transferred, strict=True))


def assemble(into: Path, folders: Sequence[Path]) -> bool:
    """Link the parts that a pod's hosts stored on their own disks into one dataset at ``into``.

    If a file exists on several hosts, that of the first host counts, because only that host commits. Parts of different
    attempts of a stream are refused. Returns False if the folders contain no dataset.
    """
    parts = [folder for folder in folders if (folder / RUN).is_file()]
    if not parts:
        return False
    ids: dict[str, tuple[str, Path]] = {}
    for part in parts:
        for stream in sorted(file for file in part.glob(f"*/{STREAM}") if stream_number(file.parent.name) is not None):
            mine = read_stream(open_folder(str(stream.parent)))
            first = ids.setdefault(stream.parent.name, (mine.id if mine else "", part))
            if mine is not None and mine.id != first[0]:
                raise Damaged(
                    f"{part} and {first[1]} hold different streams for {stream.parent.name}",
                    expected=f"stream id {first[0]}",
                    found=mine.id,
                    fix="run it again on all hosts, into a bucket or an empty folder; these parts cannot be merged",
                )
    for part in parts:
        for info in open_folder(str(part)).list():
            if info.linked or parse_key(info.key) is None:
                continue  # It stays in the folder of its host.
            file, target = part / info.key, into / info.key
            target.parent.mkdir(parents=True, exist_ok=True)
            if part == parts[0]:
                target.unlink(missing_ok=True)  # Its ledger may have grown since the last call.
            if not target.exists():
                _link_or_copy(file, target)
    return True


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # The target is on another disk, or the file system has no hard links.
        shutil.copyfile(file, target)
