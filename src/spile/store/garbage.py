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
from spile.store.layout import PROGRESS, is_data, stream_folder, stream_number
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


def find_garbage(root: Folder, named: dict[int, set[str]], *, now: float, older_than: float = HOUR) -> list[Garbage]:
    """What no commit names, of exactly our names. ``named``: the committed shards of each stream whose ledger could be
    read; nothing outside those streams' folders is ever looked at.
    """
    found = [
        Garbage("shard", number, info.key, info.size, now - info.updated, info.key)
        for info in root.list("tpu_")
        for number, name in [_split(info.key)]
        if number in named and is_data(name) and name not in named[number]
    ]
    found += [
        Garbage("upload", number, left.key, left.size, now - left.started, left.handle)
        for left in root.unfinished("tpu_")
        for number, name in [_split(left.key)]
        if number in named and is_ours(name)
    ]
    alive = {number: is_alive(root.child(stream_folder(number)), now) for number in {item.stream for item in found}}
    return [replace(item, state=_state(item, alive, older_than)) for item in found]


def _split(key: str) -> tuple[int, str]:
    """The stream and the name in its folder; (-1, …) for what is in none."""
    folder, _, name = key.partition("/")
    number = stream_number(folder)
    return -1 if number is None else number, name


def _state(item: Garbage, alive: dict[int, bool], older_than: float) -> str:
    if alive[item.stream]:
        return "a worker is alive"
    return "too young" if item.age < older_than else "found"


def remove_garbage(root: Folder, garbage: Iterable[Garbage], ids: dict[int, tuple[str, int]]) -> list[Garbage]:
    """Remove what is in the state ``found``. ``ids``: each stream's id and next number, as read before the search."""
    items = list(garbage)
    left = {item.handle: item for item in root.unfinished("tpu_")}
    removals = {number: _removal(root, number, *of) for number, of in ids.items()}

    def removed(item: Garbage) -> bool:
        removal = removals[item.stream]
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


def _removal(root: Folder, number: int, stream: str, free: int) -> Removal:
    folder = root.child(stream_folder(number))
    return Removal(
        root.url,
        ours=lambda key: _split(key)[0] == number and is_data(_split(key)[1]),
        remove=root.delete,
        fence=lambda: fence(folder, stream, free, "garbage was removed"),
    )
