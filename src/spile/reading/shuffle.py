"""Shuffled rows: a buffer that a source of blocks fills, and the iterator that draws batches from it.

The order is the business of :mod:`spile.reading.shuffle_order`.
"""

from __future__ import annotations

import math
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import StoreError, UserError
from spile.objects.folder import iterate_ahead
from spile.objects.local import reserve
from spile.reading.rows import RowBatch
from spile.reading.shuffle_order import BlockSource, Position, ReaderClosed, RowChunk, RowGroup, ShuffleOrder, row_keys
from spile.spec.amounts import counted
from spile.store.statistics import widened

_AHEAD = 3
"""Batches that are ready before they are asked for."""

_Array = npt.NDArray[Any]
_Numbers = npt.NDArray[np.int64]


class ShuffleBuffer:
    """Rows of several taps in numbered slots, in memory or in a file of the folder ``scratch``."""

    def __init__(self, types: Mapping[str, tuple[np.dtype[Any], int]], capacity: int, scratch: str | None) -> None:
        self._types, self._scratch = dict(types), scratch
        self._arrays = self._allocate(capacity)
        # Used from the end, and what was released last is used first: memory that was never needed is never touched.
        self._free: _Numbers = np.arange(capacity)[::-1].copy()
        self._free_count = capacity
        self._writers = 0
        self._changed = threading.Condition()

    def _allocate(self, capacity: int) -> dict[str, _Array]:
        shapes = {tap: (capacity, columns) for tap, (_, columns) in self._types.items()}
        if self._scratch is None:
            return {tap: np.empty(shape, _plain_type(self._types[tap][0])) for tap, shape in shapes.items()}
        found: dict[str, _Array] = {}
        try:
            Path(self._scratch).mkdir(parents=True, exist_ok=True)
            for tap, shape in shapes.items():
                # A file without a name: the system frees its space when the reader ends, however it ends. Its space is
                # reserved, because a disk that fills up would end the process with SIGBUS.
                with tempfile.TemporaryFile(dir=self._scratch, prefix=".spile-") as file:
                    kind = _plain_type(self._types[tap][0])
                    reserve(file.fileno(), math.prod(shape) * kind.itemsize)
                    found[tap] = np.memmap(file, kind, "w+", shape=shape)
        except OSError as error:
            raise StoreError(
                f"cannot write to scratch={self._scratch!r}",
                found=error.strerror or str(error),
                fix="use a folder with more room, or less memory",
            ) from error
        return found

    def put(self, rows: Mapping[str, Sequence[_Array]], count: int) -> _Numbers:
        """Copy ``count`` rows of each tap into free slots and return the slots. Safe to call from several threads."""
        with self._changed:
            while self._free_count < count:
                if self._writers:  # they write into the arrays that growing replaces
                    self._changed.wait()
                else:
                    self._grow(count)
            self._free_count -= count
            slots = self._free[self._free_count : self._free_count + count][::-1].copy()
            self._writers += 1
        try:
            in_line = count > 0 and int(slots[-1]) - int(slots[0]) == count - 1 and bool((np.diff(slots) == 1).all())
            for tap, arrays in rows.items():
                target, at = self._arrays[tap], 0
                for array in arrays:
                    end = at + len(array)
                    # Copying to consecutive slots is faster than copying to a list of slots.
                    where = slice(slots[at], slots[end - 1] + 1) if in_line and end > at else slots[at:end]
                    target[where] = _plain(array)
                    at = end
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()
        return slots

    def _grow(self, count: int) -> None:
        """Make room for more rows than were expected: samples may differ much in length."""
        old = len(self._free)
        more = max(count, old // 4)
        arrays = self._allocate(old + more)
        for tap, array in arrays.items():
            array[:old] = self._arrays[tap]
        self._arrays = arrays
        free = np.empty(old + more, np.int64)
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + more] = np.arange(old, old + more)[::-1]
        self._free, self._free_count = free, self._free_count + more

    def take(self, slots: _Numbers) -> dict[str, _Array]:
        """Return copies of the rows in some slots."""
        found = {}
        for tap, array in self._arrays.items():
            rows = np.empty((len(slots), array.shape[1]), array.dtype)
            # Every slot exists. With mode="raise" NumPy would write to a second array first, to protect ``out``.
            np.take(array, slots, axis=0, out=rows, mode="clip")
            found[tap] = rows.view(self._types[tap][0])
        return found

    def release(self, slots: _Numbers) -> None:
        """Make slots available for other rows."""
        with self._changed:
            self._free[self._free_count : self._free_count + len(slots)] = slots
            self._free_count += len(slots)


