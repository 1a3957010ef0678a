"""Rows in memory in the order in which they will be given: each is put at its place in it as it is read.

The memory is a ring of batches: each of those that are to come has a slot, from the first row read into it until it is
given out, and nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.planning.shuffle import Places
from spile.reading.leases import BatchMemory
from spile.reading.rows import RowBatch
from spile.reading.slots import RowSlots
from spile.reading.source import TapSource

__all__ = ["BatchRows", "Group", "RowRing", "Window"]

_Array = npt.NDArray[Any]
_Mask = npt.NDArray[np.bool_]

_NONE = -1
_BORDERS = 4
"""Batches that lie only in part within what memory must hold: at both of its ends, and where an epoch begins anew."""


class RowRing:
    """Memory for so many rows of every tap, used again and again, from wherever the order begins.

    A place has memory from when it is reserved until it is released, or lent: a batch, which begins at a multiple of
    its rows, is lent as it lies. ``spare``: how many batches may be lent at a time before others are copies; None where
    the memory is not wanted again.
    """

    def __init__(
        self, source: TapSource, capacity: int, batch_rows: int, spare: int | None, scratch: str | None
    ) -> None:
        self._batch_rows, self._spare = batch_rows, spare
        most = capacity // batch_rows + _BORDERS
        types = [(tap, *source.row_type(tap)) for tap in source.taps]
        self._memory = RowSlots(types, most + (spare or 0), batch_rows, scratch)
        self._slots: Places = np.full(most, _NONE)
        """Of the batches that have memory, each at its number modulo the length."""
        self._first = self._end = 0
        self._copies = BatchMemory()

    def reserve(self, begin: int, end: int) -> None:
        """Have memory for the places from ``begin`` to ``end``; those before ``begin`` had theirs, or want none."""
        if self._first == self._end:
            self._first = self._end = begin // self._batch_rows
        while self._end * self._batch_rows < end:
            self._slots[self._end % len(self._slots)] = self._memory.take()
            self._end += 1

    def release(self, before: int) -> None:
        """Nobody will ask for the places before this one."""
        while self._first < min(self._end, before // self._batch_rows):
            slot = self._taken(self._first)
            if slot != _NONE:
                self._memory.give_back(slot)
            self._first += 1

    def _taken(self, batch: int) -> int:
        """The slot of a batch that does not have it any more."""
        at = batch % len(self._slots)
        slot, self._slots[at] = int(self._slots[at]), _NONE
        return slot

    def rows_at(self, places: Places, first: int = 0) -> Places:
        """Which rows of the memory these places have; those before the ``first`` wanted share one for nobody."""
        batches, within = np.divmod(places, self._batch_rows)
        found: Places = self._slots[batches % len(self._slots)] * self._batch_rows
        found += within
        if first:
            found[places < first] = self._memory.nobodys
        return found

    def put(self, tap: str, at: Places, rows: _Array) -> None:
        """Rows that were read, each to its row of the memory."""
        _plain(self._memory.taps[tap])[at] = _plain(rows)

    def room(self, count: int) -> dict[str, _Array]:
        """Other memory, for so many rows of every tap: such as was given before and came back."""
        taps = self._memory.taps.items()
        return {tap: self._copies.array((count, rows.shape[1]), rows.dtype) for tap, rows in taps}

    def lend(self, begin: int, count: int) -> dict[str, _Array] | None:
        """The memory of a batch itself, once; None where too many have been lent."""
        if self._spare is not None and self._memory.lent >= self._spare:
            return None
        return self._memory.lend(self._taken(begin // self._batch_rows), count)

    def copy_into(self, target: Mapping[str, _Array], places: Places) -> None:
        """The rows at these places."""
        at = self.rows_at(places)
        for tap, rows in self._memory.taps.items():
            if (np.diff(at) == 1).all():
                _plain(target[tap])[:] = _plain(rows[at[0] : at[-1] + 1])
            else:
                # Every place is there: to say so spares NumPy a copy, which it makes to leave ``out`` alone if not.
                np.take(_plain(rows), at, axis=0, out=_plain(target[tap]), mode="clip")


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

    ``lies``: all rows at its places are wanted, in this order and never again, so that their memory may be lent.
    """

    def __init__(self, ring: RowRing, places: Places, known: RowBatch | None = None, *, lies: bool) -> None:
        self.ring, self._places, self._known, self._lies = ring, places, known, lies

    @classmethod
    def between(cls, ring: RowRing, groups: Sequence[Group], begin: int, end: int, *, stays: bool) -> Window:
        """The wanted rows of these groups at these places. ``stays``: they will be given again."""
        every = all(group.wanted is None for group in groups)
        if every and all(group.known is None for group in groups):
            return cls(ring, np.arange(begin, end), lies=not stays)
        rows = [group.within(begin, end) for group in groups]
        places = np.concatenate([group.places[each] for group, each in zip(groups, rows, strict=True)])
        order = np.argsort(places)
        known = [group.known.take(each) for group, each in zip(groups, rows, strict=True) if group.known is not None]
        joined = RowBatch.join(known).take(order) if known else None
        return cls(ring, places[order], joined, lies=every and not stays)

    @classmethod
    def permuted(cls, ring: RowRing, group: Group, order: Places) -> Window:
        """The wanted rows of the one group that all are in, in this order."""
        rows = group.chosen(order)
        return cls(ring, group.places[rows], None if group.known is None else group.known.take(rows), lies=False)

    def __len__(self) -> int:
        return len(self._places)

    def run(self, begin: int, end: int) -> range | None:
        """The places of its rows ``begin`` to ``end``, where their memory may be lent."""
        return range(int(self._places[begin]), int(self._places[end - 1]) + 1) if self._lies else None

    def gather_into(self, rows: Mapping[str, _Array], begin: int, end: int) -> None:
        """Copies of its rows ``begin`` to ``end``, of every tap."""
        self.ring.copy_into(rows, self._places[begin:end])

    def known(self, begin: int, end: int) -> RowBatch | None:
        """What is known of them."""
        return None if self._known is None else self._known.take(slice(begin, end))


