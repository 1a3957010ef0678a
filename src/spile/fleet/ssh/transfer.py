"""Files to and from many hosts at once: rsync over the system's ssh, or tar where one side has no rsync.

Both check what they bring: rsync compares checksums of whole files, so what is there already is not sent again, keeps
what a broken link left in a partial folder, and changes nothing before every file has arrived. tar sends everything
each time, into a folder beside, and moves it into place when it is whole.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from spile.errors import Failure, SpileError, UserError
from spile.fleet.ssh.failures import explain, together
from spile.fleet.ssh.hosts import Access, Host

__all__ = ["Moved", "Transfers", "pull", "push"]

_MANIFEST = ".spile-copied"
"""In the folder of a copy on a host: the names that the last copy brought, so that the next knows what is stale."""
_PARTIAL = ".spile-partial"
_INCOMING = ".spile-incoming"
_SILENCE = 300
"""Seconds without a byte after which rsync ends, should the link die unheard."""
_RSYNC = (
    "--links", "--perms", "--times", "--checksum", "--chmod=u-s,g-s", f"--partial-dir={_PARTIAL}", "--delay-updates",
    "--stats", "--no-human-readable", f"--timeout={_SILENCE}",
)  # fmt: skip

Result = TypeVar("Result")


@dataclass(frozen=True)
class Moved:
    """What a transfer came to."""

    files: int
    size: int
    """All the files' bytes."""
    sent: int
    """The bytes that had to be sent."""


@dataclass
class Transfers:
    """The processes of all hosts' transfers: the first failure, or Ctrl+C, ends them all."""

    access: Access
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_all(self, hosts: Sequence[Host], one: Callable[[Transfers, Host], Result]) -> list[Result]:
        """Every host at once, a thread each."""
        self.access.check(hosts)
        with ThreadPoolExecutor(max_workers=len(hosts), thread_name_prefix="transfer") as threads:
            futures = [threads.submit(one, self, host) for host in hosts]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                errors = [error for future in futures if future.done() and (error := future.exception())]
            finally:
                self._end()
        for error in errors:
            if not isinstance(error, SpileError):
                raise error
        if errors:
            raise together([error for error in errors if isinstance(error, SpileError)], len(hosts))
        return [future.result() for future in futures]

    def _end(self) -> None:
        with self._lock:
            self._over = True
            for process in self._running:
                if process.poll() is None:
                    process.kill()

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process that ends with the others."""
        with self._lock:
            if self._over:
                raise Failure("the copy broke off", found="another host failed", fix="run it again")
            pipe = subprocess.PIPE
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)  # noqa: S603
            self._running.append(process)
        return process

    def run(self, host: Host, words: Sequence[str], given: bytes = b"") -> bytes:
        """A command's output, or its error in one line."""
        process = self.start(words)
        out, err = process.communicate(given)
        if process.returncode != 0:
            raise _error(host, process.returncode, err)
        return out

    def shell(self, host: Host, script: str, given: bytes = b"") -> bytes:
        """The output of a line for the host's own shell."""
        return self.run(host, self.access.command(host, script), given)


def push(transfers: Transfers, host: Host, root: Path, names: Sequence[str], target: str) -> Moved:
    """Make ``target`` hold these files of ``root``. What an earlier copy left over goes; what the host made stays."""
    place = _remote(target)
    there = transfers.shell(host, f"{_PROBE}; mkdir -p {place} && {{ cat {place}/{_MANIFEST} 2>/dev/null || true; }}")
    tool, home, manifest = there.split(b"\n", 2)
    listed = [name.encode("utf-8", "surrogateescape") for name in names]
    stale = sorted({name for name in manifest.split(b"\0") if name}.difference(listed))
    folders = {parent for name in listed for parent in _parents(name)}
    # What was a file and is a folder now, or the other way round, has to go first; all else when everything is there.
    clashing = [name for name in stale if name in folders or not _parents(name).isdisjoint(listed)]
    _remove(transfers, host, place, clashing)
    if _both_have_rsync(tool):
        moved = _push_rsync(transfers, host, root, listed, _address(host, home, target))
    else:
        moved = _push_tar(transfers, host, root, names, place)
    _remove(transfers, host, place, sorted(set(stale).difference(clashing)))
    transfers.shell(host, f"cat > {place}/{_MANIFEST}", b"\0".join(listed))
    return moved


def pull(transfers: Transfers, host: Host, source: str, into: Path) -> Moved:
    """The host's folder ``source`` here. Files that are here already, whole and equal, are not sent again by rsync."""
    place = _remote(source)
    there = transfers.shell(host, f"if [ -d {place} ]; then {_PROBE}; fi")
    if not there:
        raise UserError(f"{host.label}: no such folder: {source}")
    tool, home, _ = there.split(b"\n", 2)
    into.mkdir(parents=True, exist_ok=True)
    if not _both_have_rsync(tool):
        return _pull_tar(transfers, host, place, into)
    words = [
        *_rsync(transfers.access, host),
        "--recursive",
        "--safe-links",
        f"{_address(host, home, source)}/",
        f"{into}/",
    ]
    return _tally(transfers.run(host, words))


