"""``progress.json``: what a worker says of itself, about every 30 s and at every commit; no proof of anything."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from types import TracebackType

from spile.errors import Damaged, Fenced, Interrupted, SpileError
from spile.objects.folder import Folder, NotFound
from spile.spec.heartbeat import Beat, Reading
from spile.spec.hiding import secret_values, struck_out
from spile.spec.phase import Phase
from spile.store.layout import PROGRESS
from spile.version import __version__

__all__ = ["Heartbeat", "read_beat"]

EVERY = 30.0
_TAIL = 20
_LINE = 400
_MOST = 1 << 20
"""Bytes of a heartbeat; ours have 10,000 at most."""
_PATIENCE = 10.0
"""Seconds that the end of a run waits for the last heartbeat."""


class Heartbeat:
    """Writes the heartbeat in a thread of its own. It never raises: a run is worth more than its pulse."""

    def __init__(
        self,
        folder: Folder,
        attempt: str,
        read: Callable[[], Reading],
        *,
        every: float = EVERY,
        clock: Callable[[], float] = time.time,
        host: str | None = None,
        log: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._folder, self._attempt, self._read = folder, attempt, read
        self._every, self._clock, self._log = every, clock, log
        self._host = host or socket.gethostname()
        self._started = self._progressed = _iso(clock())
        self._last: Reading | None = None
        self._hidden = secret_values({}, os.environ)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._error: str | None = None
        self._ended: Phase | None = None
        self._handed_over = False
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.missed = 0

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.note_error(error)
            asked = isinstance(error, Interrupted) or not isinstance(error, Exception)
            self._ended = Phase.STOPPED if asked else Phase.FAILED
            self._handed_over = isinstance(error, Fenced)  # the heartbeat is its successor's now
        self._over.set()
        self._wake.set()
        self._thread.join(_PATIENCE)

    def beat(self) -> None:
        """Write one soon: after a commit. Returns at once."""
        self._wake.set()

    def note(self, line: str) -> None:
        """A line of the log; the last few are part of the heartbeat, without the values of secret variables."""
        self._tail.append(struck_out(line, self._hidden)[:_LINE])

    def note_error(self, error: BaseException | str) -> None:
        """The last error."""
        text = str(error) if isinstance(error, str | SpileError) else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        self._error = struck_out(text, self._hidden)[:_LINE]

    def _run(self) -> None:
        while not self._over.is_set():
            self._write()
            self._wake.wait(self._every)
            self._wake.clear()
        if not self._handed_over:
            self._write()

    def _write(self) -> None:
        try:
            now = self._read()
            if self._last is None or not now.got_no_further_than(self._last):
                self._last, self._progressed = now, _iso(self._clock())
            beat = Beat(
                attempt=self._attempt,
                host=self._host,
                started=self._started,
                updated=_iso(self._clock()),
                version=__version__,
                log_tail=tuple(self._tail),
                last_error=self._error,
                missed=self.missed,
                progressed=self._progressed,
                **{**asdict(now), "phase": self._ended or now.phase},
            )
            self._folder.put(PROGRESS, json.dumps(beat.to_json(), indent=1).encode() + b"\n")
        except Exception as error:  # noqa: BLE001  whatever it was, the run goes on
            self.missed += 1
            self._log(f"heartbeat not written ({self.missed} so far): {error}")


def read_beat(folder: Folder) -> Beat | None:
    """The heartbeat in a stream's folder; None where there is none, or none that can be read."""
    try:
        data = folder.get(PROGRESS)
    except (NotFound, Damaged):
        return None
    if len(data) > _MOST:
        return None
    try:
        return Beat.from_json(json.loads(data))
    except Exception:  # noqa: BLE001 - anybody can write it; one that makes no sense is none, and stops no monitor
        return None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
