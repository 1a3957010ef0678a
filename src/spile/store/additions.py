"""Taps that were added to a finished stream: a ledger of their own beside the stream's, shard for shard.

A shard of an addition holds the rows of exactly one shard of the stream, sample for sample and row for row. Both
commits have the checksums of offsets, samples, tokens and roles: where those are equal the rows are aligned, and no row
has to be read to know it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from spile.errors import Damaged
from spile.objects.folder import Folder
from spile.objects.mirror import home_of
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.store.clearing import clear_folder
from spile.store.codec import CONTEXT, CONTEXT_OFFSETS, POSITIONS
from spile.store.layout import STREAM, addition_folder, is_addition, new_attempt
from spile.store.ledger import read_commits, read_ledger
from spile.store.record import Commit, ShardRecord
from spile.store.stream import StreamRecord, StreamStore, read_stream, stream_bytes

__all__ = ["Addition", "Alignment", "alignment", "find_additions", "join_addition"]

_ALIGNED = ("offsets", "sample_index", "tokens", "roles", POSITIONS, CONTEXT, CONTEXT_OFFSETS)
Alignment = tuple[int | None, ...]


def alignment(shard: ShardRecord) -> Alignment:
    """What two shards have in common whose rows are of the same tokens in the same order."""
    return tuple(shard.tensors.get(name) for name in _ALIGNED)


class Addition:
    """Some taps added to one stream, as far as its ledger goes."""

    def __init__(self, folder: Folder, record: StreamRecord) -> None:
        self.folder, self.record = folder, record
        self.taps = tuple(str(tap) for tap in record.identity.taps)

    @cached_property
    def commits(self) -> tuple[Commit, ...]:
        """Its ledger, read once."""
        return tuple(read_commits(self.folder, self.record.id))

    @cached_property
    def shards(self) -> tuple[ShardRecord, ...]:
        """In the order they were committed."""
        return tuple(shard for commit in self.commits for shard in commit.shards)

    def beside(self, shards: Iterable[ShardRecord]) -> dict[str, ShardRecord]:
        """By the names of a stream's shards, the one that holds the same rows; those without one are absent."""
        known = {alignment(shard): shard for shard in self.shards}
        return {shard.name: known[alignment(shard)] for shard in shards if alignment(shard) in known}

    def left(self, shards: Iterable[ShardRecord]) -> list[ShardRecord]:
        """Of a stream's shards, those to which nothing was added yet."""
        every = list(shards)
        done = self.beside(every)
        return [shard for shard in every if shard.name not in done]


def find_additions(stream: Folder, record: StreamRecord, names: Iterable[str]) -> list[Addition]:
    """What was added to this life of a stream, finished or not. ``names`` are the folders in the stream's own."""
    found = []
    for name in sorted(filter(is_addition, names)):
        folder = stream.child(name)
        added = read_stream(folder)
        if added is None or added.base != record.id:
            continue  # being removed, or of a life of the stream that was overwritten
        if (added.fingerprint, added.worker_id) != (record.fingerprint, record.worker_id):
            raise Damaged(
                f"{folder.url}/{STREAM} belongs to another run or stream",
                expected=f"fingerprint {record.fingerprint}, stream {record.worker_id}",
                found=f"fingerprint {added.fingerprint}, stream {added.worker_id}",
            )
        found.append(Addition(folder, added))
    return found


def join_addition(stream: Folder, base: StreamRecord, identity: StreamIdentity, run: RunIdentity) -> StreamStore:
    """Begin to add taps to a stream, or go on with it: what a worker writes them through."""
    folder = stream.child(addition_folder(str(tap) for tap in identity.taps))
    stored = read_stream(folder)
    if stored is not None and stored.base != base.id:
        clear_folder(home_of(folder))  # added to what was there before the stream was begun again
        stored = None
    if stored is None:
        whole = replace(base.identity, taps=identity.taps, shapes=identity.shapes)
        fresh = StreamRecord(secrets.token_hex(8), base.worker_id, base.fingerprint, whole, base.id)
        stored = fresh if folder.create(STREAM, stream_bytes(fresh)) else read_stream(folder)
    if stored is None or stored.base != base.id:
        raise Damaged(f"{folder.url}/{STREAM} changed while it was being read", fix="run the same command again")
    return StreamStore(folder, stored, run, new_attempt(), read_ledger(folder, stored.id))
