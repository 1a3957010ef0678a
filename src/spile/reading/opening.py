"""A bucket's shards, opened before their rows are asked for.

To open one takes two answers, one after the other: its header, then the checksums of its chunks. A bucket gives each
after tens of milliseconds, and in that time a small shard's rows could have come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from spile.reading.read_pool import ReadPool
from spile.store.shard_reader import ShardReader

__all__ = ["OpeningGroup", "ShardOpener"]

_THREADS = 8
_AHEAD = 16
"""Shards that are open, or being opened, before the one that is read."""

_LOOKED_AT = 256
"""Pieces after a group's own, for shards that are not open yet: in a dataset of few shards there are none."""

_Numbered = tuple[int, ShardReader]


class ShardOpener:
    """Threads that open shards for whoever reads these taps of them. What fails is met again by who reads the rows."""

    def __init__(self, taps: Sequence[str]) -> None:
        self._taps, self._pool = taps, ReadPool(_THREADS)

    def begin(self, shard: ShardReader) -> None:
        """Have it opened. Shards on a local disk are not: they answer at once."""
        if shard.folder.local_path is None:
            self._pool.submit(partial(_open, shard, self._taps))

    def in_turn(self, shards: Iterable[_Numbered]) -> Iterator[_Numbered]:
        """The same shards, with the next ones on their way."""
        coming: deque[_Numbered] = deque()
        for each in shards:
            self.begin(each[1])
            coming.append(each)
            if len(coming) > _AHEAD:
                yield coming.popleft()
        yield from coming

    def close(self) -> None:
        """Open no more."""
        self._pool.close()


class OpeningGroup:
    """Shards by number that are read about in this order, each opened some way ahead.

    ``following``: what is read after them. The first of it are opened too, before the last of these are read.
    """

    def __init__(
        self, opener: ShardOpener, shards: Sequence[_Numbered], numbers: Iterable[int], following: Iterable[int]
    ) -> None:
        self._opener, self._shards = opener, shards
        order = dict.fromkeys(numbers)
        most = len(order) + _AHEAD
        for number in islice(following, _LOOKED_AT):
            if len(order) == most:
                break
            order[number] = None
        ahead = list(order)
        self._later = dict(zip(ahead, ahead[_AHEAD:], strict=False))
        for number in ahead[:_AHEAD]:
            opener.begin(shards[number][1])

    def reached(self, number: int) -> None:
        """One of them is being read. Safe to call from several threads."""
        later = self._later.pop(number, None)
        if later is not None:
            self._opener.begin(self._shards[later][1])


def _open(shard: ShardReader, taps: Iterable[str]) -> None:
    for tap in taps:
        shard.of(tap).sums(tap)
