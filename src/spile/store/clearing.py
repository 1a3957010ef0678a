"""Taking away what a stream holds: beginning it again, and the fence that comes before anything is removed.

The fence is an empty commit under the next free number. Every worker that joined before loses its next commit to it,
however long it sleeps, and stops. Where it cannot be created somebody else has just committed: the stream is alive.
"""

from __future__ import annotations

from spile.errors import Damaged, StoreError
from spile.objects.disk import is_abandoned
from spile.objects.folder import Folder
from spile.objects.mirror import home_of
from spile.objects.removal import Removal
from spile.store.layout import (
    METADATA,
    PREDICTIONS,
    PROGRESS,
    STREAM,
    SUBMISSION,
    commit_key,
    commit_number,
    is_addition,
    is_data,
    new_attempt,
    stream_folder,
)
from spile.store.ledger import commit_numbers, has_commits
from spile.store.record import Commit
from spile.store.run import now_iso
from spile.store.stream import read_stream
from spile.version import __version__

__all__ = [
    "clear_folder",
    "clear_stream",
    "empty_commit",
    "fence",
    "is_ours",
    "remove_remains",
    "stream_has_commits",
    "stream_is_begun",
]

_RECORDS = (METADATA, PREDICTIONS, SUBMISSION, PROGRESS, STREAM)


def is_ours(name: str) -> bool:
    """Whether a name in a stream's folder is exactly one that a worker gives."""
    return name in _RECORDS or commit_number(name) is not None or is_data(name)


def remove_remains(folder: Folder) -> tuple[int, int]:
    """Remove the unfinished shards that killed workers left in a stream's folder on a disk: how many, and their bytes.

    A live writer holds its file locked. What is left of uploads to a bucket is garbage collection's, which waits an
    hour: nobody can tell whether their writer lives.
    """
    home = home_of(folder)
    if home.local_path is None:
        return 0, 0
    left = [item for item in home.unfinished() if is_data(item.key) and is_abandoned(home.local_path / item.handle)]
    for item in left:
        home.discard(item)
    return len(left), sum(item.size or 0 for item in left)


def empty_commit(number: int, stream: str, purpose: str) -> Commit:
    """An entry of the ledger that stands for nothing but its number."""
    return Commit(
        number=number,
        attempt=new_attempt(),
        stream=stream,
        shards=(),
        skipped=(),
        end=None,
        statistics={"purpose": purpose},
        created=now_iso(),
        version=__version__,
    )


def fence(folder: Folder, stream: str, number: int, before: str) -> bool:
    """Keep every worker that joined before from committing; False: one has just committed."""
    commit = empty_commit(number, stream, f"fences workers that joined before {before}")
    return folder.create(commit_key(number), commit.to_bytes())


def stream_has_commits(root: Folder, worker_id: int) -> bool:
    """Whether anything of this stream is done: where ``--no-checkpointing`` alone is refused."""
    return has_commits(root.child(stream_folder(worker_id)))


def stream_is_begun(root: Folder, worker_id: int) -> bool:
    """Whether a worker has ever joined it, whatever is left of its records."""
    return any(is_ours(info.key) for info in root.child(stream_folder(worker_id)).list())


def clear_stream(root: Folder, worker_id: int) -> None:
    """Remove a stream, so that it can be begun again. Killed at any moment, it leaves a shorter ledger, never a mix.

    First the claim that it is finished; then the commits, newest first, so that what is left is always 1 to n; then
    the shards, which no commit names any more; ``stream.json`` last. A worker that still writes to the old life cannot
    mix into the next: its commits carry the old id. Taps that were added to it go first.
    """
    folder = root.child(stream_folder(worker_id))
    for name in sorted({info.key.partition("/")[0] for info in folder.list("added_")}):
        if is_addition(name):
            clear_folder(folder.child(name))
    clear_folder(folder)


def clear_folder(folder: Folder) -> None:
    """One ledger with its shards, as :func:`clear_stream` does it."""
    removal = Removal(folder.url, ours=is_ours, remove=folder.delete, fence=lambda: _fence(folder))
    merged = [info.key for info in folder.list() if info.key in (PREDICTIONS, SUBMISSION)]
    if not removal.in_order([METADATA, *merged]):
        raise StoreError(
            f"{folder.url} is not begun again",
            expected="a stream that nobody is working on",
            found="a worker that has just committed",
            fix="stop it, then run the same command again",
        )
    removal.in_order(commit_key(number) for number in reversed(commit_numbers(folder)))
    removal.in_parallel(info.key for info in folder.list() if is_data(info.key))
    removal.in_order([PROGRESS, STREAM])


def _fence(folder: Folder) -> bool:
    """Where no record tells the stream's id, no worker of it can commit either: each looks there first."""
    try:
        record = read_stream(home_of(folder))
    except Damaged:
        record = None
    last = max(commit_numbers(folder), default=0)
    return record is None or fence(folder, record.id, last + 1, "the stream was begun again")
