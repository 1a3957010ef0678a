"""What every export reads: a dataset shard by shard, and the folder that it writes, which it fills once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import UserError
from spile.reading.dataset import Dataset
from spile.reading.rows import context_of
from spile.store.shard_reader import ShardReader

__all__ = ["Block", "Export", "Exported", "Seen", "new_folder", "nobody", "per_shard"]

_Array = npt.NDArray[Any]
Seen = Callable[[int, int], None]
"""Told how much is done, and of how much."""


def nobody(_done: int, _total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Block:
    """One shard."""

    stream: int
    number: int
    """Of the stream's shards, from 1."""
    shard: ShardReader
    taps: tuple[str, ...]
    dtype: str
    """Of the numbers that are given."""

    @property
    def length(self) -> int:
        """Rows."""
        return self.shard.record.tokens

    def rows(self, tap: str, start: int = 0, stop: int | None = None) -> _Array:
        """A tap's rows as numbers that every program knows."""
        return self.shard.rows(tap, start, self.length if stop is None else stop).astype(self.dtype)

    def columns(self) -> dict[str, _Array]:
        """What is known of each row: stream, sample, position, token, role."""
        known = context_of(self.stream, self.shard, 0, self.length)
        found = {
            "stream": known.streams,
            "sample": known.samples,
            "position": known.positions,
            "token": known.tokens,
            "role": known.roles,
        }
        return {name: np.asarray(column) for name, column in found.items()}

    def task_ids(self) -> list[str]:
        """Each row's."""
        lengths = np.diff(self.shard.whole("offsets"))
        return [note["task_id"] for note, count in zip(self.shard.notes, lengths, strict=True) for _ in range(count)]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: int
    rows: int


@dataclass(frozen=True)
class Export:
    """What is exported: some taps of a dataset, as which numbers."""

    dataset: Dataset
    taps: tuple[str, ...]
    dtype: str = "float32"
    streams: Sequence[int] | None = None
    """None: all."""
    seen: Seen = nobody
    """Told of rows as they go by."""

    @property
    def rows(self) -> int:
        """Of all streams that have these taps."""
        return sum(stream.tokens for stream in self.dataset.having(self.taps, self.streams))

    def blocks(self) -> Iterator[Block]:
        """The shards that have these taps, in the order of streams and commits."""
        total, done = self.rows, 0
        for stream in self.dataset.having(self.taps, self.streams):
            for number, record in enumerate(stream.shards, 1):
                yield Block(stream.number, number, stream.open(record), self.taps, self.dtype)
                done += record.tokens
                self.seen(done, total)


def per_shard(export: Export, write: Callable[[Block], None]) -> Exported:
    """One file for each stored shard."""
    files = rows = 0
    for block in export.blocks():
        write(block)
        files, rows = files + 1, rows + block.length
    return Exported(files, rows)


def new_folder(path: str) -> Path:
    """An empty folder to write into: an export never mixes with what is there."""
    folder = Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {path}", expected="a new or an empty folder", found="something there already")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
