"""Parts of a dataset that different processes verify or inspect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spile.errors import SpecError

_PARTS_PER_WORKER = 4
"""There are more parts than workers, so that all workers end at about the same time."""
_TEXT = re.compile(r"(\d{1,9}):(\d{1,12})-(\d{1,9}):(\d{1,12})", re.ASCII)

CommitSizes = Mapping[int, Mapping[int, int]]
"""The bytes of the shards of each commit, by the number of the stream and the number of the commit."""
RunParts = Callable[[CommitSizes], Iterable[Mapping[str, Any]]]
"""Divides a dataset and runs a command for each part in another process; yields the JSON objects that they print."""


@dataclass(frozen=True)
class DatasetPart:
    """Consecutive commits, in the order of streams and then of numbers."""

    first: tuple[int, int]
    """The stream and the number of the first commit."""
    last: tuple[int, int]
    size: int = 0

    def __str__(self) -> str:
        return "{}:{}-{}:{}".format(*self.first, *self.last)

    @classmethod
    def parse(cls, text: str) -> DatasetPart:
        found = _TEXT.fullmatch(text)
        if found is None:
            raise SpecError("--part", expected="STREAM:COMMIT-STREAM:COMMIT such as 0:1-3:20", found=repr(text))
        return cls((int(found[1]), int(found[2])), (int(found[3]), int(found[4])))

    def has_stream(self, number: int) -> bool:
        return self.first[0] <= number <= self.last[0]

    def has_commit(self, stream: int, number: int) -> bool:
        return self.first <= (stream, number) <= self.last


def divide(sizes: CommitSizes, workers: int) -> list[DatasetPart]:
    """Return parts of similar size that together contain every commit of these streams once."""
    goal = max(1, sum(sum(commits.values()) for commits in sizes.values()) // (workers * _PARTS_PER_WORKER))
    parts: list[DatasetPart] = []
    for stream, commits in sorted(sizes.items()):
        for number, size in sorted({0: 0, **commits}.items()):  # Streams without commits are in a part too.
            last = parts[-1] if parts else None
            if last is None or (last.size and last.size + size > goal):
                parts.append(DatasetPart((stream, number), (stream, number), size))
            else:
                parts[-1] = replace(last, last=(stream, number), size=last.size + size)
    return parts
