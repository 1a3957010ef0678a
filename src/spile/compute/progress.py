"""Progress of a run: counters that all threads share, a timeline of the start, the heartbeat and the final summary."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spile.errors import Interrupted, SpileError
from spile.objects import Folder, open_folder
from spile.spec.amounts import amount, counted, duration, size
from spile.spec.phase import Phase
from spile.spec.run import RunSpec
from spile.spec.sample import BAD_ROW, Skip
from spile.store.heartbeat import Heartbeat, Reading
from spile.store.ledger import Ledger
from spile.store.writer import StreamWriter

_BAD_ROWS = 3
"""The number of bad rows that the summary describes."""
_RECENT = 20.0
"""Seconds over which the displayed rate is measured."""
STAGES = ("tokenizer", "model", "host copy", "sink")
"""The stages of the pipeline. The busiest one limits the run."""


def _age() -> float:
    """Return the seconds since this process was started, imports included; 0 if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


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
    cleared: bool = False
    """Whether the command removed what was stored before."""
    quarantined: tuple[Skip, ...] = ()
    """The samples that were set aside because workers end when they compute them."""
    cut: str = ""
    """What the limit of length did, according to the commits."""

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


def summarize(root: Folder, ledgers: Sequence[Ledger], progress: Progress, **facts: Any) -> Summary:
    """Return the summary of a run into ``root``; ``ledgers`` are those of its streams."""
    return Summary(
        root=root.url,
        progress=progress.snapshot(),
        samples=sum(ledger.samples for ledger in ledgers),
        tokens=sum(ledger.tokens for ledger in ledgers),
        bytes=sum(ledger.bytes for ledger in ledgers),
        shards=sum(ledger.shards for ledger in ledgers),
        sink="bucket" if root.local_path is None else "disk",
        peak_memory=peak_memory(),
        retries=root.stats.retries,
        **facts,
    )


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
        return self.start + self.compile + self.run + self.end


