"""Workers' logs in the bucket, ``<home>/logs/NAME/000012.log``: kept when the machine is gone, rotated and bounded."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

from spile.errors import SpecError, SpileError
from spile.objects.folder import Folder, NotFound
from spile.objects.removal import Removal

__all__ = ["LogKeeper", "read_log"]

PART = 256 << 10
"""Bytes of one object; the next one is begun then."""
PARTS = 16
"""Objects kept of a machine, the newest."""


class LogKeeper:
    """Keeps what a machine's worker prints. ``add`` never waits for the bucket; ``flush`` does."""

    def __init__(self, folder: Folder, name: str, *, part: int = PART, parts: int = PARTS) -> None:
        self._folder, self._name, self._part, self._parts = folder, name, part, parts
        self._lock = threading.Lock()
        self._text = bytearray()
        self._changed = False
        self._dropped = 0
        """Bytes that went unstored since the last flush began."""
        self._number: int | None = None

    def add(self, line: str) -> None:
        """A line that the worker printed."""
        with self._lock:
            self._text += line.rstrip("\n").encode(errors="replace") + b"\n"
            over = max(0, len(self._text) - 4 * self._part)  # a bucket that is out must not fill the memory
            del self._text[:over]
            self._dropped += over
            self._changed = True

    def flush(self) -> None:
        """Store what there is; called every minute, and at the worker's end."""
        with self._lock:
            if not self._changed:
                return
            text, self._changed, self._dropped = bytes(self._text), False, 0
        try:
            if self._number is None:
                self._number = max(_numbers(self._folder, self._name), default=0) + 1
            self._folder.put(_key(self._name, self._number), text)
        except SpileError:
            self._changed = True  # it stays, for the next flush
            raise
        if len(text) >= self._part:
            with self._lock:
                del self._text[: max(0, len(text) - self._dropped)]
            self._number += 1
            numbers = _numbers(self._folder, self._name)
            old = [_key(self._name, number) for number in numbers if number <= self._number - self._parts]
            Removal(self._folder.url, ours=_ours(self._name), remove=self._folder.delete).in_order(old)


def read_log(folder: Folder, name: str, pattern: str | None = None) -> Iterator[str]:
    """The lines that were kept of a machine, oldest first; with ``pattern`` those that it is found in."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise SpecError("--grep", expected="a regular expression", found=f"{pattern!r}: {error}") from error
    for number in _numbers(folder, name):
        try:
            text = folder.get(_key(name, number)).decode(errors="replace")
        except NotFound:  # rotated away meanwhile
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
