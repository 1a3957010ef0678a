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
from spile.objects.removal import Removal
from spile.spec.phase import Phase
from spile.store.clearing import fence, is_ours
from spile.store.layout import PROGRESS, is_addition, is_data, stream_number
from spile.store.report import Garbage
from spile.store.run import parse_iso

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
    except Exception:  # noqa: BLE001 - what cannot be read holds back
        return True


def find_garbage(root: Folder, named: dict[str, set[str]], *, now: float, older_than: float = HOUR) -> list[Garbage]:
    """What no commit names, of exactly our names. ``named``: by folder, the committed shards of each stream, and of
    taps added to one, whose ledger could be read; nothing outside those folders is ever looked at.
    """
    found = [
        Garbage("shard", _number(folder), info.key, info.size, now - info.updated, info.key)
        for info in root.list("tpu_")
        for folder, name in [_split(info.key)]
        if folder in named and is_data(name) and name not in named[folder]
    ]
    found += [
        Garbage("upload", _number(folder), left.key, left.size, now - left.started, left.handle)
        for left in root.unfinished("tpu_")
        for folder, name in [_split(left.key)]
        if folder in named and is_ours(name)
    ]
    alive = {folder: is_alive(root.child(folder), now) for folder in {_split(item.key)[0] for item in found}}
    return [replace(item, state=_state(item, alive, older_than)) for item in found]


def _split(key: str) -> tuple[str, str]:
    """The folder of a stream, or of taps added to it, and the name in it."""
    stream, _, rest = key.partition("/")
    added, _, name = rest.partition("/")
    return (f"{stream}/{added}", name) if is_addition(added) else (stream, rest)


def _number(folder: str) -> int:
    number = stream_number(folder.partition("/")[0])
    return -1 if number is None else number


def _state(item: Garbage, alive: dict[str, bool], older_than: float) -> str:
    if alive[_split(item.key)[0]]:
        return "a worker is alive"
    return "too young" if item.age < older_than else "found"


def remove_garbage(root: Folder, garbage: Iterable[Garbage], ids: dict[str, tuple[str, int]]) -> list[Garbage]:
    """Remove what is in the state ``found``. ``ids``: by folder, each id and next number, as read before the search."""
    items = list(garbage)
    left = {item.handle: item for item in root.unfinished("tpu_")}
    removals = {folder: _removal(root, folder, *of) for folder, of in ids.items()}

    def removed(item: Garbage) -> bool:
        removal = removals[_split(item.key)[0]]
        if item.kind == "shard":
            return removal.in_order([item.key])
        if not removal.fenced():
            return False
        if item.handle in left:
            root.discard(left[item.handle])
        return True

    for place, item in enumerate(items):
        if item.state == "found":
            items[place] = replace(item, state="removed" if removed(item) else "a worker is alive")
    return items


def _removal(root: Folder, folder: str, stream: str, free: int) -> Removal:
    return Removal(
        root.url,
        ours=lambda key: _split(key)[0] == folder and is_data(_split(key)[1]),
        remove=root.delete,
        fence=lambda: fence(root.child(folder), stream, free, "garbage was removed"),
    )
