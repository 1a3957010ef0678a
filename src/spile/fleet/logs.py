"""The logs of workers: an agent stores them in the bucket; people read them there, on the machine or in a heartbeat."""

from __future__ import annotations

import re
import shlex
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from spile.errors import SpecError, SpileError, UserError
from spile.fleet.home import NumberedObjects
from spile.fleet.provider import Node
from spile.fleet.spec import owns, worker_of
from spile.objects.folder import Folder, get_if_present
from spile.store.claims import ClaimReader
from spile.store.heartbeat import Beat, hide_values, read_beat
from spile.store.layout import PROGRESS, existing_folder, list_stream_files

PART = 256 << 10
"""The size at which the next object is started."""
PARTS = 16
"""The number of objects that are kept for a machine."""
_TAIL = 40
"""The number of lines that an agent reports if the worker fails."""
UNIT = "spile-worker"
"""The systemd unit of the worker."""
LOG_FILES = ("~/spile-worker.log", "~/unit.log", "/opt/spile/startup.log")
"""The log files of a machine without the unit."""
NO_LOG = 66
"""The exit code of the remote command if there is no log."""


def _stored_log(folder: Folder, name: str) -> NumberedObjects:
    return NumberedObjects(folder, f"logs/{name}/", ".log")


class WorkerLog:
    """The output of a worker: printed, stored in the bucket, and its last lines. Secrets are hidden in all of them.

    ``add`` never waits for the bucket; ``flush`` does.
    """

    def __init__(
        self, folder: Folder, name: str, secrets: Collection[str] = (), *, part: int = PART, parts: int = PARTS
    ) -> None:
        self._objects, self._secrets, self._part, self._parts = _stored_log(folder, name), secrets, part, parts
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._lock = threading.Lock()
        self._new = bytearray()
        self._text = self._stored = b""
        """The end of the log, and what the bucket has of it, in the object with this number."""
        self._number = 0

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        line = hide_values(line, self._secrets).rstrip("\n")
        self.tail.append(line)
        print(line, flush=True)
        with self._lock:
            self._new += line.encode(errors="replace") + b"\n"
            del self._new[: -4 * self._part]  # A bucket that fails must not fill the memory.

    def flush(self) -> None:
        """Store the lines. It is called every minute and when the worker ends. A failure is only printed."""
        with self._lock:
            new, self._new = bytes(self._new), bytearray()
        self._text = (self._text + new)[-4 * self._part :]
        if self._text == self._stored:
            return
        try:
            self._number = self._number or max(self._objects.numbers(), default=0) + 1
            self._objects.put(self._number, self._text)
            self._stored = self._text
            if len(self._text) >= self._part:
                self._text = self._stored = b""
                self._number += 1
                self._objects.remove_below(self._number - self._parts + 1)
        except SpileError as error:  # The log is for people; the run continues without it.
            print(f"spile agent: {error}", flush=True)


def read_log(folder: Folder, name: str, pattern: str | None = None) -> Iterator[str]:
    """Return the stored lines of a machine, oldest first; with ``pattern`` only matching lines."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise SpecError("--grep", expected="a regular expression", found=f"{pattern!r}: {error}") from error
    objects = _stored_log(folder, name)
    for number in objects.numbers():
        data = get_if_present(folder, objects.key(number)) or b""  # It may have been removed meanwhile.
        yield from (line for line in data.decode(errors="replace").splitlines() if wanted.search(line))


def tail_command(lines: int, follow: bool) -> str:
    """Return the shell command that prints the last lines of the journal or of a log file."""
    tilde = [f'"$HOME"/{shlex.quote(name[2:])}' if name.startswith("~/") else shlex.quote(name) for name in LOG_FILES]
    journal = f"journalctl --no-pager --quiet -o cat -u {UNIT} -n {lines}" + (" -f" if follow else "")
    return (
        f"if systemctl cat {UNIT} >/dev/null 2>&1 && command -v journalctl >/dev/null; then "
        f"if sudo -n true 2>/dev/null; then exec sudo -n {journal}; else exec {journal}; fi; fi; "
        f"for file in {' '.join(tilde)}; do "
        f'if [ -f "$file" ]; then exec tail -n {lines}{" -F" if follow else ""} "$file"; fi; done; '
        f"exit {NO_LOG}"
    )


def find_machine(nodes: Iterable[Node], worker: str, fleet: str | None) -> Node | None:
    """Return the machine that ``5`` or ``tpu-us-central1-a-0`` names."""
    mine = [node for node in nodes if fleet is None or owns(fleet, node)]
    found = [node for node in mine if worker in (node.name, str(worker_of(node)))]
    if len(found) > 1:
        names = ", ".join(f"{node.name} in {node.zone}" for node in found)
        raise UserError(f"several machines are worker {worker}", found=names, fix="name one with --zone or --fleet")
    return found[0] if found else None


def last_heartbeat(root: Folder, worker: str, node: Node | None) -> Beat:
    """Return the heartbeat of the stream that the worker claimed last; it contains the last lines of its log.

    Without claims, the number of a worker is that of its stream, and its name that of its host.
    """
    name = node.name if node is not None else worker
    number = int(worker) if worker.isdigit() else worker_of(node) if node is not None else None
    held = [stream for stream, owner in ClaimReader(root).owners().items() if owner.worker in (worker, name)]
    named = held or ([] if number is None else [number])
    folders = [existing_folder(root, each) for each in named] or _streams(root)
    beats = [beat for folder in folders if (beat := read_beat(root.child(folder))) is not None]
    found = [beat for beat in beats if named or beat.host.split(".")[0] == worker]
    if not found:
        expected = "one in stream_N/progress.json"
        fix = "check --output" if named else "name the worker by its number"
        raise UserError(f"no heartbeat of worker {worker} in {root.url}", expected=expected, fix=fix)
    return max(found, key=lambda beat: beat.updated)


def _streams(root: Folder) -> list[str]:
    keys = [info.key.split("/") for info in list_stream_files(root)]
    return [parts[0] for parts in keys if len(parts) == 2 and parts[1] == PROGRESS]
