"""The worker's pipeline: produce, copy, write, commit. ``extract``, ``infer`` and ``--add-taps`` all run through it.

::

    plan          samples ─► shards of batches          thread "plan"        plan_shards, Producer.batches
    produce       batches ─► the device                 the calling thread   Producer.start
    copy          the device ─► host memory             thread "copy"        Producer.fetch
    write         rows ─► their place in the shard      threads "write-N"    ShardBuilder.write
    commit        shard ─► durable ─► ledger            threads "commit-N"   ShardBuilder.finish, Sink.commit

The queues between the threads are short, so a slow disk or bucket makes the device wait and memory stays bounded. The
first error in any thread ends all of them. The pipeline never imports JAX.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from spile.compute.batches import AHEAD, Batch, Sizes
from spile.compute.producer import Control, Decision, OutOfDeviceMemory, Producer, TokenLimit
from spile.compute.progress import Progress
from spile.compute.threads import POLL, Channel, ThreadGroup, ThreadsEnded
from spile.spec.phase import Phase
from spile.spec.sample import Prediction, Sample, Skip
from spile.spec.taps import row_bytes
from spile.store.ledger import ShardRecord
from spile.store.predictions import put_predictions
from spile.store.shard import ShardBuilder
from spile.store.writer import StreamWriter

T = TypeVar("T")

_PLANNED = 1
"""Planned shards that wait in the queue; the planning thread holds one more."""
_SHARD_SAMPLES, _GROUP_SAMPLES = 16_384, 2_048
"""Most samples per shard, in total and per group, so that headers, indexes and what is planned ahead stay small."""
_SKIPS = 16_384
"""Most skipped samples that are held before they are committed."""


# -- what the pipeline is given ---------------------------------------------------------------------------------------


class Sink:
    """Where activation rows go: the store of a stream. On a pod, the hosts commit together."""

    def __init__(self, stream: StreamWriter, after_commit: Callable[[], None] = lambda: None) -> None:
        self._stream, self._after = stream, after_commit
        self.remote = stream.folder.local_path is None
        self.bytes_per_token = row_bytes(stream.record.identity.rows(stream.run))
        """What one token takes in a shard."""

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out a shard for these samples."""
        return self._stream.begin(samples)

    def add_predictions(self, record: ShardRecord, predictions: Sequence[Prediction]) -> ShardRecord:
        """Store the answers of a shard, and return its record with their file."""
        return put_predictions(self._stream.folder, record, predictions)

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip] = (), end: int | None = None) -> None:
        """Commit a shard and skipped samples as one record; do nothing if there is nothing to commit.

        ``end`` is the number of samples of the stream, if it is known only after all of them were read.
        """
        if record is None and not skipped and end is None:
            return
        self._stream.commit([] if record is None else [record], skipped, end=end)
        self._after()


@dataclass(frozen=True)
class ShardTask:
    """One shard to make, and the samples that were skipped before it."""

    batches: Sequence[Batch] = ()
    skipped: tuple[Skip, ...] = ()
    undivided: bool = False
    """Whether the shard is committed with all its batches or not at all."""


def plan_shards(
    items: Iterable[Sample | Skip],
    make_batches: Callable[[Iterator[Sample]], Iterable[Batch | Decision]],
    bytes_per_token: int,
    shard_bytes: float,
) -> Iterator[ShardTask]:
    """Group batches into shards of about ``shard_bytes``, each with the samples that were skipped before it.

    Args:
        items: The samples of the stream that are left, and those to skip.
        make_batches: Turns samples into batches; a decision ``commit`` closes the shard, ``stop`` ends the run.
        bytes_per_token: What one token takes in a shard.
        shard_bytes: The size of a shard; a single batch may exceed it.
    """
    waiting = iter(items)
    skipped: list[Skip] = []
    open_: list[Batch] = []
    size = samples = 0
    more, stop = True, False

    def read() -> Iterator[Sample]:
        nonlocal more
        for item in waiting:
            if isinstance(item, Skip):
                skipped.append(item)
                if len(skipped) >= _SKIPS:
                    return
            else:
                yield item
        more = False

    def close() -> ShardTask:
        nonlocal size, samples
        task = ShardTask(tuple(open_), tuple(skipped))
        open_.clear()
        skipped.clear()
        size = samples = 0
        return task

    while more and not stop:
        for batch in make_batches(read()):
            if isinstance(batch, Batch):
                added, count = batch.stored_bytes(bytes_per_token), len(batch.samples)
                most = min(_SHARD_SAMPLES, _GROUP_SAMPLES * len(batch.groups))
                if open_ and (size + added > shard_bytes or samples + count > most):
                    yield close()
                open_.append(batch)
                size, samples = size + added, samples + count
            elif batch == "stop":
                stop = True
                break
            elif batch == "commit" and (open_ or skipped):
                yield close()
        if open_ or skipped:
            yield close()


