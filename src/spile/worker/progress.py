"""Where a command's wall time goes: named spans since a command was typed, whichever threads they were in."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from spile.errors import Interrupted, SpileError
from spile.objects import open_folder
from spile.objects.mirror import MirrorFolder
from spile.spec.amounts import amount, counted, duration, size
from spile.spec.phase import Phase
from spile.spec.run import ExtractSpec
from spile.store.heartbeat import Heartbeat, Reading
from spile.store.stream import StreamStore

__all__ = [
    "STAGES",
    "Progress",
    "ProgressSnapshot",
    "StatusFiles",
    "Summary",
    "Timeline",
    "TimelineSpan",
    "WallTime",
    "peak_memory",
    "write_checkpoint_file",
]


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


def peak_memory() -> int:
    """The most host memory this process ever held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # rusage would count what the process that started this one held then
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Summary:
    """One visit, and what the stream holds after it."""

    root: str
    stream: str
    complete: bool
    """Nothing of the stream is left (or of its first ``--max-samples``)."""
    interrupted: bool
    visit: ProgressSnapshot
    """What this visit did."""
    samples: int
    """What the stream holds now, earlier visits included."""
    tokens: int
    bytes: int
    shards: int
    skipped: int
    device: str
    sink: str
    """``disk`` or ``bucket``."""
    peak_memory: int
    retries: int = 0

    @property
    def exit_code(self) -> int:
        """0, or that of an interruption: what is left waits for the next visit."""
        return Interrupted.exit_code if self.interrupted else 0

    @property
    def limited_by(self) -> str | None:
        """``disk, 1.31 GB/s`` or ``model, 12,345 tokens/s``: the stage that all others waited for."""
        stage = self.visit.limit
        if stage is None or not self.visit.tokens:
            return None
        if stage == "compiling":
            return f"compiling, {duration(self.visit.compile_seconds)}"
        busy = self.visit.busy[stage]
        if stage in ("host copy", "sink"):
            name = self.sink if stage == "sink" else stage
            return f"{name}, {size(self.visit.bytes / busy)}/s"
        return f"{stage}, {amount(self.visit.tokens / busy)} tokens/s"


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


class StatusFiles:
    """A pulse while it lasts, and a call for each commit."""

    def __init__(
        self, spec: ExtractSpec, stream: StreamStore, progress: Progress, *, pulse: bool, expected: int | None
    ) -> None:
        self._spec, self._stream, self.progress, self._expected = spec, stream, progress, expected
        self._heart = Heartbeat(stream.folder, stream.attempt, self._reading, log=progress.log) if pulse else None
        self._tidied = 0
        self._stack = ExitStack()

    def __enter__(self) -> StatusFiles:
        if self._heart is not None:
            self._stack.enter_context(self._heart)
            self._stack.enter_context(self.progress.also_logged_to(self._heart.note))
            # Now, so that a folder that cannot be written is told before hours of work.
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def committed(self) -> None:
        """After each commit."""
        self._tidy()
        if self._heart is not None:  # on a pod, the one process whose ledger is the stream's
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
            ledger = self._stream.ledger
            self.progress.log_detail(
                f"committed: {len(ledger.done):,} samples in {counted(ledger.shards, 'shard')} so far"
            )
            self._heart.beat()

    def _reading(self) -> Reading:
        now = self.progress.snapshot()
        return Reading(
            phase=now.phase,
            samples=now.samples,
            samples_committed=now.samples_committed,
            tokens=now.tokens,
            shards_written=now.shards_written,
            shards_committed=now.shards_committed,
            tokens_per_second=now.tokens_per_second,
            retries=self._stream.folder.stats.retries,
            expected=self._expected,
        )

    def _tidy(self) -> None:
        """``--delete-local-after-upload``: a copy whose commit stands is not needed any more."""
        folder = self._stream.folder
        if not self._spec.delete_local_after_upload or not isinstance(folder, MirrorFolder):
            return
        files = self._stream.ledger.files
        for file in files[self._tidied :]:
            folder.copy.delete(file.name)
        self._tidied = len(files)


def write_checkpoint_file(
    spec: ExtractSpec, stream: StreamStore, status: str, log: Callable[[str], None] = lambda _: None
) -> None:
    """``--checkpoint-dir``: the guides' file, for people. The ledger alone is read."""
    if spec.checkpoint_dir is None:
        return
    ledger, worker_id = stream.ledger, spec.data.worker_id
    record = {
        "worker_id": worker_id,
        "last_processed_sample_idx": len(ledger.done) - 1,
        "total_samples_processed": len(ledger.done),
        "total_shards": ledger.shards,
        "dataset_path": stream.record.identity.data,
        "model_path": spec.model,
        "status": status,
    }
    text = json.dumps(record, indent=2).encode() + b"\n"
    try:
        open_folder(spec.checkpoint_dir).put(f"checkpoint_worker_{worker_id}.json", text)
    except SpileError as error:  # it is for people and never read: no reason to lose a run
        log(f"--checkpoint-dir is not written: {error}")
