"""The worker's pipeline: every stage busy at once, each in a thread of its own, with short queues between.

    feeder      samples ▸ windows ▸ batches ▸ shard plans         (tokenizing goes on behind it, in the data room)
    dispatcher  starts batches on the device, a few ahead          (the caller's thread: signals land here)
    drainer     waits for rows, writes them where they belong in the shard, checksums them, in threads over the taps
    finisher    makes the shard durable, commits it

A shard's samples are known before its first batch starts, so its layout is too: rows go from the device's output
straight to their final place, and padding stays behind in the device's packed block. Backpressure is the queues'
length: a slow sink fills them, and then the dispatcher waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from spile.plan.batches import Batch
from spile.plan.shards import ShardPlan
from spile.runtime.pipes import Crew, Pipe
from spile.runtime.producer import Block, OutOfDeviceMemory, Producer
from spile.runtime.progress import Progress
from spile.spec.sample import Sample, Skip
from spile.store.record import ShardRecord
from spile.store.shard import ShardBuilder

__all__ = ["Control", "Pipeline", "Sink", "Verdict", "Work"]

_PLANS_AHEAD = 2
_BATCHES_IN_FLIGHT = 2
_SHARDS_TO_FINISH = 1
_COPY_THREADS = 8

Verdict = Literal["go", "commit", "stop"]
"""At a batch's boundary: go on; commit the shard as it is and go on; commit it and end."""


class Control(Protocol):
    """Who decides when a shard ends early. On a pod, all hosts must hear the same answer at the same batch."""

    def verdict(self) -> Verdict:
        """Asked before each batch."""

    def committed(self) -> None:
        """A shard was closed: the clock of ``--commit-every`` starts again."""


class Sink(Protocol):
    """Where rows go: a stream's store, seen from the pipeline."""

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out a shard for these samples. May wait until an earlier one has left."""

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Make a shard and skipped samples part of the dataset."""


@dataclass(frozen=True)
class Work:
    """A shard to make, and the samples skipped on the way to it."""

    plan: ShardPlan
    skipped: tuple[Skip, ...] = ()
    end: int | None = None
    """With the last work of a stream: how many samples the stream has."""


@dataclass
class _Open:
    """A shard being filled."""

    builder: ShardBuilder | None
    """None where this process stores no row of it."""
    rows: int = 0
    samples: int = 0


@dataclass(frozen=True)
class _Step:
    shard: _Open
    batch: Batch
    pending: object
    first_row: int
    started: float


@dataclass(frozen=True)
class _Close:
    shard: _Open
    whole: bool
    skipped: tuple[Skip, ...]
    end: int | None


