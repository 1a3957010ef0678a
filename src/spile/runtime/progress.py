"""What the worker knows of itself while it runs: counters that threads add to, and views read at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spile.spec.phase import Phase

__all__ = ["STAGES", "Progress", "ProgressSnapshot"]

STAGES = ("tokenizer", "model", "host copy", "sink")
"""The pipeline's stages. Each is busy or waits for another; the busiest is what limits the run."""


@dataclass(frozen=True)
class ProgressSnapshot:
    """The counters at one moment."""

    phase: Phase
    detail: str
    """What the phase is about: ``the model``, ``for 8 × 512 tokens``."""
    samples: int
    tokens: int
    bytes: int
    shards_written: int
    shards_committed: int
    samples_committed: int
    computed_tokens: int
    skipped: dict[str, int]
    truncated: int
    compile_seconds: float
    shapes: int
    seconds: float
    """Since the first batch was started."""
    busy: dict[str, float]
    """Seconds each stage was busy."""

    @property
    def doing(self) -> str:
        """The phase for people."""
        return f"{self.phase} {self.detail}".strip()

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a second since the first batch, time spent on waiting for compilation left out."""
        working = self.seconds - self.compile_seconds
        return self.tokens / working if working > 0 else 0.0

    @property
    def padding(self) -> float:
        """The part of the computed tokens that was padding."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def limit(self) -> str | None:
        """The stage that the others wait for."""
        return max(self.busy, key=self.busy.__getitem__) if any(self.busy.values()) else None


@dataclass
class Progress:
    """The one mutable thing that all threads of a worker share."""

    total_samples: int | None = None
    """Samples that this visit will finish, where known."""
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = field(default=lambda _line: None)
    """Where a line for the user goes: above the bar, or to the log."""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler looks at the counters in whatever the main thread is at
        self._phase, self._detail = Phase.STARTING, ""
        self._counts = dict.fromkeys(
            ("samples", "tokens", "bytes", "shards_written", "shards_committed", "samples_committed",
             "computed_tokens", "truncated", "shapes"), 0,
        )  # fmt: skip
        self._skipped: dict[str, int] = {}
        self._busy = dict.fromkeys(STAGES, 0.0)
        self._compile = 0.0
        self._started: float | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Lines for the user go to a listener too while this lasts."""
        before = self.say

        def both(line: str) -> None:
            before(line)
            listener(line)

        self.say = both
        try:
            yield
        finally:
            self.say = before

    def phase(self, phase: Phase, detail: str = "") -> None:
        """What is going on from now on."""
        with self._lock:
            self._phase, self._detail = phase, detail

    def start(self) -> None:
        """The first batch begins now."""
        with self._lock:
            self._started = self._started or self.clock()

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def skip(self, reason: str) -> None:
        """A sample that is done without rows."""
        with self._lock:
            self._skipped[reason] = self._skipped.get(reason, 0) + 1

    def compiled(self, seconds: float) -> None:
        """The loop waited this long for a program."""
        with self._lock:
            self._compile += seconds
            self._counts["shapes"] += 1

    def busy_for(self, stage: str, seconds: float) -> None:
        """A stage worked this long."""
        with self._lock:
            self._busy[stage] += seconds

    @contextmanager
    def busy(self, stage: str, threads: int = 1) -> Iterator[None]:
        """One of a stage's threads works while this lasts."""
        began = self.clock()
        try:
            yield
        finally:
            self.busy_for(stage, (self.clock() - began) / threads)

    def snapshot(self) -> ProgressSnapshot:
        """A consistent copy."""
        with self._lock:
            seconds = self.clock() - self._started if self._started is not None else 0.0
            return ProgressSnapshot(
                phase=self._phase, detail=self._detail, skipped=dict(self._skipped), compile_seconds=self._compile,
                seconds=seconds, busy=dict(self._busy), **self._counts,
            )  # fmt: skip
