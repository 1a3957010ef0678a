"""The heartbeat of a worker: ``progress.json``."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

from spile.errors import Damaged, Fenced, Interrupted, SpileError
from spile.objects.folder import Folder, NotFound
from spile.spec.phase import Phase
from spile.spec.records import read_record
from spile.store.layout import PROGRESS
from spile.store.ledger import iso_time, parse_time
from spile.version import __version__

INTERVAL = 30.0
"""Seconds between two heartbeats of a worker. A heartbeat states it, so that readers need not know it."""


class Liveness(NamedTuple):
    """The ages in seconds at which a heartbeat is judged. All follow from the interval at which it is written."""

    interval: float = INTERVAL

    @property
    def silent(self) -> float:
        """From this age on the worker needs recovery: its machine is replaced, or another worker takes over."""
        return 5 * self.interval

    @property
    def dead(self) -> float:
        """From this age on the worker's stream may be removed or repaired."""
        return 20 * self.interval


_COUNTS = ("samples", "samples_committed", "tokens", "shards_written", "shards_committed", "retries")


@dataclass(frozen=True)
class Reading:
    """The progress of a worker at one moment. Counts are those of this attempt."""

    phase: Phase
    samples: int = 0
    samples_committed: int = 0
    tokens: int = 0
    shards_written: int = 0
    shards_committed: int = 0
    tokens_per_second: float = 0.0
    retries: int = 0
    expected: int | None = None
    """The number of samples of the stream when this worker is done, limited by ``--max-samples``."""

    def has_no_progress_since(self, before: Reading) -> bool:
        """Return whether there was no progress since ``before``. The rate and retries are not progress."""
        return replace(self, tokens_per_second=0.0, retries=0) == replace(before, tokens_per_second=0.0, retries=0)


@dataclass(frozen=True, kw_only=True)
class Beat(Reading):
    """A reading with the worker that wrote it and the time."""

    attempt: str
    host: str
    started: str
    updated: str
    version: str
    log_tail: tuple[str, ...] = ()
    last_error: str | None = None
    missed: int = 0
    """The number of heartbeats that could not be written."""
    progressed: str | None = None
    """The time of the last change of the counts or the phase: a worker can be alive without making progress."""
    interval: float = INTERVAL

    def age(self, now: float) -> float:
        return now - parse_time(self.updated)

    def idle(self, now: float) -> float | None:
        """Return the seconds since the last progress, or None if the heartbeat does not state it."""
        return None if self.progressed is None else now - parse_time(self.progressed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Beat:
        """Return the heartbeat that :meth:`to_json` described; raise any exception if a field is malformed."""
        beat = read_record(cls, found)
        if any(getattr(beat, name) < 0 for name in _COUNTS) or (beat.expected or 0) < 0:
            raise ValueError("a negative count")
        if not 0 < beat.interval <= _LONGEST:
            raise ValueError("not an interval")
        beat.age(0.0), beat.idle(0.0)  # These raise if a time is malformed.
        return beat


_LONGEST = 3600.0
"""The longest interval that is believed. Other programs can write to the bucket too."""
_LOG_LINES = 20
_MAX_LINE = 400
_MAX_BYTES = 1 << 20
"""The largest heartbeat that is read, in bytes. Workers write at most 10,000 bytes."""
_LAST_BEAT_TIMEOUT = 10.0
"""Seconds that the end of a run waits for the last heartbeat."""


class Heartbeat:
    """Writes the heartbeat in a separate thread. It never raises, because a failed heartbeat must not end the run."""

    def __init__(
        self,
        folder: Folder,
        attempt: str,
        read: Callable[[], Reading],
        *,
        every: float = INTERVAL,
        clock: Callable[[], float] = time.time,
        host: str | None = None,
        log: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._folder, self._attempt, self._read = folder, attempt, read
        self._every, self._clock, self._log = every, clock, log
        self._host = host or socket.gethostname()
        self._started = self._progressed = iso_time(clock())
        self._last: Reading | None = None
        self._hidden = secret_values({}, os.environ)
        self._tail: deque[str] = deque(maxlen=_LOG_LINES)
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
            text = str(error) if isinstance(error, SpileError) else f"{type(error).__name__}: {error}"
            text = "interrupted" if isinstance(error, KeyboardInterrupt) else text
            self._error = hide_values(text, self._hidden)[:_MAX_LINE]
            asked = isinstance(error, Interrupted) or not isinstance(error, Exception)
            self._ended = Phase.STOPPED if asked else Phase.FAILED
            self._handed_over = isinstance(error, Fenced)  # The worker that took over writes the heartbeat now.
        self._over.set()
        self._wake.set()
        self._thread.join(_LAST_BEAT_TIMEOUT)

    def beat(self) -> None:
        """Request a heartbeat soon, such as after a commit. This does not block."""
        self._wake.set()

    def note(self, line: str) -> None:
        """Add a line of the log. The heartbeat contains the last lines, without the values of secret variables."""
        self._tail.append(hide_values(line, self._hidden)[:_MAX_LINE])

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
            if self._last is None or not now.has_no_progress_since(self._last):
                self._last, self._progressed = now, iso_time(self._clock())
            beat = Beat(
                attempt=self._attempt,
                host=self._host,
                started=self._started,
                updated=iso_time(self._clock()),
                version=__version__,
                log_tail=tuple(self._tail),
                last_error=self._error,
                missed=self.missed,
                progressed=self._progressed,
                interval=self._every,
                **{**asdict(now), "phase": self._ended or now.phase},
            )
            self._folder.put(PROGRESS, json.dumps(beat.to_json(), indent=1).encode() + b"\n")
        except Exception as error:  # noqa: BLE001 - the run goes on after any error
            self.missed += 1
            self._log(f"heartbeat not written ({self.missed} so far): {error}")


def read_beat(folder: Folder) -> Beat | None:
    """Read the heartbeat in a stream's folder; return None if there is none or it cannot be read."""
    try:
        data = folder.get(PROGRESS)
    except (NotFound, Damaged):
        return None
    try:
        return Beat.from_json(json.loads(data)) if len(data) <= _MAX_BYTES else None
    except Exception:  # noqa: BLE001 - the content is untrusted, and a malformed heartbeat must not stop a monitor
        return None


# -- secrets -----------------------------------------------------------------------------------------------------------

REFERENCE = "secret:"
"""The prefix of a value that refers to a secret instead of containing it."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|PRIVATE|_KEY$|^KEY", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values are not removed: replacing every ``0`` would make a log unreadable."""


def secret_values(environment: Mapping[str, str], given: Mapping[str, str]) -> frozenset[str]:
    """Return the secret values in ``given``: those whose names suggest it, and those that ``environment`` refers to."""
    named = {value for name, value in given.items() if _SECRET.search(name)}
    brought = {given[name] for name, value in environment.items() if value.startswith(REFERENCE) and name in given}
    return frozenset(value for value in named | brought if len(value) >= _SHORTEST)


def hide_values(text: str, values: Iterable[str]) -> str:
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text
