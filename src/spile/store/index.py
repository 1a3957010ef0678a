"""The index of a dataset in a bucket: copies of finished ledgers, many to an object, so that readers open it quickly.

The index is derived data. An entry is used only if a listing of the bucket shows exactly the objects, in the same
versions, from which it was copied; otherwise the ledger itself is read. Verification never uses it.

``index/0003.json.z`` has the entries of streams 384 to 511. A worker adds the entry of its stream when it has finished
the stream. Two workers that write at the same time may undo one another, so each looks afterwards and tries again.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from spile.errors import Damaged, SpileError, StoreError, untrusted
from spile.objects.folder import Folder, read_ahead
from spile.objects.mirror import without_copy
from spile.store.layout import (
    COMMITS,
    STREAM,
    ListedStream,
    commit_key,
    commit_number,
    existing_folder,
    index_key,
    scan_streams,
)

_GROUP = 128
"""The number of streams whose entries are in one object."""
_MIN_STREAMS = 48
"""The ledgers of fewer streams are read as fast as the index."""
_MAX_LEDGER = 64 << 10
"""Bytes of the commits of a stream. The entry of a stream with larger ledgers has its record only."""
_MAX_GROUP = _GROUP * (_MAX_LEDGER + (16 << 10))
_ATTEMPTS = 6
_PAUSE = 2.0
"""Seconds between two attempts, at most."""
_READERS = 32


@dataclass(frozen=True)
class IndexEntry:
    """The copies of one stream's ``stream.json`` and commits."""

    digest: str
    stream: str
    commits: tuple[str, ...] | None
    """None if they are too large."""


def read_index(root: Folder, found: Mapping[int, ListedStream]) -> dict[int, IndexEntry]:
    """Return the entries that agree with a listing. Objects that cannot be read count as absent."""
    if root.local_path is not None or len(found) < _MIN_STREAMS:
        return {}
    keys = sorted({group_key(number) for number in found})
    entries: dict[int, IndexEntry] = {}
    for group in read_ahead((partial(_read_group, root, key) for key in keys), _READERS):
        entries |= {n: entry for n, entry in group.items() if n in found and found[n].digest == entry.digest}
    return entries


def write_entry(root: Folder, number: int) -> None:
    """Add a stream to the index of a dataset in a bucket. Failures are ignored: readers then use the ledger."""
    if root.local_path is None:
        with suppress(SpileError):
            _write_entry(without_copy(root), number)


def _write_entry(root: Folder, number: int) -> None:
    """Replace the object with one that has the entry, and again if another worker undid it at the same time."""
    entry, key = copy_ledger(root, number), group_key(number)
    for attempt in range(_ATTEMPTS):
        group = _read_group(root, key)
        if group.get(number) == entry:
            return
        if attempt:
            time.sleep(random.uniform(0, _PAUSE))
        root.put(key, pack_group({**group, number: entry}))


def copy_ledger(root: Folder, number: int) -> IndexEntry:
    """Return the entry of a stream."""
    folder = existing_folder(root, number)
    infos = [info for info in root.list(f"{folder}/") if not info.key.startswith(f"{folder}/shard_")]
    files = scan_streams(root, infos)[number]
    numbers = [each for info in infos if (each := commit_number(info.key.removeprefix(f"{folder}/"))) is not None]
    size = sum(info.size for info in infos if info.key.startswith(f"{folder}/{COMMITS}"))
    keys = [f"{folder}/{commit_key(each)}" for each in sorted(numbers)]
    commits = tuple(data.decode() for data in root.get_many(keys)) if size <= _MAX_LEDGER else None
    return IndexEntry(files.digest, root.get(f"{folder}/{STREAM}").decode(), commits)


def group_key(number: int) -> str:
    """Return the key of the object that has the entry of a stream."""
    return index_key(number // _GROUP)


def pack_group(group: Mapping[int, IndexEntry]) -> bytes:
    """Return the content of an object of the index, from entries by stream."""
    fields = {str(number): [entry.digest, entry.stream, entry.commits] for number, entry in group.items()}
    return zlib.compress(json.dumps(fields).encode(), 1)


def read_group(root: Folder, key: str) -> dict[int, IndexEntry]:
    """Return the entries of an object of the index, by stream; raise :class:`Damaged` if any of it is malformed."""
    data = root.get(key)
    with untrusted(Damaged, "the object of the index is malformed"):
        fields = json.loads(zlib.decompressobj().decompress(data, _MAX_GROUP))
        return {
            int(number): IndexEntry(str(digest), str(stream), None if texts is None else tuple(map(str, texts)))
            for number, (digest, stream, texts) in fields.items()
        }


def _read_group(root: Folder, key: str) -> dict[int, IndexEntry]:
    """Return the entries of an object of the index; none if it is absent or malformed."""
    with suppress(StoreError, Damaged):
        return read_group(root, key)
    return {}
