"""Rows in random order: the two-level shuffle, its buffer and its iterator.

The samples of a dataset, ordered by stream and sample index, are divided into *shuffle blocks*: several consecutive
samples, or a part of one sample. Every epoch permutes all blocks and deals them out to the readers in turn. A reader
loads its blocks in groups. The rows of a group are permuted and divided over the next ``spread`` windows; a window is
the permuted rows that up to ``spread`` groups contribute to it. Batches are consecutive rows of the windows. So rows
are drawn from a *shuffle buffer* whose content changes by one group at a time. If all rows of a reader fit in the
buffer, there is one group and the order is a full permutation.

The order depends on the samples, the number of rows of each, the selection and :class:`ShuffleSpec`, all of which count
rows. It does not depend on the width or dtype of a row, nor on how rows are divided into shards. Where rows come from
is the business of a :class:`BlockSource`.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, count
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import SpecError, UserError
from spile.objects.ahead import iterate_ahead, read_ahead
from spile.reading.rows import RowBatch
from spile.store.statistics import widened

__all__ = ["MEMORY", "BlockSource", "RowChunk", "ShufflePlan", "ShuffleSpec", "Shuffled"]

MEMORY = 2 << 30
"""Default size of the shuffle buffer in bytes."""
_SPREAD = 12
"""Windows over which the rows of a group are divided."""
_UNITS = 4096
"""Samples, or parts of samples, that the buffer should hold. With fewer, a sparse autoencoder trained on the rows ends
measurably above one trained on a full permutation (docs/performance.md)."""
_BLOCKS = 512
"""Blocks that the buffer holds if whole samples are short enough."""
_REMOTE_BLOCKS = 64
"""The same for a bucket: each block costs a request."""
_SMALLEST_PART = 32
"""Rows of a part of a sample, at least: smaller parts cost more to read than they improve the order."""
_LEAST_BLOCKS = 64
"""Blocks of each of several readers, at least: readers have equally many blocks, and about equally many rows."""
_AHEAD = 3
"""Batches that are ready before they are asked for."""
_ROW_BITS = 32

_Array = npt.NDArray[Any]
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShuffleSpec:
    """Everything that decides the order, beside the samples and the selection of rows."""

    buffer_rows: int
    """Rows that the shuffle buffer holds."""
    batch_rows: int = 4096
    seed: int = 0
    part: int = 0
    parts: int = 1
    """This reader is number ``part`` of ``parts``; their rows are disjoint and together complete."""
    drop_last: bool = False
    """Every reader gives the same number of full batches in an epoch; the remaining rows are left out."""
    permute_all: bool = False
    """A full permutation, even if the rows exceed ``buffer_rows`` (they are then kept on a scratch disk)."""
    block_rows: int | None = None
    """Rows of a shuffle block, approximately; None: derived from ``buffer_rows`` and the length of the samples."""

    def __post_init__(self) -> None:
        for name in ("batch_rows", "buffer_rows", "parts", "block_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(name, expected="at least 1", found=value)
        if self.seed < 0:
            raise SpecError("seed", expected="at least 0", found=self.seed)
        if not 0 <= self.part < self.parts:
            raise SpecError("part", expected="(k, n) with k from 0 to n - 1", found=(self.part, self.parts))


class RowChunk(NamedTuple):
    """Selected rows of some samples, as a source delivers them."""

    samples: _Numbers
    """Number of each row's sample, in the order of streams and sample indices."""
    offsets: _Numbers
    """Number of each row among the stored rows of its sample."""
    rows: Mapping[str, Sequence[_Array]]
    """Tap → rows, in one or several arrays, which need to be valid only until the call that receives them returns."""
    known: RowBatch | None
    """Tokens, roles, streams, samples and positions of the rows, if they were requested."""


