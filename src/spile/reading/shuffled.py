"""``dataset.shuffled(…)``: rows in random order at the speed of the store, resumable at any batch."""

from __future__ import annotations

import hashlib
import os
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
from spile.planning.shuffle import EpochPlan, RowPiece, ShuffleSpec, group_order, plan_epoch, row_order
from spile.reading.read_pool import ReadPool
from spile.reading.rows import RowBatch
from spile.reading.selection import Selection
from spile.reading.window import Group, GroupLoader, LoadingGroup, TapSource, Window
from spile.store.statistics import widened

__all__ = ["ShuffleOrder", "ShufflePlace", "Shuffled"]

_THREADS = 8
_AHEAD = 3
"""Batches made before they are asked for."""

_ORDER = 2
"""Of the two-level shuffle: a state of another version's would go on with other rows."""

_Array = npt.NDArray[Any]


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
        """What is this reader's of an epoch."""
        if not self.shards:
            return EpochPlan((), 1, 0, whole=True)
        return plan_epoch([rows for _, rows in self.shards], self.source.widths, self.spec, epoch)

    def comes_back(self, epochs: int | None) -> bool:
        """Whether rows are read again, and may still be in the system's page cache by then."""
        if epochs == 1 or not self.shards or self.plan(0).whole:
            return False
        size = sum(rows for _, rows in self.shards) * self.source.width
        return size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

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
            "order": _ORDER,
            "piece": self.spec.piece,
            "selection": self.selection.describe(),
        }

    def place(self, state: Mapping[str, Any]) -> ShufflePlace:
        """Where a state says to go on."""
        wanted = self.describe()
        state = {"order": 1, "piece": None, **state}
        wrong = [name for name, value in wanted.items() if name in state and state[name] != value]
        if wrong == ["order"] and len(self.plan(0).groups) <= 1:  # a full permutation is what it was
            wrong = []
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
        plan = self.plan(epoch)
        if not self.selection.by_tail:
            groups = [sum(map(len, group)) for group in plan.groups]
        else:
            groups = [sum(map(self._selected, group)) for group in plan.groups]
        shares = [
            [plan.share(groups[group], group, number) for group in plan.sources(number)]
            for number in range(plan.windows)
        ]
        return [sum(share.stop - share.start for share in each) for each in shares]

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
        plan = self.plan(1)  # of a later epoch: the first one's groups grow from small ones
        share = "" if self.spec.parts == 1 else f" of this reader's share, one of {self.spec.parts}"
        if len(plan.groups) <= 1:
            return f"a full permutation{share}"
        pieces = sum(map(len, plan.groups))
        most = max(map(len, plan.groups)) * plan.spread
        held = size(self.spec.memory * plan.spread // plan.slots)
        return (
            f"two levels{share}: {pieces:,} pieces in random order, rows drawn from {most:,} of them at a time "
            f"({held}), which change gradually"
        )


class Shuffled(Iterator[Any]):
    """An iterator over shuffled batches.

    One tap gives arrays ``[batch_rows, d]``, several give a dict of them, row-aligned; with ``context`` each batch is a
    :class:`~spile.reading.rows.RowBatch`. ``state()`` is what to give to ``shuffled(…, state=…)`` to go on after the
    last batch given. Ends after ``epochs``; batches of an endless one (None) are all full, over the borders of epochs.
    Where all rows are in memory, the batches of the last epoch are parts of it: copy one that is to be kept alone.
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
        page_cache: bool | None,
    ) -> None:
        self._order, self._place = order, start
        pool = ReadPool(_THREADS)
        past_cache = not (order.comes_back(epochs) if page_cache is None else page_cache)
        loader = GroupLoader(
            order.source, order.selection, pool, context=context, scratch=order.spec.scratch, past_cache=past_cache
        )
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


class _Engine:
    """Makes batches, in a thread of its own; knows nothing of who reads them."""

    def __init__(
        self,
        order: ShuffleOrder,
        loader: GroupLoader,
        epochs: int | None,
        dtype: np.dtype[Any] | None,
        single: bool,
    ) -> None:
        self._order, self._loader, self._epochs, self._dtype, self._single = order, loader, epochs, dtype, single
        self._everything: Group | None = None
        """The one group that all rows are in, kept over epochs."""
        self._planned: dict[int, EpochPlan] = {}

    def run(self, place: ShufflePlace) -> Iterator[tuple[Any, ShufflePlace]]:
        """Batches from a place on, each with the place after it."""
        most = self._order.spec.batch_rows
        batch = _Batch(most)
        batches, found = place.batches, place.taken
        steps = self._order.steps(place.epoch)
        for turn, window in self._windows(place):
            order = row_order(self._order.spec, turn.epoch, turn.number, len(window))
            taken = place.taken if (turn.epoch, turn.number) == (place.epoch, place.window) else 0
            found += len(order)
            while taken < len(order) and batches != steps:
                taken += batch.take(window, order[taken:])
                if batch.held == most:
                    batches += 1
                    yield self._finished(batch), ShufflePlace(turn.epoch, batches, turn.number, taken)
                    batch = _Batch(most)
            if not turn.last:
                continue
            if self._epochs is None and not found:
                return  # nothing is selected: an endless search would find no more
            if self._epochs is not None and batch.held and not self._order.spec.drop_last:
                yield self._finished(batch), ShufflePlace(turn.epoch + 1)
            if self._epochs is not None:
                batch = _Batch(most)
            batches, found, steps = 0, 0, self._order.steps(turn.epoch + 1)

    def _windows(self, place: ShufflePlace) -> Iterator[tuple[_Turn, Window]]:
        """The windows from a place on. A window's last group was on its way while the one before was given out."""
        loaded = self._groups(place)
        for epoch, plan in self._plans(place.epoch):
            held: dict[int, Group] = {}
            for number in range(place.window if epoch == place.epoch else 0, plan.windows):
                held.pop(number - plan.spread, None)
                for group in plan.sources(number):
                    if group not in held:
                        held[group] = self._everything if self._everything is not None else next(loaded)
                parts = [(group, plan.share(len(group.places), at, number)) for at, group in held.items()]
                turn = _Turn(epoch, number, last=number + 1 == plan.windows)
                last = plan.whole and epoch + 1 == self._epochs
                yield turn, Window(self._loader.buffers, parts, last=last)

    def _groups(self, place: ShufflePlace) -> Iterator[Group]:
        """The groups from the first that a place needs, each begun when the one before it is taken."""
        coming: tuple[EpochPlan, int, int, LoadingGroup] | None = None
        for epoch, plan in self._plans(place.epoch):
            first = plan.sources(place.window).start if epoch == place.epoch else 0
            for number in range(first, len(plan.groups)):
                begun = self._loader.begin(plan.groups[number], plan.room, plan.slots, self._known_order(plan, epoch))
                if coming is not None:
                    yield self._dealt(*coming)
                coming = plan, epoch, number, begun
            if plan.whole:
                break
        if coming is not None:
            yield self._dealt(*coming)

    def _known_order(self, plan: EpochPlan, epoch: int) -> npt.NDArray[np.int64] | None:
        """The order of a full permutation, where it is known before rows are read."""
        if len(plan.groups) > 1 or not self._loader.orders:
            return None
        return row_order(self._order.spec, epoch, 0, sum(map(len, plan.groups[0])))

    def _dealt(self, plan: EpochPlan, epoch: int, number: int, loading: LoadingGroup) -> Group:
        group = loading.result()
        if plan.whole:
            self._everything = group
        elif plan.spread > 1:
            group.deal(group_order(self._order.spec, epoch, number, len(group.places)))
        return group

    def _plans(self, first: int) -> Iterator[tuple[int, EpochPlan]]:
        if not any(rows for _, rows in self._order.shards):
            return
        for epoch in count(first) if self._epochs is None else range(first, self._epochs):
            if epoch not in self._planned:  # asked for twice: for what is read, and for what is given out
                self._planned = {epoch: self._order.plan(epoch)} | {
                    number: plan for number, plan in self._planned.items() if number == epoch - 1
                }
            yield epoch, self._planned[epoch]

    def _finished(self, batch: _Batch) -> Any:
        rows = {tap: array[: batch.held] for tap, array in batch.rows.items()}
        if self._dtype is not None:
            rows = {tap: widened(array, self._dtype) for tap, array in rows.items()}
        given: Any = next(iter(rows.values())) if self._single else rows
        return replace(RowBatch.join(batch.known), rows=given) if batch.known else given


class _Batch:
    """Rows of one window, or of as many as it takes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self.rows: dict[str, _Array] = {}
        self.known: list[RowBatch] = []

    def take(self, window: Window, order: npt.NDArray[np.int64]) -> int:
        """As many rows as are wanted, or as there are: so many."""
        order = order[: self._most - self.held]
        if len(order) == self._most:
            self.rows, known = window.gather(order)
        else:
            self.rows = self.rows or window.room(self._most)
            part = {tap: rows[self.held : self.held + len(order)] for tap, rows in self.rows.items()}
            known = window.gather_into(part, order)
        self.held += len(order)
        self.known += [] if known is None else [known]
        return len(order)
