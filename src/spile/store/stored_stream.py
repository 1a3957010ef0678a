"""The streams of a dataset: their committed shards, added taps and local copies."""

from __future__ import annotations

import json
import secrets
import shlex
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from spile.errors import Damaged, StoreError, untrusted
from spile.objects.folder import Folder
from spile.objects.mirror import without_copy
from spile.spec.amounts import size
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.taps import TapRows
from spile.store.cleanup import clear_folder
from spile.store.index import IndexEntry, read_index
from spile.store.layout import (
    METADATA,
    STREAM,
    addition_folder,
    existing_folder,
    find_streams,
    new_attempt,
    scan_streams,
)
from spile.store.ledger import Commit, ShardRecord, read_commits, read_ledger
from spile.store.shard import CONTEXT, CONTEXT_OFFSETS, POSITIONS
from spile.store.shard_reader import ShardReader
from spile.store.writer import StreamRecord, StreamWriter, parse_stream, read_or_create, read_stream


def expected_streams(records: Sequence[StreamRecord]) -> int | None:
    """Return the number of streams of the split according to the streams' records, or None if no record states it."""
    return max((r.identity.streams for r in records if r.identity.streams is not None), default=None)


def mixed_splits(records: Sequence[StreamRecord]) -> str:
    """Return how streams of different splits were mixed, which duplicates or loses samples; empty if they were not."""
    groups: dict[str, list[int]] = {}
    for record in records:
        streams, split = record.identity.streams, record.identity.split
        name = "no split" if streams is None else f"{streams} streams (split {split or 'unknown'})"
        groups.setdefault(name, []).append(record.worker_id)
    if len(groups) < 2:
        return ""
    more = {name: f" and {len(numbers) - 1} more" if len(numbers) > 1 else "" for name, numbers in groups.items()}
    found = "; ".join(f"stream {numbers[0]}{more[name]} of {name}" for name, numbers in groups.items())
    return f"its streams are of different splits of the data: {found}"


_ALIGNED = ("offsets", "sample_index", "tokens", "roles", POSITIONS, CONTEXT, CONTEXT_OFFSETS)
Alignment = tuple[int | None, ...]


def alignment(shard: ShardRecord) -> Alignment:
    """Return a key that is equal for two shards if their rows belong to the same tokens in the same order."""
    return tuple(shard.tensors.get(name) for name in _ALIGNED)


def join_addition(stream: Folder, base: StreamRecord, identity: StreamIdentity, run: RunIdentity) -> StreamWriter:
    """Start or continue adding taps to a stream; return the store through which a worker writes them."""
    folder = stream.child(addition_folder(str(tap) for tap in identity.taps))
    stored = read_stream(folder)
    if stored is not None and stored.base != base.id:
        clear_folder(without_copy(folder))  # The taps were added before the stream was started again.
    added = replace(base.identity, taps=identity.taps, shapes=identity.shapes)
    fresh = StreamRecord(secrets.token_hex(8), base.worker_id, base.fingerprint, added, base.id)
    stored = read_or_create(folder, fresh)
    if stored.base != base.id:
        raise Damaged(f"{folder.url}/{STREAM} changed while it was being read", fix="run the same command again")
    return StreamWriter(folder, stored, run, new_attempt(), read_ledger(folder, stored.id))


_COPY = {"gs": "gcloud storage rsync --recursive", "s3": "aws s3 sync", "az": "azcopy sync"}


def copy_command(source: str, target: str) -> str:
    """Return the shell command that copies a folder from or to a bucket."""
    schemes = (place.partition("://")[0] for place in (source, target) if "://" in place)
    program = _COPY.get(next(schemes, ""), "cp -rn")
    places = (place.replace("az://", "https://ACCOUNT.blob.core.windows.net/") for place in (source, target))
    return f"{program} {shlex.join(places)}"


def missing_from_copy(copy: Folder, home: str, worker_id: int) -> str | None:
    """Return which committed shards of the stream's folder at ``home`` are missing from a local copy, as a message."""
    folder = copy.child(existing_folder(copy, worker_id))
    record = read_stream(folder)
    if record is None:
        return None
    files, there = read_ledger(folder, record.id).files, {info.key: info.size for info in folder.list("shard_")}
    absent = [file for file in files if there.get(file.name) != file.size]
    if not absent:
        return None
    return (
        f"the local copy {folder.url} has {len(files) - len(absent)} of {len(files)} shards: {len(absent)} "
        f"({size(sum(file.size for file in absent))}) were stored before it was there, or by other machines; "
        f"{copy_command(home, folder.url)} brings them"
    )


