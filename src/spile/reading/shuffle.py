"""Shuffled rows: the order of a reader, its state, and the buffer that batches are drawn from.

The samples of a dataset, ordered by stream and sample index, are divided into *shuffle blocks*: several consecutive
samples, or a part of one sample. Every epoch permutes all blocks and deals them out to the readers in turn. A reader
loads its blocks in groups. The rows of a group are permuted and divided over the next twelve windows; a window is the
permuted rows that up to twelve groups contribute to it. Batches are consecutive rows of the windows. So rows are drawn
from a *shuffle buffer* whose content changes by one group at a time. If all rows of a reader fit in the buffer, there
is one group and the order is a full permutation.

With the order ``data``, which rows that are not stored can have too, samples are not permuted: a group is consecutive
samples.

The order depends on the samples, the number of rows of each, the selection and the plan, all of which count rows. It
does not depend on the width or dtype of a row, nor on how rows are divided into shards.
"""

from __future__ import annotations

import math
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from json import dumps
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from spile.errors import SpecError, UserError
from spile.objects.folder import iterate_ahead, read_ahead
from spile.reading.rows import BlockSource, Read, ReaderClosed, RowBatch, RowGroup
from spile.spec.amounts import counted
from spile.store.statistics import widened

MEMORY = 2 << 30
"""Default size of the shuffle buffer in bytes."""
RowOrder = Literal["random", "data"]
_SPREAD = 12  # windows over which the rows of a group are divided
_BLOCKS = 4096
"""Blocks that the buffer holds. With fewer, a sparse autoencoder trained on the rows ends measurably above one trained
on a full permutation (docs/performance.md)."""
_REMOTE_BLOCKS = 512  # the same for a bucket: each block costs a request
_MIN_PART_ROWS = 64  # rows of a part of a sample, at least: smaller parts cost more to read than they improve the order
_MIN_BLOCKS = 64
"""Blocks of each of several readers, at least: readers have equally many blocks, and about equally many rows."""
_AHEAD = 3  # batches that are prepared in advance

