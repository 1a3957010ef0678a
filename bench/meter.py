"""Measure CPU seconds by program over all processes of the machine while something runs.

The daemons of a cluster are not child processes, so the kernel's count for children would not include them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType

import psutil

__all__ = ["ProcessorMeter"]

_EVERY = 0.5
_Process = tuple[int, float]
"""A process id with its start time, because ids are reused."""


class ProcessorMeter:
    """Counts inside a ``with`` block. At most the last half second of a process that ends is not counted."""

    def __init__(self, name: Callable[[str], str | None]) -> None:
        """Create a meter. ``name`` returns the program of a command line, or None if it is not counted."""
        self._name = name
        self._names: dict[_Process, str | None] = {}
        self._last: dict[_Process, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meter", daemon=True)
        self._look()
        self._before = dict(self._last)

    def __enter__(self) -> ProcessorMeter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        for process in psutil.process_iter():
            key = process.pid, process.create_time()
            try:
                if key not in self._names:
                    self._names[key] = self._name(" ".join(process.cmdline()))
                if self._names[key] is not None:
                    times = process.cpu_times()
                    self._last[key] = times.user + times.system
            except psutil.Error:
                continue

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the CPU seconds of each program, the largest first."""
        total: dict[str, float] = {}
        for key, spent in self._last.items():
            name = self._names[key] or ""
            total[name] = total.get(name, 0.0) + spent - self._before.get(key, 0.0)
        return dict(sorted(total.items(), key=lambda item: -item[1]))
