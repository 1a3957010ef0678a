"""Garbage: shards that no commit names and uploads that never ended. Removed only when told to, and safely.

Before anything of a stream is removed an empty commit is created. It fences every worker that joined before: none of
them can commit a shard that we are about to remove, however long it slept. Where that commit cannot be created somebody
else has just committed, so the stream is alive and left alone. A worker that joins later writes under new names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from spile.objects.folder import Folder, NotFound
from spile.spec.phase import Phase
from spile.store.layout import PROGRESS, commit_key, is_shard, new_attempt, stream_folder, stream_number
from spile.store.record import Commit
from spile.store.report import Garbage
from spile.store.run import now_iso, parse_iso
from spile.version import __version__

__all__ = ["HOUR", "find_garbage", "is_alive", "remove_garbage"]

HOUR = 3600.0
_SILENCE = 600.0
"""Seconds without a heartbeat after which a worker is not counted as alive; one comes every 30."""


def is_alive(folder: Folder, now: float) -> bool:
    """Whether a worker's heartbeat is recent. Only ever used to hold back, never to go ahead."""
    try:
        beat = json.loads(folder.get(PROGRESS))
        return bool(not Phase.read(beat["phase"]).ended and now - parse_iso(beat["updated"]) < _SILENCE)
    except NotFound:
        return False
    except (ValueError, KeyError, TypeError):
        return True


def find_garbage(root: Folder, named: dict[int, set[str]], *, now: float, older_than: float = HOUR) -> list[Garbage]:
    """What no commit names. ``named`` holds, for each stream whose ledger could be read, its committed shards."""
    found = [
        Garbage("shard", number, info.key, info.size, now - info.updated, info.key)
        for info in root.list("tpu_")
        for number, name in [_split(info.key)]
        if number in named and is_shard(name) and name not in named[number]
    ]
    found += [
        Garbage("upload", _split(left.key)[0], left.key, left.size, now - left.started, left.handle)
        for left in root.unfinished()
    ]
    alive = {
        number: is_alive(root.child(stream_folder(number)), now)
        for number in {item.stream for item in found if item.stream is not None}
    }
    return [replace(item, state=_state(item, alive, named, older_than)) for item in found]


def _split(key: str) -> tuple[int | None, str]:
    folder, _, name = key.partition("/")
    return stream_number(folder), name


def _state(item: Garbage, alive: dict[int, bool], named: dict[int, set[str]], older_than: float) -> str:
    if item.stream is not None and alive[item.stream]:
        return "a worker is alive"
    if item.stream is not None and item.stream not in named:
        return "its ledger cannot be read"
    return "too young" if item.age < older_than else "found"


def remove_garbage(root: Folder, garbage: Iterable[Garbage], ids: dict[int, tuple[str, int]]) -> list[Garbage]:
    """Remove what is in the state ``found``. ``ids``: each stream's id and last commit, as read before the search."""
    items = list(garbage)
    fenced: dict[int | None, bool] = {None: True}
    left = {item.handle: item for item in root.unfinished()}
    for place, item in enumerate(items):
        if item.state != "found":
            continue
        if item.stream is not None and item.stream not in fenced:
            fenced[item.stream] = _fence(root.child(stream_folder(item.stream)), *ids[item.stream])
        if not fenced[item.stream]:
            items[place] = replace(item, state="a worker is alive")
            continue
        if item.kind == "shard":
            root.delete(item.key)
        elif item.handle in left:
            root.discard(left[item.handle])
        items[place] = replace(item, state="removed")
    return items


def _fence(folder: Folder, stream: str, last: int) -> bool:
    commit = Commit(
        number=last + 1,
        attempt=new_attempt(),
        stream=stream,
        shards=(),
        skipped=(),
        end=None,
        statistics={"purpose": "fences workers that joined before garbage was removed"},
        created=now_iso(),
        version=__version__,
    )
    return folder.create(commit_key(commit.number), commit.to_bytes())