def run_pipeline(
    items: Iterable[Sample | Skip],
    producer: Producer,
    sink: Sink,
    sizes: Sizes,
    *,
    progress: Progress,
    control: Control,
    limit: TokenLimit | None = None,
) -> bool:
    """Compute and store what is left of a stream.

    Args:
        items: The samples that are left, and those to skip.
        producer: Turns samples into activation rows.
        sink: Where rows go.
        sizes: How much is computed, held and written at once.
        progress: The counters of the run.
        control: Decides when to stop and when to commit early.
        limit: Ends the stream once it holds a number of tokens.

    Returns:
        True if all items are done, False if the control stopped the run; then everything computed is committed.

    """
    sizes = replace(sizes, groups=producer.groups)
    generates, stopped = producer.generates, False  # the length of an answer is known once it is made

    def make_batches(samples: Iterator[Sample]) -> Iterator[Batch | Decision]:
        nonlocal stopped
        for batch in producer.batches(samples, sizes, control):
            if generates and limit is not None and isinstance(batch, Batch):
                limit.add(batch.stored_rows)
            stopped = batch == "stop"
            yield batch

    items = items if limit is None else limit.cut(items, count=not generates)
    tasks = plan_shards(items, make_batches, sink.bytes_per_token, sizes.shard_bytes)
    return Pipeline(producer, sink, control, progress, sizes).run(tasks) and not stopped


# -- the pipeline -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Shard:
    """A shard that is being filled."""

    task: ShardTask
    writer: int
    builder: ShardBuilder | None
    """None if this process stores no row of it."""
    waiting: deque[Batch]
    predictions: list[Prediction] = field(default_factory=list)
    """The answers that this process stores with it."""
    rows: int = 0
    samples: int = 0
    bytes: int = 0
    """Rows, samples and bytes of rows that this process stores."""
    started: int = 0
    """Started batches: the same number on every host of a pod, so decisions depend on it."""

    @property
    def complete(self) -> bool:
        return not self.waiting


class _InFlight(NamedTuple):
    """A batch between the device and its place in the shard."""

    shard: _Shard
    batch: Batch
    rows: Any
    """What :meth:`Producer.start` returned, and later what :meth:`Producer.fetch` returned."""
    first_row: int
    began: float


