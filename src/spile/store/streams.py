"""The streams of a dataset as their ledgers tell them: which there are, their committed shards, who holds a sample.

What says that a stream belongs to its dataset is asked here, for the reader and for the proof.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from operator import itemgetter

from spile.errors import Damaged
from spile.objects import Folder
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.taps import TapRows
from spile.store.additions import Addition, find_additions
from spile.store.joined import JoinedShard
from spile.store.layout import STREAM, is_addition, stream_folder, stream_number
from spile.store.ledger import read_commits
from spile.store.record import Commit, ShardRecord
from spile.store.shard_reader import ShardReader
from spile.store.splits import mixed_splits
from spile.store.stream import StreamRecord, read_stream

__all__ = ["AT_ONCE", "Stream", "find_streams", "open_streams", "read_ledgers", "stranger"]

AT_ONCE = 32
"""Streams or shards that are asked for side by side: a bucket answers each after tens of milliseconds."""


class Stream:
    """One stream of a dataset: its identity and its committed shards."""

    def __init__(self, folder: Folder, record: StreamRecord, begun: Sequence[Addition] = ()) -> None:
        self.folder, self.record = folder, record
        self._commits: tuple[Commit, ...] | None = None
        self.number = record.worker_id
        self.begun = tuple(begun)
        """Taps that somebody began to add."""

    @cached_property
    def additions(self) -> tuple[Addition, ...]:
        """Those that have every row: a reader sees no others."""
        return tuple(added for added in self.begun if not added.left(self._own))

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """Its own, then those that were added."""
        own = (str(tap) for tap in self.record.identity.taps)
        return (*own, *(tap for added in self.additions for tap in added.taps))

    def kinds(self, run: RunIdentity) -> tuple[TapRows, ...]:
        """What the taps' rows are on disk, in the order of the taps."""
        records = [self.record, *(added.record for added in self.additions)]
        return tuple(row for record in records for row in record.identity.rows(run))

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The ledger, read once."""
        # No cached_property: before Python 3.12 it has one lock for all objects, and streams would wait in line.
        if self._commits is None:
            self._commits = tuple(read_commits(self.folder, self.record.id))
        return self._commits

    @property
    def _own(self) -> tuple[ShardRecord, ...]:
        return tuple(shard for commit in self.commits for shard in commit.shards)

    @cached_property
    def _beside(self) -> tuple[dict[str, ShardRecord], ...]:
        """Of each addition, its shards by the names of the stream's own."""
        return tuple(added.beside(self._own) for added in self.additions)

    @cached_property
    def shards(self) -> tuple[ShardRecord, ...]:
        """In the order they were committed, each with what is known of the taps that were added to it."""
        return tuple(self._with_added(shard) for shard in self._own)

    @property
    def files(self) -> tuple[ShardRecord, ...]:
        """Every file of it that is read: its own shards, and those of added taps."""
        return (*self._own, *(shard for added in self.additions for shard in added.shards))

    def _with_added(self, shard: ShardRecord) -> ShardRecord:
        known = dict(shard.statistics)
        for beside in self._beside:
            known |= beside[shard.name].statistics
        return replace(shard, statistics=known)

    def open(self, shard: ShardRecord) -> ShardReader:
        """One of its shards, which must say of itself that it is this stream's, with what was added to it."""
        own = ShardReader(self.folder, shard, stream=self.record.id, fingerprint=self.record.fingerprint)
        added: dict[str, ShardReader] = {}
        for each, beside in zip(self.additions, self._beside, strict=True):
            reader = ShardReader(
                each.folder, beside[shard.name], stream=each.record.id, fingerprint=each.record.fingerprint
            )
            added |= dict.fromkeys(each.taps, reader)
        return JoinedShard(own, added) if added else own

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
    return sorted(_folders(root))


def _folders(root: Folder) -> dict[int, list[str]]:
    """Each stream's number, and the folders in its own that taps were added in. One listing."""
    found: dict[int, list[str]] = {}
    added: dict[int, list[str]] = {}
    for info in root.list("tpu_"):
        folder, _, rest = info.key.partition("/")
        number = stream_number(folder)
        if number is None or not rest.endswith(STREAM):
            continue
        if rest == STREAM:
            found[number] = []
        elif is_addition(rest.removesuffix("/" + STREAM)):
            added.setdefault(number, []).append(rest.removesuffix("/" + STREAM))
    return {number: added.get(number, []) for number in found}


def stranger(record: StreamRecord, number: int, run: RunIdentity) -> str | None:
    """Why a ``stream.json`` does not belong in folder ``number`` of this run; None where it does."""
    if record.fingerprint != run.fingerprint():
        return f"{STREAM} belongs to another run: expected fingerprint {run.fingerprint()}, found {record.fingerprint}"
    if record.worker_id != number:
        return f"{STREAM} belongs to another stream: expected {stream_folder(number)}, found tpu_{record.worker_id}"
    return None


def open_streams(root: Folder, run: RunIdentity) -> list[Stream]:
    """Every stream of the dataset; :class:`Damaged` where one is of another run, or copied from another's folder."""
    found = _folders(root)
    numbers = sorted(found)
    folders = [root.child(stream_folder(number)) for number in numbers]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="streams") as pool:
        records = list(pool.map(read_stream, folders))
    streams = []
    for number, folder, record in zip(numbers, folders, records, strict=True):
        if record is None:
            continue  # removed since it was listed
        if why := stranger(record, number, run):
            fix = f"move {folder.url} out of the dataset; spile verify {root.url} tells the rest"
            raise Damaged(f"{folder.url} does not belong to the dataset", found=why, fix=fix)
        streams.append(Stream(folder, record, find_additions(folder, record, found[number])))
    # Streams that say nothing of a split, as older versions wrote them, are read beside any; verify names them.
    told = [stream.record for stream in streams if stream.record.identity.streams is not None]
    for problem in mixed_splits(root.url, told):
        raise Damaged(problem.where, found=problem.text, fix="move the streams of one split to a dataset of their own")
    return streams


def read_ledgers(streams: Iterable[Stream]) -> None:
    """Read the ledgers of these streams that were not read yet, many at a time."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ledgers") as pool:
        for _ in pool.map(lambda stream: stream.commits, streams):
            pass
