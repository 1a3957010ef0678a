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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import SpecError

__all__ = [
    "MEMORY",
    "EpochOrder",
    "EpochPlan",
    "Places",
    "RowPieces",
    "ShuffleSpec",
    "group_order",
    "piece_rows",
    "plan_epoch",
    "row_order",
    "small_piece",
]

Places = npt.NDArray[np.int64]

MEMORY = 2 << 30
"""Bytes of rows in memory, unless told: 4,096 pieces of it are as large as chunks, so that each is read once."""

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
    memory: int = MEMORY
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


@dataclass(frozen=True, eq=False)
class RowPieces:
    """Pieces side by side: rows ``starts`` to ``stops`` of each one's shard. Arrays, because there may be millions."""

    shards: Places
    starts: Places
    stops: Places

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> RowPieces:
        return RowPieces(self.shards[which], self.starts[which], self.stops[which])

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.shards.tolist(), self.starts.tolist(), self.stops.tolist(), strict=True)

    @property
    def lengths(self) -> Places:
        """Rows of each."""
        return self.stops - self.starts

    @property
    def rows(self) -> int:
        """Of all of them."""
        return int(self.lengths.sum())

    def split(self, rows: int | None) -> RowPieces:
        """Each in parts of at most so many rows, as many as there are of that many in each and the rest."""
        if rows is None or not len(self) or int(self.lengths.max()) <= rows:
            return self
        parts = -(-self.lengths // rows)
        owner = np.repeat(np.arange(len(self)), parts)
        starts = self.starts[owner] + (np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)) * rows
        return RowPieces(self.shards[owner], starts, np.minimum(starts + rows, self.stops[owner]))

    def joined(self) -> RowPieces:
        """Neighbours as one."""
        same = (self.shards[1:] == self.shards[:-1]) & (self.starts[1:] == self.stops[:-1])
        first, last = np.concatenate([[True], ~same]), np.concatenate([~same, [True]])
        return RowPieces(self.shards[first], self.starts[first], self.stops[last])

    def stored(self) -> RowPieces:
        """In the order they are stored."""
        return self[np.lexsort((self.starts, self.shards))]

    @classmethod
    def cut(cls, shards: Sequence[int], rows: int) -> RowPieces:
        """Every shard in pieces of so many rows, the last of each shorter."""
        counts = np.asarray(shards, np.int64)
        return cls(np.arange(len(counts)), np.zeros_like(counts), counts)[counts > 0].split(rows)


