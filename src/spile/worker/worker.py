"""The worker's one loop: what is left of a stream, through a producer, into the store. It never imports jax."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spile.spec.sample import Sample, Skip
from spile.store.ledger import ShardRecord
from spile.store.shard import ShardBuilder
from spile.store.stream import StreamStore
from spile.worker.batches import BatchPlan, ShardBatches, batches, row_bytes, shards
from spile.worker.pipeline import Control, Pipeline, ShardTask, Sink, Verdict
from spile.worker.producer import Producer
from spile.worker.progress import Progress

__all__ = ["LocalControl", "Sizes", "StreamSink", "run_worker", "shard_tasks"]

_MOST_SKIPPED = 16_384
"""Skipped samples that are held before they are committed: as many as a shard may have samples."""


@dataclass(frozen=True)
class Sizes:
    """How much at once. None of it changes a number that is stored."""

    batch_tokens: int
    batch_size: int | None
    longest: int
    shard_bytes: float
    lanes: int = 1
    """Shards filled side by side: a file takes 2 GB/s, a fast device gives more."""
    finishers: int | None = None
    """Shards made durable side by side; as many as lanes, unless a bucket's line would idle while one is completed."""
    in_flight: int | None = None
    """Batches started and not yet written: their rows are what a worker holds in memory."""
    shortest_row: int = 64
    short_tail: bool = False

    def batch_plan(self, groups: int) -> BatchPlan:
        """The part of it that bounds batches."""
        return BatchPlan(self.batch_tokens, self.batch_size, self.longest, groups, self.shortest_row, self.short_tail)


class LocalControl:
    """One process decides for itself: a signal stops it, the clock asks for commits."""

    def __init__(
        self, stop: threading.Event, commit_every: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stop, self._every, self._clock = stop, commit_every, clock
        self._since = clock()

    def verdict(self) -> Verdict:
        """Stop before commit before go."""
        if self._stop.is_set():
            return "stop"
        return "commit" if self._every is not None and self._clock() - self._since >= self._every else "go"

    def stopping(self) -> bool:
        """A signal came."""
        return self._stop.is_set()

    def committed(self) -> None:
        """The clock starts again."""
        self._since = self._clock()


class StreamSink:
    """A stream's store as the pipeline's sink, with a call after each commit (the heartbeat's)."""

    def __init__(self, stream: StreamStore, after_commit: Callable[[], None] = lambda: None) -> None:
        self._stream, self._after = stream, after_commit

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out a shard."""
        return self._stream.begin(samples)

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """One record, one commit."""
        if record is None and not skipped and end is None:
            return
        self._stream.commit([] if record is None else [record], skipped, end=end)
        self._after()


def shard_tasks(
    items: Iterable[Sample | Skip], sizes: Sizes, groups: int, bytes_per_token: int, end: Callable[[], int | None]
) -> Iterator[ShardTask]:
    """Shards to make, in order, each with the samples skipped on the way to it; last, what was skipped after them.

    Where very many are skipped a shard ends early, so that they are committed and forgotten.
    """
    waiting = iter(items)
    skipped: list[Skip] = []
    more = True

    def samples() -> Iterator[Sample]:
        nonlocal more
        for item in waiting:
            if isinstance(item, Skip):
                skipped.append(item)
                if len(skipped) >= _MOST_SKIPPED:
                    return
            else:
                yield item
        more = False

    plan = sizes.batch_plan(groups)
    while more:
        for shard in shards(batches(samples(), plan), bytes_per_token, sizes.shard_bytes):
            yield ShardTask(shard, tuple(skipped))
            skipped.clear()
        if more and skipped:
            yield ShardTask(ShardBatches(), tuple(skipped))
            skipped.clear()
    total = end()
    if skipped or total is not None:
        yield ShardTask(ShardBatches(), tuple(skipped), total)


def run_worker(
    items: Iterable[Sample | Skip],
    producer: Producer,
    stream: StreamStore,
    sizes: Sizes,
    *,
    progress: Progress,
    control: Control,
    end: Callable[[], int | None] = lambda: None,
    after_commit: Callable[[], None] = lambda: None,
    sink: Sink | None = None,
) -> bool:
    """Work off what is left of a stream. True: to the end; False: told to stop, all that was computed committed."""
    bytes_per_token = row_bytes(stream.record.identity.rows(stream.run))
    todo = shard_tasks(items, sizes, producer.groups, bytes_per_token, end)
    sink = sink or StreamSink(stream, after_commit)
    pipeline = Pipeline(
        producer,
        sink,
        control,
        progress,
        lanes=sizes.lanes,
        finishers=sizes.finishers,
        in_flight=sizes.in_flight,
    )
    return pipeline.run(todo)
