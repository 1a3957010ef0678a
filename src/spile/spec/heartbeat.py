"""A worker's heartbeat, the content of ``progress.json``, as a noun. ``status.heartbeat`` writes and reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from spile.spec.phase import Phase
from spile.spec.records import known_fields

__all__ = ["Beat", "Reading"]


_COUNTS = ("samples", "samples_committed", "tokens", "shards_written", "shards_committed", "retries")


def _count(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{number} is no count")
    return number


@dataclass(frozen=True)
class Reading:
    """What the worker knows of itself at one moment. Counts are of this attempt."""

    phase: Phase
    samples: int = 0
    samples_committed: int = 0
    tokens: int = 0
    shards_written: int = 0
    shards_committed: int = 0
    tokens_per_second: float = 0.0
    retries: int = 0
    expected: int | None = None
    """Samples that the stream will have when this worker is done with it (``--max-samples`` counted in)."""

    def got_no_further_than(self, before: Reading) -> bool:
        """Whether nothing was done in between: a rate that falls and a retry are no progress."""
        return replace(self, tokens_per_second=0.0, retries=0) == replace(before, tokens_per_second=0.0, retries=0)


@dataclass(frozen=True)
class Beat:
    """A reading with its author and its time."""

    attempt: str
    host: str
    phase: Phase
    samples: int
    samples_committed: int
    tokens: int
    shards_written: int
    shards_committed: int
    tokens_per_second: float
    retries: int
    expected: int | None
    started: str
    updated: str
    version: str
    log_tail: tuple[str, ...] = ()
    last_error: str | None = None
    missed: int = 0
    """Heartbeats that could not be written."""
    progressed: str | None = None
    """When its counts or its phase last changed: a worker can be alive and get no further."""

    def age(self, now: float) -> float:
        """Seconds since it was written."""
        return now - datetime.fromisoformat(self.updated).timestamp()

    def idle(self, now: float) -> float | None:
        """Seconds since it last got further, where it says so."""
        return None if self.progressed is None else now - datetime.fromisoformat(self.progressed).timestamp()

    def to_json(self) -> dict[str, Any]:
        """As stored."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Beat:
        """As stored, every field of its type; an exception of any kind where it is none."""
        known = known_fields(cls, found)
        for name in _COUNTS:
            known[name] = _count(known[name])
        rate = float(known["tokens_per_second"])
        known["tokens_per_second"] = rate if math.isfinite(rate) else 0.0
        known["expected"] = None if known["expected"] is None else _count(known["expected"])
        for name in ("attempt", "host", "version", "started", "updated"):
            known[name] = str(known[name])
        known["log_tail"] = tuple(str(line) for line in known.get("log_tail", ()))
        known["last_error"] = None if known.get("last_error") is None else str(known["last_error"])
        beat = cls(**{**known, "phase": Phase.read(known["phase"])})
        beat.age(0.0), beat.idle(0.0)  # a time that cannot be read is no heartbeat
        return beat
