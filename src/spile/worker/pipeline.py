"""Bounded queues between the threads of a worker, and one way for all of them to end when one fails."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from spile.spec.phase import Phase
from spile.spec.sample import Sample, Skip
from spile.store.ledger import ShardRecord
from spile.store.shard import ShardBuilder
from spile.worker.batches import Batch, ShardBatches
from spile.worker.producer import OutOfDeviceMemory, Producer, RowBlock
from spile.worker.progress import Progress

__all__ = [
    "AHEAD",
    "Close",
    "Control",
    "Countdown",
    "Crew",
    "Flow",
    "Pipe",
    "Pipeline",
    "Rows",
    "Shard",
    "ShardTask",
    "Sink",
    "Step",
    "Stopped",
    "Verdict",
]


T = TypeVar("T")

_LOOK_UP = 0.1
"""Seconds between looks at whether the crew was told to stop."""
_PATIENCE = 2.0
"""Seconds that an interrupted crew is waited for."""


class Stopped(Exception):  # control flow between our own threads; never leaves them
    """Another thread of the crew failed: drop what you hold and end."""


class Crew:
    """Threads that fail together: the first error ends all of them and is raised by :meth:`join`."""

    def __init__(self) -> None:
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def failed(self) -> bool:
        """Whether to end."""
        return self._failed.is_set()

    def fail(self, error: BaseException) -> None:
        """End everybody; the first error is the one that counts, but for an interrupt, which is the user's word."""
        with self._lock:
            if isinstance(error, KeyboardInterrupt) or (self._error is None and not isinstance(error, Stopped)):
                self._error = error
        self._failed.set()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run a stage in a thread of its own."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept, and raised again by join
                self.fail(error)

        thread = threading.Thread(target=guarded, name=f"spile-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all to end, then raise what ended them early, if anything.

        Who is interrupted does not wait long for a thread that waits itself, for a device or a network that hangs.
        """
        try:
            while not self._interrupted and not self.ended:
                time.sleep(_LOOK_UP / 10)  # a bare join would hold back Ctrl+C
        except KeyboardInterrupt as error:
            self.fail(error)
        patience = time.monotonic() + _PATIENCE
        while not self.ended and time.monotonic() < patience:
            time.sleep(_LOOK_UP / 10)
        if self._error is not None:
            raise self._error

    @property
    def ended(self) -> bool:
        """Whether no thread is at work any more."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _interrupted(self) -> bool:
        return isinstance(self._error, KeyboardInterrupt)


class Pipe(Generic[T]):
    """A queue of bounded length that ends for good when its crew fails."""

    def __init__(self, crew: Crew, most: int) -> None:
        self._crew = crew
        self._queue: queue.Queue[T | None] = queue.Queue(most)

    def put(self, item: T | None) -> None:
        """Wait for room. None closes the pipe."""
        while not self._crew.failed:
            try:
                self._queue.put(item, timeout=_LOOK_UP)
            except queue.Full:
                continue
            return
        raise Stopped

    def close(self) -> None:
        """Nothing more comes."""
        self.put(None)

    def __iter__(self) -> Iterator[T]:
        while not self._crew.failed:
            try:
                item = self._queue.get(timeout=_LOOK_UP)
            except queue.Empty:
                continue
            if item is None:
                return
            yield item
        raise Stopped


_PLANS = 1
"""Shards that wait with their samples; the feeder holds one more, and all are compiled for."""
AHEAD = 3
"""Batches beyond those being written, unless told: two on the device, and one on its way from it."""

Verdict = Literal["go", "commit", "stop"]
"""At a batch's boundary: go on; commit the shards as they are and go on; commit them and end."""


class Control(Protocol):
    """Who decides when shards end early. On a pod, all hosts must hear the same answer at the same batch."""

    def verdict(self) -> Verdict:
        """Asked before each batch."""

    def stopping(self) -> bool:
        """Whether a wait before the next batch is of no use any more. The verdict alone decides."""

    def committed(self) -> None:
        """Shards were closed: the clock of ``--commit-every`` starts again."""


class Sink(Protocol):
    """Where rows go: a stream's store, seen from the pipeline."""

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out a shard for these samples. May wait until an earlier one has left."""

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Make a shard and skipped samples part of the dataset."""


@dataclass(frozen=True)
class ShardTask:
    """A shard to make, and the samples skipped on the way to it."""

    plan: ShardBatches
    skipped: tuple[Skip, ...] = ()
    end: int | None = None
    """With the last work of a stream: how many samples the stream has."""
    undivided: bool = False
    """Committed whole or not at all."""


@dataclass(eq=False)
class Shard:
    """A shard being filled."""

    builder: ShardBuilder | None
    """None where this process stores no row of it."""
    lane: int
    waiting: deque[Batch]
    skipped: tuple[Skip, ...]
    end: int | None
    rows: int = 0
    samples: int = 0
    """Rows and samples that this process stores."""
    undivided: tuple[Batch, ...] = ()
    """All of its batches, where it is committed whole or not at all."""
    started: int = 0
    """Batches: the same on every host of a pod, whatever each stores of them, so decisions are made on it."""


class Step(NamedTuple):
    """A batch on its way: started, then fetched, then written."""

    shard: Shard
    batch: Batch
    pending: object
    first_row: int
    started: float


class Rows(NamedTuple):
    """A batch that was fetched."""

    step: Step
    blocks: Sequence[Sequence[RowBlock]]


class Close(NamedTuple):
    """The end of a shard; whole, or as far as it came."""

    shard: Shard
    whole: bool


@dataclass
class Flow:
    """The queues of one run."""

    crew: Crew
    lanes: int
    in_flight: int
    plans: Pipe[ShardTask] = field(init=False)
    steps: Pipe[Step | Close] = field(init=False)
    rows: list[Pipe[Rows | Close]] = field(init=False)
    closes: Pipe[Close] = field(init=False)

    def __post_init__(self) -> None:
        self.plans = Pipe(self.crew, _PLANS)
        most = 2 * self.in_flight + 1  # each batch may be the last of its shard; a full queue would hold up all lanes
        self.steps = Pipe(self.crew, most)
        self.rows = [Pipe(self.crew, most) for _ in range(self.lanes)]
        self.closes = Pipe(self.crew, 1)
        self.credits = threading.Semaphore(self.in_flight)
        # Batches of each lane, counted by the dispatcher and by the lane: each number has one writer and needs no lock.
        self.started = [0] * self.lanes
        self.written = [0] * self.lanes

    def waiting(self, lane: int) -> int:
        """Batches on their way to a lane's file."""
        return self.started[lane] - self.written[lane]

    def wait_for_room(self) -> None:
        """Wait until one more batch may be in flight. The dispatcher alone takes credits, so the room stays."""
        while not self.credits.acquire(timeout=0.1):
            if self.crew.failed:
                raise Stopped
        self.credits.release()


class Countdown:
    """Closes a pipe, once for each of its readers, when the last of its writers is done."""

    def __init__(self, writers: int, pipe: Pipe[Close], readers: int) -> None:
        self._left, self._pipe, self._readers = writers, pipe, readers
        self._lock = threading.Lock()

    def one_less(self) -> None:
        """A writer is done."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        for _ in range(self._readers):
            self._pipe.close()


class Pipeline:
    """One visit to a stream: works off a sequence of :class:`ShardTask` until it ends or is told to stop."""

    def __init__(
        self,
        producer: Producer,
        sink: Sink,
        control: Control,
        progress: Progress,
        *,
        lanes: int = 1,
        finishers: int | None = None,
        in_flight: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._producer, self._sink, self._control, self._progress = producer, sink, control, progress
        self._lanes, self._finishers, self._clock = lanes, finishers or lanes, clock
        self._in_flight = in_flight or lanes + AHEAD
        self._most_tokens: int | None = None
        """Computed tokens per group that the device has room for, once it ran out."""
        self._stopped = False
        self._unfinished: set[Shard] = set()
        self._commit_lock = threading.Lock()
        self._refused = False
        """A commit failed."""

    def run(self, tasks: Iterable[ShardTask]) -> bool:
        """Work everything off. True: to the end; False: stopped early, with all that was computed committed."""
        crew = Crew()
        flow = Flow(crew, self._lanes, self._in_flight)
        left = Countdown(self._lanes, flow.closes, self._finishers)
        crew.start("feeder", lambda: self._feed(tasks, flow.plans))
        crew.start("fetcher", lambda: self._fetch(flow))
        for lane in range(self._lanes):
            crew.start(f"lane-{lane}", lambda lane=lane: self._fill(flow, lane, left))  # type: ignore[misc]
        for number in range(self._finishers):
            crew.start(f"finisher-{number}", lambda: self._finish(flow.closes))
        try:
            self._dispatch(flow)
        except BaseException as error:  # noqa: BLE001 - Ctrl+C too ends the crew first; join raises it again
            crew.fail(error)
        try:
            crew.join()
        finally:
            # Nothing half-written stays; but under a thread that hangs, an open file is left to the end of the process.
            for shard in self._unfinished if crew.ended else ():
                if shard.builder is not None:
                    shard.builder.abort()
        return not self._stopped

    # -- feeder ---------------------------------------------------------------------------------------------------

    def _feed(self, tasks: Iterable[ShardTask], plans: Pipe[ShardTask]) -> None:
        iterator = iter(tasks)
        while not self._stopped:
            with self._progress.busy("tokenizer"):
                task = next(iterator, None)
            if task is None:
                break
            for batch in task.plan.batches:
                self._producer.prepare(batch.shape)
            plans.put(task)
        plans.close()

    # -- dispatcher -----------------------------------------------------------------------------------------------

    def _dispatch(self, flow: Flow) -> None:
        """Start batches, the idlest lane first, until the plans run out or the control says stop."""
        plans = iter(flow.plans)
        open_: list[Shard | None] = [None] * self._lanes
        more = True
        while more or any(open_):
            flow.wait_for_room()  # before the choice: which lane is idle shows when there is room
            lane = min((lane for lane in range(self._lanes) if more or open_[lane]), key=flow.waiting)
            if open_[lane] is None:
                task = next(plans, None)
                more = task is not None
                if task is not None:
                    whole = tuple(task.plan.batches) if task.undivided else ()
                    open_[lane] = self._begin(lane, task.plan.batches, task.skipped, task.end, whole)
            shard = open_[lane]
            if shard is not None:
                open_[lane] = self._advance(flow, shard, open_)
            if self._stopped:
                self._close_all(flow, open_)
                more = False
        self._progress.phase(Phase.UPLOADING)
        for _ in plans if self._stopped else ():
            pass  # let the feeder find room, see the flag, and end
        flow.steps.close()

    def _advance(self, flow: Flow, shard: Shard, open_: list[Shard | None]) -> Shard | None:
        """Start a shard's next batch. What the lane goes on with: the shard, what is left of it, or nothing."""
        if shard.waiting and self._fits(shard.waiting[0]):  # no wait for a program that will not be run
            self._progress.start()
            self._producer.await_program(shard.waiting[0], lambda: flow.crew.failed or self._control.stopping())
        verdict = self._control.verdict()
        if verdict == "stop":
            self._stopped = True
            return shard
        if verdict == "commit" and shard.started:
            self._close_all(flow, open_, again=True)
            shard = open_[shard.lane] or shard
        if shard.waiting:
            batch = shard.waiting[0]
            if not self._fits(batch):
                return self._again(flow, shard)
            flow.credits.acquire()
            began = self._clock()  # before: a CPU computes in here
            try:
                pending = self._producer.start(batch)
            except OutOfDeviceMemory as error:
                flow.credits.release()
                self._shrink(batch, error)
                return self._again(flow, shard)
            flow.steps.put(Step(shard, batch, pending, shard.rows, began))
            flow.started[shard.lane] += 1
            own = self._own(batch)
            shard.rows += sum(sample.rows for sample in own)
            shard.samples += len(own)
            shard.started += 1
            shard.waiting.popleft()
        if shard.waiting:
            return shard
        flow.steps.put(Close(shard, whole=True))
        self._control.committed()
        return None

    def _begin(
        self,
        lane: int,
        batches: Iterable[Batch],
        skipped: tuple[Skip, ...],
        end: int | None,
        undivided: tuple[Batch, ...] = (),
    ) -> Shard:
        waiting = deque(self._fitting(batches))
        samples = [sample for batch in waiting for sample in self._own(batch)]
        builder = self._sink.begin(samples) if samples else None
        shard = Shard(builder, lane, waiting, skipped, end, undivided=undivided)
        self._unfinished.add(shard)
        return shard

    def _again(self, flow: Flow, shard: Shard) -> Shard:
        """Close a shard as far as it came, and begin another with what is left of it: all, of an undivided one."""
        waiting, skipped, end = shard.undivided or shard.waiting, shard.skipped, shard.end
        if self._close_short(flow, shard) and not shard.undivided:
            skipped = ()
        return self._begin(shard.lane, waiting, skipped, end, shard.undivided)

    def _close_short(self, flow: Flow, shard: Shard) -> bool:
        """Commit what a shard has, or drop it where it has nothing. True: it had something."""
        shard.end = None
        if shard.started:
            flow.steps.put(Close(shard, whole=False))
            return True
        self._drop(shard)
        return False

    def _close_all(self, flow: Flow, open_: list[Shard | None], again: bool = False) -> None:
        for lane, shard in enumerate(open_):
            if shard is None:
                continue
            if again:
                open_[lane] = self._again(flow, shard) if shard.started and not shard.undivided else shard
            else:
                self._close_short(flow, shard)
                open_[lane] = None
        self._control.committed()

    def _own(self, batch: Batch) -> list[Sample]:
        return [sample for group in self._producer.owned for sample in batch.of(group)]

    def _fits(self, batch: Batch) -> bool:
        return self._most_tokens is None or batch.rows == 1 or batch.rows * batch.length <= self._most_tokens

    def _fitting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, those that the device has no room for in pieces."""
        for batch in batches:
            if self._fits(batch):
                yield batch
            else:
                yield from self._fitting(half for half in batch.halves() if half.samples)

    def _shrink(self, batch: Batch, error: OutOfDeviceMemory) -> None:
        """Halve the batch, or give up where there is nothing left to halve."""
        if batch.rows == 1:
            raise OutOfDeviceMemory(
                f"one row of {batch.length} tokens does not fit on the device",
                fix="use fewer --taps, a smaller --max-seq-length or --dtype bfloat16",
            ) from error
        rows = -(-batch.rows // 2)
        self._most_tokens = rows * batch.length
        self._progress.log(
            f"device memory ran out at {batch.rows} × {batch.length} tokens: going on with {rows} × {batch.length} "
            f"(--batch-tokens {self._most_tokens} from the start saves this detour)"
        )

    # -- fetcher and lanes ----------------------------------------------------------------------------------------

    def _fetch(self, flow: Flow) -> None:
        last_ready = 0.0
        for step in flow.steps:
            if isinstance(step, Close):
                flow.rows[step.shard.lane].put(step)
                continue
            blocks = self._producer.fetch(step.pending)
            ready = self._clock()
            self._progress.busy_for("model", ready - max(step.started, last_ready))
            last_ready = ready
            flow.rows[step.shard.lane].put(Rows(step, blocks))
            del step, blocks  # or their memory would be held until the next batch is there
        for pipe in flow.rows:
            pipe.close()

    def _fill(self, flow: Flow, lane: int, left: Countdown) -> None:
        for item in flow.rows[lane]:
            if isinstance(item, Close):
                flow.closes.put(item)
                continue
            with self._progress.busy("host copy", self._lanes):
                self._write(item.step, item.blocks)
            del item  # its memory is the next batch's
            flow.written[lane] += 1
            flow.credits.release()
        left.one_less()

    def _write(self, step: Step, blocks: Sequence[Sequence[RowBlock]]) -> None:
        """Put a batch's rows where they belong, tap after tap."""
        builder, batch = step.shard.builder, step.batch
        if builder is not None:
            sizes = {group: sum(sample.rows for sample in batch.of(group)) for group in self._producer.owned}
            for tap, of_tap in enumerate(blocks):
                row = step.first_row
                for group, rows in of_tap:
                    builder.write(tap, row, rows[: sizes[group]])
                    row += sizes[group]
        self._progress.add(  # of the whole batch: on a pod too, progress is the worker's and not a host's
            samples=len(batch.samples),
            tokens=batch.real_tokens,
            computed_tokens=batch.computed_tokens,
            truncated=sum(sample.truncated > 0 for sample in batch.samples),
        )

    # -- finishers ------------------------------------------------------------------------------------------------

    def _finish(self, closes: Pipe[Close]) -> None:
        for close in closes:
            with self._progress.busy("sink", self._finishers):
                self._commit(close)

    def _drop(self, shard: Shard) -> None:
        if shard.builder is not None:
            shard.builder.abort()
        self._unfinished.discard(shard)

    def _commit(self, close: Close) -> None:
        shard = close.shard
        record = None
        if shard.undivided and not close.whole:
            self._drop(shard)
            return
        if shard.builder is not None and not shard.samples:
            shard.builder.abort()  # closed early, before a batch with a row of this host's
        elif shard.builder is not None:
            record = shard.builder.finish(None if close.whole else shard.samples)
            self._progress.add(shards_written=1, bytes=record.size)
        with self._commit_lock:
            if self._refused:
                raise Stopped  # the first refusal is the one to tell: after it the store only says that it is unsure
            self._refused = True
            self._sink.commit(record, shard.skipped, shard.end)
            self._refused = False
        self._unfinished.discard(shard)
        self._progress.add(
            shards_committed=int(record is not None), samples_committed=shard.samples + len(shard.skipped)
        )
        for skip in shard.skipped:
            self._progress.skip(skip.reason)
