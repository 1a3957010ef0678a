"""The order of shuffled rows: which blocks are loaded when, which rows form a window, and the state of a reader.

The samples of a dataset, ordered by stream and sample index, are divided into *shuffle blocks*: several consecutive
samples, or a part of one sample. Every epoch permutes all blocks and deals them out to the readers in turn. A reader
loads its blocks in groups. The rows of a group are permuted and divided over the next ``spread`` windows; a window is
the permuted rows that up to ``spread`` groups contribute to it. Batches are consecutive rows of the windows. So rows
are drawn from a *shuffle buffer* whose content changes by one group at a time. If all rows of a reader fit in the
buffer, there is one group and the order is a full permutation.

With the order ``data``, which rows that are not stored can have too, samples are not permuted: a group is consecutive
samples, and the last window of an epoch is everything that is left (:class:`DataPlan`).

The order depends on the samples, the number of rows of each, the selection and :class:`ShuffleSpec`, all of which count
rows. It does not depend on the width or dtype of a row, nor on how rows are divided into shards. Where rows come from
is the business of a :class:`BlockSource`.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, count
from json import dumps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import SpecError, UserError

if TYPE_CHECKING:
    from spile.reading.rows import RowBatch

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

_ROW_BITS = 32

_Array = npt.NDArray[Any]
_Numbers = npt.NDArray[np.int64]


def row_keys(samples: _Numbers, offsets: _Numbers) -> _Numbers:
    """Return numbers that order rows by sample and by their place in it."""
    return np.asarray((samples << _ROW_BITS) + offsets)


@dataclass(frozen=True)
class ShuffleSpec:
    """Everything that determines the order, besides the samples and the selection of rows."""

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


class ReaderClosed(Exception):
    """The reader was closed while a group was loading."""


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

    @property
    def window(self) -> int:
        """Consecutive tokens of a row: 1, or more if each row comes with its predecessors."""

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return the dtype and the number of columns of each tap; a row has the columns of all tokens of a window."""

    def load(self, samples: _Numbers, part: _Numbers, parts: int, put: Callable[[RowChunk], None]) -> None:
        """Pass the selected rows of part ``part[i]`` of ``parts`` of each ``samples[i]`` to ``put``, in any order.

        Part p of n of a sample with r rows is the rows from ``r * p // n`` to ``r * (p + 1) // n``. ``put`` may be
        called from several threads.
        """

    def counts(self, parts: int) -> _Numbers:
        """Return the number of selected rows ``[samples, parts]``, without reading rows."""

    def groups(self, plan: DataPlan, first: int) -> Iterator[RowGroup]:
        """Yield the groups of an epoch in the order of the data, from the one that begins with sample ``first`` on."""

    def cancel(self) -> None:
        """Make calls that wait for rows raise :class:`ReaderClosed`: the reader was closed."""


class RowGroup(NamedTuple):
    """Samples whose rows are loaded together."""

    first: int
    """In the order of the data: the number of its first sample, from which a reader can continue."""
    last: bool
    """Whether no group follows in this epoch."""
    load: Callable[[Callable[[RowChunk], None]], None]
    """Passes the selected rows to a function, in any order."""


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

    def share(self, rows: int, group: int, window: int, last: bool = False) -> slice:
        """Return the part of a group's permuted rows that belongs to a window; the last window gets all the rest.

        The last groups have fewer windows left and contribute more to each, so that an epoch does not end with the
        rows of a few blocks only.
        """
        part, parts = window - group, min(self.spread, self.groups - group)
        return slice(rows * part // parts, rows if last else rows * (part + 1) // parts)

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


_ENDLESS = 1 << 52
"""Rows and groups of data whose end is unknown."""


class DataPlan(ShufflePlan):
    """Groups and windows in the order of the data, of which neither the samples nor the rows need to be known."""

    def __init__(self, spec: ShuffleSpec) -> None:
        if spec.permute_all or spec.block_rows is not None:
            name = "scratch" if spec.permute_all else "piece"
            raise SpecError(name, expected='order="random"', found='order="data"')
        if spec.drop_last and spec.parts > 1:
            fix = "use epochs=None, whose batches are all full, and count steps"
            raise SpecError(
                "drop_last", expected="one reader of rows in the order of the data", found=spec.parts, fix=fix
            )
        super().__init__(spec, _ENDLESS, _ENDLESS)

    @property
    def one_group(self) -> bool:
        """False: it is not known whether all rows fit in the buffer."""
        return False

    @property
    def block_shape(self) -> tuple[int, int]:
        """A sample is the smallest unit."""
        return 1, 1

    @property
    def spread(self) -> int:
        """Windows over which the rows of a group are divided."""
        return _SPREAD

    @property
    def group_rows(self) -> int:
        """A group ends with the sample that makes it this large, before the selection."""
        return max(1, int(self.spec.buffer_rows / (_SPREAD / 2 + 1.5)))

    @property
    def groups(self) -> int:
        """More than there are."""
        return _ENDLESS

    def cut(self, lengths: Iterable[tuple[int, int]]) -> Iterator[tuple[list[int], bool]]:
        """Group samples, given as (number, rows): yield the numbers of each group, and whether it is the last."""
        group: list[int] = []
        rows = 0
        for number, length in lengths:
            if rows >= self.group_rows:
                yield group, False
                group, rows = [], 0
            group.append(number)
            rows += length
        if group:
            yield group, True

    def describe(self) -> str:
        """Return in words how random the order is."""
        share = "" if self.spec.parts == 1 else f" of this reader's share, one of {self.spec.parts}"
        return (
            f"in the order of the data{share}: rows drawn from about {self.spec.buffer_rows:,} consecutive rows at a "
            "time, which change gradually"
        )


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
            **({"order": "data"} if isinstance(self.plan, DataPlan) else {}),
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
                "the state of a different reader",
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

    def groups(self, epoch: int, number: int, sample: int) -> Iterator[RowGroup]:
        """Yield the groups of an epoch from this number on. In the order of the data, it begins with this sample."""
        plan, load = self.plan, self.source.load
        if isinstance(plan, DataPlan):
            yield from self.source.groups(plan, sample)
            return
        for place in range(number, plan.groups):
            samples, parts = plan.group(epoch, place)
            yield RowGroup(0, place + 1 == plan.groups, partial(load, samples, parts, plan.block_shape[1]))

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
        if isinstance(self.plan, DataPlan):
            raise UserError(
                "after", expected="a state, because rows in the order of the data are not counted", found=batches
            )
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