CONCURRENT_REQUESTS = 32
"""The number of concurrent requests for streams or shards: a bucket answers each after tens of milliseconds."""


class Stream:
    """One stream of a dataset, or taps that were added to it: its identity and its committed shards.

    Args:
        folder: The folder of the stream, or of the added taps.
        record: Its ``stream.json``.
        additions: All additions of taps, including unfinished ones.
        entry: Its entry in the index, if there is one.

    """

    def __init__(
        self, folder: Folder, record: StreamRecord, additions: Sequence[Stream] = (), entry: IndexEntry | None = None
    ) -> None:
        self.folder, self.record, self._entry = folder, record, entry
        self._commits: tuple[Commit, ...] | None = None
        self.number = record.worker_id
        self.all_additions = tuple(additions)

    @cached_property
    def additions(self) -> tuple[Stream, ...]:
        """The finished additions, which have every row. Readers use only these."""
        return tuple(added for added in self.all_additions if not added.remaining(self._own_shards))

    def added_shards(self, shards: Iterable[ShardRecord]) -> dict[str, ShardRecord]:
        """Map names of shards to the shards of these added taps for the same rows; those without one are left out."""
        known = {alignment(shard): shard for shard in self._own_shards}
        return {shard.name: known[alignment(shard)] for shard in shards if alignment(shard) in known}

    def remaining(self, shards: Sequence[ShardRecord]) -> list[ShardRecord]:
        """Return those of a stream's shards that do not have these added taps yet."""
        done = self.added_shards(shards)
        return [shard for shard in shards if shard.name not in done]

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """The stream's own taps, then the added ones."""
        own = (str(tap) for tap in self.record.identity.taps)
        return (*own, *(tap for added in self.additions for tap in added.taps))

    def kinds(self, run: RunIdentity) -> tuple[TapRows, ...]:
        """Return the shape and dtype of each tap's stored rows, in the order of the taps."""
        records = [self.record, *(added.record for added in self.additions)]
        return tuple(row for record in records for row in record.identity.rows(run))

    @property
    def input_turns(self) -> tuple[int, int] | None:
        """The number of streams that have the rows of one input in turn, and the samples of a row; None if alone."""
        identity = self.record.identity
        return None if identity.turn is None or identity.streams is None else (identity.streams, identity.turn)

    def place(self, index: Any) -> Any:
        """Return the number in the input of a sample, or the numbers of several; see :class:`StreamIdentity`."""
        return self.record.identity.place(self.number, index)

    def key(self, index: int) -> tuple[int, int]:
        """Return a key of a sample that does not depend on the number of streams that share its input."""
        return 0 if self.record.identity.turn is not None else self.number, int(self.place(index))

    @property
    def commits(self) -> tuple[Commit, ...]:
        # A cached_property of Python 3.11 has one lock for all objects, so streams would be read one after another.
        if self._commits is None:
            copies = None if self._entry is None else self._entry.commits
            if copies is None:
                found = read_commits(self.folder, self.record.id)
            else:
                every = (Commit.from_bytes(text.encode(), self.folder.url) for text in copies)
                found = (commit for commit in every if commit.stream == self.record.id)
            self._commits, self._entry = tuple(found), None
        return self._commits

    @property
    def _own_shards(self) -> tuple[ShardRecord, ...]:
        return tuple(shard for commit in self.commits for shard in commit.shards)

    @cached_property
    def _added_by_shard(self) -> tuple[dict[str, ShardRecord], ...]:
        """For each addition: its shards by the names of the stream's own shards."""
        return tuple(added.added_shards(self._own_shards) for added in self.additions)

    @cached_property
    def shards(self) -> tuple[ShardRecord, ...]:
        """The shards in the order of their commits, with the statistics of added taps."""
        return tuple(self._with_added(shard) for shard in self._own_shards)

    @property
    def files(self) -> tuple[ShardRecord, ...]:
        """All files that readers use: the stream's own shards and those of added taps."""
        return (*self._own_shards, *(shard for added in self.additions for shard in added.shards))

    def _with_added(self, shard: ShardRecord) -> ShardRecord:
        known = dict(shard.statistics)
        for added in self._added_by_shard:
            known |= added[shard.name].statistics
        return replace(shard, statistics=known)

    def open(self, shard: ShardRecord) -> ShardReader:
        """Open a shard together with its added taps. The header must name this stream."""
        added: dict[str, ShardReader] = {}
        for each, shards in zip(self.additions, self._added_by_shard, strict=True):
            reader = ShardReader(each.folder, shards[shard.name], each.record.header_fields())
            added |= dict.fromkeys(each.taps, reader)
        return ShardReader(self.folder, shard, self.record.header_fields(), added)

    @cached_property
    def _ranges(self) -> list[tuple[int, int, int]]:
        """Sorted (first, last + 1, shard) of every range of samples, for bisection."""
        return sorted((a, b, place) for place, shard in enumerate(self.shards) for a, b in shard.samples.pairs())

    def shard_with(self, index: int) -> ShardRecord | None:
        """Return the shard that contains a sample, or None."""
        place = bisect_right(self._ranges, index, key=itemgetter(0)) - 1
        if place < 0 or index >= self._ranges[place][1]:
            return None
        return self.shards[self._ranges[place][2]]

    @property
    def samples(self) -> int:
        """The number of stored samples."""
        return sum(shard.count for shard in self.shards)

    @property
    def tokens(self) -> int:
        """The number of rows at each tap."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def skipped(self) -> Ranges:
        """The samples that were skipped and have no rows."""
        return Ranges.of(skip.index for commit in self.commits for skip in commit.skipped)

    def __repr__(self) -> str:
        return f"Stream({self.number}, {len(self.shards)} shards, {self.samples} samples)"


def finished_quarantines(root: Folder) -> list[str]:
    """Return the quarantined samples of finished streams, from their ``metadata.json``; no ledger is read."""

    def read(folder: str) -> list[str]:
        with suppress(StoreError), untrusted(StoreError, "the file is for people; a ledger has the truth"):
            return [str(sample) for sample in json.loads(root.get(f"{folder}/{METADATA}")).get("quarantined", [])]
        return []

    with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="metadata") as pool:
        return [sample for found in pool.map(read, find_streams(root).values()) for sample in found]


def ownership_problem(record: StreamRecord, number: int, run: RunIdentity) -> str | None:
    """Return why a ``stream.json`` does not belong to folder ``number`` of this run, or None if it does."""
    if record.fingerprint != run.fingerprint():
        return f"{STREAM} belongs to another run: expected fingerprint {run.fingerprint()}, found {record.fingerprint}"
    if record.worker_id != number:
        return f"{STREAM} belongs to another stream: expected stream {number}, found stream {record.worker_id}"
    return None


def open_streams(root: Folder, run: RunIdentity) -> list[Stream]:
    """Open every stream of the dataset.

    Raises:
        Damaged: If a stream belongs to another run, another folder or another split of the data.

    """
    found = {number: files for number, files in scan_streams(root).items() if files.started}
    entries = read_index(root, found)

    def checked(stream: Stream, number: int) -> Stream:
        if why := ownership_problem(stream.record, number, run):
            url = stream.folder.url
            fix = f"move {url} out of the dataset, then look for other problems with: spile verify {root.url}"
            raise Damaged(f"{url} does not belong to the dataset", found=why, fix=fix)
        return stream

    def read(number: int) -> Stream | None:
        folder, entry = root.child(found[number].folder), entries.get(number)
        where = f"{folder.url}/{STREAM}"
        record = read_stream(folder) if entry is None else parse_stream(entry.stream.encode(), where)
        if record is None:
            return None  # The stream was removed after it was listed.
        folders = [folder.child(name) for name in sorted(found[number].added)]
        # An addition without a record is being removed; one with another base belongs to a stream that was cleared.
        additions = [
            checked(Stream(each, added), number)
            for each in folders
            if (added := read_stream(each)) is not None and added.base == record.id
        ]
        return checked(Stream(folder, record, additions, entry), number)

    with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="streams") as pool:
        streams = [stream for stream in pool.map(read, found) if stream is not None]
    # A stream whose data is not listed in streams.json states no split. It is accepted here; spile verify reports it.
    with_split = [stream.record for stream in streams if stream.record.identity.streams is not None]
    if mixed := mixed_splits(with_split):
        raise Damaged(root.url, found=mixed, fix="move the streams of one split to a dataset of their own")
    return streams


def read_ledgers(streams: Iterable[Stream]) -> None:
    """Read the ledgers of these streams concurrently, unless they were read before."""
    with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="ledgers") as pool:
        for _ in pool.map(lambda stream: stream.commits, streams):
            pass