_Array = npt.NDArray[Any]
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShufflePlan:
    """Blocks, groups and windows of a reader: pure arithmetic."""

    buffer_rows: int
    """Rows that the shuffle buffer holds."""
    batch_rows: int = 4096
    seed: int = 0
    part: int = 0
    parts: int = 1
    """This reader is number ``part`` of ``parts``; their rows are disjoint and together complete."""
    drop_last: bool = False
    """Every reader gives the same number of full batches in an epoch; the remaining rows are left out."""
    order: RowOrder = "random"
    samples: int = 0
    rows: int = 0
    """Samples of the dataset and their rows before the selection; not used in the order of the data."""
    remote: bool = False
    """Whether each block costs a network request."""
    whole_samples: bool = False
    """Whether samples must not be divided, because rows come with their predecessors."""

    def __post_init__(self) -> None:
        for name in ("batch_rows", "buffer_rows", "parts"):
            if getattr(self, name) < 1:
                raise SpecError(name, expected="at least 1", found=getattr(self, name))
        if self.order not in get_args(RowOrder):
            raise SpecError("order", expected=f"one of {', '.join(get_args(RowOrder))}", found=repr(self.order))
        if self.seed < 0:
            raise SpecError("seed", expected="at least 0", found=self.seed)
        if not 0 <= self.part < self.parts:
            raise SpecError("part", expected="(k, n) with k from 0 to n - 1", found=(self.part, self.parts))

    @cached_property
    def one_group(self) -> bool:
        """Whether all rows of this reader fit in the buffer: the order is then a full permutation."""
        margin = 1.0 if self.parts == 1 else 1.1  # readers have equally many blocks, not equally many rows
        return self.order == "random" and self.rows / self.parts * margin <= self.buffer_rows

    @property
    def keeps_rows(self) -> bool:
        """Whether the one group is the whole dataset, so that later epochs need not load it again."""
        return self.one_group and self.parts == 1

    @cached_property
    def block_shape(self) -> tuple[int, int]:
        """Samples per block, and parts per sample; at least one of them is 1."""
        if self.order == "data":
            return 1, 1
        mean = max(1.0, self.rows / max(1, self.samples))
        wanted = max(min(mean, _MIN_PART_ROWS), self.buffer_rows / (_REMOTE_BLOCKS if self.remote else _BLOCKS))
        wanted = mean if self.one_group else wanted
        if self.parts > 1:
            wanted = max(1.0, min(wanted, self.rows / self.parts / _MIN_BLOCKS))
        if wanted >= mean or self.whole_samples:
            return max(1, int(wanted / mean)), 1
        return 1, math.ceil(mean / wanted)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of the whole dataset."""
        samples, parts = self.block_shape
        return -(-self.samples // samples) * parts

    @property
    def spread(self) -> int:
        """Windows over which the rows of a group are divided."""
        return 1 if self.one_group else _SPREAD

    @property
    def group_rows(self) -> int:
        """Rows of a group before the selection.

        Rows leave the buffer as they are given, so (spread + 1) / 2 groups are in it on average, and one that loads.
        """
        return max(1, int(self.buffer_rows / (_SPREAD / 2 + 1.5)))

    @cached_property
    def group_blocks(self) -> int:
        return max(1, self.blocks if self.one_group else self.group_rows * self.blocks // max(1, self.rows))

    @cached_property
    def groups(self) -> int:
        """Groups of this reader in every epoch; there are as many windows. In the order of the data: unknown, many."""
        if self.order == "data":
            return 1 << 52
        return -(-len(range(self.part, self.blocks, self.parts)) // self.group_blocks)

    def block_order(self, epoch: int, part: int) -> _Numbers:
        """Return the order of a reader's blocks in an epoch."""
        return _permutation(self.seed, epoch, self.blocks)[part :: self.parts]

    def group(self, epoch: int, number: int) -> tuple[_Numbers, _Numbers]:
        """Return the samples of a group, and for each the number of its part."""
        begin = number * self.group_blocks
        return self.members(np.sort(self.block_order(epoch, self.part)[begin : begin + self.group_blocks]))

    def members(self, blocks: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the samples of some blocks, and for each the number of its part."""
        size, parts = self.block_shape
        first, part = np.divmod(blocks, parts)
        samples = (first[:, None] * size + np.arange(size)).reshape(-1)
        inside = samples < self.samples
        return samples[inside], np.repeat(part, size)[inside]

    def share(self, rows: int, age: int, last: bool = False) -> slice:
        """Return the part of a group's rows that belongs to the window ``age`` windows after the group's own.

        The last window of an epoch gets all remaining rows.
        """
        return slice(rows * age // self.spread, rows if last else rows * (age + 1) // self.spread)

    def window_rows(self, epoch: int, counts: _Numbers) -> list[int]:
        """Return the number of selected rows of each window; ``counts``: those of each part of each sample."""
        windows = [0] * self.groups
        for group in range(self.groups):
            rows, left = int(counts[self.group(epoch, group)].sum()), self.groups - group
            for age in range(min(self.spread, left)):
                share = self.share(rows, age, age + 1 == left)
                windows[group + age] += share.stop - share.start
        return windows

    def full_batches(self, epoch: int, counts: _Numbers) -> int:
        """Return how many full batches every one of the readers has in an epoch."""
        shares = (self.members(self.block_order(epoch, part)) for part in range(self.parts))
        return min(int(counts[share].sum()) for share in shares) // self.batch_rows

    def position_after(self, batches: int, counts: _Numbers, *, endless: bool) -> Position:
        """Return the position after this many batches from the start."""
        rows, epoch = batches * self.batch_rows, 0
        while True:
            ends = np.cumsum([0, *self.window_rows(epoch, counts)])
            epoch_rows = total = int(ends[-1])
            if not endless:  # the last batch of an epoch may have fewer rows; it counts as a full one
                steps = self.full_batches(epoch, counts) if self.drop_last else -(-total // self.batch_rows)
                epoch_rows = self.batch_rows * steps
            if not epoch_rows:
                raise UserError("after", expected="an epoch with at least one batch", found=f"{total} rows")
            if rows < epoch_rows:
                window = int(np.searchsorted(ends, rows, side="right")) - 1
                return Position(epoch, -(-rows // self.batch_rows), window, rows - int(ends[window]))
            rows, epoch = rows - epoch_rows, epoch + 1

    def permutation(self, epoch: int, number: int, rows: int, *, of_group: bool = False) -> _Numbers:
        """Return the order of the rows of a window, or that in which the rows of a group are divided over windows."""
        return np.random.default_rng([self.seed, epoch, self.part, number, of_group]).permutation(rows)

    def describe(self) -> str:
        """Return in words how random the order is."""
        share = "" if self.parts == 1 else f" of this reader's share, one of {self.parts}"
        if self.one_group:
            return f"a full permutation{share}"
        if self.order == "data":
            drawn = f"rows drawn from about {self.buffer_rows:,} consecutive rows at a time"
            return f"in the order of the data{share}: {drawn}, which change gradually"
        size, parts = self.block_shape
        unit = f"{size:,} samples" if size > 1 else "one sample" if parts == 1 else f"1/{parts} of a sample"
        drawn = f"rows drawn from {min(self.group_blocks * self.spread, self.blocks):,} blocks at a time"
        return f"two levels{share}: {self.blocks:,} blocks of {unit} in random order, {drawn}, which change gradually"


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, blocks: int) -> _Numbers:
    order = np.random.default_rng([seed, epoch]).permutation(blocks)
    order.setflags(write=False)
    return order


class Position(NamedTuple):
    """Where a reader is: after ``batches`` batches of an epoch and ``taken`` rows of a window."""

    epoch: int = 0
    batches: int = 0
    window: int = 0
    taken: int = 0
    sample: int = 0
    """In the order of the data: the first sample of the groups that contribute to the window."""


def _checksum(state: Mapping[str, Any]) -> str:
    try:
        return f"{zlib.crc32(dumps(state, sort_keys=True).encode()):08x}"
    except (TypeError, ValueError):
        return ""


class ShuffleBuffer:
    """Rows of several taps in numbered slots. One thread puts rows, another one takes and releases them."""

    def __init__(self, types: Mapping[str, tuple[np.dtype[Any], int]], capacity: int) -> None:
        self._types = dict(types)
        # Rows are kept as integers: NumPy holds the interpreter's lock while it copies dtypes that it does not know.
        self._arrays: dict[str, _Array] = {
            tap: np.empty((capacity, columns), _bits(dtype)) for tap, (dtype, columns) in self._types.items()
        }
        # Used from the end, and what was released last is used first: memory that was never needed is never touched.
        self._free: _Numbers = np.arange(capacity)[::-1].copy()
        self._free_count = capacity
        self._lock = threading.Lock()

    def put(self, rows: Mapping[str, Sequence[_Array]], count: int) -> _Numbers:
        """Copy ``count`` rows of each tap, in one or several arrays, into free slots and return the slots."""
        with self._lock:
            if self._free_count < count:
                self._grow(count)
            self._free_count -= count
            slots = self._free[self._free_count : self._free_count + count][::-1].copy()
        consecutive = bool((np.diff(slots) == 1).all())
        for tap, arrays in rows.items():
            at = 0
            for array in arrays:
                end = at + len(array)
                # Copying to consecutive slots is faster than copying to a list of slots.
                where = slice(slots[at], slots[end - 1] + 1) if consecutive and end > at else slots[at:end]
                self._arrays[tap][where] = array.view(_bits(array.dtype))
                at = end
        return slots

    def _grow(self, count: int) -> None:
        """Make room for more rows than were expected: samples may differ much in length."""
        old = len(self._free)
        more = max(count, old // 4)
        for tap, array in self._arrays.items():
            grown = np.empty((old + more, array.shape[1]), array.dtype)
            grown[:old] = array
            self._arrays[tap] = grown
        used = np.empty(old - self._free_count, np.int64)  # room for the slots that will be released
        self._free = np.concatenate([self._free[: self._free_count], np.arange(old, old + more)[::-1], used])
        self._free_count += more

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
        with self._lock:
            self._free[self._free_count : self._free_count + len(slots)] = slots
            self._free_count += len(slots)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


class _Rows(NamedTuple):
    """Rows in the buffer, in some order, and their context if it is requested."""

    slots: _Numbers
    context: RowBatch | None

    def take(self, which: Any) -> _Rows:
        return _Rows(self.slots[which], None if self.context is None else self.context.take(which))

    @staticmethod
    def join(parts: list[_Rows]) -> _Rows:
        full = [part for part in parts if len(part.slots)]
        slots = np.concatenate([part.slots for part in full]) if full else np.zeros(0, np.int64)
        contexts = [part.context for part in full if part.context is not None]
        return _Rows(slots, RowBatch.join(contexts) if contexts else None)


class _Window(NamedTuple):
    """The rows of a window, in the order in which they are given."""

    epoch: int
    number: int
    last: bool
    sample: int
    rows: _Rows


class Shuffled(Iterator[Any]):
    """An iterator over shuffled batches.

    One tap gives arrays ``[batch_rows, d]``; several give a dict of arrays whose rows belong together; with context,
    each batch is a :class:`~spile.reading.rows.RowBatch`. The iterator ends after ``epochs``. With ``epochs=None`` it
    does not end, and batches continue over the end of an epoch, so that all of them are full.
    """

    def __init__(
        self,
        plan: ShufflePlan,
        source: BlockSource,
        taps: Sequence[str],
        *,
        epochs: int | None,
        dtype: npt.DTypeLike | None,
        single: bool,
        state: Mapping[str, Any] | None,
        after: int,
    ) -> None:
        self._plan, self._source, self._taps, self._epochs = plan, source, taps, epochs
        self._dtype, self._single = None if dtype is None else np.dtype(dtype), single
        by_norm = source.selection.by_norm
        if plan.drop_last and plan.parts > 1 and (plan.order == "data" or by_norm):
            raise UserError(
                f"drop_last with {'a bound on norms' if by_norm else 'the order of the data'}",
                expected="one reader, because the rows of each of several readers are counted only by reading",
                found=f"{plan.parts} readers",
                fix="use epochs=None, whose batches are all full, and count steps",
            )
        self._begin(self._position_after(after) if state is None else self._position_of(state))

    def _begin(self, start: Position) -> None:
        self._position, stop = start, threading.Event()
        # The maker has no reference to this object, so that the garbage collector can end both.
        maker = _BatchMaker(self._plan, self._source, self._epochs, self._dtype, self._single, stop)
        self._items: Iterator[tuple[Any, Position]] = iterate_ahead(maker.run(start), _AHEAD)
        # Also called at the end of the program, while threads can still be stopped in order.
        self._end = weakref.finalize(self, _close, stop, self._source, self._items)

    def _position_after(self, batches: int) -> Position:
        if batches < 0:
            raise UserError("after", expected="at least 0", found=batches)
        if not batches:
            return Position()
        if self._plan.order == "data" or self._source.selection.by_norm:
            expected = (
                'a state if order="data" or a bound on norms is given: such rows are counted only by reading them'
            )
            raise UserError("after", expected=expected, found=f"after={batches}")
        counts = self._source.counts(self._plan.block_shape[1])
        return self._plan.position_after(batches, counts, endless=self._epochs is None)

    def _identity(self) -> dict[str, Any]:
        """Return everything that a state must agree with: readers for which it is equal give equal batches."""
        plan, source = self._plan, self._source
        names = ("batch_rows", "seed", "buffer_rows", "drop_last", "order")
        return {
            "dataset": source.identity,
            "taps": list(self._taps),
            **{name: getattr(plan, name) for name in names},
            "selection": source.selection.describe(),
            "context": source.window,
            "part": [plan.part, plan.parts],
            "block": list(plan.block_shape),
        }

    def _position_of(self, state: Mapping[str, Any]) -> Position:
        """Return the position that a state names.

        Raises:
            UserError: The state was edited, is incomplete, or belongs to another dataset or to other arguments.
        """
        wanted, fix = self._identity(), "pass the arguments of the reader that made the state, or no state"
        if not isinstance(state, Mapping) or not {*wanted, *Position._fields, "check"} <= state.keys():
            raise UserError("state", expected="what state() returned", found=repr(state)[:200])
        wrong = [name for name, value in wanted.items() if state[name] != value]
        if wrong:
            raise UserError(
                "the state of a different reader",
                expected=", ".join(f"{name} = {str(state[name])[:80]}" for name in wrong),
                found=", ".join(f"{name} = {str(wanted[name])[:80]}" for name in wrong),
                fix=fix,
            )
        rest = {name: value for name, value in state.items() if name != "check"}
        found = Position(*(state[name] for name in Position._fields))
        valid = all(type(number) is int and 0 <= number < 1 << 53 for number in found)
        if not valid or state["check"] != _checksum(rest):
            raise UserError("state", expected="what state() returned", found="an edited state", fix=fix)
        groups, epochs = self._plan.groups, self._epochs
        if found.window >= max(1, groups):
            raise UserError("state", expected=f"a window below {groups}", found=found.window, fix=fix)
        if epochs is not None and found.epoch > epochs:
            raise UserError("state", expected=f"at most {epochs} epochs", found=f"{found.epoch} complete ones", fix=fix)
        return found

    def __iter__(self) -> Shuffled:
        return self

    def __next__(self) -> Any:
        batch, self._position = next(self._items)
        return batch

    def __repr__(self) -> str:
        rows, at = self._plan.batch_rows, self._position
        return f"<shuffled batches of {counted(rows, 'row')}, after batch {at.batches:,} of epoch {at.epoch}>"

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain JSON for ``shuffled(…, state=…)``."""
        state = {**self._position._asdict(), **self._identity()}
        return {**state, "check": _checksum(state)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as torch and torchdata name it."""
        return self.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which a state of the same reader was taken."""
        position = self._position_of(state)
        self.close()
        self._begin(position)

    @property
    def quality(self) -> str:
        """How random the order is, in words."""
        return self._plan.describe()

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


class _BatchMaker:
    """Makes the batches of a reader, in a thread of its own."""

    def __init__(
        self,
        plan: ShufflePlan,
        source: BlockSource,
        epochs: int | None,
        dtype: np.dtype[Any] | None,
        single: bool,
        stop: threading.Event,
    ) -> None:
        self._plan, self._source = plan, source
        self._epochs, self._dtype, self._single, self._stop = epochs, dtype, single, stop

    @cached_property
    def _buffer(self) -> ShuffleBuffer:
        plan = self._plan
        capacity = int(1.06 * plan.buffer_rows) + 1
        if plan.one_group:  # each of several readers loads its next epoch during the last
            capacity = min(int(2.2 * plan.rows / plan.parts) + 1, plan.rows)
        return ShuffleBuffer(self._source.types(), capacity)

    def run(self, start: Position) -> Iterator[tuple[Any, Position]]:
        """Yield the batches from a position on, each with the position after it."""
        batch_rows = self._plan.batch_rows
        batches, epoch, steps = start.batches, -1, None
        pending = _Rows.join([])
        for window in self._windows(start):
            if window.epoch != epoch:
                epoch, steps = window.epoch, self._steps(window.epoch)
            rows, taken = window.rows, start.taken if window[:2] == (start.epoch, start.window) else 0
            total = len(rows.slots)
            if taken > total:
                raise UserError("state", expected=f"at most {total} rows of its window", found=taken)
            self._release(rows.slots[:taken])
            while taken < total and batches != steps:
                part = rows.take(slice(taken, taken + batch_rows - len(pending.slots)))
                pending = _Rows.join([pending, part])
                taken += len(part.slots)
                if len(pending.slots) == batch_rows:
                    batches += 1
                    yield self._batch(pending), Position(epoch, batches, window.number, taken, window.sample)
                    pending = _Rows.join([])
            self._release(rows.slots[taken:])
            if not window.last:
                continue
            if self._epochs is None and not batches and not len(pending.slots):
                return  # no row is selected: later epochs have none either
            if self._epochs is not None:
                if len(pending.slots) and not self._plan.drop_last:
                    yield self._batch(pending), Position(epoch + 1)
                else:
                    self._release(pending.slots)
                pending = _Rows.join([])
            batches = 0

    def _steps(self, epoch: int) -> int | None:
        """Return the full batches that every reader has in an epoch; None if the reader gives all its rows."""
        plan = self._plan
        if self._epochs is None or not plan.drop_last or plan.parts == 1:
            return None
        return plan.full_batches(epoch, self._source.counts(plan.block_shape[1]))

    def _release(self, slots: _Numbers) -> None:
        if len(slots) and not self._plan.keeps_rows:
            self._buffer.release(slots)

    def _batch(self, rows: _Rows) -> Any:
        """Return rows as a batch and release their slots."""
        taps = self._buffer.take(rows.slots)
        self._release(rows.slots)
        if self._dtype is not None:
            taps = {tap: widened(array, self._dtype) for tap, array in taps.items()}
        if self._source.window > 1:
            taps = {tap: array.reshape(len(array), self._source.window, -1) for tap, array in taps.items()}
        given: Any = next(iter(taps.values())) if self._single else taps
        return given if rows.context is None else replace(rows.context, rows=given)

    def _windows(self, start: Position) -> Iterator[_Window]:
        """Yield the windows from that of the start on. The next group loads while a window is given."""
        plan = self._plan
        held: deque[tuple[int, _Rows]] = deque(maxlen=plan.spread)
        with closing(iterate_ahead(self._groups(start), 1)) as loaded:  # type: ignore[type-var]
            try:
                for epoch, number, group, rows in loaded:
                    held.append((group.first, rows))
                    first = start.window if epoch == start.epoch else 0
                    if number < first:  # its first rows were given before the start
                        self._release(rows.slots[: plan.share(len(rows.slots), first - number).start])
                        continue
                    shares = [
                        each.take(plan.share(len(each.slots), age, group.last))
                        for age, (_, each) in enumerate(reversed(held))
                    ]
                    window = _Rows.join(shares[::-1])
                    order = plan.permutation(epoch, number, len(window.slots))
                    yield _Window(epoch, number, group.last, held[0][0], window.take(order))
                    if group.last:
                        held.clear()
            except ReaderClosed:
                return

    def _groups(self, start: Position) -> Iterator[tuple[int, int, RowGroup, _Rows]]:
        """Load groups and yield epoch, number, group and rows, from the first group that the start needs."""
        kept: _Rows | None = None
        for epoch in count(start.epoch) if self._epochs is None else range(start.epoch, self._epochs):
            first = start.window if epoch == start.epoch else 0
            number = before = max(0, first - self._plan.spread + 1)
            for group in self._read_groups(epoch, number, start.sample if first else 0):
                rows = self._load(epoch, number, group.reads) if kept is None else kept
                kept = rows if self._plan.keeps_rows else None
                yield epoch, number, group, rows
                number += 1
            if number == before:  # there is no sample at all
                yield epoch, number, RowGroup(0, True, iter(())), _Rows.join([])

    def _read_groups(self, epoch: int, number: int, sample: int) -> Iterator[RowGroup]:
        """Yield the groups of an epoch from this number on. In the order of the data, it begins with this sample."""
        plan = self._plan
        if plan.order == "data":
            yield from self._source.groups(plan, sample)
            return
        for each in range(number, plan.groups):
            samples, part = plan.group(epoch, each)
            yield RowGroup(0, each + 1 == plan.groups, self._source.reads(samples, part, plan.block_shape[1]))

    def _load(self, epoch: int, number: int, reads: Iterator[Read]) -> _Rows:
        """Load a group into the buffer. Returns its rows in the order in which they are divided over windows."""
        keys: list[_Numbers] = []
        found: list[_Rows] = []
        with closing(read_ahead(reads, self._source.threads)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                if self._stop.is_set():
                    raise ReaderClosed
                if chunk is not None:
                    keys.append(chunk.keys)
                    found.append(_Rows(self._buffer.put(chunk.rows, len(chunk.keys)), chunk.context))
        rows = _Rows.join(found)
        if not found:
            return rows
        # Shards may have their samples in any order; the order of rows must not depend on it.
        rows = rows.take(np.argsort(np.concatenate(keys), kind="stable"))
        if self._plan.spread == 1:
            return rows
        return rows.take(self._plan.permutation(epoch, number, len(rows.slots), of_group=True))
