"""Rows in memory in the order in which they will be given: each is put at its place in it as it is read.

The memory is a ring: a row's place in all that is given out, modulo how many rows there is room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.planning.shuffle import Places
from spile.reading.leases import BatchMemory
from spile.reading.rows import RowBatch
from spile.reading.source import TapSource

__all__ = ["Group", "RowRing", "Window"]

_Array = npt.NDArray[Any]
_Mask = npt.NDArray[np.bool_]


class RowRing:
    """Memory for so many rows of every tap, used again and again: new memory costs as much as a copy."""

    def __init__(self, source: TapSource, capacity: int, scratch: str | None) -> None:
        self.capacity = capacity
        self._batches = BatchMemory()
        self.taps = {tap: _allocate((capacity, columns), dtype, scratch) for tap, dtype, columns in _types(source)}

    def put(self, tap: str, places: Places, rows: _Array, first: int = 0) -> None:
        """Rows that were read, each to its place, unless it lies before the ``first`` that is still to be given."""
        if first and (late := places >= first).sum() < len(places):
            places, rows = places[late], rows[late]
        _plain(self.taps[tap])[places % self.capacity] = _plain(rows)

    def room(self, count: int) -> dict[str, _Array]:
        """Other memory, for so many rows of every tap: such as was given before and came back."""
        return {tap: self._batches.array((count, rows.shape[1]), rows.dtype) for tap, rows in self.taps.items()}

    def part(self, places: Places) -> dict[str, _Array] | None:
        """The memory itself, where these places are neighbours."""
        first = int(places[0]) % self.capacity
        if first + len(places) > self.capacity or not (np.diff(places) == 1).all():
            return None
        return {tap: rows[first : first + len(places)] for tap, rows in self.taps.items()}

    def copy_into(self, target: Mapping[str, _Array], places: Places) -> None:
        """The rows at these places."""
        part = self.part(places)
        for tap, rows in self.taps.items():
            if part is not None:
                _plain(target[tap])[:] = _plain(part[tap])
            else:
                # Every place is there: to say so spares NumPy a copy, which it makes to leave ``out`` alone if not.
                np.take(_plain(rows), places % self.capacity, axis=0, out=_plain(target[tap]), mode="clip")


def _types(source: TapSource) -> list[tuple[str, np.dtype[Any], int]]:
    return [(tap, *source.row_type(tap)) for tap in source.taps]


def _allocate(shape: tuple[int, int], dtype: np.dtype[Any], scratch: str | None) -> _Array:
    if scratch is None:
        return np.empty(shape, dtype)
    import tempfile

    folder = Path(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    # Without a name: its room is free again when the reader ends, however it ends.
    with tempfile.TemporaryFile(dir=folder, prefix=".spile-") as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def _plain(rows: _Array) -> _Array:
    """As integers: NumPy holds the interpreter's lock over a dtype that it does not know, and readers would wait."""
    return rows.view(f"u{rows.dtype.itemsize}")


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that were read side by side: their places, and what is known of them, as they are stored."""

    places: Places
    wanted: _Mask | None
    """None: all."""
    known: RowBatch | None

    def chosen(self, rows: Places) -> Places:
        """Those of its rows, given by number, that are wanted."""
        return rows if self.wanted is None else rows[self.wanted[rows]]

    def within(self, begin: int, end: int) -> Places:
        """The numbers of its wanted rows at these places."""
        return self.chosen(np.flatnonzero((self.places >= begin) & (self.places < end)))


class Window:
    """Rows of one or several groups that are given out one after the other.

    ``last``: nobody reads this memory again, so that rows which lie as they are wanted can be given without a copy.
    """

    def __init__(self, ring: RowRing, places: Places, known: RowBatch | None = None, *, last: bool) -> None:
        self._ring, self._places, self._known, self._last = ring, places, known, last

    @classmethod
    def between(cls, ring: RowRing, groups: Sequence[Group], begin: int, end: int, *, last: bool) -> Window:
        """The wanted rows of these groups at these places."""
        if all(group.wanted is None and group.known is None for group in groups):
            return cls(ring, np.arange(begin, end), last=last)
        rows = [group.within(begin, end) for group in groups]
        places = np.concatenate([group.places[each] for group, each in zip(groups, rows, strict=True)])
        order = np.argsort(places)
        known = [group.known.take(each) for group, each in zip(groups, rows, strict=True) if group.known is not None]
        return cls(ring, places[order], RowBatch.join(known).take(order) if known else None, last=last)

    @classmethod
    def permuted(cls, ring: RowRing, group: Group, order: Places, *, last: bool) -> Window:
        """The wanted rows of the one group that all are in, in this order."""
        rows = group.chosen(order)
        return cls(ring, group.places[rows], None if group.known is None else group.known.take(rows), last=last)

    def __len__(self) -> int:
        return len(self._places)

    def gather(self, begin: int, end: int) -> tuple[dict[str, _Array], RowBatch | None]:
        """Its rows ``begin`` to ``end``, of every tap, and what is known of them."""
        part = self._ring.part(self._places[begin:end]) if self._last else None
        if part is not None:
            return part, self._known_of(begin, end)
        rows = self.room(end - begin)
        return rows, self.gather_into(rows, begin, end)

    def room(self, count: int) -> dict[str, _Array]:
        """Memory for so many rows of every tap."""
        return self._ring.room(count)

    def gather_into(self, rows: Mapping[str, _Array], begin: int, end: int) -> RowBatch | None:
        """The same into memory that is there already."""
        self._ring.copy_into(rows, self._places[begin:end])
        return self._known_of(begin, end)

    def _known_of(self, begin: int, end: int) -> RowBatch | None:
        return None if self._known is None else self._known.take(slice(begin, end))
