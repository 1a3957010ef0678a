"""Progress of a run: counters that all threads share, a timeline of the start, the heartbeat and the final summary."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import deque
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
from spile.spec.sample import BAD_ROW, Skip
from spile.store.heartbeat import Heartbeat, Reading
from spile.store.stream import StreamStore

_BAD_ROWS = 3
"""The number of bad rows that the summary describes."""


@dataclass(frozen=True)
class TimelineSpan:
    """A named piece of work, in seconds since the origin of the timeline."""

    name: str
    began: float
    ended: float

    def __str__(self) -> str:
        return f"{self.began:6.2f} to {self.ended:6.2f} s  {self.name}"


def _age() -> float:
    """Return the seconds since this process was started, imports included; 0 if the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


@dataclass
class Timeline:
    """Spans of work since a command was started, added by any thread as they end."""

    origin: float = field(default_factory=time.perf_counter)
    """On the clock of ``time.perf_counter``."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[TimelineSpan] = []

    @classmethod
    def of_process(cls) -> Timeline:
        """Return a timeline that begins when this process was started; its first span is what came before this call."""
        made = cls(time.perf_counter() - _age())
        made.add("interpreter and imports", 0.0, _age())
        return made

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the work inside the context as a span."""
        began = time.perf_counter() - self.origin
        try:
            yield
        finally:
            self.add(name, began, time.perf_counter() - self.origin)

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a span."""
        with self._lock:
            self._spans.append(TimelineSpan(name, began, ended))

    def spans(self) -> list[TimelineSpan]:
        """Return all ended spans, ordered by their begin."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.began, span.ended))


