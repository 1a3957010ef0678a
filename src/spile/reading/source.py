"""What a shuffled reader reads: taps of shards, each opened when it is asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.store.ledger import ShardRecord
from spile.store.shard_reader import SMALL_SHARD, ShardReader
from spile.store.streams import Stream

__all__ = ["ShardCache", "TapSource"]

_MOST_HELD = 320_000_000
"""Bytes of the shards that are open: token ids and roles take five per token, and a small one is held whole."""


class ShardCache(Sequence[tuple[int, ShardReader]]):
    """Shards by number, each opened when it is asked for; what their tails take in memory is bounded."""

    def __init__(self, shards: Sequence[tuple[Stream, ShardRecord]]) -> None:
        self._shards = shards
        self._opened: OrderedDict[int, ShardReader] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: Any) -> Any:
        stream, record = self._shards[number]
        with self._lock:
            found = self._opened.pop(number, None)
            if found is None:
                found = stream.open(record)
                self._held += _weight(record)
            self._opened[number] = found
            while self._held > _MOST_HELD and len(self._opened) > 1:
                old, _ = self._opened.popitem(last=False)
                self._held -= _weight(self._shards[old][1])
        return stream.number, found


def _weight(record: ShardRecord) -> int:
    return 5 * record.tokens + (record.size if record.size <= SMALL_SHARD else 0)


@dataclass(frozen=True)
class TapSource:
    """What is to be read: these taps of these shards."""

    taps: tuple[str, ...]
    shards: Sequence[tuple[int, ShardReader]]
    """Each with its stream's number."""

    def row_type(self, tap: str) -> tuple[np.dtype[Any], int]:
        """The dtype and the number of columns of a tap's rows, the same in every shard."""
        shard: ShardReader = self.shards[0][1]
        return shard.row_type(tap)

    @property
    def widths(self) -> list[int]:
        """The bytes of a row of each tap."""
        return [dtype.itemsize * columns for dtype, columns in map(self.row_type, self.taps)]

    @property
    def chunk_rows(self) -> int | None:
        """Rows that are checked together, of the tap with the widest; None where they are not cut at rows."""
        shard: ShardReader = self.shards[0][1]
        return shard.chunk_rows(max(zip(self.widths, self.taps, strict=True))[1])

    @property
    def local(self) -> bool:
        """Whether shards lie on a local disk."""
        return bool(self.shards) and self.shards[0][1].folder.local_path is not None

    @property
    def block_rows(self) -> int | None:
        """Rows of a local disk's shards that are read by themselves, many at once; None: a piece is one read."""
        return self.chunk_rows if self.local else None

    @property
    def width(self) -> int:
        """The bytes of a row of all taps together."""
        return sum(self.widths)
