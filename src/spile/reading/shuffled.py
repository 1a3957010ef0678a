"""``dataset.shuffled(…)``: rows in random order at the speed of the store, resumable at any batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spile.data.background import ahead
from spile.objects.environment import this_machines_cores
from spile.planning.shuffle import EpochOrder, EpochPlan, Places, row_order
from spile.reading.loading import GroupLoader, LoadingGroup
from spile.reading.opening import ShardOpener
from spile.reading.order import ShuffleOrder, ShufflePlace
from spile.reading.read_pool import ReadPool
from spile.reading.ring import BatchRows, Group, RowRing, Window
from spile.reading.rows import RowBatch
from spile.store.statistics import widened

__all__ = ["Shuffled"]

_BUCKET_THREADS = (8, 16)
"""That read from a bucket, at least and at most: each waits for its answer, and two cores do not keep up with more."""
_DISK_THREADS = 4
"""That read from a disk, where each asks for many parts at a time: more wait for the interpreter."""
_AHEAD = 3
"""Batches made before they are asked for."""
_LENT = 8
"""Batches that are out at a time, at most: who keeps more of them is given copies."""

_Array = npt.NDArray[Any]


class Shuffled(Iterator[Any]):
    """An iterator over shuffled batches.

    One tap gives arrays ``[batch_rows, d]``, several give a dict of them, row-aligned; with ``context`` each batch is a
    :class:`~spile.reading.rows.RowBatch`. ``state()`` is what to give to ``shuffled(…, state=…)`` to go on after the
    last batch given. Ends after ``epochs``; batches of an endless one (None) are all full, over the borders of epochs.
    A batch is memory that rows were read into, lent: it is used again when nobody has the batch any more.
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
        pool = ReadPool(_DISK_THREADS if order.source.local else _bucket_threads())
        opener = ShardOpener(order.source.taps)
        past_cache = not (order.comes_back(epochs) if page_cache is None else page_cache)
        loader = GroupLoader(order.source, order.selection, pool, opener, context=context, past_cache=past_cache)
        engine = _Engine(order, loader, epochs, np.dtype(dtype) if dtype is not None else None, single)
        self._items: Iterator[tuple[Any, ShufflePlace]] = ahead(engine.run(self._place), _AHEAD)
        # Also at the end of the program, while threads can still be told: a daemon thread that is cut off prints.
        self._end = weakref.finalize(self, _end, self._items, pool, opener)

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


def _bucket_threads() -> int:
    return min(max(len(this_machines_cores()), _BUCKET_THREADS[0]), _BUCKET_THREADS[1])


def _end(items: Any, pool: ReadPool, opener: ShardOpener) -> None:
    pool.close()  # first: whoever waits for a read is let go
    opener.close()
    items.close()


class _Turn(NamedTuple):
    """A window's turn."""

    epoch: int
    number: int
    last: bool
    """Of its epoch."""


