"""Remove data of a stream: all of it, garbage that no commit names, or stale commits.

A stream that is cleared and started again gets a new id. A commit of a worker that has not noticed this has the old id:
it is stale. Before anything is removed, an empty commit is created under the next free number (the fence). The next
commit of every worker that joined earlier then fails, and the worker stops. If the fence cannot be created, a worker
has just committed: the stream is in use, and nothing is removed. A worker that joins later writes under new names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial

from spile.errors import Damaged, SpecError, StoreError
from spile.objects.folder import Folder, Unwritable, get_if_present, remove_by_name
from spile.objects.local import is_abandoned
from spile.objects.mirror import without_copy
from spile.spec.amounts import counted
from spile.store.claims import remove_finished_marks
from spile.store.heartbeat import Liveness, read_beat
from spile.store.layout import (
    METADATA,
    PREDICTIONS,
    PROGRESS,
    STREAM,
    SUBMISSION,
    SUSPECTS,
    commit_key,
    existing_folder,
    is_data_file,
    ledger_file_kind,
    new_attempt,
    split_addition,
)
from spile.store.ledger import Commit, commit_numbers, iso_time
from spile.store.writer import read_stream
from spile.version import __version__

_PARALLEL_REMOVALS = 32


def is_worker_file(name: str) -> bool:
    """Return whether a name in a stream's folder has the form of a name that a worker creates."""
    return ledger_file_kind(name) is not None


def remove_unfinished(folder: Folder) -> tuple[int, int]:
    """Remove the unfinished shards that killed workers left in a stream's local folder; return their number and bytes.

    A live writer holds a lock on its file. Unfinished uploads to a bucket have no lock, so they are left to garbage
    collection, which removes only those that are older than an hour.
    """
    home = without_copy(folder)
    if home.local_path is None:
        return 0, 0
    left = [
        item for item in home.unfinished() if is_data_file(item.key) and is_abandoned(home.local_path / item.handle)
    ]
    for item in left:
        home.discard(item)
    return len(left), sum(item.size or 0 for item in left)


def empty_commit(number: int, stream: str, purpose: str) -> Commit:
    """Return a commit without shards that only occupies a number of the ledger."""
    return Commit(number, new_attempt(), stream, purpose=purpose, created=iso_time(), version=__version__)


def fence(folder: Folder, stream: str, number: int, before: str) -> bool:
    """Prevent commits of workers that joined earlier; return False if one of them has just committed."""
    commit = empty_commit(number, stream, f"fences workers that joined before {before}")
    return folder.create(commit_key(number), commit.to_bytes())


def stream_has_commits(root: Folder, worker_id: int) -> bool:
    return bool(commit_numbers(root.child(existing_folder(root, worker_id))))


def stream_version(root: Folder, worker_id: int) -> str | None:
    """Return a hash of ``stream.json``, or None if there is none. A stream that is started again gets another one."""
    data = get_if_present(root.child(existing_folder(root, worker_id)), STREAM)
    return None if data is None else hashlib.sha256(data).hexdigest()[:16]


def streams_to_clear(root: Folder, streams: Iterable[int], *, overwrite: bool) -> dict[int, str]:
    """Return the versions of those streams that ``--no-checkpointing`` clears: with ``--overwrite`` all that exist.

    A worker clears a stream only while it has this version. A worker that is started again with the same command
    finds another version and resumes.

    Raises:
        SpecError: If a stream has commits, without ``--overwrite``.

    """
    if overwrite:
        versions = {stream: stream_version(root, stream) for stream in streams}
        return {stream: version for stream, version in versions.items() if version is not None}
    if found := [stream for stream in streams if stream_has_commits(root, stream)]:
        raise SpecError(
            "--no-checkpointing",
            expected="streams without commits",
            found=f"commits of {counted(len(found), 'stream')} in {root.url}",
            fix="add --overwrite to remove them, or leave --no-checkpointing out to resume",
        )
    return {}


def clear_stream(root: Folder, worker_id: int) -> None:
    """Remove a stream, so that it can be started again.

    Added taps are removed first, then ``metadata.json``, then the commits from the newest to the oldest, then the
    shards, and ``stream.json`` last. If this is interrupted, commits 1 to n remain, which is a valid ledger.

    Raises:
        Unwritable: A symbolic link leads to some of the files. Nothing was removed: another dataset may be there.

    """
    folder = root.child(existing_folder(root, worker_id))
    additions = {split_addition(key)[0] for key in _own_files(folder)} - {""}
    remove_finished_marks(root, worker_id)
    for name in sorted(additions):
        clear_folder(folder.child(name))
    clear_folder(folder)


def _own_files(folder: Folder) -> set[str]:
    """Return the files of a stream's folder, with those of added taps; refuse files that a symbolic link leads to."""
    found = [info for info in folder.list() if is_worker_file(split_addition(info.key)[1])]
    for info in found:
        if info.linked:
            raise Unwritable(
                f"{folder.url} cannot be started again",
                found=f"a symbolic link that leads to {info.key}",
                fix="remove the link, or choose another --output",
            )
    return {info.key for info in found}


def clear_folder(folder: Folder) -> None:
    """Remove one ledger and its shards in the order that :func:`clear_stream` describes."""
    remove = partial(remove_by_name, folder.url, ours=is_worker_file, remove=folder.delete)
    names = _own_files(folder)
    merged, suspects = sorted(names & {PREDICTIONS, SUBMISSION}), sorted(names & {SUSPECTS})
    if not _fence(folder):
        busy = f"{folder.url} cannot be started again: a worker has just committed to it"
        raise StoreError(busy, fix="stop the worker, then run the same command again")
    remove([METADATA, *merged])
    remove(commit_key(number) for number in reversed(commit_numbers(folder)))
    remove((info.key for info in folder.list() if is_data_file(info.key)), threads=_PARALLEL_REMOVALS)
    remove([PROGRESS, *suspects, STREAM])


def _fence(folder: Folder) -> bool:
    """Create the fence. Without a readable ``stream.json`` none is needed: workers check it before each commit."""
    try:
        record = read_stream(without_copy(folder))
    except Damaged:
        record = None
    last = max(commit_numbers(folder), default=0)
    return record is None or fence(folder, record.id, last + 1, "the stream was started again")


def is_alive(folder: Folder, now: float) -> bool:
    """Return whether a worker's heartbeat is recent or unreadable. The result is only used to prevent removal."""
    beat = read_beat(folder)
    if beat is None:
        return any(info.key == PROGRESS for info in folder.list(PROGRESS))
    return not beat.phase.ended and beat.age(now) < Liveness(beat.interval).dead