def peak_memory() -> int:
    """Return the most host memory that this process ever held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # rusage would count the memory of the process that forked this one
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Summary:
    """The result of a run, and what the stream holds after it."""

    root: str
    stream: str
    complete: bool
    """Whether nothing of the stream (or of its first ``--max-samples``) is left to do."""
    interrupted: bool
    progress: ProgressSnapshot
    """What this run did."""
    samples: int
    """What the stream holds now, earlier runs included."""
    tokens: int
    bytes: int
    shards: int
    skipped: int
    device: str
    sink: str
    """``disk`` or ``bucket``."""
    peak_memory: int
    retries: int = 0
    scattered: bool = False
    """Whether each host of a pod may have its part of the stream on its own disk."""
    quarantined: tuple[Skip, ...] = ()
    """The samples that were set aside because workers end when they compute them."""

    def __repr__(self) -> str:
        state = "complete" if self.complete else "interrupted" if self.interrupted else "incomplete"
        skipped = f", {self.skipped:,} skipped" if self.skipped else ""
        held = f"{counted(self.samples, 'sample')}{skipped}, {counted(self.tokens, 'token')}, {size(self.bytes)}"
        return f"<run into {self.root}, {state}: {held}>"

    @property
    def exit_code(self) -> int:
        """0, or 130 if the run was interrupted."""
        return Interrupted.exit_code if self.interrupted else 0

    @property
    def limited_by(self) -> str | None:
        """The slowest stage: ``disk, 1.31 GB/s`` or ``model, 12,345 tokens/s``."""
        stage = self.progress.limit
        if stage is None or not self.progress.tokens:
            return None
        if stage == "compiling":
            return f"compiling, {duration(self.progress.compile_seconds)}"
        busy = self.progress.busy[stage]
        if stage in ("host copy", "sink"):
            name = self.sink if stage == "sink" else stage
            return f"{name}, {size(self.progress.bytes / busy)}/s"
        return f"{stage}, {amount(self.progress.tokens / busy)} tokens/s"


_RECENT = 20.0
"""Seconds over which the displayed rate is measured."""

STAGES = ("tokenizer", "model", "host copy", "sink")
"""The stages of the pipeline. The busiest one limits the run."""


@dataclass(frozen=True)
class WallTime:
    """How the seconds since the command was started were spent."""

    start: float = 0.0
    """Until the first batch could be started, if its program had been compiled."""
    compile: float = 0.0
    """Waiting for programs and for pinned memory."""
    run: float = 0.0
    """From the first batch to the last row written."""
    end: float = 0.0
    """Making the last shards durable."""

    @property
    def total(self) -> float:
        """All seconds."""
        return self.start + self.compile + self.run + self.end


@dataclass(frozen=True)
class ProgressSnapshot:
    """The counters at one moment."""

    phase: Phase
    detail: str
    """More about the phase: ``the model``, ``for 8 × 512 tokens``."""
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
    """Seconds since the first batch was started."""
    busy: dict[str, float]
    """Seconds each stage was busy."""
    wall: WallTime
    generated_tokens: int = 0
    """Tokens of answers (``infer``)."""
    recent_tokens_per_second: float = 0.0
    """Tokens per second of the last seconds: what a display shows."""
    bad_rows: tuple[str, ...] = ()
    """Why the first bad rows were skipped."""

    @property
    def doing(self) -> str:
        """The phase and its detail."""
        return f"{self.phase} {self.detail}".strip()

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second since the first batch, without the time spent waiting for programs."""
        working = self.seconds - self.compile_seconds
        return self.tokens / working if working > 0 else 0.0

    @property
    def padding(self) -> float:
        """The fraction of the computed tokens that was padding."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def limit(self) -> str | None:
        """The stage that the others wait for, or ``compiling`` if waiting for programs took longest."""
        if not any(self.busy.values()):
            return None
        return max(times := {**self.busy, "compiling": self.compile_seconds}, key=times.__getitem__)


@dataclass
class Progress:
    """The counters of a run, shared by all threads of a worker."""

    total_samples: int | None = None
    """Samples that this run will finish, if known."""
    clock: Callable[[], float] = time.perf_counter
    log: Callable[[str], None] = field(default=lambda _line: None)
    """Prints a line for the user."""
    log_detail: Callable[[str], None] = field(default=lambda _line: None)
    """Prints a line that is shown only with ``--verbose``: each commit."""
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._phase, self._detail = Phase.STARTING, ""
        self._counts = dict.fromkeys(
            ("samples", "tokens", "bytes", "shards_written", "shards_committed", "samples_committed",
             "computed_tokens", "generated_tokens", "truncated", "shapes"), 0,
        )  # fmt: skip
        self._skipped: dict[str, int] = {}
        self._bad_rows: list[str] = []
        self._busy = dict.fromkeys(STAGES, 0.0)
        self._compile = 0.0
        self._started: float | None = None
        self._written: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        """(time, tokens) of the last seconds."""
        self._waits: dict[object, float] = {}
        self._longest_wait: float | None = None

    @contextmanager
    def also_logged_to(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Also pass all lines to ``listener`` while the context is open."""
        before = self.log, self.log_detail

        def both(first: Callable[[str], None]) -> Callable[[str], None]:
            def log(line: str) -> None:
                first(line)
                listener(line)

            return log

        self.log, self.log_detail = both(self.log), both(self.log_detail)
        try:
            yield
        finally:
            self.log, self.log_detail = before

    def phase(self, phase: Phase, detail: str = "") -> None:
        """Set the current phase."""
        with self._lock:
            self._phase, self._detail = phase, detail

    def start(self) -> None:
        """Record that the first batch starts now."""
        with self._lock:
            self._started = self._started or self.clock()

    def add(self, **counts: int) -> None:
        """Add to counters, by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
            if counts.get("tokens"):
                self._written = self.clock()
                self._remember(self._written)

    def skip(self, skip: Skip) -> None:
        """Count a skipped sample, and remember the first bad rows."""
        with self._lock:
            self._skipped[skip.reason] = self._skipped.get(skip.reason, 0) + 1
            if skip.reason == BAD_ROW and len(self._bad_rows) < _BAD_ROWS:
                self._bad_rows.append(str(skip.detail.get("error", skip.task_id)))

    def compiled(self, seconds: float) -> None:
        """Count a program that was waited for."""
        with self._lock:
            self._compile += seconds
            self._counts["shapes"] += 1

    def busy_for(self, stage: str, seconds: float) -> None:
        """Add to the time that a stage worked."""
        with self._lock:
            self._busy[stage] += seconds

    @contextmanager
    def busy(self, stage: str, threads: int = 1) -> Iterator[None]:
        """Measure the work of one of a stage's ``threads`` threads."""
        began = self.clock()
        try:
            yield
        finally:
            self.busy_for(stage, (self.clock() - began) / threads)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Mark a wait for the device, and for nothing else, so that :class:`HangWatch` sees if it never ends."""
        wait = object()
        with self._lock:
            self._waits[wait] = self.clock()
        try:
            yield
        finally:
            with self._lock:
                self._longest_wait = max(self._longest_wait or 0.0, self.clock() - self._waits.pop(wait))

    def device_waits(self) -> tuple[frozenset[object], float | None]:
        """Return the waits for the device that have not ended, and the seconds of the longest that has."""
        with self._lock:
            return frozenset(self._waits), self._longest_wait

    def snapshot(self) -> ProgressSnapshot:
        """Return a consistent copy of the counters."""
        with self._lock:
            now = self.clock()
            seconds = now - self._started if self._started is not None else 0.0
            return ProgressSnapshot(
                phase=self._phase, detail=self._detail, skipped=dict(self._skipped), bad_rows=tuple(self._bad_rows),
                compile_seconds=self._compile, seconds=seconds, busy=dict(self._busy), wall=self._wall(now),
                recent_tokens_per_second=self._recent_rate(now), **self._counts,
            )  # fmt: skip

    def _remember(self, now: float) -> None:
        if not self._recent or now - self._recent[-1][0] >= _RECENT / 64:
            self._recent.append((now, self._counts["tokens"]))
        while now - self._recent[0][0] > _RECENT:
            self._recent.popleft()

    def _recent_rate(self, now: float) -> float:
        """Return the rate of the last seconds, or since the first batch if the run is younger."""
        if self._started is None:
            return 0.0
        since, tokens = self._started + self._compile, 0
        if now - since > _RECENT:
            known = [point for point in self._recent if now - point[0] <= _RECENT]
            since, tokens = known[0] if known else (now - _RECENT, self._counts["tokens"])
        return (self._counts["tokens"] - tokens) / (now - since) if now > since else 0.0

    def _wall(self, now: float) -> WallTime:
        first = self._started if self._started is not None else now
        last = self._written if self._written is not None else now
        return WallTime(first - self.timeline.origin, self._compile, last - first - self._compile, now - last)


_HANG_TICK = 5.0
_HANG_LEAST, _HANG_FIRST, _HANG_BATCHES = 600.0, 3600.0, 30
"""Seconds after which a wait for the device is a hang: the first number, or as many times the longest wait so far as
the third says; before any wait has ended, the second."""


class HangWatch:
    """A thread that ends the worker if the device does not finish a batch.

    Only time that the worker spends waiting for the device counts: not compiling, tokenizing, writing or uploading.
    It is counted in ticks of this thread, so a process that was suspended, or has no processor, gets more time.

    Args:
        progress: Knows the waits.
        hung: Called with the seconds of the wait, once.

    """

    def __init__(self, progress: Progress, hung: Callable[[float], None]) -> None:
        self._progress, self._hung = progress, hung
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        ages: dict[object, float] = {}
        while not self._over.wait(_HANG_TICK):
            waits, longest = self._progress.device_waits()
            ages = {wait: ages.get(wait, 0.0) + _HANG_TICK for wait in waits}
            oldest = max(ages.values(), default=0.0)
            if oldest > hang_limit(longest):
                self._hung(oldest)
                return


def hang_limit(longest: float | None) -> float:
    """Return the seconds after which a wait for the device is a hang, from the longest wait so far."""
    return _HANG_FIRST if longest is None else max(_HANG_LEAST, _HANG_BATCHES * longest)


_READ = ("phase", "samples", "samples_committed", "tokens", "shards_written", "shards_committed")
"""What a heartbeat has of the counters."""


class StatusFiles:
    """The heartbeat and ``--checkpoint-dir`` files of a run."""

    def __init__(
        self, spec: ExtractSpec, stream: StreamStore, progress: Progress, *, pulse: bool, expected: int | None
    ) -> None:
        self._spec, self._stream, self.progress = spec, stream, progress
        self.expected = expected
        """The number of samples that the stream must hold, if it is known."""
        self._heart = Heartbeat(stream.folder, stream.attempt, self._reading, log=progress.log) if pulse else None
        self._deleted = 0
        self._stack = ExitStack()

    def __enter__(self) -> StatusFiles:
        if self._heart is not None:
            self._stack.enter_context(self._heart)
            self._stack.enter_context(self.progress.also_logged_to(self._heart.note))
            # Now, so that a folder that cannot be written to is reported before hours of work.
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def committed(self) -> None:
        """Update the files; called after each commit."""
        self._delete_local_copies()
        if self._heart is not None:  # on a pod, only process 0 has the whole ledger
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
            ledger = self._stream.ledger
            self.progress.log_detail(
                f"committed: {len(ledger.done):,} samples in {counted(ledger.shards, 'shard')} so far"
            )
            self._heart.beat()

    def _reading(self) -> Reading:
        now = self.progress.snapshot()
        return Reading(
            **{name: getattr(now, name) for name in _READ},
            tokens_per_second=now.recent_tokens_per_second,
            retries=self._stream.folder.stats.retries,
            expected=self.expected,
        )

    def _delete_local_copies(self) -> None:
        """Delete the local copies of committed shards (``--delete-local-after-upload``)."""
        folder = self._stream.folder
        if not self._spec.delete_local_after_upload or not isinstance(folder, MirrorFolder):
            return
        files = self._stream.ledger.files
        for file in files[self._deleted :]:
            folder.copy.delete(file.name)
        self._deleted = len(files)


def write_checkpoint_file(
    spec: ExtractSpec, stream: StreamStore, status: str, log: Callable[[str], None] = lambda _: None
) -> None:
    """Write the file of ``--checkpoint-dir``. It is for people; spile reads only the ledger."""
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
    except SpileError as error:  # not worth losing a run
        log(f"could not write to --checkpoint-dir: {error}")
