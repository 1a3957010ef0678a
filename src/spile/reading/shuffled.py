"""``dataset.shuffled(…)``: rows in random order at the speed of the store, resumable at any batch."""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spile.data.background import ahead
from spile.errors import UserError
from spile.planning.amounts import size
from spile.planning.shuffle import EpochPlan, RowPiece, ShuffleSpec, plan_epoch, row_order
from spile.reading.read_pool import ReadPool
from spile.reading.rows import RowBatch
from spile.reading.selection import Selection
from spile.reading.window import TapSource, Window, WindowLoader

__all__ = ["ShuffleOrder", "ShufflePlace", "Shuffled"]

_THREADS = 8
_AHEAD = 3
"""Batches made before they are asked for."""

_Array = npt.NDArray[Any]
_Part = tuple[dict[str, _Array], RowBatch | None]


@dataclass(frozen=True)
class ShufflePlace:
    """After a batch: how many batches of the epoch were given, and how many rows of which window."""

    epoch: int = 0
    batches: int = 0
    window: int = 0
    taken: int = 0


@dataclass(frozen=True)
class ShuffleOrder:
    """What decides which row comes when: two readers with equal orders give equal batches."""

    source: TapSource
    spec: ShuffleSpec
    selection: Selection
    shards: tuple[tuple[str, int], ...]
    """Name and rows of each shard."""

    def plan(self, epoch: int) -> EpochPlan:
        """The windows of an epoch that are this reader's."""
        if not self.shards:
            return EpochPlan((), whole=True)
        widths = [dtype.itemsize * columns for dtype, columns in map(self.source.row_type, self.source.taps)]
        return plan_epoch([rows for _, rows in self.shards], widths, self.spec, epoch)

    def describe(self) -> dict[str, Any]:
        """What a state is of; compared when it is given back."""
        named = "\n".join(f"{name} {rows}" for name, rows in self.shards)
        return {
            "taps": list(self.source.taps),
            "shards": hashlib.sha256(named.encode()).hexdigest()[:16],
            "batch_rows": self.spec.batch_rows,
            "seed": self.spec.seed,
            "memory": self.spec.memory,
            "part": [self.spec.part, self.spec.parts],
            "drop_last": self.spec.drop_last,
            "scratch": self.spec.scratch is not None,
            "selection": self.selection.describe(),
        }

    def place(self, state: Mapping[str, Any]) -> ShufflePlace:
        """Where a state says to go on."""
        wanted = self.describe()
        wrong = [name for name, value in wanted.items() if name in state and state[name] != value]
        if wrong:
            raise UserError(
                "a state of another reader",
                expected=", ".join(f"{name} = {state[name]}" for name in wrong),
                found=", ".join(f"{name} = {wanted[name]}" for name in wrong),
                fix="give shuffled() what it was given before, or no state",
            )
        try:
            return ShufflePlace(*(int(state[name]) for name in ("epoch", "batches", "window", "taken")))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("state", expected="what state() returned", found=repr(state)) from error

    def selected(self, epoch: int) -> list[int]:
        """How many rows of each window are wanted, as the shards' tails tell."""
        windows = self.plan(epoch).windows
        if not self.selection.by_tail:
            return [sum(map(len, window)) for window in windows]
        return [sum(map(self._selected, window)) for window in windows]

    def _selected(self, piece: RowPiece) -> int:
        stream, shard = self.source.shards[piece.shard]
        return int(np.count_nonzero(self.selection.mask(stream, shard, piece.start, piece.stop)))

    def steps(self, epoch: int) -> int | None:
        """With ``drop_last``: the full batches that every reader has in this epoch; None: no such bound."""
        if not self.spec.drop_last or self.spec.parts == 1:
            return None
        shares = [replace(self, spec=replace(self.spec, part=part)) for part in range(self.spec.parts)]
        return min(sum(share.selected(epoch)) for share in shares) // self.spec.batch_rows

    def after(self, batches: int, *, endless: bool) -> ShufflePlace:
        """The place after so many batches from the start: no row is read for it."""
        if not batches:
            return ShufflePlace()
        if self.selection.by_norm:
            raise UserError("after", expected="no bound on norms, or a state", found=f"after={batches}")
        most = self.spec.batch_rows
        rows, left = batches * most, batches
        for epoch in count():
            windows = self.selected(epoch)
            total, steps = sum(windows), self.steps(epoch)
            if not total:
                return ShufflePlace(epoch)
            whole = total // most if self.spec.drop_last else -(-total // most)
            given = whole if steps is None else steps
            if (rows < total) if endless else (left < given):
                taken = rows if endless else left * most
                ends = list(accumulate(windows))
                number = bisect_right(ends, taken)
                return ShufflePlace(epoch, left, number, taken - (ends[number] - windows[number]))
            rows -= total
            left = batches - (batches * most - rows) // most if endless else left - given
        raise AssertionError("an endless count ended")

    def quality(self) -> str:
        """How random the order is, in words."""
        plan = self.plan(1)  # of a later epoch: the first one's windows grow from small ones
        share = "" if self.spec.parts == 1 else f" of this reader's share, one of {self.spec.parts}"
        if len(plan.windows) <= 1:
            return f"a full permutation{share}"
        pieces = sum(map(len, plan.windows))
        most = max(map(len, plan.windows))
        return (
            f"two levels{share}: {pieces:,} pieces in random order, rows permuted within windows of {most:,} pieces "
            f"({size(self.spec.memory // 2)})"
        )


