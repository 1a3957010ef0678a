"""Mending a ledger: commits of an earlier life are taken out, each with a copy kept beside it.

A worker that slept through ``--overwrite`` may leave commits among those of the new life. They count for nothing, and
nothing is lost by them; but a reader of an earlier version calls them damage. Their places are filled with empty
commits of this life, because a number that a worker may already have passed by must never be missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from spile.objects.folder import Folder
from spile.objects.removal import Removal
from spile.store.clearing import empty_commit, fence
from spile.store.layout import commit_key, commit_number, stray_key
from spile.store.record import Commit

__all__ = ["free_number", "repair_ledger"]

_MOST_FILLED = 1000
"""Absent numbers before a stranger's that are filled; beyond a wider gap no worker has come, and it is removed."""


def free_number(commits: Sequence[Commit], strangers: Sequence[Commit]) -> int:
    """The number that the next commit of this life takes."""
    taken = {commit.number for commit in strangers}
    number = commits[-1].number + 1 if commits else 1
    while number in taken:
        number += 1
    return number


def repair_ledger(
    folder: Folder, stream: str, commits: Sequence[Commit], strangers: Sequence[Commit]
) -> tuple[str, ...] | None:
    """Take the strangers' commits out of a ledger. Where their copies are; None: a worker is alive, nothing changed."""
    removal = Removal(
        folder.url,
        ours=lambda key: commit_number(key) in {commit.number for commit in strangers},
        remove=folder.delete,
        fence=lambda: fence(folder, stream, free_number(commits, strangers), "the ledger was mended"),
    )
    if not removal.fenced():
        return None
    kept: list[str] = []
    filled = max([free_number(commits, strangers), *(commit.number for commit in commits)])
    for commit in strangers:
        copy = stray_key(commit.number, commit.stream)
        folder.create(copy, folder.get(commit_key(commit.number)))
        kept.append(f"{folder.url}/{copy}")
        if commit.number - filled > _MOST_FILLED:
            removal.in_order([commit_key(commit.number)])
            continue
        for number in range(filled + 1, commit.number):
            fence(folder, stream, number, "the ledger was mended")
        folder.put(commit_key(commit.number), empty_commit(commit.number, stream, "in a stranger's place").to_bytes())
        filled = max(filled, commit.number)
    return tuple(kept)
