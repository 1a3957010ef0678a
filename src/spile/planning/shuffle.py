"""The order of a shuffled pass: which pieces of which shards, in which windows, for which reader. Pure arithmetic.

Two levels. A tap is cut into *pieces* of a few MiB, each one read. Every epoch has its own permutation of all pieces,
which the readers share out in stretches of equally many rows. A reader reads its stretch in *groups* of pieces. Each
group's rows are permuted and dealt out over the next ``spread`` *windows*; a window is the permuted parts of as many
groups. So what is drawn from changes by one group at a time, and is always as much as memory holds. Where a reader's
whole stretch is one group, its rows come in a uniformly random order: a full permutation.

Rows of one document lie side by side, mostly in one piece, and so come within one stretch of the epoch. Pieces smaller
than documents take them apart: so they are where memory would hold too few whole documents (:func:`small_piece`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spile.errors import SpecError

__all__ = [
    "EpochPlan",
    "RowPiece",
    "ShuffleSpec",
    "group_order",
    "piece_rows",
    "plan_epoch",
    "row_order",
    "small_piece",
]

_CHUNK = 1 << 20
_PIECE = 4 << 20
"""Bytes of a piece, about: one read. Large enough for a bucket, small enough for a window of many places."""
_PLACES = 256
"""Pieces in memory, at least, where it allows for pieces of a chunk."""
_PARTS = 4096
"""Samples, or parts of them, that memory should hold for the order to be as good as a full permutation's."""
_SMALLEST_PIECE = 16 << 10
_SPREAD = 12
"""Windows that a group is dealt out over: one more group, which is being read, takes memory and is not drawn from."""
_LARGEST_PIECE = 16 << 20
_FIRST_GROUP = 64 << 20
"""Of the first epoch: groups grow from here, so that the first batch comes soon."""


