"""Where a tree's tensor lies in the files: a part of one tensor of theirs, or one of theirs for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import ModelError
from spile.weights.names import Order
from spile.weights.safetensors import DTYPES, Entry
from spile.weights.source import ByteSource

__all__ = ["Bounds", "Change", "Piece", "PieceStack", "Values"]

Bounds = tuple[tuple[int, int], ...]
"""First and last + 1 in each dimension; a missing one: all of it."""
Values = npt.NDArray[Any]


class Change(Protocol):
    """What is added to a file's tensor as it is read: an adapter's part of it."""

    def apply(self, values: Values) -> Values:
        """The tensor with the change in it."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the tree, in the files."""

    entries: tuple[Entry, ...]
    """More than one: stacked along a first dimension."""
    shape: tuple[int, ...]
    """The tree's."""
    order: Order = "rows"
    first: int = 0
    """Its first row (or column) in a file's tensor that holds several."""
    groups: tuple[int, int, int] = (1, 1, 0)
    """Order ``heads``: heads, tensors for each head, which of them this is."""
    changes: tuple[Change | None, ...] = (None,)
    """For each entry, what is added to it."""

    @property
    def file(self) -> str:
        """Where it lies, for errors."""
        return self.entries[0].file

    def read(self, source: ByteSource, bounds: Bounds = ()) -> Values:
        """A slice of it; of a tensor that lies as the tree's does, only the rows it spans are touched."""
        if len(self.shape) == 3 and len(self.entries) == self.shape[0]:
            chosen = range(self.shape[0])[slice(*bounds[0])] if bounds else range(self.shape[0])
            return np.stack([self._one(source, place, self.shape[1:], bounds[1:]) for place in chosen])
        return self._one(source, 0, self.shape, bounds)

    def _one(self, source: ByteSource, place: int, shape: Sequence[int], bounds: Bounds) -> Values:
        entry, change = self.entries[place], self.changes[place]
        start, stop = bounds[0] if bounds else (0, shape[0])
        rest = tuple(slice(*bound) for bound in bounds[1:])
        if change is None and self.order == "rows":
            return _rows(source, entry, self.first + start, self.first + stop)[(slice(None), *rest)]
        whole = _rows(source, entry, 0, entry.shape[0])
        whole = whole if change is None else change.apply(whole)
        return self._cut(whole, shape[0])[(slice(start, stop), *rest)]

    def _cut(self, whole: Values, outer: int) -> Values:
        if self.order == "heads":
            heads, parts, place = self.groups
            return whole.reshape(heads, parts, outer // heads, *whole.shape[1:])[:, place].reshape(
                outer, *whole.shape[1:]
            )
        turned = whole.T if self.order == "columns" else whole
        return turned[self.first : self.first + outer]


@dataclass(frozen=True)
class PieceStack:
    """One tensor of each of several layers, as one with a dimension more in front."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tree's."""
        return len(self.pieces), *self.pieces[0].shape

    def read(self, source: ByteSource, bounds: Bounds = ()) -> Values:
        """A slice of it."""
        chosen = self.pieces[slice(*bounds[0])] if bounds else self.pieces
        return np.stack([piece.read(source, bounds[1:]) for piece in chosen])


def _rows(source: ByteSource, entry: Entry, first: int, last: int) -> Values:
    row = entry.length // max(entry.shape[0], 1)
    data = source.read(entry.file, entry.start + first * row, (last - first) * row)
    if len(data) != (last - first) * row:
        raise ModelError(f"{entry.file} ended inside {entry.name}", fix="it changed while it was read; run again")
    return data.view(DTYPES[entry.dtype]).reshape(last - first, *entry.shape[1:])