class Pipeline:
    """One run over a sequence of :class:`ShardTask`. An object is used once."""

    def __init__(self, producer: Producer, sink: Sink, control: Control, progress: Progress, sizes: Sizes) -> None:
        self._producer, self._sink, self._control, self._progress = producer, sink, control, progress
        self._writers, self._clock = sizes.writers, progress.clock
        self._finishers = sizes.finishers or sizes.writers
        in_flight = sizes.in_flight or sizes.writers + AHEAD
        self._threads = ThreadGroup()
        self._tasks: Channel[ShardTask] = Channel(self._threads, _PLANNED)
        length = 2 * in_flight + 1  # each batch may end its shard; a full queue would hold up all writers
        # A shard follows its last batch through the channels.
        self._started: Channel[_InFlight | _Shard] = Channel(self._threads, length)
        self._fetched: list[Channel[_InFlight | _Shard]] = [
            Channel(self._threads, length) for _ in range(self._writers)
        ]
        self._closed: Channel[_Shard] = Channel(self._threads, 1)
        self._credits = threading.Semaphore(in_flight)
        # Batches of each writer. Each number is changed by one thread and needs no lock.
        self._counts_started, self._counts_written = [0] * self._writers, [0] * self._writers
        self._writers_left, self._lock = self._writers, threading.Lock()
        self._most_tokens: int | None = None
        """Computed tokens per group that fit on the device, known once a batch did not fit."""
        self._stopped = False
        self._unfinished: set[_Shard] = set()
        self._commit_lock = threading.Lock()
        self._commit_failed = False

    def run(self, tasks: Iterable[ShardTask]) -> bool:
        """Make all shards. Return False if stopped early; then everything that was computed is committed."""
        threads = self._threads
        threads.start("plan", lambda: self._plan(tasks))
        threads.start("copy", self._copy)
        for number in range(self._writers):
            threads.start(f"write-{number}", lambda number=number: self._write_batches(number))  # type: ignore[misc]
        for number in range(self._finishers):
            threads.start(f"commit-{number}", self._commit_shards)
        try:
            self._produce()
        except BaseException as error:  # noqa: BLE001 - Ctrl+C ends the threads first; join raises it again
            threads.fail(error)
        try:
            threads.join()
        finally:
            # Remove half-written files, unless a thread hangs that may still write to them.
            for shard in self._unfinished if threads.ended else ():
                if shard.builder is not None:
                    shard.builder.abort()
        return not self._stopped

    # -- plan ---------------------------------------------------------------------------------------------------------

    def _plan(self, tasks: Iterable[ShardTask]) -> None:
        iterator = iter(tasks)
        while not self._stopped:
            # A producer that generates computes in here and measures its own stages.
            with nullcontext() if self._producer.generates else self._progress.busy("tokenizer"):
                task = next(iterator, None)
            if task is None:
                break
            for batch in task.batches:
                self._producer.prepare(batch)
            self._tasks.put(task)
            del task  # it may hold the rows of finished answers
        self._tasks.put(None)

    # -- produce ------------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        """Start batches, the least busy writer first, until the tasks are done or the control says stop."""
        tasks = iter(self._tasks)
        open_: list[_Shard | None] = [None] * self._writers
        more = True
        while more or any(open_):
            self._wait_for_room()  # before the choice: only now is it known which writer is least busy
            # Go on with an open shard rather than wait for the next one to be planned.
            new = more and (self._tasks.ready or not any(open_))
            writer = min((number for number in range(self._writers) if new or open_[number]), key=self._unwritten)
            if open_[writer] is None:
                task = next(tasks, None)
                more = task is not None
                if task is not None:
                    open_[writer] = self._begin(writer, task)
                del task
            shard = open_[writer]
            if shard is not None:
                open_[writer] = self._advance(shard, open_)
            if self._stopped:
                for shard in filter(None, open_):
                    self._close_early(shard)
                for _ in tasks:
                    pass  # let the planning thread find room, see the flag, and end
                break
        self._started.put(None)

    def _unwritten(self, writer: int) -> int:
        """Return the number of batches that were started for a writer and are not written."""
        return self._counts_started[writer] - self._counts_written[writer]

    def _wait_for_room(self) -> None:
        """Wait until one more batch may be in flight. Only this thread takes credits, so the room stays."""
        while not self._credits.acquire(timeout=POLL):
            if self._threads.failed:
                raise ThreadsEnded
        self._credits.release()

    def _advance(self, shard: _Shard, open_: list[_Shard | None]) -> _Shard | None:
        """Start the next batch of a shard; return the shard that its writer continues with, if any."""
        if shard.waiting and self._fits(shard.waiting[0]):  # no wait for a program that will not run
            self._progress.start()
            self._producer.await_program(shard.waiting[0], lambda: self._threads.failed or self._control.stopping())
        decision = "continue" if self._producer.generates else self._control.decide()
        if decision == "stop":
            self._stopped = True
            return shard
        if decision == "commit" and shard.started:
            for each in filter(None, open_):
                if each.started and not each.task.undivided:
                    open_[each.writer] = self._reopen(each)
            self._control.committed()
            shard = open_[shard.writer] or shard
        if shard.waiting:
            batch = shard.waiting[0]
            if not self._fits(batch):
                return self._reopen(shard)
            self._credits.acquire()
            began = self._clock()  # before start: a CPU computes inside it
            try:
                with self._progress.computing():
                    pending = self._producer.start(batch)
            except OutOfDeviceMemory as error:
                self._credits.release()
                self._halve_batches(batch, error)
                return self._reopen(shard)
            self._started.put(_InFlight(shard, batch, pending, shard.rows, began))
            self._counts_started[shard.writer] += 1
            own = self._own_samples(batch)
            shard.rows += sum(sample.rows for sample in own)
            shard.samples += len(own)
            shard.predictions += batch.predictions() if own else []
            shard.started += 1
            shard.waiting.popleft()
        if shard.waiting:
            return shard
        self._started.put(shard)
        self._control.committed()
        return None

    def _begin(self, writer: int, task: ShardTask) -> _Shard:
        waiting = deque(self._split_to_fit(task.batches))
        samples = [sample for batch in waiting for sample in self._own_samples(batch)]
        shard = _Shard(task, writer, self._sink.begin(samples) if samples else None, waiting)
        self._unfinished.add(shard)
        return shard

    def _reopen(self, shard: _Shard) -> _Shard:
        """Close a shard early and begin another with the batches that are left: all of them if it is undivided."""
        task = shard.task
        if not task.undivided:
            task = replace(task, batches=tuple(shard.waiting), skipped=() if shard.started else task.skipped)
        self._close_early(shard)
        return self._begin(shard.writer, task)

    def _close_early(self, shard: _Shard) -> None:
        """Commit what a shard has, or drop it if it has nothing."""
        if shard.started:
            self._started.put(shard)
        else:
            self._drop(shard)

    def _own_samples(self, batch: Batch) -> list[Sample]:
        return [sample for group in self._producer.owned for sample in batch.samples_of(group)]

    def _fits(self, batch: Batch) -> bool:
        return self._most_tokens is None or batch.rows == 1 or batch.rows * batch.length <= self._most_tokens

    def _split_to_fit(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, split until each fits on the device."""
        for batch in batches:
            if self._fits(batch):
                yield batch
            else:
                yield from self._split_to_fit(half for half in batch.halves() if half.samples)

    def _halve_batches(self, batch: Batch, error: OutOfDeviceMemory) -> None:
        """Halve the batch size, or give up if a batch has one row."""
        if batch.rows == 1:
            raise OutOfDeviceMemory(
                f"one row of {batch.length} tokens does not fit on the device",
                fix="use fewer --taps, a smaller --max-seq-length or --dtype bfloat16",
            ) from error
        rows = -(-batch.rows // 2)
        self._most_tokens = rows * batch.length
        self._progress.log(
            f"device memory ran out at {batch.rows} × {batch.length} tokens: going on with {rows} × {batch.length} "
            f"(--batch-tokens {self._most_tokens} avoids this)"
        )

    # -- copy and write -----------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        last_ready = 0.0
        for item in self._started:
            if isinstance(item, _Shard):
                self._fetched[item.writer].put(item)
                continue
            with self._progress.computing():
                blocks = self._producer.fetch(item.rows)
            ready = self._clock()
            self._progress.add_busy("model", ready - max(item.began, last_ready))
            last_ready = ready
            self._fetched[item.shard.writer].put(item._replace(rows=blocks))
            del item, blocks  # or their memory would be held until the next batch arrives
        self._progress.phase(Phase.UPLOADING if self._sink.remote else Phase.WRITING)
        for channel in self._fetched:
            channel.put(None)

    def _write_batches(self, writer: int) -> None:
        for item in self._fetched[writer]:
            if isinstance(item, _Shard):
                self._closed.put(item)
                continue
            with self._progress.busy("host copy", self._writers):
                self._write(item)
            del item  # the next batch uses its memory
            self._counts_written[writer] += 1
            self._credits.release()
        with self._lock:
            self._writers_left -= 1
            last = not self._writers_left
        for _ in range(self._finishers if last else 0):
            self._closed.put(None)

    def _write(self, step: _InFlight) -> None:
        """Write the rows of a batch to their places in the shard, tap after tap."""
        builder, batch, written = step.shard.builder, step.batch, 0
        if builder is not None:
            sizes = {group: batch.stored_rows_of(group) for group in self._producer.owned}
            for tap, of_tap in enumerate(step.rows):
                row = step.first_row
                for group, rows in of_tap:
                    builder.write(tap, row, kept := rows[: sizes[group]])
                    row, written = row + sizes[group], written + kept.nbytes
        step.shard.bytes += written
        self._progress.add(**batch.counts(), bytes=written)  # of all hosts of a pod: the progress is the worker's

    # -- commit -------------------------------------------------------------------------------------------------------

    def _commit_shards(self) -> None:
        for shard in self._closed:
            with self._progress.busy("sink", self._finishers):
                self._commit(shard)

    def _drop(self, shard: _Shard) -> None:
        if shard.builder is not None:
            shard.builder.abort()
            self._progress.add(bytes=-shard.bytes)
        self._unfinished.discard(shard)

    def _commit(self, shard: _Shard) -> None:
        record, skipped = None, shard.task.skipped
        if shard.task.undivided and not shard.complete:
            self._drop(shard)
            return
        if shard.builder is not None and not shard.samples:
            shard.builder.abort()  # closed before a batch with a row of this host
        elif shard.builder is not None:
            record = shard.builder.finish(None if shard.complete else shard.samples)
            if shard.predictions:
                record = self._sink.add_predictions(record, shard.predictions)
            self._progress.add(shards_written=1, bytes=record.size - shard.bytes)
        with self._commit_lock:
            if self._commit_failed:
                raise ThreadsEnded  # report only the first failure: after it the store does not know its own state
            self._commit_failed = True
            self._sink.commit(record, skipped)
            self._commit_failed = False
        self._unfinished.discard(shard)
        self._progress.add(shards_committed=int(record is not None), samples_committed=shard.samples + len(skipped))
        for skip in skipped:
            self._progress.skip(skip)