class _Epoch(NamedTuple):
    """An epoch's order, and its first place in all that this reader gives out."""

    order: EpochOrder
    base: int

    def bounds(self, window: int) -> tuple[int, int]:
        """The places of a window's first row and of the one after its last."""
        begin, end = self.order.starts[window : window + 2]
        return self.base + begin, self.base + end

    def end_of(self, group: int) -> int:
        """The place after the last window that a group is dealt out over."""
        return self.bounds(min(group + self.order.plan.spread, len(self.order.plan.groups)) - 1)[1]


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
        self._ring: RowRing | None = None
        self._known: dict[int, _Epoch] = {}

    def run(self, place: ShufflePlace) -> Iterator[tuple[Any, ShufflePlace]]:
        """Batches from a place on, each with the place after it."""
        most = self._order.spec.batch_rows
        batch: BatchRows | None = None
        batches, found = place.batches, place.taken
        steps = self._order.steps(place.epoch)
        for turn, window in self._windows(place):
            taken = place.taken if (turn.epoch, turn.number) == (place.epoch, place.window) else 0
            found += len(window)
            while taken < len(window) and batches != steps:
                batch = batch or BatchRows(window.ring, most)
                taken += batch.take(window, taken)
                if batch.held == most:
                    batches += 1
                    done, batch = batch, None
                    yield self._finished(done), ShufflePlace(turn.epoch, batches, turn.number, taken)
            if not turn.last:
                continue
            if self._epochs is None and not found:
                return  # nothing is selected: an endless search would find no more
            if self._epochs is not None and batch is not None and not self._order.spec.drop_last:
                yield self._finished(batch), ShufflePlace(turn.epoch + 1)
            if self._epochs is not None:
                batch = None
            batches, found, steps = 0, 0, self._order.steps(turn.epoch + 1)

    def _windows(self, place: ShufflePlace) -> Iterator[tuple[_Turn, Window]]:
        """The windows from a place on. A window's last group was on its way while the one before was given out."""
        loaded = self._groups(place)
        everything: Group | None = None
        for epoch, known in self._known_epochs(place):
            plan = known.order.plan
            held: dict[int, Group] = {0: everything} if everything is not None else {}
            for number in range(place.window if epoch == place.epoch else 0, len(plan.groups)):
                turn = _Turn(epoch, number, last=number + 1 == len(plan.groups))
                stays, memory = plan.whole and epoch + 1 != self._epochs, self._memory(plan)
                held.pop(number - plan.spread, None)
                if not plan.whole:
                    memory.release(known.bounds(number)[0])
                for group in plan.sources(number):
                    if group not in held:
                        held[group] = next(loaded)
                groups = list(held.values())
                if everything is not None or self._order.spec.scratch is not None:
                    order = row_order(self._order.spec, epoch, 0, len(groups[0].places))
                    yield turn, Window.permuted(memory, groups[0], order)
                else:
                    yield turn, Window.between(memory, groups, *known.bounds(number), stays=stays)
            everything = held[0] if plan.whole else None

    def _groups(self, place: ShufflePlace) -> Iterator[Group]:
        """The groups from the first that a place needs, each begun when the one before it is taken."""
        coming: LoadingGroup | None = None
        for epoch, known in self._known_epochs(place):
            plan = known.order.plan
            begin = plan.sources(place.window).start if epoch == place.epoch else 0
            first = known.bounds(place.window)[0] if epoch == place.epoch and not plan.whole else 0
            for number in range(begin, len(plan.groups)):
                places, memory = known.base + self._places(known.order, number), self._memory(plan)
                memory.reserve(max(first, known.bounds(number)[0]), known.end_of(number))
                following = islice(plan.groups, number + 1, None)
                begun = self._loader.begin(memory, plan.groups[number], places, first, following)
                if coming is not None:
                    yield coming.result()
                coming = begun
            if plan.whole:
                break
        if coming is not None:
            yield coming.result()

    def _places(self, order: EpochOrder, group: int) -> Places:
        """Where a group's rows go. On a scratch disk as they are stored: it is written from front to back."""
        stored = self._order.spec.scratch is not None
        return np.arange(order.plan.groups[group].rows) if stored else order.places(group)

    def _memory(self, plan: EpochPlan) -> RowRing:
        if self._ring is None:
            spec, spare = self._order.spec, None if plan.whole else _LENT
            self._ring = RowRing(self._order.source, plan.capacity, spec.batch_rows, spare, spec.scratch)
        return self._ring

    def _known_epochs(self, start: ShufflePlace) -> Iterator[tuple[int, _Epoch]]:
        """From a place on. Batches begin at multiples of their rows, as long as all rows are wanted."""
        if not any(rows for _, rows in self._order.shards):
            return
        base, most = 0, self._order.spec.batch_rows
        for epoch in count(start.epoch) if self._epochs is None else range(start.epoch, self._epochs):
            if epoch not in self._known:  # asked for twice: for what is read, and for what is given out
                order = EpochOrder(self._order.plan(epoch), self._order.spec, epoch)
                if epoch == start.epoch:
                    base = -(order.starts[start.window] + start.taken) % most
                self._known = {number: known for number, known in self._known.items() if number == epoch - 1}
                self._known[epoch] = _Epoch(order, base)
            known = self._known[epoch]
            yield epoch, known
            base = known.base + known.order.starts[-1]
            base += -base % most if self._epochs is not None else 0

    def _finished(self, batch: BatchRows) -> Any:
        rows = batch.rows()
        if self._dtype is not None:
            rows = {tap: widened(array, self._dtype) for tap, array in rows.items()}
        given: Any = next(iter(rows.values())) if self._single else rows
        return replace(RowBatch.join(batch.known), rows=given) if batch.known else given