_PROBE = 'if command -v rsync >/dev/null; then echo rsync; else echo tar; fi; echo "$HOME"'


def _both_have_rsync(tool: bytes) -> bool:
    return tool == b"rsync" and shutil.which("rsync") is not None


def _rsync(access: Access, host: Host) -> list[str]:
    ssh = access.command(host, "")
    return ["rsync", *_RSYNC, "-e", shlex.join(ssh[: ssh.index("--")])]


def _push_rsync(transfers: Transfers, host: Host, root: Path, names: Sequence[bytes], address: str) -> Moved:
    words = [*_rsync(transfers.access, host), "--compress", "--from0", "--files-from=-", f"{root}/", f"{address}/"]
    moved = _tally(transfers.run(host, words, b"\0".join(names)))
    return Moved(len(names), moved.size, moved.sent)


def _remove(transfers: Transfers, host: Host, place: str, names: Sequence[bytes]) -> None:
    """These files, and the folders that hold nothing else."""
    if names:
        gone = b"\0".join(b"./" + name for name in names)
        transfers.shell(host, f"cd {place} && xargs -0 rm -f --", gone)
        folders = sorted({parent for name in names for parent in _parents(name)}, key=len, reverse=True)
        script = f"cd {place} && xargs -0 -n 1 rmdir -- 2>/dev/null; true"
        transfers.shell(host, script, b"\0".join(b"./" + folder for folder in folders))


def _parents(name: bytes) -> set[bytes]:
    parts = name.split(b"/")
    return {b"/".join(parts[:count]) for count in range(1, len(parts))}


def _push_tar(transfers: Transfers, host: Host, root: Path, names: Sequence[str], place: str) -> Moved:
    unpack = f"cd {place} && rm -rf {_INCOMING} && mkdir {_INCOMING} && tar -xzf - -C {_INCOMING}"
    process = transfers.start(transfers.access.command(host, unpack))
    assert process.stdin is not None  # noqa: S101
    size = 0
    # A pipe that breaks is no news: the exit code says why.
    with suppress(BrokenPipeError), tarfile.open(fileobj=process.stdin, mode="w|gz") as archive:
        for name in names:
            archive.add(root / name, name, recursive=False, filter=_plain)
            size += (root / name).lstat().st_size
    _, err = process.communicate()
    if process.returncode != 0:
        raise _error(host, process.returncode, err)
    transfers.shell(host, f"cd {place} && cp -a {_INCOMING}/. . && rm -rf {_INCOMING}")
    return Moved(len(names), size, size)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mode &= 0o777
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _pull_tar(transfers: Transfers, host: Host, place: str, into: Path) -> Moved:
    process = transfers.start(transfers.access.command(host, f"cd {place} && tar -cf - ."))
    assert process.stdin is not None  # noqa: S101
    assert process.stdout is not None  # noqa: S101
    process.stdin.close()
    process.stdin = None  # communicate would flush it
    beside = into / _INCOMING
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            archive.extractall(beside, filter="data")  # nothing leaves the folder, no setuid bits
    except tarfile.TarError as error:
        _, err = process.communicate()
        raise _error(host, process.returncode, err or str(error).encode()) from error
    _, err = process.communicate()
    if process.returncode != 0:
        raise _error(host, process.returncode, err)
    files = [path for path in sorted(beside.rglob("*")) if path.is_symlink() or path.is_file()]
    size = sum(path.lstat().st_size for path in files)
    for path in files:
        final = into / path.relative_to(beside)
        final.parent.mkdir(parents=True, exist_ok=True)
        path.replace(final)
    shutil.rmtree(beside)
    return Moved(len(files), size, size)


def _remote(path: str) -> str:
    """For the host's shell: a leading ~ is the login's home, all else is literal."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def _address(host: Host, home: bytes, path: str) -> str:
    """For rsync: an absolute path, because versions differ in what they let the host's shell expand."""
    whole = f"{home.decode()}{path[1:]}" if path == "~" or path.startswith("~/") else path
    return f"[{host.address}]:{whole.rstrip('/')}" if ":" in host.address else f"{host.address}:{whole.rstrip('/')}"


def _tally(stats: bytes) -> Moved:
    text = stats.decode("utf-8", "replace")

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    files = number(r"Number of files: .*\breg: (\d+)") + number(r"Number of files: .*\blink: (\d+)")
    return Moved(files, number(r"Total file size: (\d+)"), number(r"Literal data: (\d+)"))


def _error(host: Host, code: int, err: bytes) -> SpileError:
    if code < 0:
        return Failure(f"{host.label}: the copy broke off", found=f"signal {-code}", fix="run it again")
    return explain(host, code, err.decode("utf-8", "replace"))