@dataclass(frozen=True)
class EpochPlan:
    """One reader's groups of one epoch, in order. There are as many windows."""

    groups: tuple[RowPieces, ...]
    spread: int
    """Windows that each group's rows are dealt out over; those of the last groups over as many as are left."""
    room: int
    """Rows of the largest group of any epoch."""
    whole: bool
    """Whether the one group is everything there is: then its rows need not be read again for the next epoch."""

    @property
    def capacity(self) -> int:
        """Rows in memory at once: of the windows that the group being read is dealt out over, and of the one before."""
        return self.room if self.whole else (self.spread + 1) * (self.room + self.spread)

    def sources(self, window: int) -> range:
        """The groups of which a window has a part."""
        return range(max(0, window - self.spread + 1), window + 1)

    def share(self, rows: int, group: int, window: int) -> slice:
        """Which of a group's permuted rows are this window's.

        The last groups have fewer windows left, and larger parts in them: so an epoch does not end on what was read
        last alone, a few documents.
        """
        part, parts = window - group, min(self.spread, len(self.groups) - group)
        return slice(rows * part // parts, rows * (part + 1) // parts)


class EpochOrder:
    """Which row of an epoch comes when: the place of each in all that is given out, known before any is read."""

    def __init__(self, plan: EpochPlan, spec: ShuffleSpec, epoch: int) -> None:
        self.plan, self.epoch, self._spec = plan, epoch, spec
        self._rows = [group.rows for group in plan.groups]
        sizes = [sum(map(len, self._parts(window))) for window in range(len(plan.groups))]
        self.starts = list(accumulate(sizes, initial=0))
        """The place at which each window begins, and the end."""
        self._within: dict[int, Places] = {}

    def _parts(self, window: int) -> list[range]:
        """Which of their permuted rows a window takes of its groups, one after the other."""
        shares = [self.plan.share(self._rows[group], group, window) for group in self.plan.sources(window)]
        return [range(share.start, share.stop) for share in shares]

    def places(self, group: int) -> Places:
        """Of each row of a group, as they are stored."""
        order = group_order(self._spec, self.epoch, group, self._rows[group]) if self.plan.spread > 1 else None
        found = np.empty(self._rows[group], np.int64)
        for window in range(group, min(group + self.plan.spread, len(self.plan.groups))):
            parts = self._parts(window)
            at = group - self.plan.sources(window).start
            first, mine = sum(map(len, parts[:at])), slice(parts[at].start, parts[at].stop)
            within = self._permuted(window)[first : first + len(parts[at])]
            found[mine if order is None else order[mine]] = self.starts[window] + within
        self._within = {window: within for window, within in self._within.items() if window > group}
        return found

    def _permuted(self, window: int) -> Places:
        """Where in a window each of its rows comes."""
        if window not in self._within:
            order = row_order(self._spec, self.epoch, window, self.starts[window + 1] - self.starts[window])
            self._within[window] = np.empty_like(order)
            self._within[window][order] = np.arange(len(order))
        return self._within[window]


def piece_rows(
    widths: Sequence[int], memory: int, piece: int | None = None, chunk: int | None = None, *, local: bool = True
) -> int:
    """Rows of a piece, for taps whose rows have these bytes. ``piece``: the bytes of one, about, if not as usual.

    With little memory pieces are smaller, so that a window still has some of many places. From a bucket they are
    larger: each is a request, which costs the same whatever its size.

    What is read is checked in whole chunks, so pieces end where chunks do, or are parts of one. ``chunk``: the rows of
    one, a power of two; None where shards are cut at MiBs, as earlier versions wrote them.
    """
    total = sum(widths)
    largest, places = (_PIECE, _PLACES) if local else (2 * _PIECE, _PLACES // 8)
    usual = max(_CHUNK, min(largest, memory // places))
    if chunk is not None:
        rows = max(1, (usual if piece is None else piece) // total)
        if rows >= chunk or piece is None:
            return max(1, rows // chunk) * chunk
        return 1 << rows.bit_length() - 1
    if piece is not None:
        return max(1, piece // total)
    aligned = max(_CHUNK // (width & -width) if width & -width < _CHUNK else 1 for width in widths)
    if aligned * total <= _LARGEST_PIECE:
        return int(aligned * max(1, usual // (aligned * total)))
    return int(max(1, 2 * usual // total))


def small_piece(total: int, sample: int, spec: ShuffleSpec) -> int | None:
    """The bytes of pieces that take samples apart, where too few whole ones fit in memory; None: pieces of some MiB.

    ``total``: the bytes of all rows; ``sample``: those of one sample, on average.
    """
    permuted = spec.scratch is not None or total <= spec.memory * spec.parts
    if spec.piece is not None or permuted or sample * _PARTS <= spec.memory:
        return spec.piece
    wanted = max(_SMALLEST_PIECE, spec.memory // _PARTS)
    return wanted if wanted < _CHUNK else None


def plan_epoch(
    shards: Sequence[int],
    widths: Sequence[int],
    spec: ShuffleSpec,
    epoch: int,
    chunk: int | None = None,
    *,
    local: bool = True,
) -> EpochPlan:
    """The groups of reader ``spec.part`` in this epoch.

    ``shards``: the rows of each shard, in the dataset's order; ``widths``: the bytes of each tap's; ``chunk``
    and ``local``: see :func:`piece_rows`.
    """
    pieces = RowPieces.cut(shards, piece_rows(widths, spec.memory, spec.piece, chunk, local=local))
    total, width = sum(shards), sum(widths)
    if spec.parts == 1 and (total * width <= spec.memory or spec.scratch is not None):
        return EpochPlan((pieces,) if total else (), 1, total, whole=True)
    order = np.random.default_rng([spec.seed, epoch]).permutation(len(pieces))
    mine = _stretch(pieces[order], total, spec)
    share = mine.rows
    if share * width <= spec.memory or spec.scratch is not None:
        return EpochPlan((mine,) if share else (), 1, share, whole=False)
    spread, most = _dealt(spec.memory // width, int(pieces.lengths.max()))
    groups = _groups(mine, most, spread, first=_FIRST_GROUP // width if epoch == 0 else None)
    return EpochPlan(groups, spread, most, whole=False)


def _dealt(memory: int, largest: int) -> tuple[int, int]:
    """Over how many windows groups are dealt out, and their rows, at most and at least those of any piece."""
    for spread in range(_SPREAD, 1, -1):
        if largest <= _ending(memory // (spread + 1), spread):
            return spread, memory // (spread + 1)
    return 1, max(memory // 2, largest)


def _ending(most: int, spread: int) -> int:
    """Rows of an epoch's last groups: they have fewer windows, where what is left of those before comes too."""
    return most * (spread + 1) // (2 * spread)


def _stretch(pieces: RowPieces, total: int, spec: ShuffleSpec) -> RowPieces:
    """The reader's share of all rows: a border may lie within a piece, and then two readers read it."""
    if spec.parts == 1:
        return pieces
    begin, end = (total * k // spec.parts for k in (spec.part, spec.part + 1))
    ends = np.cumsum(pieces.lengths)
    at = ends - pieces.lengths
    low, high = np.maximum(begin - at, 0), np.minimum(end - at, pieces.lengths)
    mine = low < high
    return RowPieces(pieces.shards[mine], (pieces.starts + low)[mine], (pieces.starts + high)[mine])


def _groups(pieces: RowPieces, most: int, spread: int, first: int | None) -> tuple[RowPieces, ...]:
    """Pieces in the order they are given, those of a group as they are stored: its rows are permuted anyway.

    ``most``: rows of a group. ``first``: from how many on groups grow.
    """
    found: list[RowPieces] = []
    ends = np.cumsum(pieces.lengths)
    limit, begin, held, last = most if first is None else min(first, most), 0, 0, _ending(most, spread)
    while begin < len(pieces):
        room = limit if ends[-1] - held - limit >= spread * last else min(limit, last)
        end = max(begin + 1, int(np.searchsorted(ends, held + room, side="right")))
        found.append(pieces[begin:end].stored())
        begin, held = end, int(ends[end - 1])
        limit = min(2 * limit, most)
    return tuple(found)


def group_order(spec: ShuffleSpec, epoch: int, group: int, rows: int) -> Places:
    """The permutation in which a group's selected rows are dealt out."""
    return np.random.default_rng([spec.seed, epoch, spec.part, group, 1]).permutation(rows)


def row_order(spec: ShuffleSpec, epoch: int, window: int, rows: int) -> Places:
    """The permutation of a window's selected rows."""
    return np.random.default_rng([spec.seed, epoch, spec.part, window]).permutation(rows)