class Pipeline:
    """One visit to a stream: works off a sequence of :class:`Work` until it ends or is told to stop."""

    def __init__(
        self,
        producer: Producer,
        sink: Sink,
        control: Control,
        progress: Progress,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._producer = producer
        self._sink = sink
        self._control = control
        self._progress = progress
        self._clock = clock
        self._most_tokens: int | None = None
        """Computed tokens a group that the device has room for, once it ran out."""
        self._stopped = False
        self._unfinished: list[_Open] = []

    def run(self, works: Iterable[Work]) -> bool:
        """Work everything off. True: to the end; False: stopped early, with all that was computed committed."""
        crew = Crew()
        plans: Pipe[Work] = Pipe(crew, _PLANS_AHEAD)
        steps: Pipe[_Step | _Close] = Pipe(crew, _BATCHES_IN_FLIGHT)
        closes: Pipe[_Close] = Pipe(crew, _SHARDS_TO_FINISH)
        crew.start("feeder", lambda: self._feed(works, plans))
        crew.start("drainer", lambda: self._drain(steps, closes))
        crew.start("finisher", lambda: self._finish(closes))
        try:
            self._dispatch(plans, steps)
        except BaseException as error:  # noqa: BLE001 - Ctrl+C too ends the crew first; join raises it again
            crew.fail(error)
        try:
            crew.join()
        finally:
            for shard in self._unfinished:
                if shard.builder is not None:
                    shard.builder.abort()  # nothing half-written stays; a shard that was finished is not touched
        return not self._stopped

    # -- feeder ---------------------------------------------------------------------------------------------------

    def _feed(self, works: Iterable[Work], plans: Pipe[Work]) -> None:
        iterator = iter(works)
        while not self._stopped:
            with self._progress.busy("tokenizer"):
                work = next(iterator, None)
            if work is None:
                break
            for batch in work.plan.batches:
                self._producer.prepare(batch)
            plans.put(work)
        plans.close()

    # -- dispatcher -----------------------------------------------------------------------------------------------

    def _dispatch(self, plans: Pipe[Work], steps: Pipe[_Step | _Close]) -> None:
        for work in plans:
            if self._stopped:
                continue  # let the feeder find room, see the flag, and end
            waiting = list(work.plan.batches)
            while True:
                waiting = list(self._fitting(waiting))
                done = self._dispatch_shard(work, waiting, steps)
                waiting = waiting[done:]
                if not waiting or self._stopped:
                    break
                work = replace(work, skipped=() if done else work.skipped)
        steps.close()

    def _dispatch_shard(self, work: Work, batches: Sequence[Batch], steps: Pipe[_Step | _Close]) -> int:
        """Start batches of one shard until it is full, or ends early. How many were started."""
        shard = self._begin(batches)
        done = 0
        for batch in batches:
            verdict = self._control.verdict()
            if verdict == "stop" or (verdict == "commit" and done):
                self._stopped = verdict == "stop"
                break
            try:
                pending = self._producer.start(batch)
            except OutOfDeviceMemory as error:
                self._shrink(batch, error)
                break
            self._progress.start()
            steps.put(_Step(shard, batch, pending, shard.rows, self._clock()))
            shard.rows += sum(len(sample) for sample in self._own(batch))
            shard.samples += len(self._own(batch))
            done += 1
        if done or not batches:
            whole = done == len(batches)
            # What was skipped on the way is done once this shard is; the stream's end is known only with the last.
            steps.put(_Close(shard, whole, work.skipped, work.end if whole else None))
            self._control.committed()
        elif shard.builder is not None:
            shard.builder.abort()
        return done

    def _begin(self, batches: Sequence[Batch]) -> _Open:
        samples = [sample for batch in batches for sample in self._own(batch)]
        shard = _Open(self._sink.begin(samples) if samples else None)
        self._unfinished.append(shard)
        return shard

    def _own(self, batch: Batch) -> list[Sample]:
        return [sample for group in self._producer.owned for sample in batch.groups[group]]

    def _fitting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, those that the device has no room for in pieces."""
        for batch in batches:
            if self._most_tokens is None or batch.rows == 1 or batch.rows * batch.length <= self._most_tokens:
                yield batch
            else:
                yield from self._fitting(half for half in batch.halves() if half.samples)

    def _shrink(self, batch: Batch, error: OutOfDeviceMemory) -> None:
        """Halve the batch, or give up where there is nothing left to halve."""
        if batch.rows == 1:
            raise OutOfDeviceMemory(
                f"one sample of {batch.length} tokens does not fit on the device",
                fix="use fewer --taps, a smaller --max-seq-length or --dtype bfloat16",
            ) from error
        rows = -(-batch.rows // 2)
        self._most_tokens = rows * batch.length
        self._progress.say(
            f"device memory ran out at {batch.rows} × {batch.length} tokens: going on with {rows} × {batch.length} "
            f"(--batch-tokens {self._most_tokens} from the start saves this detour)"
        )

    # -- drainer --------------------------------------------------------------------------------------------------

    def _drain(self, steps: Pipe[_Step | _Close], closes: Pipe[_Close]) -> None:
        last_ready = 0.0
        with ThreadPoolExecutor(_COPY_THREADS, "spile-copy") as pool:
            for step in steps:
                if isinstance(step, _Close):
                    closes.put(step)
                    continue
                blocks = self._producer.fetch(step.pending)
                ready = self._clock()
                self._progress.busy_for("model", ready - max(step.started, last_ready))
                last_ready = ready
                with self._progress.busy("host copy"):
                    self._write(step, blocks, pool)
        closes.close()

    def _write(self, step: _Step, blocks: Sequence[Sequence[Block]], pool: ThreadPoolExecutor) -> None:
        """Put a batch's rows where they belong, taps side by side in threads, one tap's rows in order."""
        builder = step.shard.builder
        if builder is None:
            self._count(step)
            return
        sizes = {group: sum(map(len, step.batch.groups[group])) for group in self._producer.owned}

        def write(tap: int) -> None:
            row = step.first_row
            for group, rows in blocks[tap]:
                builder.write(tap, row, rows[: sizes[group]])
                row += sizes[group]

        for _ in pool.map(write, range(len(blocks))):
            pass
        self._count(step)

    def _count(self, step: _Step) -> None:
        own = self._own(step.batch)
        self._progress.add(
            samples=len(own),
            tokens=sum(map(len, own)),
            computed_tokens=step.batch.computed_tokens,
            truncated=sum(sample.truncated > 0 for sample in own),
        )

    # -- finisher -------------------------------------------------------------------------------------------------

    def _finish(self, closes: Pipe[_Close]) -> None:
        for close in closes:
            with self._progress.busy("sink"):
                self._commit(close)

    def _commit(self, close: _Close) -> None:
        record = None
        if close.shard.builder is not None:
            record = close.shard.builder.finish(None if close.whole else close.shard.samples)
            self._progress.add(shards_written=1, bytes=record.size)
        self._sink.commit(record, close.skipped, close.end)
        self._unfinished.remove(close.shard)
        self._progress.add(
            shards_committed=record is not None,
            samples_committed=close.shard.samples + len(close.skipped),
        )
        for skip in close.skipped:
            self._progress.skip(skip.reason)
