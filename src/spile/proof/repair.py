"""Remove what no commit names, and replace stale commits: ``spile verify --gc`` and ``--repair``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spile.objects.folder import Folder, Unfinished, remove_by_name
from spile.proof.report import Garbage
from spile.store.cleanup import empty_commit, fence, is_alive
from spile.store.layout import (
    FileKind,
    commit_key,
    commit_number,
    is_data_file,
    list_stream_files,
    parse_key,
    stale_commit_key,
    stream_number,
)
from spile.store.ledger import Commit

HOUR = 3600.0


def find_garbage(root: Folder, named: dict[str, set[str]], *, now: float, older_than: float = HOUR) -> list[Garbage]:
    """Return the files and unfinished uploads that no commit names, if their names have the form of a worker's names.

    ``named`` maps the folder of each readable ledger to its committed shards. Other folders are not searched.
    """
    numbers = {folder: stream_number(folder.partition("/")[0]) or 0 for folder in named}
    found = [
        Garbage("shard", numbers[file.ledger], info.key, info.size, now - info.updated, info.key)
        for info in list_stream_files(root)
        if (file := parse_key(info.key)) is not None and file.kind is FileKind.DATA and not info.linked
        if file.ledger in named and file.name not in named[file.ledger]
    ]
    found += [
        Garbage("upload", numbers[file.ledger], left.key, left.size, now - left.started, left.handle)
        for left in root.unfinished("")
        if (file := parse_key(left.key)) is not None and file.ledger in named
    ]
    alive = {folder: is_alive(root.child(folder), now) for folder in {_ledger_of(item) for item in found}}
    return [replace(item, state=_state(item, alive, older_than)) for item in found]


def _ledger_of(item: Garbage) -> str:
    file = parse_key(item.key)
    return "" if file is None else file.ledger


def _state(item: Garbage, alive: dict[str, bool], older_than: float) -> str:
    if alive[_ledger_of(item)]:
        return "a worker is alive"
    return "too young" if item.age < older_than else "found"


def remove_garbage(root: Folder, garbage: Sequence[Garbage], fences: Mapping[str, Callable[[], bool]]) -> list[Garbage]:
    """Remove the items in the state ``found`` and return all items with their new states.

    ``fences`` has, for the folder of each ledger, a function that creates the fence under the number that was free
    before the search.
    """
    fenced: dict[str, bool] = {}

    def removed(item: Garbage) -> bool:
        folder = _ledger_of(item)
        if folder not in fenced:
            fenced[folder] = fences[folder]()
        if not fenced[folder]:
            return False
        if item.kind == "shard":
            name = item.key.removeprefix(f"{folder}/")
            remove_by_name(f"{root.url}/{folder}", [name], ours=is_data_file, remove=root.child(folder).delete)
        else:
            root.discard(Unfinished(item.key, item.handle, started=0.0))
        return True

    return [
        replace(item, state="removed" if removed(item) else "a worker is alive") if item.state == "found" else item
        for item in garbage
    ]


_MAX_GAP = 1000
"""The widest gap of numbers that is filled with empty commits. A stale commit after a wider gap is removed."""


def free_number(commits: Sequence[Commit], stale: Sequence[Commit]) -> int:
    """Return the number of the next commit of a stream with these commits and stale ones."""
    taken = {commit.number for commit in stale}
    number = commits[-1].number + 1 if commits else 1
    while number in taken:
        number += 1
    return number


def repair_ledger(
    folder: Folder, stream: str, commits: Sequence[Commit], stale: Sequence[Commit]
) -> tuple[str, ...] | None:
    """Replace stale commits by empty ones and keep copies of them.

    Returns:
        The locations of the copies, or None if a worker is active and nothing was changed.

    """
    free = free_number(commits, stale)
    if not fence(folder, stream, free, "the ledger was repaired"):
        return None
    kept: list[str] = []
    filled = max([free, *(commit.number for commit in commits)])
    for commit in stale:
        key, copy = commit_key(commit.number), stale_commit_key(commit.number, commit.stream)
        folder.create(copy, folder.get(key))
        kept.append(f"{folder.url}/{copy}")
        if commit.number - filled > _MAX_GAP:
            remove_by_name(folder.url, [key], ours=lambda name: commit_number(name) is not None, remove=folder.delete)
            continue
        for number in range(filled + 1, commit.number):
            fence(folder, stream, number, "the ledger was repaired")
        folder.put(key, empty_commit(commit.number, stream, "in place of a stale commit").to_bytes())
        filled = max(filled, commit.number)
    return tuple(kept)
