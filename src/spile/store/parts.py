"""Parts of a dataset that different processes verify or inspect: whole streams, or some commits of a large stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spile.errors import SpecError

_PARTS_PER_WORKER = 4
"""There are more parts than workers, so that all workers end at about the same time."""
_TEXT = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,12})-(\d{1,12}))?", re.ASCII)

CommitSizes = Mapping[int, Mapping[int, int]]
"""The bytes of the shards of each commit, by the number of the stream and the number of the commit."""


@dataclass(frozen=True)
class DatasetPart:
    """Consecutive streams, or consecutive commits of one stream. Commits that are added later do not change it."""

    first: int
    last: int
    commits: tuple[int, int] | None = None
    """The first and the last commit; None means all commits."""
    size: int = 0

    def __str__(self) -> str:
        streams = f"{self.first}-{self.last}"
        return streams if self.commits is None else f"{streams}:{self.commits[0]}-{self.commits[1]}"

    @classmethod
    def parse(cls, text: str) -> DatasetPart:
        found = _TEXT.fullmatch(text)
        if found is None:
            raise SpecError("--part", expected="streams and commits such as 0-3 or 5-5:1-20", found=repr(text))
        first, last, begin, end = (int(word or 0) for word in found.groups())
        return cls(first, last, None if found[3] is None else (begin, end))

    def has_stream(self, number: int) -> bool:
        return self.first <= number <= self.last

    def has_commit(self, number: int) -> bool:
        return self.commits is None or self.commits[0] <= number <= self.commits[1]


RunParts = Callable[[CommitSizes], Iterable[Mapping[str, Any]]]
"""Divides a dataset and runs a command for each part in another process; yields the JSON objects that they print."""


def divide(sizes: CommitSizes, workers: int) -> list[DatasetPart]:
    """Return parts of similar size that together contain every commit of these streams once."""
    goal = max(1, sum(sum(commits.values()) for commits in sizes.values()) // (workers * _PARTS_PER_WORKER))
    parts: list[DatasetPart] = []
    for number, commits in sorted(sizes.items()):
        total = sum(commits.values())
        before = parts[-1] if parts else None
        if total > goal and len(commits) > 1:
            parts += _cut(number, commits, goal)
        elif before is not None and before.commits is None and before.size + total <= goal:
            parts[-1] = DatasetPart(before.first, number, size=before.size + total)
        else:
            parts.append(DatasetPart(number, number, size=total))
    return parts


def _cut(number: int, commits: Mapping[int, int], goal: int) -> list[DatasetPart]:
    parts: list[DatasetPart] = []
    first, size = 0, 0
    for commit, length in sorted(commits.items()):
        if size and size + length > goal:
            parts.append(DatasetPart(number, number, (first, commit - 1), size))
            first, size = commit, 0
        size += length
    return [*parts, DatasetPart(number, number, (first, max(commits)), size)]
