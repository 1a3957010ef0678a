"""The logs of workers in the bucket, ``<home>/logs/NAME/000012.log``. They outlive the machine and are rotated."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spile.errors import SpecError, SpileError, UserError
from spile.fleet.manage import hosts_of
from spile.fleet.provider import Node, NodeState
from spile.fleet.spec import owns, worker_of
from spile.hosts.hosts import Host
from spile.objects.folder import Folder, NotFound, Removal
from spile.store.heartbeat import Beat, read_beat
from spile.store.layout import PROGRESS

PART = 256 << 10
"""The size at which the next object is started."""
PARTS = 16
"""The number of objects that are kept for a machine."""


class LogKeeper:
    """Stores the output of a worker. ``add`` never waits for the bucket; ``flush`` does."""

    def __init__(self, folder: Folder, name: str, *, part: int = PART, parts: int = PARTS) -> None:
        self._folder, self._name, self._part, self._parts = folder, name, part, parts
        self._lock = threading.Lock()
        self._text = bytearray()
        self._changed = False
        self._dropped = 0
        """Bytes that were dropped since the last flush began."""
        self._number: int | None = None

    def add(self, line: str) -> None:
        """Add a line of output."""
        with self._lock:
            self._text += line.rstrip("\n").encode(errors="replace") + b"\n"
            over = max(0, len(self._text) - 4 * self._part)  # A bucket that fails must not fill the memory.
            del self._text[:over]
            self._dropped += over
            self._changed = True

    def flush(self) -> None:
        """Store the lines. It is called every minute and when the worker ends."""
        with self._lock:
            if not self._changed:
                return
            text, self._changed, self._dropped = bytes(self._text), False, 0
        try:
            if self._number is None:
                self._number = max(_numbers(self._folder, self._name), default=0) + 1
            self._folder.put(_key(self._name, self._number), text)
        except SpileError:
            self._changed = True  # The next flush tries again.
            raise
        if len(text) >= self._part:
            with self._lock:
                del self._text[: max(0, len(text) - self._dropped)]
            self._number += 1
            numbers = _numbers(self._folder, self._name)
            old = [_key(self._name, number) for number in numbers if number <= self._number - self._parts]
            Removal(self._folder.url, ours=_ours(self._name), remove=self._folder.delete).in_order(old)


def read_log(folder: Folder, name: str, pattern: str | None = None) -> Iterator[str]:
    """Return the stored lines of a machine, oldest first; with ``pattern`` only matching lines."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise SpecError("--grep", expected="a regular expression", found=f"{pattern!r}: {error}") from error
    for number in _numbers(folder, name):
        try:
            text = folder.get(_key(name, number)).decode(errors="replace")
        except NotFound:  # It was removed meanwhile.
            continue
        yield from (line for line in text.splitlines() if wanted.search(line))


def _numbers(folder: Folder, name: str) -> list[int]:
    ours = _ours(name)
    keys = (info.key for info in folder.list(f"logs/{name}/"))
    return sorted(int(key.rpartition("/")[2].removesuffix(".log")) for key in keys if ours(key))


def _ours(name: str) -> Callable[[str], bool]:
    shape = re.compile(rf"logs/{re.escape(name)}/([0-9]{{6}}|[1-9][0-9]{{6,}})\.log")
    return lambda key: shape.fullmatch(key) is not None


def _key(name: str, number: int) -> str:
    return f"logs/{name}/{number:06d}.log"


UNIT = "spile-worker"
"""The systemd unit of the worker."""
LOG_FILES = ("~/spile-worker.log", "~/unit.log", "/opt/spile/startup.log")
"""The log files of a machine without the unit."""
NO_LOG = 66
"""The exit code of the remote command if there is no log."""


@dataclass(frozen=True)
class LogMachine:
    """The machine of a worker, if there is one."""

    host: Host | None
    worker: int | None
    story: str
    """Why there is no host, as text."""


def tail_command(lines: int, follow: bool, unit: str = UNIT, files: Sequence[str] = LOG_FILES) -> str:
    """Return the shell command that prints the last lines of the journal or of a log file."""
    tilde = [f'"$HOME"/{shlex.quote(name[2:])}' if name.startswith("~/") else shlex.quote(name) for name in files]
    journal = f"journalctl --no-pager --quiet -o cat -u {shlex.quote(unit)} -n {lines}" + (" -f" if follow else "")
    return (
        f"if systemctl cat {shlex.quote(unit)} >/dev/null 2>&1 && command -v journalctl >/dev/null; then "
        f"if sudo -n true 2>/dev/null; then exec sudo -n {journal}; else exec {journal}; fi; fi; "
        f"for file in {' '.join(tilde)}; do "
        f'if [ -f "$file" ]; then exec tail -n {lines}{" -F" if follow else ""} "$file"; fi; done; '
        f"exit {NO_LOG}"
    )


def find_machine(nodes: Iterable[Node], worker: str, *, fleet: str | None, host: int, internal_ip: bool) -> LogMachine:
    """Return the machine that ``5`` or ``tpu-us-central1-a-0`` names."""
    number = int(worker) if worker.isdigit() else None
    mine = [node for node in nodes if fleet is None or owns(fleet, node)]
    found = [node for node in mine if (node.name == worker if number is None else worker_of(node) == number)]
    if len(found) > 1:
        names = ", ".join(f"{node.name} in {node.zone}" for node in found)
        raise UserError(f"several machines are worker {worker}", found=names, fix="name one with --zone or --fleet")
    if not found:
        return LogMachine(None, number, "it has no machine")
    node = found[0]
    number = worker_of(node) if number is None else number
    if node.state != NodeState.READY:
        return LogMachine(None, number, f"{node.name} is {node.state}")
    hosts = hosts_of([node], node.name, internal_ip=internal_ip)
    if not 0 <= host < len(hosts):
        raise UserError(f"{node.name} has no host {host}", expected=f"0 to {len(hosts) - 1}")
    return LogMachine(hosts[host], number, "")


def last_words(root: Folder, worker: str, number: int | None) -> Beat:
    """Return the worker's heartbeat, which contains the last lines of its log."""
    for folder in [f"tpu_{number}"] if number is not None else _streams(root):
        beat = read_beat(root.child(folder))
        if beat is not None and (number is not None or beat.host.split(".")[0] == worker):
            return beat
    fix = "check --output" if number is not None else "name the worker by its number"
    raise UserError(f"no heartbeat of worker {worker} in {root.url}", expected="one in tpu_N/progress.json", fix=fix)


def _streams(root: Folder) -> list[str]:
    keys = [info.key.split("/") for info in root.list("tpu_")]
    return [parts[0] for parts in keys if len(parts) == 2 and parts[1] == PROGRESS]