@dataclass(frozen=True)
class ShuffleSpec:
    """Everything that decides the order, beside the dataset and the selection of its rows."""

    batch_rows: int = 4096
    seed: int = 0
    memory: int = 1 << 30
    """Bytes of rows that are held: all rows where they fit, else the groups that are drawn from and one being read."""
    part: int = 0
    parts: int = 1
    """This reader is number ``part`` of ``parts``: their rows are disjoint, and together they are all."""
    drop_last: bool = False
    """Every reader gives the same number of full batches, as data-parallel training needs it; the rest is left out."""
    scratch: str | None = None
    """A folder on a local disk: a full permutation also where the rows do not fit in memory."""
    piece: int | None = None
    """Bytes of a piece; None: some MiB, each one read and its checksums."""

    def __post_init__(self) -> None:
        for name, least in (("batch_rows", 1), ("seed", 0), ("memory", 1), ("parts", 1), ("piece", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise SpecError(name, expected=f"at least {least}", found=getattr(self, name))
        if not 0 <= self.part < self.parts:
            raise SpecError("part", expected="(k, n) with k from 0 to n - 1", found=(self.part, self.parts))


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows ``start`` to ``stop`` of one shard."""

    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class EpochPlan:
    """One reader's groups of one epoch, in order."""

    groups: tuple[tuple[RowPiece, ...], ...]
    spread: int
    """Windows that each group's rows are dealt out over."""
    room: int
    """Rows of the largest group of any epoch."""
    whole: bool
    """Whether the one group is everything there is: then its rows need not be read again for the next epoch."""

    @property
    def slots(self) -> int:
        """Groups that are in memory at once: those that are drawn from, and one being read."""
        return 1 if self.whole else self.spread + 1

    @property
    def windows(self) -> int:
        """How many."""
        return len(self.groups)

    def sources(self, window: int) -> range:
        """The groups of which a window has a part."""
        return range(max(0, window - self.spread + 1), window + 1)

    def share(self, rows: int, group: int, window: int) -> slice:
        """Which of a group's permuted rows are this window's; the last window has all that are left.

        So an epoch does not end on what was read last alone: training would end on a few documents.
        """
        part, last = window - group, window + 1 == self.windows
        return slice(rows * part // self.spread, rows if last else rows * (part + 1) // self.spread)


def piece_rows(widths: Sequence[int], memory: int, piece: int | None = None) -> int:
    """Rows of a piece, for taps whose rows have these bytes: a number that ends on a chunk's border in each, if it can.

    With little memory pieces are smaller, so that a window still has some of many places.

    Checksums are of chunks of a MiB: a piece that ends within one makes two readers read and check the whole chunk.
    """
    total = sum(widths)
    if piece is not None:
        return max(1, piece // total)
    aligned = max(_CHUNK // (width & -width) if width & -width < _CHUNK else 1 for width in widths)
    wanted = max(_CHUNK, min(_PIECE, memory // _PLACES))
    if aligned * total <= _LARGEST_PIECE:
        return int(aligned * max(1, wanted // (aligned * total)))
    return int(max(1, 2 * wanted // total))


def small_piece(total: int, sample: int, spec: ShuffleSpec) -> int | None:
    """The bytes of pieces that take samples apart, where too few whole ones fit in memory; None: pieces of some MiB.

    ``total``: the bytes of all rows; ``sample``: those of one sample, on average.
    """
    permuted = spec.scratch is not None or total <= spec.memory * spec.parts
    if spec.piece is not None or permuted or sample * _PARTS <= spec.memory:
        return spec.piece
    wanted = max(_SMALLEST_PIECE, spec.memory // _PARTS)
    return wanted if wanted < _CHUNK else None


def plan_epoch(shards: Sequence[int], widths: Sequence[int], spec: ShuffleSpec, epoch: int) -> EpochPlan:
    """The groups of reader ``spec.part`` in this epoch. ``shards``: the rows of each shard, in the dataset's order."""
    rows = piece_rows(widths, spec.memory, spec.piece)
    pieces = [RowPiece(n, at, min(at + rows, count)) for n, count in enumerate(shards) for at in range(0, count, rows)]
    total, width = sum(shards), sum(widths)
    if spec.parts == 1 and (total * width <= spec.memory or spec.scratch is not None):
        return EpochPlan((tuple(pieces),) if pieces else (), 1, total, whole=True)
    order = np.random.default_rng([spec.seed, epoch]).permutation(len(pieces))
    mine = _stretch([pieces[place] for place in order.tolist()], total, spec)
    share = sum(map(len, mine))
    if share * width <= spec.memory or spec.scratch is not None:
        return EpochPlan((tuple(mine),) if mine else (), 1, share, whole=False)
    largest = max(map(len, pieces))
    spread = max(1, min(_SPREAD, spec.memory // (largest * width) - 1))
    most = spec.memory // (spread + 1)
    groups = _groups(mine, width, most, first=_FIRST_GROUP if epoch == 0 else None)
    return EpochPlan(groups, spread, max(most // width, largest), whole=False)


def _stretch(pieces: list[RowPiece], total: int, spec: ShuffleSpec) -> list[RowPiece]:
    """The reader's share of all rows: a border may lie within a piece, and then two readers read it."""
    if spec.parts == 1:
        return pieces
    begin, end = (total * k // spec.parts for k in (spec.part, spec.part + 1))
    mine, at = [], 0
    for piece in pieces:
        low, high = max(begin - at, 0), min(end - at, len(piece))
        if low < high:
            mine.append(RowPiece(piece.shard, piece.start + low, piece.start + high))
        at += len(piece)
    return mine


def _groups(pieces: list[RowPiece], width: int, most: int, first: int | None) -> tuple[tuple[RowPiece, ...], ...]:
    """Pieces in the order they are given, those of a group as they are stored: its rows are permuted anyway."""
    found: list[tuple[RowPiece, ...]] = []
    group: list[RowPiece] = []
    limit, held = most if first is None else min(first, most), 0
    for piece in pieces:
        size = len(piece) * width
        if group and held + size > limit:
            found.append(tuple(sorted(group, key=_place)))
            group, held = [], 0
            limit = min(2 * limit, most)
        group.append(piece)
        held += size
    return (*found, tuple(sorted(group, key=_place))) if group else tuple(found)


def _place(piece: RowPiece) -> tuple[int, int]:
    return piece.shard, piece.start


def group_order(spec: ShuffleSpec, epoch: int, group: int, rows: int) -> npt.NDArray[np.int64]:
    """The permutation in which a group's selected rows are dealt out."""
    return np.random.default_rng([spec.seed, epoch, spec.part, group, 1]).permutation(rows)


def row_order(spec: ShuffleSpec, epoch: int, window: int, rows: int) -> npt.NDArray[np.int64]:
    """The permutation of a window's selected rows."""
    return np.random.default_rng([spec.seed, epoch, spec.part, window]).permutation(rows)