def _plain_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def _plain(rows: _Array) -> _Array:
    """View rows as integers: NumPy holds the interpreter's lock while it copies dtypes that it does not know."""
    return rows.view(_plain_type(rows.dtype))


@dataclass
class _Rows:
    """Rows in the buffer, in some order."""

    slots: _Numbers
    known: RowBatch | None

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, which: Any) -> _Rows:
        return _Rows(self.slots[which], None if self.known is None else self.known.take(which))

    @staticmethod
    def join(parts: list[_Rows]) -> _Rows:
        known = [part.known for part in parts if part.known is not None]
        return _Rows(np.concatenate([part.slots for part in parts]), RowBatch.join(known) if known else None)


_NO_ROWS = _Rows(np.zeros(0, np.int64), None)


class Shuffled(Iterator[Any]):
    """An iterator over shuffled batches.

    One tap gives arrays ``[batch_rows, d]``; several give a dict of arrays whose rows belong together; with context,
    each batch is a :class:`~spile.reading.rows.RowBatch`. The iterator ends after ``epochs``. With ``epochs=None`` it
    does not end, and batches continue over the end of an epoch, so that all of them are full.
    """

    def __init__(
        self,
        order: ShuffleOrder,
        *,
        epochs: int | None = 1,
        dtype: npt.DTypeLike | None = None,
        single: bool = True,
        start: Position = Position(),  # noqa: B008  immutable
        scratch: str | None = None,
    ) -> None:
        self._order, self._epochs = order, epochs
        self._how = None if dtype is None else np.dtype(dtype), single, scratch
        self._begin(start)

    def _begin(self, start: Position) -> None:
        self._position, stop = start, threading.Event()
        engine = _Engine(self._order, self._epochs, *self._how, stop)
        self._items: Iterator[tuple[Any, Position]] = iterate_ahead(engine.run(start), _AHEAD)
        # Also called at the end of the program, while threads can still be stopped in order.
        self._end = weakref.finalize(self, _close, stop, self._order.source, self._items)

    def __iter__(self) -> Shuffled:
        return self

    def __next__(self) -> Any:
        batch, self._position = next(self._items)
        return batch

    def __repr__(self) -> str:
        rows, at = self._order.plan.spec.batch_rows, self._position
        return f"<shuffled batches of {counted(rows, 'row')}, after batch {at.batches:,} of epoch {at.epoch}>"

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain JSON for ``shuffled(…, state=…)``."""
        return self._order.state(self._position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as torch and torchdata name it."""
        return self.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which a state of the same reader was taken."""
        position = self._order.position(state, self._epochs)
        self.close()
        self._begin(position)

    @property
    def quality(self) -> str:
        """How random the order is, in words."""
        return self._order.plan.describe()

    def close(self) -> None:
        """Stop reading ahead. The end of the program, or of this object, does the same."""
        self._end()

    def __enter__(self) -> Shuffled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(stop: threading.Event, source: BlockSource, items: Any) -> None:
    stop.set()
    source.cancel()
    if threading.current_thread() is threading.main_thread():
        items.close()
    else:
        # The garbage collector may call this in a thread that the reader waits for: waiting here would never end.
        threading.Thread(target=items.close, daemon=True).start()


class _Engine:
    """Makes the batches of a reader, in a thread of its own."""

    def __init__(
        self,
        order: ShuffleOrder,
        epochs: int | None,
        dtype: np.dtype[Any] | None,
        single: bool,
        scratch: str | None,
        stop: threading.Event,
    ) -> None:
        self._order, self._plan, self._source = order, order.plan, order.source
        self._epochs, self._dtype, self._single, self._scratch, self._stop = epochs, dtype, single, scratch, stop
        self._pending: list[_Rows] = []

    @cached_property
    def _buffer(self) -> ShuffleBuffer:
        plan = self._plan
        # Memory that is never needed is never touched. Of several readers each loads its next epoch during the last.
        rows = 2.2 * plan.rows / plan.spec.parts if plan.one_group else 1.06 * plan.spec.buffer_rows
        return ShuffleBuffer(self._source.types(), min(int(rows) + 1, plan.rows), self._scratch)

    def run(self, start: Position) -> Iterator[tuple[Any, Position]]:
        """Yield the batches from a position on, each with the position after it."""
        most, drop_last = self._plan.spec.batch_rows, self._plan.spec.drop_last
        batches, seen, epoch = start.batches, start.batches > 0, -1
        steps: int | None = None
        for window_epoch, number, last, origin, window in self._windows(start):
            if window_epoch != epoch:
                epoch, steps = window_epoch, self._order.steps(window_epoch)
            taken = start.taken if (epoch, number) == (start.epoch, start.window) else 0
            self._skip(window, taken)
            while taken < len(window) and batches != steps:
                seen = True
                part = window.take(slice(taken, taken + most - self._held))
                self._pending.append(part)
                taken += len(part)
                if self._held == most:
                    batches += 1
                    yield self._batch(), Position(epoch, batches, number, taken, origin)
            self._free(window.slots[taken:])
            if not last:
                continue
            if self._epochs is None and not seen:
                return  # no row is selected: later epochs have none either
            if self._epochs is not None:
                if self._held and not drop_last:
                    yield self._batch(), Position(epoch + 1)
                self._drop_pending()
            batches, seen = 0, False

    @property
    def _held(self) -> int:
        return sum(map(len, self._pending))

    def _skip(self, window: _Rows, taken: int) -> None:
        if taken > len(window):
            raise UserError("state", expected=f"at most {len(window)} rows of its window", found=taken)
        self._free(window.slots[:taken])

    def _free(self, slots: _Numbers) -> None:
        if len(slots) and not self._plan.keeps_rows:
            self._buffer.release(slots)

    def _drop_pending(self) -> None:
        for part in self._pending:
            self._free(part.slots)
        self._pending = []

    def _batch(self) -> Any:
        rows = _Rows.join(self._pending)
        taps = self._buffer.take(rows.slots)
        self._drop_pending()
        if self._dtype is not None:
            taps = {tap: widened(array, self._dtype) for tap, array in taps.items()}
        if self._source.window > 1:
            taps = {tap: array.reshape(len(array), self._source.window, -1) for tap, array in taps.items()}
        given: Any = next(iter(taps.values())) if self._single else taps
        return given if rows.known is None else replace(rows.known, rows=given)

    def _windows(self, start: Position) -> Iterator[tuple[int, int, bool, int, _Rows]]:
        """Yield epoch, number, whether it is the last, first sample and rows of each window.

        The next group loads while a window is given.
        """
        plan = self._plan
        loaded = iterate_ahead(self._groups(start), 1)
        held: dict[int, tuple[int, _Rows]] = {}
        try:
            for epoch, number, group, rows in loaded:
                first = start.window if epoch == start.epoch else 0
                if number == plan.sources(first).start:
                    held = {}
                held[number] = group.first, rows
                self._free(rows.slots[: plan.share(len(rows), number, max(number, first)).start])
                if number < first:
                    continue
                shares = [each.take(plan.share(len(each), at, number, group.last)) for at, (_, each) in held.items()]
                origin = held[plan.sources(number).start][0]
                held.pop(number - plan.spread + 1, None)
                window = _Rows.join(shares)
                yield epoch, number, group.last, origin, window.take(plan.row_order(epoch, number, len(window)))
        except ReaderClosed:
            return
        finally:
            loaded.close()  # type: ignore[attr-defined]

    def _groups(self, start: Position) -> Iterator[tuple[int, int, RowGroup, _Rows]]:
        """Yield epoch, number, group and rows of each group from the first one that the start needs."""
        kept: _Rows | None = None
        for epoch in count(start.epoch) if self._epochs is None else range(start.epoch, self._epochs):
            first = start.window if epoch == start.epoch else 0
            number = self._plan.sources(first).start
            empty = True
            for group in self._order.groups(epoch, number, start.sample if first else 0):
                rows = self._fill(epoch, number, group.load) if kept is None else kept
                kept = rows if self._plan.keeps_rows else None
                yield epoch, number, group, rows
                number, empty = number + 1, False
            if empty:  # there is no sample at all
                yield epoch, number, RowGroup(0, True, lambda _put: None), _NO_ROWS

    def _fill(self, epoch: int, number: int, load: Callable[[Callable[[RowChunk], None]], None]) -> _Rows:
        """Load a group into the buffer. Returns its rows in the order in which they are divided over windows."""
        found: list[tuple[_Numbers, _Rows]] = []

        def put(chunk: RowChunk) -> None:
            if self._stop.is_set():
                raise ReaderClosed
            slots = self._buffer.put(chunk.rows, len(chunk.samples))
            found.append((row_keys(chunk.samples, chunk.offsets), _Rows(slots, chunk.known)))

        load(put)
        if not found:
            return _NO_ROWS
        # Chunks arrive in any order; the order of rows must not depend on it.
        rows = _Rows.join([rows for _, rows in found])
        rows = rows.take(np.argsort(np.concatenate([keys for keys, _ in found]), kind="stable"))
        return rows.take(self._plan.deal_order(epoch, number, len(rows))) if self._plan.spread > 1 else rows
