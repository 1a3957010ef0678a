"""Shards: which batches go into which file, and how large a row is. Pure arithmetic, known before the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from spile.planning.batches import Batch
from spile.spec.taps import TapRows

__all__ = ["ShardBatches", "row_bytes", "shards"]

_INDEX_BYTES = 5
"""A token's id and role."""
_SHARD_SAMPLES, _GROUP_SAMPLES = 16_384, 2_048
"""No shard holds more samples, in all and for each group: its header, its index and what is planned ahead of the model
stay small however short the samples are."""


def row_bytes(taps: Iterable[TapRows]) -> int:
    """Bytes that one token takes in a shard, over all taps."""
    return sum(tap.bytes for tap in taps) + _INDEX_BYTES


@dataclass(frozen=True)
class ShardBatches:
    """The batches of one shard, in the order in which their rows lie in it."""

    batches: Sequence[Batch] = field(default_factory=tuple)

    @property
    def tokens(self) -> int:
        """Rows per tap."""
        return sum(batch.stored_rows for batch in self.batches)


def shards(batches: Iterable[Batch], bytes_per_token: int, shard_bytes: float) -> Iterator[ShardBatches]:
    """Whole batches until the next one would pass the size; at least one batch per shard."""
    waiting: list[Batch] = []
    size = samples = 0
    for batch in batches:
        more = batch.stored_rows * bytes_per_token
        count = len(batch.samples)
        most = min(_SHARD_SAMPLES, _GROUP_SAMPLES * len(batch.groups))
        if waiting and (size + more > shard_bytes or samples + count > most):
            yield ShardBatches(tuple(waiting))
            waiting, size, samples = [], 0, 0
        waiting.append(batch)
        size += more
        samples += count
    if waiting:
        yield ShardBatches(tuple(waiting))
