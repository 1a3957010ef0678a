"""Rows of other taps beside a stream's own, shard for shard: the loop of ``--add-taps``. It never imports jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from spile.errors import Damaged
from spile.planning.batches import batches_in_order
from spile.planning.shards import ShardBatches
from spile.runtime.flow import Control, ShardTask
from spile.runtime.pipeline import Pipeline
from spile.runtime.producer import Producer
from spile.runtime.progress import Progress
from spile.runtime.worker import Sizes, StreamSink
from spile.spec.positions import ALL
from spile.spec.records import known_fields
from spile.spec.sample import Sample, Skip
from spile.store.additions import Alignment, alignment
from spile.store.codec import CONTEXT, CONTEXT_OFFSETS, POSITIONS
from spile.store.record import ShardRecord
from spile.store.shard_reader import ShardReader
from spile.store.stream import StreamStore
from spile.store.streams import Stream

__all__ = ["add_beside", "finish_beside", "tasks_beside"]


def add_beside(
    stream: Stream,
    store: StreamStore,
    left: Sequence[ShardRecord],
    producer: Producer,
    sizes: Sizes,
    *,
    control: Control,
    progress: Progress,
    after_commit: Callable[[], None] = lambda: None,
) -> bool:
    """Add what is ``left``. True: to the end; False: told to stop, the shards in the making dropped."""
    pipeline = Pipeline(
        producer,
        _SinkBeside(store, left, after_commit),
        control,
        progress,
        lanes=sizes.lanes,
        finishers=sizes.finishers,
        in_flight=sizes.in_flight,
    )
    some = store.run.positions != ALL
    finished = pipeline.run(tasks_beside(stream, left, sizes, producer.groups, some=some))
    if finished:
        finish_beside(stream, store)
    return finished


def finish_beside(stream: Stream, store: StreamStore) -> None:
    """What the stream skipped is done here too: both ledgers cover the same samples."""
    skips = [skip for commit in stream.commits for skip in commit.skipped if skip.index not in store.ledger.done]
    ends = [commit.end for commit in stream.commits if commit.end is not None]
    end = ends[-1] if ends and store.ledger.end is None else None
    if skips or end is not None:
        store.commit([], skips, end=end)
    store.finish()


def tasks_beside(
    stream: Stream, left: Iterable[ShardRecord], sizes: Sizes, groups: int, *, some: bool
) -> Iterator[ShardTask]:
    """A task for each of a stream's shards, of the same samples in the same order, committed whole or not at all.

    ``some``: not all tokens have rows.
    """
    known: list[int] = []
    plan = sizes.batch_plan(groups)
    for record in left:
        samples = _samples(stream.open(record), some)
        yield ShardTask(ShardBatches(tuple(batches_in_order(samples, plan, known))), undivided=True)


def _samples(shard: ShardReader, some: bool) -> list[Sample]:
    """A stored shard's samples, as they were when they were computed: from its tail, which is read once."""
    every, starts = (shard.whole(name) for name in ((CONTEXT, CONTEXT_OFFSETS) if some else ("tokens", "offsets")))
    found = []
    for place, note in enumerate(shard.notes):
        rows = slice(*shard.bounds(place))
        tokens, roles, positions = every[starts[place] : starts[place + 1]], shard.whole("roles")[rows], None
        if some:
            positions = shard.whole(POSITIONS)[rows]
            known, roles = roles, np.zeros(len(tokens), np.uint8)
            roles[positions] = known
        found.append(Sample(**{**known_fields(Sample, note), "tokens": tokens, "roles": roles, "positions": positions}))
    return found


class _SinkBeside(StreamSink):
    """Commits a shard only where its rows are those of one of the stream's own, in the same order."""

    def __init__(
        self, store: StreamStore, wanted: Iterable[ShardRecord], after_commit: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(store, after_commit)
        self._wanted: set[Alignment] = {alignment(record) for record in wanted}

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """As a stream's, checked."""
        if record is not None and alignment(record) not in self._wanted:
            raise Damaged(
                f"{record.name} holds other rows than the dataset's own shard of the same samples",
                expected="the same samples, tokens and roles in the same order",
            )
        super().commit(record, skipped, end)