class BlockSource(Protocol):
    """Where the rows of shuffle blocks come from: stored shards, or any other producer of the same samples."""

    @property
    def samples(self) -> int:
        """Number of samples."""

    @property
    def rows(self) -> int:
        """Number of rows of all samples, before the selection."""

    @property
    def remote(self) -> bool:
        """Whether each block costs a network request."""

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return the dtype and the number of columns of each tap."""

    def load(self, samples: _Numbers, part: _Numbers, parts: int, put: Callable[[RowChunk], None]) -> None:
        """Pass the selected rows of part ``part[i]`` of ``parts`` of each ``samples[i]`` to ``put``, in any order.

        Part p of n of a sample with r rows is the rows from ``r * p // n`` to ``r * (p + 1) // n``. ``put`` may be
        called from several threads.
        """

    def counts(self, parts: int) -> _Numbers:
        """Return the number of selected rows ``[samples, parts]``, without reading rows."""


@dataclass(frozen=True)
class ShufflePlan:
    """Blocks, groups and windows of a reader: pure arithmetic."""

    spec: ShuffleSpec
    samples: int
    rows: int
    remote: bool = False

    @cached_property
    def one_group(self) -> bool:
        """Whether all rows of this reader fit in the buffer: the order is then a full permutation."""
        margin = 1.0 if self.spec.parts == 1 else 1.1  # readers have equally many blocks, not equally many rows
        return self.spec.permute_all or self.rows / self.spec.parts * margin <= self.spec.buffer_rows

    @property
    def keeps_rows(self) -> bool:
        """Whether the one group is the whole dataset, so that later epochs need not load it again."""
        return self.one_group and self.spec.parts == 1

    @cached_property
    def block_shape(self) -> tuple[int, int]:
        """Samples per block, and parts per sample; at least one of them is 1."""
        mean, buffer = max(1.0, self.rows / max(1, self.samples)), self.spec.buffer_rows
        if self.spec.block_rows is not None:
            wanted: float = self.spec.block_rows
        elif self.one_group:
            wanted = 1.0 * mean
        elif mean * _UNITS <= buffer:
            wanted = max(mean, buffer / (_REMOTE_BLOCKS if self.remote else _BLOCKS))
        else:
            wanted = mean if self.remote else max(_SMALLEST_PART, buffer / _UNITS)
        if self.spec.parts > 1:
            wanted = max(1.0, min(wanted, self.rows / self.spec.parts / _LEAST_BLOCKS))
        return (max(1, int(wanted / mean)), 1) if wanted >= mean else (1, -int(-mean // wanted))

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of the whole dataset."""
        samples, parts = self.block_shape
        return -(-self.samples // samples) * parts

    @cached_property
    def spread(self) -> int:
        """Windows over which the rows of a group are divided."""
        if self.one_group:
            return 1
        return max(1, min(_SPREAD, int(2 * (self.spec.buffer_rows / self._block_rows - 1.5))))

    @property
    def _block_rows(self) -> float:
        return max(1.0, self.rows / max(1, self.blocks))

    @cached_property
    def group_blocks(self) -> int:
        """Blocks of a group.

        Rows leave the buffer as they are given, so (spread + 1) / 2 groups are in it on average, and one that loads.
        """
        if self.one_group:
            return max(1, self.blocks)
        return max(1, int(self.spec.buffer_rows / (self.spread / 2 + 1.5) / self._block_rows))

    @cached_property
    def groups(self) -> int:
        """Groups of this reader in every epoch; there are as many windows."""
        mine = len(range(self.spec.part, self.blocks, self.spec.parts))
        return -(-mine // self.group_blocks)

    def block_order(self, epoch: int) -> _Numbers:
        """Return the order of this reader's blocks in an epoch."""
        return _permutation(self.spec.seed, epoch, self.blocks)[self.spec.part :: self.spec.parts]

    def group(self, epoch: int, number: int) -> tuple[_Numbers, _Numbers]:
        """Return the samples of a group, and for each the number of its part."""
        begin = number * self.group_blocks
        return self.members(np.sort(self.block_order(epoch)[begin : begin + self.group_blocks]))

    def members(self, blocks: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the samples of some blocks, and for each the number of its part."""
        size, parts = self.block_shape
        first, part = np.divmod(blocks, parts)
        samples = (first[:, None] * size + np.arange(size)).reshape(-1)
        inside = samples < self.samples
        return samples[inside], np.repeat(part, size)[inside]

    def sources(self, window: int) -> range:
        """Return the groups that contribute to a window."""
        return range(max(0, window - self.spread + 1), window + 1)

    def share(self, rows: int, group: int, window: int) -> slice:
        """Return the part of a group's permuted rows that belongs to a window.

        The last groups have fewer windows left and contribute more to each, so that an epoch does not end with the
        rows of a few blocks only.
        """
        part, parts = window - group, min(self.spread, self.groups - group)
        return slice(rows * part // parts, rows * (part + 1) // parts)

    def window_rows(self, epoch: int, counts: _Numbers) -> list[int]:
        """Return the number of selected rows of each window; ``counts``: those of each part of each sample."""
        totals = [int(counts[self.group(epoch, number)].sum()) for number in range(self.groups)]
        windows = [0] * self.groups
        for window in range(self.groups):
            for group in self.sources(window):
                share = self.share(totals[group], group, window)
                windows[window] += share.stop - share.start
        return windows

    def full_batches(self, epoch: int, counts: _Numbers) -> int:
        """Return how many full batches every one of the readers has in an epoch."""
        order = _permutation(self.spec.seed, epoch, self.blocks)
        shares = (order[part :: self.spec.parts] for part in range(self.spec.parts))
        return min(int(counts[self.members(mine)].sum()) for mine in shares) // self.spec.batch_rows

    def deal_order(self, epoch: int, group: int, rows: int) -> _Numbers:
        """Return the permutation in which the rows of a group are divided over windows."""
        return np.random.default_rng([self.spec.seed, epoch, self.spec.part, group, 1]).permutation(rows)

    def row_order(self, epoch: int, window: int, rows: int) -> _Numbers:
        """Return the permutation of the rows of a window."""
        return np.random.default_rng([self.spec.seed, epoch, self.spec.part, window]).permutation(rows)

    def describe(self) -> str:
        """Return in words how random the order is."""
        share = "" if self.spec.parts == 1 else f" of this reader's share, one of {self.spec.parts}"
        if self.one_group:
            return f"a full permutation{share}"
        size, parts = self.block_shape
        unit = f"{size:,} samples" if size > 1 else "one sample" if parts == 1 else f"1/{parts} of a sample"
        drawn = min(self.group_blocks * self.spread, self.blocks)
        return (
            f"two levels{share}: {self.blocks:,} blocks of {unit} in random order, rows drawn from {drawn:,} blocks "
            "at a time, which change gradually"
        )


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, blocks: int) -> _Numbers:
    order = np.random.default_rng([seed, epoch]).permutation(blocks)
    order.setflags(write=False)
    return order


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
        Path(self._scratch).mkdir(parents=True, exist_ok=True)
        found: dict[str, _Array] = {}
        for tap, shape in shapes.items():
            # A file without a name: the system frees its space when the reader ends, however it ends.
            with tempfile.TemporaryFile(dir=self._scratch, prefix=".spile-") as file:
                found[tap] = np.memmap(file, _plain_type(self._types[tap][0]), "w+", shape=shape)
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


class Position(NamedTuple):
    """Where a reader is: after ``batches`` batches of an epoch and ``taken`` rows of a window."""

    epoch: int = 0
    batches: int = 0
    window: int = 0
    taken: int = 0


@dataclass(frozen=True)
class ShuffleOrder:
    """A plan, its source, and what else identifies the order: readers with equal orders give equal batches."""

    plan: ShufflePlan
    source: BlockSource
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values that name the dataset, the taps and the selection."""
    needs_rows: bool = False
    """Whether the selection depends on the rows themselves, so that no count is known without reading them."""

    def describe(self) -> dict[str, Any]:
        """Return everything that a state must agree with."""
        spec = self.plan.spec
        return {
            **self.identity,
            "batch_rows": spec.batch_rows,
            "seed": spec.seed,
            "buffer_rows": spec.buffer_rows,
            "part": [spec.part, spec.parts],
            "drop_last": spec.drop_last,
            "permute_all": spec.permute_all,
            "block": list(self.plan.block_shape),
        }

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position as plain JSON, with everything that a state must agree with and a checksum."""
        state = {**position._asdict(), **self.describe()}
        return {**state, "check": _checksum(state)}

    def position(self, state: Mapping[str, Any], epochs: int | None) -> Position:
        """Return the position that a state names.

        Raises:
            UserError: The state was edited, is incomplete, or belongs to another dataset or to other arguments.
        """
        wanted, fix = self.describe(), "pass the arguments of the reader that made the state, or no state"
        if not isinstance(state, Mapping) or not {*wanted, *Position._fields, "check"} <= state.keys():
            raise UserError("state", expected="what state() returned", found=repr(state)[:200])
        wrong = [name for name, value in wanted.items() if state[name] != value]
        if wrong:
            raise UserError(
                "a state of another reader",
                expected=", ".join(f"{name} = {str(state[name])[:80]}" for name in wrong),
                found=", ".join(f"{name} = {str(wanted[name])[:80]}" for name in wrong),
                fix=fix,
            )
        rest = {name: value for name, value in state.items() if name != "check"}
        numbers = [state[name] for name in Position._fields]
        valid = all(type(number) is int and 0 <= number < 1 << 53 for number in numbers)
        if not valid or state["check"] != _checksum(rest):
            raise UserError("state", expected="what state() returned", found="an edited state", fix=fix)
        found = Position(*numbers)
        if found.window >= max(1, self.plan.groups):
            raise UserError("state", expected=f"a window below {self.plan.groups}", found=found.window, fix=fix)
        if epochs is not None and found.epoch > epochs:
            raise UserError("state", expected=f"at most {epochs} epochs", found=f"{found.epoch} complete ones", fix=fix)
        return found

    @cached_property
    def _counts(self) -> _Numbers:
        return self.source.counts(self.plan.block_shape[1])

    def steps(self, epoch: int) -> int | None:
        """Return the full batches that every reader has in an epoch; None if the reader gives all its rows."""
        if not self.plan.spec.drop_last or self.plan.spec.parts == 1:
            return None
        return self.plan.full_batches(epoch, self._counts)

    def after(self, batches: int, *, endless: bool) -> Position:
        """Return the position after this many batches from the start, without reading rows."""
        if batches < 0:
            raise UserError("after", expected="at least 0", found=batches)
        if not batches:
            return Position()
        if self.needs_rows:
            raise UserError("after", expected="no bound on norms, or a state instead", found=f"after={batches}")
        most = self.plan.spec.batch_rows
        rows, left = batches * most, batches
        for epoch in count():
            windows = self.plan.window_rows(epoch, self._counts)
            total, steps = sum(windows), self.steps(epoch)
            if not total:
                return Position(epoch)
            complete = total // most if self.plan.spec.drop_last else -(-total // most)
            given = complete if steps is None else steps
            if not endless and not given:
                raise UserError("after", expected="an epoch with at least one batch", found=f"{total} rows")
            if (rows < total) if endless else (left < given):
                taken = rows if endless else left * most
                ends = list(accumulate(windows))
                number = bisect_right(ends, taken)
                return Position(epoch, left, number, taken - (ends[number] - windows[number]))
            rows -= total
            left = batches - (batches * most - rows) // most if endless else left - given
        raise AssertionError("unreachable: count() does not end")


def _checksum(state: Mapping[str, Any]) -> str:
    try:
        return f"{zlib.crc32(dumps(state, sort_keys=True).encode()):08x}"
    except (TypeError, ValueError):
        return ""


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
        self._order, self._position = order, start
        self._stop = threading.Event()
        engine = _Engine(order, epochs, None if dtype is None else np.dtype(dtype), single, scratch, self._stop)
        self._items: Iterator[tuple[Any, Position]] = iterate_ahead(engine.run(start), _AHEAD)
        # Also called at the end of the program, while threads can still be stopped in order.
        self._end = weakref.finalize(self, _close, self._stop, self._items)

    def __iter__(self) -> Shuffled:
        return self

    def __next__(self) -> Any:
        batch, self._position = next(self._items)
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain JSON for ``shuffled(…, state=…)``."""
        return self._order.state(self._position)

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


def _close(stop: threading.Event, items: Any) -> None:
    stop.set()
    items.close()


class _Stopped(Exception):
    """The reader was closed while a group was loading."""


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
        for window_epoch, number, window in self._windows(start):
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
                    yield self._batch(), Position(epoch, batches, number, taken)
            self._free(window.slots[taken:])
            if number + 1 < self._plan.groups:
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
        given: Any = next(iter(taps.values())) if self._single else taps
        return given if rows.known is None else replace(rows.known, rows=given)

    def _windows(self, start: Position) -> Iterator[tuple[int, int, _Rows]]:
        """Yield epoch, number and rows of each window. The next group loads while a window is given."""
        plan = self._plan
        loaded = read_ahead(self._loads(start), 1)
        try:
            kept: _Rows | None = None
            for epoch in self._epoch_numbers(start):
                held: dict[int, _Rows] = {}
                first = start.window if epoch == start.epoch else 0
                for number in range(first, plan.groups):
                    for group in plan.sources(number):
                        if group not in held:
                            held[group] = kept if kept is not None else next(loaded)
                            given = plan.share(len(held[group]), group, max(group, first)).start
                            self._free(held[group].slots[:given])
                    shares = [rows.take(plan.share(len(rows), group, number)) for group, rows in held.items()]
                    held.pop(number - plan.spread + 1, None)
                    window = _Rows.join(shares)
                    if plan.keeps_rows:
                        kept = shares[0]
                    yield epoch, number, window.take(plan.row_order(epoch, number, len(window)))
        except _Stopped:
            return
        finally:
            loaded.close()  # type: ignore[attr-defined]

    def _epoch_numbers(self, start: Position) -> Iterator[int]:
        if not self._plan.groups:
            return iter(())
        return iter(count(start.epoch) if self._epochs is None else range(start.epoch, self._epochs))

    def _loads(self, start: Position) -> Iterator[Callable[[], _Rows]]:
        for epoch in self._epoch_numbers(start):
            first = self._plan.sources(start.window).start if epoch == start.epoch else 0
            for number in range(first, self._plan.groups):
                yield partial(self._load, epoch, number)
            if self._plan.keeps_rows:
                return

    def _load(self, epoch: int, number: int) -> _Rows:
        """Load a group into the buffer. Returns its rows in the order in which they are divided over windows."""
        found: list[tuple[_Numbers, _Rows]] = []

        def put(chunk: RowChunk) -> None:
            if self._stop.is_set():
                raise _Stopped
            slots = self._buffer.put(chunk.rows, len(chunk.samples))
            found.append(((chunk.samples << _ROW_BITS) + chunk.offsets, _Rows(slots, chunk.known)))

        self._source.load(*self._plan.group(epoch, number), self._plan.block_shape[1], put)
        if not found:
            return _NO_ROWS
        # Chunks arrive in any order; the order of rows must not depend on it.
        rows = _Rows.join([rows for _, rows in found])
        rows = rows.take(np.argsort(np.concatenate([keys for keys, _ in found]), kind="stable"))
        return rows.take(self._plan.deal_order(epoch, number, len(rows))) if self._plan.spread > 1 else rows