class BatchRows:
    """Rows of one window, or of as many as it takes. They stay where they lie as long as they may."""

    def __init__(self, ring: RowRing, most: int) -> None:
        self._ring, self._most = ring, most
        self.held = 0
        self._lying: range | None = range(0)
        self._rows: dict[str, _Array] = {}
        self.known: list[RowBatch] = []

    def take(self, window: Window, begin: int) -> int:
        """As many rows from this one on as are wanted, or as there are: so many."""
        end = min(len(window), begin + self._most - self.held)
        lying = self._joined(window.run(begin, end))
        if lying is None:
            self._settle()
            part = {tap: rows[self.held : self.held + end - begin] for tap, rows in self._rows.items()}
            window.gather_into(part, begin, end)
        self._lying = lying
        known = window.known(begin, end)
        self.known += [] if known is None else [known]
        self.held += end - begin
        return end - begin

    def _joined(self, more: range | None) -> range | None:
        """What lies in the batch and what comes, where both are the first part of one batch's memory."""
        if self._lying is None or more is None:
            return None
        first, expected = (more.start, more.start) if not self.held else (self._lying.start, self._lying.stop)
        return range(first, more.stop) if first % self._most == 0 and more.start == expected else None

    def _settle(self) -> None:
        """Copy what lies: what comes does not lie beside it."""
        self._rows = self._rows or self._ring.room(self._most)
        if self._lying:
            part = {tap: rows[: self.held] for tap, rows in self._rows.items()}
            self._ring.copy_into(part, np.arange(self._lying.start, self._lying.stop))

    def rows(self) -> dict[str, _Array]:
        """All that it holds, of every tap: to be asked for once."""
        lent = self._ring.lend(self._lying.start, self.held) if self._lying else None
        if lent is not None:
            return lent
        if self._lying is not None:
            self._settle()
        return {tap: rows[: self.held] for tap, rows in self._rows.items()}
