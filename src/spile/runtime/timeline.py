"""Where a command's wall time goes: named spans since a command was typed, whichever threads they were in."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Timeline", "TimelineSpan"]


@dataclass(frozen=True)
class TimelineSpan:
    """A piece of work, in seconds since the timeline's origin."""

    name: str
    began: float
    ended: float

    def __str__(self) -> str:
        return f"{self.began:6.2f} to {self.ended:6.2f} s  {self.name}"


def _age() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


@dataclass
class Timeline:
    """Spans that threads add to as they end."""

    origin: float = field(default_factory=time.perf_counter)
    """On the clock of ``time.perf_counter``."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[TimelineSpan] = []

    @classmethod
    def of_process(cls) -> Timeline:
        """From when this process was started: what came before, imports first of all, is its first span."""
        made = cls(time.perf_counter() - _age())
        made.add("interpreter and imports", 0.0, _age())
        return made

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name the work that goes on while this lasts."""
        began = time.perf_counter() - self.origin
        try:
            yield
        finally:
            self.add(name, began, time.perf_counter() - self.origin)

    def add(self, name: str, began: float, ended: float) -> None:
        """A span that is known."""
        with self._lock:
            self._spans.append(TimelineSpan(name, began, ended))

    def spans(self) -> list[TimelineSpan]:
        """All that have ended, by when they began."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.began, span.ended))
