"""The ledger: all the commits of a stream, one gapless sequence, the only truth about what is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spile.errors import Damaged
from spile.objects.folder import Folder, NotFound
from spile.plan.ranges import Ranges
from spile.store.layout import COMMITS, commit_key, commit_number
from spile.store.record import Commit

__all__ = ["Ledger", "ShardFile", "has_commits", "list_commits", "read_commits", "read_ledger"]


class ShardFile(NamedTuple):
    """What the ledger remembers of a shard: little, because a stream may have ten thousand."""

    name: str
    samples: int
    tokens: int
    size: int


@dataclass(frozen=True)
class Ledger:
    """What a stream's commits add up to."""

    done: Ranges = field(default_factory=Ranges)
    """Stored and skipped."""
    doubled: Ranges = field(default_factory=Ranges)
    """Samples that are there twice: always empty, unless somebody broke the rules."""
    commits: int = 0
    files: tuple[ShardFile, ...] = ()
    samples: int = 0
    """Stored."""
    skipped: int = 0
    tokens: int = 0
    bytes: int = 0
    end: int | None = None
    """How many samples the stream has, where only reading it to its end tells."""
    created: str | None = None
    """When the last commit was made."""

    @property
    def shards(self) -> int:
        """How many."""
        return len(self.files)

    def plus(self, commits: Iterable[Commit]) -> Ledger:
        """The ledger with these commits after its own."""
        done, doubled = self.done, self.doubled
        files: list[ShardFile] = []
        skipped, count, end, created = self.skipped, self.commits, self.end, self.created
        for commit in commits:
            covered = commit.covered()
            doubled = doubled | (done & covered) | commit.doubled()
            done = done | covered
            files += [ShardFile(shard.name, shard.count, shard.tokens, shard.size) for shard in commit.shards]
            skipped += len(commit.skipped)
            count += 1
            end = commit.end if commit.end is not None else end
            created = commit.created or created
        return replace(
            self,
            done=done,
            doubled=doubled,
            commits=count,
            files=(*self.files, *files),
            samples=self.samples + sum(file.samples for file in files),
            skipped=skipped,
            tokens=self.tokens + sum(file.tokens for file in files),
            bytes=self.bytes + sum(file.size for file in files),
            end=end,
            created=created,
        )


def has_commits(folder: Folder) -> bool:
    """Whether the stream in this folder has any commit."""
    return any(commit_number(info.key) is not None for info in folder.list(COMMITS))


def list_commits(folder: Folder) -> list[int]:
    """The numbers of a stream's commits, in order: 1, 2 … n. :class:`Damaged` where one is missing."""
    found = {number for info in folder.list(COMMITS) if (number := commit_number(info.key)) is not None}
    last = max(found, default=0)
    missing = [number for number in range(1, last + 1) if number not in found]
    # Past 9999 names do not sort as numbers do, so a listing may pass a place before a commit lands there. Ask again.
    lost = Ranges.of(number for number in missing if not _exists(folder, commit_key(number)))
    if lost:
        raise Damaged(
            f"the ledger of {folder.url} has a gap",
            expected=f"commits 1 to {last}",
            found=f"none numbered {lost.text()}",
            fix="restore them, or start the stream again with --no-checkpointing --overwrite",
        )
    return list(range(1, last + 1))


def _exists(folder: Folder, key: str) -> bool:
    try:
        folder.info(key)
    except NotFound:
        return False
    return True


def read_commits(folder: Folder, stream: str | None, after: int = 0) -> Iterator[Commit]:
    """A stream's commits in order, many reads at a time. ``stream`` is the id that all of them must carry."""
    numbers = list_commits(folder)[after:]
    for number, data in zip(numbers, folder.get_many(map(commit_key, numbers)), strict=True):
        yield _checked(data, number, stream, folder.url)


def _checked(data: bytes, number: int, stream: str | None, url: str) -> Commit:
    where = f"{url}/{commit_key(number)}"
    commit = Commit.from_bytes(data, where)
    if commit.number != number:
        raise Damaged(f"{where} is another commit", expected=f"number {number}", found=commit.number)
    if stream is not None and commit.stream != stream:
        raise Damaged(
            f"{where} belongs to another life of this stream",
            expected=f"stream id {stream}",
            found=commit.stream,
            fix="start the stream again with --no-checkpointing --overwrite",
        )
    return commit


def read_ledger(folder: Folder, stream: str | None) -> Ledger:
    """The ledger of the stream in this folder."""
    return Ledger().plus(read_commits(folder, stream))
