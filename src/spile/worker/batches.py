"""Batches: rows of one length that hold one sample or several, under a token budget, in one shape or two.

A batch is a rectangle of ``groups × rows`` rows. A group is what one device (or one model-parallel set of devices)
computes: a single device has one group, eight data-parallel ones eight. Samples are taken in bounded windows and packed
by best fit, the longest first; rows that do not fill a batch wait for the next window, so that a run has no padding but
what packing leaves, and the part of its very last batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from spile.spec.sample import Sample
from spile.spec.taps import TapRows

__all__ = [
    "Batch",
    "BatchPlan",
    "Row",
    "ShardBatches",
    "batches",
    "batches_in_order",
    "row_bytes",
    "shards",
    "single_row",
]


Row = tuple[Sample, ...]
"""Samples one after another; padding behind the last."""

_FIRST_WINDOW, _WINDOW = 4, 64
"""Batches that a window holds: few at first, for the device waits; then more, which fill better."""
_WINDOW_TOKENS = 1 << 17
"""Every window holds as many, which take a tenth of a second to tokenize: fewer would not fill rows well."""
_WINDOW_SAMPLES, _GROUP_SAMPLES = 8192, 2048
"""No window holds more, or for many groups more per group, however short its samples: memory stays bounded."""
_FULL = 31 / 32
"""A row less full than this waits for the next window's samples, once."""
_NEAR = 4
"""A row may be this many times as long as the longest sample near by, where rows of that length have a program."""


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def single_row(length: int) -> int:
    """The padded length of a sample that stands alone: at most an eighth over it, so that there are few."""
    step = max(64, (1 << max(length - 1, 1).bit_length() - 1) // 8)
    return -(-length // step) * step


@dataclass(frozen=True)
class BatchPlan:
    """What bounds a batch. None of it changes a number that is stored."""

    batch_tokens: int
    """Computed tokens per group, padding included."""
    batch_size: int | None
    """Rows per group at most."""
    longest: int
    """The longest a sample can be."""
    groups: int = 1
    shortest_row: int = 64
    """Rows are no shorter: a few times the longest sample, they fill better."""
    short_tail: bool = False
    """The last batch has no more rows than it needs, where another program costs less than rows of padding."""

    def row_length(self, longest: int, known: Iterable[int] = ()) -> int:
        """How long a row is whose longest sample is this long: one that has a program already, where one is near."""
        power = min(_power_of_two(longest), -(-max(self.longest, longest) // 64) * 64)
        needed = max(power, min(self.shortest_row, self.batch_tokens))
        return min((length for length in known if longest <= length <= _NEAR * needed), default=needed)

    def rows(self, length: int) -> int:
        """Rows of this length per group."""
        rows = max(1, self.batch_tokens // length)
        return rows if self.batch_size is None else min(rows, self.batch_size)

    @property
    def window_samples(self) -> int:
        """Samples that are looked at, at most, before batches of them are formed."""
        return max(_WINDOW_SAMPLES, _GROUP_SAMPLES * self.groups)

    def short_shape(self, length: int, tail: Sequence[Row]) -> tuple[int, int]:
        """Rows per group, and their length, of a batch for these rows and no more: an eighth too many at most."""
        rows = self.rows(length)
        step = max(1, rows // 8)
        rows = min(rows, -(-len(tail) // (self.groups * step)) * step)
        filled = max(sum(map(len, row)) for row in tail)
        return rows, min(length, single_row(filled)) if len(tail) == 1 else length


@dataclass(frozen=True)
class Batch:
    """Samples that are computed together."""

    groups: tuple[tuple[Row, ...], ...]
    """One tuple per group, each of at most ``rows`` rows; a group may be empty in a last batch."""
    rows: int
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, length) of a group: what a program is compiled for."""
        return self.rows, self.length

    def of(self, group: int) -> list[Sample]:
        """A group's samples in the order of their rows in a shard."""
        return [sample for row in self.groups[group] for sample in row]

    @property
    def samples(self) -> list[Sample]:
        """All of them, group after group: the order of their rows in a shard."""
        return [sample for group in self.groups for row in group for sample in row]

    @property
    def real_tokens(self) -> int:
        """Tokens of its samples."""
        return sum(map(len, self.samples))

    @property
    def stored_rows(self) -> int:
        """Tokens whose rows will be stored."""
        return sum(sample.rows for sample in self.samples)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return len(self.groups) * self.rows * self.length

    def halves(self) -> tuple[Batch, Batch]:
        """The same samples as two batches of half the rows, when the device has no room for the whole."""
        rows, every = -(-self.rows // 2), [row for group in self.groups for row in group]
        middle = rows * len(self.groups)
        halves = (every[:middle], every[middle:])  # the samples' order stays
        first, rest = (_batch(half, rows, self.length, len(self.groups)) for half in halves)
        return first, rest


def batches(samples: Iterable[Sample], plan: BatchPlan) -> Iterator[Batch]:
    """Batches of every sample once, window after window. The same samples give the same batches."""
    known: list[int] = []
    waiting: list[Sample] = []
    for window, last in _windows(samples, plan):
        old = {id(sample) for sample in waiting}
        pool = sorted(waiting + window, key=lambda sample: (-len(sample), sample.index))
        waiting = []
        for length, members in _by_row_length(pool, plan, known):
            # What has waited once goes first, so that no sample waits for ever; then the fullest rows.
            rows = _packed(sorted(members, key=lambda sample: id(sample) not in old), length)
            rows.sort(key=lambda row: (not last and id(row[0]) not in old, -sum(map(len, row)), row[0].index))
            size = plan.rows(length) * plan.groups
            full = sum(1 for row in rows if id(row[0]) in old or sum(map(len, row)) >= _FULL * length)
            whole = _whole(len(rows), len(rows) if last else full, size, keep_one=last and plan.short_tail)
            for start in range(0, whole, size):
                yield _batch(rows[start : start + size], plan.rows(length), length, plan.groups)
            tail = rows[whole:]
            many = sum(map(len, tail)) >= plan.window_samples  # so short that a whole window fills no batch
            if tail and (last or many):
                short = plan.short_shape(length, tail) if many or plan.short_tail else (plan.rows(length), length)
                yield _batch(tail, *short, plan.groups)
            else:
                waiting += [sample for row in tail for sample in row]


def _whole(rows: int, ready: int, size: int, *, keep_one: bool) -> int:
    """How many rows go in whole batches now: those that are ready, a batch at least so that the device has work."""
    whole = min(rows - rows % size, max(size, -(-ready // size) * size))
    return whole - size if keep_one and whole == rows else whole


def batches_in_order(samples: Sequence[Sample], plan: BatchPlan, known: list[int]) -> Iterator[Batch]:
    """Batches of these samples in just this order: rows are filled one after another, and so are batches.

    ``known`` are the row lengths that have a program already; what is new is added.
    """
    length = plan.row_length(max(map(len, samples), default=1), known)
    if length not in known:
        known.append(length)
    rows: list[list[Sample]] = []
    used = length
    for sample in samples:
        if used + len(sample) > length:
            rows.append([])
            used = 0
        rows[-1].append(sample)
        used += len(sample)
    size = plan.rows(length) * plan.groups
    for start in range(0, len(rows), size):
        some = [tuple(row) for row in rows[start : start + size]]
        short = plan.short_tail and len(some) < size
        yield _batch(some, *(plan.short_shape(length, some) if short else (plan.rows(length), length)), plan.groups)


def _windows(samples: Iterable[Sample], plan: BatchPlan) -> Iterator[tuple[list[Sample], bool]]:
    """Samples in lists of bounded size, each with whether it is the last one."""
    window: list[Sample] = []
    tokens, size = 0, _FIRST_WINDOW
    batch = plan.batch_tokens * plan.groups
    for sample in samples:
        if tokens >= max(size * batch, _WINDOW_TOKENS) or len(window) >= plan.window_samples:
            yield window, False
            window, tokens, size = [], 0, min(2 * size, _WINDOW)
        window.append(sample)
        tokens += len(sample)
    if window:
        yield window, True


def _by_row_length(pool: Sequence[Sample], plan: BatchPlan, known: list[int]) -> Iterator[tuple[int, Sequence[Sample]]]:
    """The pool, longest first, in parts of one row length; a part more only where its rows are far shorter.

    Attention costs a row's whole length, so a document of 20,000 tokens has no room for a thousand short texts.
    """
    while pool:
        length = plan.row_length(len(pool[0]), known)
        if length not in known:
            known.append(length)
        short = length // (2 * _NEAR)
        split = len(pool) if short < plan.row_length(1) else bisect_left(pool, -short, key=lambda sample: -len(sample))
        yield length, pool[:split]
        pool = pool[split:]


def _packed(samples: Sequence[Sample], length: int) -> list[Row]:
    """Best fit: each sample in this order into the fullest row that has room for it."""
    rows: list[list[Sample]] = []
    free: list[tuple[int, int]] = []
    for sample in samples:
        place = bisect_left(free, (len(sample), 0))
        if place < len(free):
            room, number = free.pop(place)
            rows[number].append(sample)
        else:
            room, number = length, len(rows)
            rows.append([sample])
        if room > len(sample):
            insort(free, (room - len(sample), number))
    return [tuple(row) for row in rows]


def _batch(rows: Sequence[Row], count: int, length: int, groups: int) -> Batch:
    return Batch(tuple(tuple(rows[g * count : (g + 1) * count]) for g in range(groups)), count, length)


_INDEX_BYTES = 5
"""A token's id and role."""
_SHARD_SAMPLES, _GROUP_SAMPLES_shards = 16_384, 2_048
"""No shard holds more samples, in all and for each group: its header, its index and what is planned ahead of the model
stay small however short the samples are."""


def row_bytes(taps: Iterable[TapRows]) -> int:
    """Bytes that one token takes in a shard, over all taps."""
    return sum(tap.bytes for tap in taps) + _INDEX_BYTES


@dataclass(frozen=True)
class ShardBatches:
    """The batches of one shard, in the order in which their rows lie in it."""

    batches: Sequence[Batch] = field(default_factory=tuple)

    @property
    def tokens(self) -> int:
        """Rows per tap."""
        return sum(batch.stored_rows for batch in self.batches)


def shards(batches: Iterable[Batch], bytes_per_token: int, shard_bytes: float) -> Iterator[ShardBatches]:
    """Whole batches until the next one would pass the size; at least one batch per shard."""
    waiting: list[Batch] = []
    size = samples = 0
    for batch in batches:
        more = batch.stored_rows * bytes_per_token
        count = len(batch.samples)
        most = min(_SHARD_SAMPLES, _GROUP_SAMPLES_shards * len(batch.groups))
        if waiting and (size + more > shard_bytes or samples + count > most):
            yield ShardBatches(tuple(waiting))
            waiting, size, samples = [], 0, 0
        waiting.append(batch)
        size += more
        samples += count
    if waiting:
        yield ShardBatches(tuple(waiting))
