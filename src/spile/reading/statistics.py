"""``dataset.stats(tap)``: from the commits where they were taken while extracting, else from the rows, in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spile.objects.ahead import read_ahead
from spile.reading.rows import context_of
from spile.store.ledger import ShardRecord
from spile.store.statistics import SUMS, TapAccumulator, TapStatistics
from spile.store.streams import Stream

if TYPE_CHECKING:
    from spile.reading.dataset import Dataset

__all__ = ["tap_statistics"]

_ROWS = 16_384
_THREADS = 4


def tap_statistics(dataset: Dataset, tap: str, streams: Iterable[int] | None = None) -> TapStatistics:
    """Of all stored rows of a tap."""
    shards = [(stream, record) for stream in dataset.having((tap,), streams) for record in stream.shards]
    calls = (partial(_of_shard, stream, record, tap) for stream, record in shards)
    return TapStatistics.merged(read_ahead(calls, _THREADS))


def _of_shard(stream: Stream, record: ShardRecord, tap: str) -> TapStatistics:
    shard = stream.open(record)
    if tap in record.statistics:
        known = TapStatistics.from_json(record.statistics[tap], stream.number)
        return replace(known, sums=(shard.whole(tap + SUMS),))
    taken = TapAccumulator(shard.place(tap).shape[1])
    for start in range(0, record.tokens, _ROWS):
        stop = min(start + _ROWS, record.tokens)
        known_rows = context_of(stream.number, shard, start, stop)
        assert known_rows.tokens is not None and known_rows.samples is not None  # noqa: S101, PT018
        assert known_rows.positions is not None  # noqa: S101  for the type checker
        taken.add(shard.rows(tap, start, stop), known_rows.tokens, known_rows.samples, known_rows.positions)
    found = taken.result()
    return replace(found, top=tuple(row._replace(stream=stream.number) for row in found.top))
