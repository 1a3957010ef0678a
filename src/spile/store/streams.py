"""The streams of a dataset as their ledgers tell them: which there are, their committed shards, who holds a sample."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from operator import itemgetter

from spile.objects import Folder
from spile.plan.ranges import Ranges
from spile.store.layout import STREAM, stream_number
from spile.store.ledger import read_commits
from spile.store.record import Commit, ShardRecord
from spile.store.stream import StreamRecord

__all__ = ["Stream", "find_streams"]


class Stream:
    """One stream of a dataset: its identity and its committed shards."""

    def __init__(self, folder: Folder, record: StreamRecord) -> None:
        self.folder, self.record = folder, record
        self.number = record.worker_id
        self.taps = tuple(str(tap) for tap in record.identity.taps)

    @cached_property
    def commits(self) -> tuple[Commit, ...]:
        """The ledger, read once."""
        return tuple(read_commits(self.folder, self.record.id))

    @cached_property
    def shards(self) -> tuple[ShardRecord, ...]:
        """In the order they were committed."""
        return tuple(shard for commit in self.commits for shard in commit.shards)

    @cached_property
    def _ranges(self) -> list[tuple[int, int, int]]:
        """(first, last + 1, shard) of every range of samples, sorted: one bisection finds one of ten thousand."""
        return sorted((a, b, place) for place, shard in enumerate(self.shards) for a, b in shard.samples.pairs())

    def holding(self, index: int) -> ShardRecord | None:
        """The shard that holds a sample, or None."""
        place = bisect_right(self._ranges, index, key=itemgetter(0)) - 1
        if place < 0 or index >= self._ranges[place][1]:
            return None
        return self.shards[self._ranges[place][2]]

    @property
    def samples(self) -> int:
        """Stored."""
        return sum(shard.count for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Rows at each tap."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def skipped(self) -> Ranges:
        """Samples that are done without rows."""
        return Ranges.of(skip.index for commit in self.commits for skip in commit.skipped)

    def __repr__(self) -> str:
        return f"Stream({self.number}, {len(self.shards)} shards, {self.samples} samples)"


def find_streams(root: Folder) -> list[int]:
    """The numbers of the streams below a root."""
    found = set()
    for info in root.list("tpu_"):
        folder, _, rest = info.key.partition("/")
        number = stream_number(folder)
        if number is not None and rest == STREAM:
            found.add(number)
    return sorted(found)