class Shuffled(Iterator[Any]):
    """An iterator over shuffled batches.

    One tap gives arrays ``[batch_rows, d]``, several give a dict of them, row-aligned; with ``context`` each batch is a
    :class:`~spile.reading.rows.RowBatch`. ``state()`` is what to give to ``shuffled(…, state=…)`` to go on after the
    last batch given. Ends after ``epochs``; batches of an endless one (None) are all full, over the borders of epochs.
    """

    def __init__(
        self,
        order: ShuffleOrder,
        *,
        epochs: int | None,
        dtype: npt.DTypeLike | None,
        context: bool,
        single: bool,
        start: ShufflePlace,
    ) -> None:
        self._order, self._place = order, start
        pool = ReadPool(_THREADS)
        loader = WindowLoader(order.source, order.selection, pool, context=context, scratch=order.spec.scratch)
        engine = _Engine(order, loader, epochs, np.dtype(dtype) if dtype is not None else None, single)
        self._items: Iterator[tuple[Any, ShufflePlace]] = ahead(engine.run(self._place), _AHEAD)
        # Also at the end of the program, while threads can still be told: a daemon thread that is cut off prints.
        self._end = weakref.finalize(self, _end, self._items, pool)

    def __iter__(self) -> Shuffled:
        return self

    def __next__(self) -> Any:
        batch, self._place = next(self._items)
        return batch

    def state(self) -> dict[str, Any]:
        """After the last batch given: plain JSON."""
        place = {"epoch": self._place.epoch, "batches": self._place.batches}
        return {**place, "window": self._place.window, "taken": self._place.taken, **self._order.describe()}

    @property
    def quality(self) -> str:
        """How random the order is, in words."""
        return self._order.quality()

    def close(self) -> None:
        """Stop reading ahead. The end of the program, and of the iterator's own life, do it too."""
        self._end()

    def __enter__(self) -> Shuffled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(items: Any, pool: ReadPool) -> None:
    pool.close()  # first: whoever waits for a read is let go
    items.close()


class _Turn(NamedTuple):
    """A window's turn."""

    epoch: int
    number: int
    last: bool
    """Of its epoch."""
    whole: bool
    pieces: tuple[RowPiece, ...]


class _Engine:
    """Makes batches, in a thread of its own; knows nothing of who reads them."""

    def __init__(
        self,
        order: ShuffleOrder,
        loader: WindowLoader,
        epochs: int | None,
        dtype: np.dtype[Any] | None,
        single: bool,
    ) -> None:
        self._order, self._loader, self._epochs, self._dtype, self._single = order, loader, epochs, dtype, single
        self._loaded: Window | None = None
        """The one window that is everything, kept over epochs."""

    def run(self, place: ShufflePlace) -> Iterator[tuple[Any, ShufflePlace]]:
        """Batches from a place on, each with the place after it."""
        most = self._order.spec.batch_rows
        waiting: list[_Part] = []
        held, batches, found = 0, place.batches, place.taken
        steps = self._order.steps(place.epoch)
        for turn, window in self._windows(place):
            order = row_order(self._order.spec, turn.epoch, turn.number, len(window.chosen))
            taken = place.taken if (turn.epoch, turn.number) == (place.epoch, place.window) else 0
            found += len(order)
            while taken < len(order) and batches != steps:
                take = min(most - held, len(order) - taken)
                waiting.append(window.gather(order[taken : taken + take]))
                taken, held = taken + take, held + take
                if held == most:
                    batches += 1
                    yield self._finished(waiting), ShufflePlace(turn.epoch, batches, turn.number, taken)
                    waiting, held = [], 0
            if not turn.last:
                continue
            if self._epochs is None and not found:
                return  # nothing is selected: an endless search would find no more
            if self._epochs is not None and held and not self._order.spec.drop_last:
                yield self._finished(waiting), ShufflePlace(turn.epoch + 1)
            if self._epochs is not None:
                waiting, held = [], 0
            batches, found, steps = 0, 0, self._order.steps(turn.epoch + 1)

    def _windows(self, place: ShufflePlace) -> Iterator[tuple[_Turn, Window]]:
        """The windows from a place on, the next one on its way while one is used."""
        turns = self._turns(place)
        turn = next(turns, None)
        coming = None if turn is None else self._loader.begin(turn.pieces)
        while turn is not None:
            window = self._loaded
            if window is None and coming is not None:
                window = coming.result()
            assert window is not None  # noqa: S101  for the type checker
            following = next(turns, None)
            if turn.whole:
                self._loaded = window
            elif following is not None:
                coming = self._loader.begin(following.pieces)
            yield turn, window
            turn = following

    def _turns(self, place: ShufflePlace) -> Iterator[_Turn]:
        if not any(rows for _, rows in self._order.shards):
            return
        for epoch in count(place.epoch) if self._epochs is None else range(place.epoch, self._epochs):
            plan = self._order.plan(epoch)
            first = place.window if epoch == place.epoch else 0
            for number in range(first, len(plan.windows)):
                last = number + 1 == len(plan.windows)
                yield _Turn(epoch, number, last, plan.whole, plan.windows[number])

    def _finished(self, parts: list[_Part]) -> Any:
        """One batch of what one or several windows gave."""
        rows = {tap: _joined([part[tap] for part, _ in parts]) for tap in self._order.source.taps}
        if self._dtype is not None:
            rows = {tap: array.astype(self._dtype, copy=False) for tap, array in rows.items()}
        given: Any = next(iter(rows.values())) if self._single else rows
        known = [known for _, known in parts if known is not None]
        return replace(RowBatch.join(known), rows=given) if known else given


def _joined(parts: list[_Array]) -> _Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