@dataclass
class ProgressSnapshot:
    """The counters at one moment."""

    phase: Phase = Phase.STARTING
    detail: str = ""
    """More about the phase: ``the model``, ``for 8 × 512 tokens``."""
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    shards_written: int = 0
    shards_committed: int = 0
    samples_committed: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    """Tokens of answers (``infer``)."""
    shapes: int = 0
    """Programs that were waited for."""
    compile_seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=dict)
    bad_rows: tuple[str, ...] = ()
    """Why the first bad rows were skipped."""
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Seconds each stage was busy."""
    seconds: float = 0.0
    """Seconds since the first batch was started."""
    wall: WallTime = field(default_factory=WallTime)
    recent_tokens_per_second: float = 0.0
    """Tokens per second of the last seconds: what a display shows."""

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
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """The timeline: begin, end and name of each piece of work of the start, in seconds since the command began."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._origin = self.clock()
        self._counts = ProgressSnapshot()
        self._started: float | None = None
        self._written: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=4096)
        """(time, tokens) of the last batches."""
        self._waits: dict[object, float] = {}
        self._longest_wait: float | None = None

    @classmethod
    def of_process(cls, **options: Any) -> Progress:
        """Return counters whose time begins when this process was started."""
        made, age = cls(**options), _age()
        made._origin -= age
        made.spans.append((0.0, age, "interpreter and imports"))
        return made

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the work inside the context in the timeline. Any thread may do this."""
        began = self.clock() - self._origin
        try:
            yield
        finally:
            self.spans.append((began, self.clock() - self._origin, name))

    @contextmanager
    def copy_log_to(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Also pass all log lines to ``listener`` while the context is open."""
        before = log, log_detail = self.log, self.log_detail

        def both(line: str, first: Callable[[str], None] = log) -> None:
            first(line)
            listener(line)

        self.log, self.log_detail = both, lambda line: both(line, log_detail)
        try:
            yield
        finally:
            self.log, self.log_detail = before

    def phase(self, phase: Phase, detail: str = "") -> None:
        """Set the current phase."""
        with self._lock:
            self._counts.phase, self._counts.detail = phase, detail

    def start(self) -> None:
        """Record that the first batch starts now."""
        with self._lock:
            self._started = self._started or self.clock()

    def add(self, **counts: int) -> None:
        """Add to counters, by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)
            if counts.get("tokens"):
                self._written = self.clock()
                self._recent.append((self._written, self._counts.tokens))

    def skip(self, skip: Skip) -> None:
        """Count a skipped sample, and remember the first bad rows."""
        with self._lock:
            counts = self._counts
            counts.skipped[skip.reason] = counts.skipped.get(skip.reason, 0) + 1
            if skip.reason == BAD_ROW and len(counts.bad_rows) < _BAD_ROWS:
                counts.bad_rows += (str(skip.detail.get("error", skip.task_id)),)

    def compiled(self, seconds: float) -> None:
        """Count a program that was waited for."""
        with self._lock:
            self._counts.compile_seconds += seconds
            self._counts.shapes += 1

    def add_busy(self, stage: str, seconds: float) -> None:
        """Add to the time that a stage worked."""
        with self._lock:
            self._counts.busy[stage] += seconds

    @contextmanager
    def busy(self, stage: str, threads: int = 1) -> Iterator[None]:
        """Measure the work of one of a stage's ``threads`` threads."""
        began = self.clock()
        try:
            yield
        finally:
            self.add_busy(stage, (self.clock() - began) / threads)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Mark a wait for the device and for nothing else, so that :func:`watch_for_hangs` notices if it never ends."""
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
            now, compiling = self.clock(), self._counts.compile_seconds
            first = now if self._started is None else self._started
            last = now if self._written is None else self._written
            return replace(
                self._counts,
                skipped=dict(self._counts.skipped),
                busy=dict(self._counts.busy),
                seconds=now - first,
                wall=WallTime(first - self._origin, compiling, last - first - compiling, now - last),
                recent_tokens_per_second=self._recent_rate(now),
            )

    def _recent_rate(self, now: float) -> float:
        """Return the rate of the last seconds, or since the first batch if the run is younger."""
        if self._started is None:
            return 0.0
        since, tokens = self._started + self._counts.compile_seconds, 0
        if now - since > _RECENT:
            known = (point for point in self._recent if now - point[0] <= _RECENT)
            since, tokens = next(known, (now - _RECENT, self._counts.tokens))
        return (self._counts.tokens - tokens) / (now - since) if now > since else 0.0


_HANG_POLL = 5.0
_HANG_LEAST, _HANG_FIRST, _HANG_BATCHES = 600.0, 3600.0, 30
"""A wait for the device is a hang after ``_HANG_BATCHES`` times the longest wait so far, but at least ``_HANG_LEAST``
seconds; before any wait has ended, after ``_HANG_FIRST`` seconds."""


@contextmanager
def watch_for_hangs(progress: Progress, hung: Callable[[float], None]) -> Iterator[None]:
    """Call ``hung`` once, with the seconds of the wait, if the device does not finish a batch.

    Only time that the worker spends waiting for the device counts: not compiling, tokenizing, writing or uploading.
    The time is counted by a polling thread, so a process that is suspended or gets no CPU time has longer.
    """
    over = threading.Event()

    def watch() -> None:
        ages: dict[object, float] = {}
        while not over.wait(_HANG_POLL):
            waits, longest = progress.device_waits()
            ages = {wait: ages.get(wait, 0.0) + _HANG_POLL for wait in waits}
            oldest = max(ages.values(), default=0.0)
            if oldest > hang_limit(longest):
                hung(oldest)
                return

    threading.Thread(target=watch, name="hang-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def hang_limit(longest: float | None) -> float:
    """Return the seconds after which a wait for the device is a hang, from the longest wait so far."""
    return _HANG_FIRST if longest is None else max(_HANG_LEAST, _HANG_BATCHES * longest)


_HEARTBEAT_COUNTERS = ("phase", "samples", "samples_committed", "tokens", "shards_written", "shards_committed")
"""The counters that are part of a heartbeat."""


class StatusFiles(ExitStack):
    """The heartbeat and ``--checkpoint-dir`` files of a run, while the context is open.

    Args:
        spec: The run spec.
        stream: The stream that they describe.
        progress: The counters.
        writes: Whether this process writes them; on a pod, only process 0 has the complete ledger.
        expected: The number of samples that the stream must hold, if it is known.

    """

    def __init__(
        self, spec: RunSpec, stream: StreamWriter, progress: Progress, *, writes: bool, expected: int | None
    ) -> None:
        super().__init__()
        self._spec, self._stream, self.progress, self.expected = spec, stream, progress, expected
        self._heartbeat = Heartbeat(stream.folder, stream.attempt, self._reading, log=progress.log) if writes else None

    def __enter__(self) -> StatusFiles:
        if self._heartbeat is not None:
            self.enter_context(self._heartbeat)
            self.enter_context(self.progress.copy_log_to(self._heartbeat.note))
            # Now, so that a folder that cannot be written to is reported before hours of work.
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
        return self

    def committed(self) -> None:
        """Update the files; called after each commit."""
        if self._heartbeat is not None:
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
            ledger = self._stream.ledger
            self.progress.log_detail(
                f"committed: {len(ledger.done):,} samples in {counted(ledger.shards, 'shard')} so far"
            )
            self._heartbeat.beat()

    def _reading(self) -> Reading:
        now = self.progress.snapshot()
        return Reading(
            **{name: getattr(now, name) for name in _HEARTBEAT_COUNTERS},
            tokens_per_second=now.recent_tokens_per_second,
            retries=self._stream.folder.stats.retries,
            expected=self.expected,
        )


def write_checkpoint_file(
    spec: RunSpec, stream: StreamWriter, status: str, log: Callable[[str], None] = lambda _: None
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
