"""The ledger: all the commits of a stream, one gapless sequence, the only truth about what is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spile.errors import Damaged
from spile.objects.folder import Folder, NotFound
from spile.spec.ranges import Ranges
from spile.store.layout import COMMITS, commit_key, commit_number
from spile.store.record import Commit

__all__ = [
    "Ledger",
    "ShardFile",
    "commit_numbers",
    "has_commits",
    "read_commits",
    "read_entries",
    "read_ledger",
]

_ASKED_FOR = 1000
"""Absent commits that are asked for by name before they are called a gap: far more than land during one listing."""


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
    """The number of the last one."""
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
        """The ledger with these commits after its own. All samples are sorted once, however scattered they are."""
        pairs = self.done.pairs()
        files: list[ShardFile] = []
        skipped, last, end, created = self.skipped, self.commits, self.end, self.created
        for commit in commits:
            pairs += commit.pairs()
            files += [ShardFile(shard.name, shard.count, shard.tokens, shard.size) for shard in commit.shards]
            skipped += len(commit.skipped)
            last = commit.number
            end = commit.end if commit.end is not None else end
            created = commit.created or created
        done, samples = Ranges(pairs), sum(file.samples for file in files)
        # As many as were named: then none was named twice, and nobody has to look which.
        single = len(done) == len(self.done) + samples + skipped - self.skipped
        return replace(
            self,
            done=done,
            doubled=self.doubled if single else self.doubled | Ranges.twice(pairs),
            commits=last,
            files=(*self.files, *files),
            samples=self.samples + samples,
            skipped=skipped,
            tokens=self.tokens + sum(file.tokens for file in files),
            bytes=self.bytes + sum(file.size for file in files),
            end=end,
            created=created,
        )


def has_commits(folder: Folder) -> bool:
    """Whether the stream in this folder has any commit."""
    return any(commit_number(info.key) is not None for info in folder.list(COMMITS))


def commit_numbers(folder: Folder) -> list[int]:
    """The numbers under which there is a commit of any life, in order."""
    return sorted(number for info in folder.list(COMMITS) if (number := commit_number(info.key)) is not None)


def read_commits(folder: Folder, stream: str | None, after: int = 0) -> Iterator[Commit]:
    """A stream's commits in order, many reads at a time. ``stream`` is its id; None takes those of any life."""
    return (commit for commit in read_entries(folder, stream, after) if commit.stream == (stream or commit.stream))


def read_entries(folder: Folder, stream: str | None, after: int = 0) -> Iterator[Commit]:
    """As :func:`read_commits`, with those of strangers: workers of an earlier life that did not know of its end.

    A stranger's commit keeps its number and counts for nothing. Up to the last commit of this life no number is
    missing: :class:`Damaged` where one is.
    """
    numbers = [number for number in commit_numbers(folder) if number > after]
    last = after
    absent: list[tuple[int, int]] = []
    for number, data in zip(numbers, folder.get_many(map(commit_key, numbers)), strict=True):
        if number > last + 1:
            absent.append((last + 1, number))
        commit = Commit.from_bytes(data, f"{folder.url}/{commit_key(number)}")
        if absent and (stream is None or commit.stream == stream):
            yield from _late(folder, Ranges(absent), numbers[-1])
            absent = []
        yield _checked(commit, number, folder.url)
        last = number


def _late(folder: Folder, absent: Ranges, last: int) -> Iterator[Commit]:
    """Commits that a listing missed: past 9999 names do not sort as numbers do, and one may land behind it."""
    lost = absent
    if len(absent) <= _ASKED_FOR:
        found = {number: data for number in absent if (data := _data(folder, commit_key(number))) is not None}
        lost = absent - Ranges.of(found)
    if lost:
        raise Damaged(
            f"the ledger of {folder.url} has a gap",
            expected=f"commits 1 to {last}",
            found=f"none numbered {lost.text()}",
            fix="restore them from a copy of it; without one give another --output, and what is stored here stays",
        )
    for number, data in found.items():
        yield _checked(Commit.from_bytes(data, f"{folder.url}/{commit_key(number)}"), number, folder.url)


def _data(folder: Folder, key: str) -> bytes | None:
    try:
        return folder.get(key)
    except NotFound:
        return None


def _checked(commit: Commit, number: int, url: str) -> Commit:
    if commit.number != number:
        raise Damaged(f"{url}/{commit_key(number)} is another commit", expected=f"number {number}", found=commit.number)
    return commit


def read_ledger(folder: Folder, stream: str | None) -> Ledger:
    """The ledger of the stream in this folder."""
    return Ledger().plus(read_commits(folder, stream))
