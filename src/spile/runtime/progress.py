"""What the worker knows of itself while it runs: counters that threads add to, and views read at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spile.runtime.timeline import Timeline
from spile.spec.phase import Phase

__all__ = ["STAGES", "Progress", "ProgressSnapshot", "WallTime"]

STAGES = ("tokenizer", "model", "host copy", "sink")
"""The pipeline's stages. Each is busy or waits for another; the busiest is what limits the run."""


@dataclass(frozen=True)
class WallTime:
    """Where the seconds since the command was typed went."""

    start: float = 0.0
    """Until the first batch could be started, but for its program."""
    compile: float = 0.0
    """Waiting for programs, and for the pinned memory that is taken beside them."""
    run: float = 0.0
    """From the first batch to the last row written."""
    end: float = 0.0
    """Making it durable."""

    @property
    def whole(self) -> float:
        """All of it."""
        return self.start + self.compile + self.run + self.end


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
    wall: WallTime

    @property
    def doing(self) -> str:
        """The phase for people."""
        return f"{self.phase} {self.detail}".strip()

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second since the first batch, time spent on waiting for compilation left out."""
        working = self.seconds - self.compile_seconds
        return self.tokens / working if working > 0 else 0.0

    @property
    def padding(self) -> float:
        """The part of the computed tokens that was padding."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def limit(self) -> str | None:
        """The stage that the others wait for; ``compiling`` where the wait for programs is longer than any works."""
        if not any(self.busy.values()):
            return None
        return max(times := {**self.busy, "compiling": self.compile_seconds}, key=times.__getitem__)


@dataclass
class Progress:
    """The one mutable thing that all threads of a worker share."""

    total_samples: int | None = None
    """Samples that this visit will finish, where known."""
    clock: Callable[[], float] = time.perf_counter
    log: Callable[[str], None] = field(default=lambda _line: None)
    """Where a line for the user goes: above the bar, or to the log."""
    log_detail: Callable[[str], None] = field(default=lambda _line: None)
    """Where a line goes that only the log, or who asked for more, wants: each commit."""
    timeline: Timeline = field(default_factory=Timeline)

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
        self._written: float | None = None

    @contextmanager
    def also_logged_to(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Lines for the user and for the log go to a listener too while this lasts."""
        before = self.log, self.log_detail

        def both(first: Callable[[str], None]) -> Callable[[str], None]:
            def tell(line: str) -> None:
                first(line)
                listener(line)

            return tell

        self.log, self.log_detail = both(self.log), both(self.log_detail)
        try:
            yield
        finally:
            self.log, self.log_detail = before

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
            if counts.get("tokens"):
                self._written = self.clock()

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
            now = self.clock()
            seconds = now - self._started if self._started is not None else 0.0
            return ProgressSnapshot(
                phase=self._phase, detail=self._detail, skipped=dict(self._skipped), compile_seconds=self._compile,
                seconds=seconds, busy=dict(self._busy), wall=self._wall(now), **self._counts,
            )  # fmt: skip

    def _wall(self, now: float) -> WallTime:
        first = self._started if self._started is not None else now
        last = self._written if self._written is not None else now
        return WallTime(first - self.timeline.origin, self._compile, last - first - self._compile, now - last)
