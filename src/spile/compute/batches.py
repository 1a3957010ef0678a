"""Batch planning: pack samples into batches of one or two shapes under a token budget.

A batch is a rectangle of ``groups × rows`` batch rows. A group is what one device or one model-parallel set of devices
computes: one device has one group, eight data-parallel devices have eight. Samples are read in chunks of bounded size
and packed into batch rows by best fit, the longest first. Batch rows that do not fill a batch wait for the next chunk,
so the only padding of a run is what packing leaves and a part of the last batch.

This module is pure: no files, network, clock or threads.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from spile.spec.sample import Prediction, Sample

Row = tuple[Sample, ...]
"""A packed sequence: samples one after another, then padding."""

AHEAD = 3
"""Default number of batches in flight beyond one per writer: two on the device and one on its way to the host."""
_FIRST_CHUNK, _CHUNK = 4, 64
"""Batches per chunk of samples: few at first because the device is waiting, then more because they pack better."""
_CHUNK_TOKENS = 1 << 17
"""Least tokens per chunk. They take a tenth of a second to tokenize; fewer would not fill batch rows well."""
_CHUNK_SAMPLES, _GROUP_SAMPLES = 8192, 2048
"""Most samples per chunk, in total and per group, so that memory stays bounded for very short samples."""
_FULL = 31 / 32
"""A batch row that is less full than this waits once for the samples of the next chunk."""
_NEAR = 4
"""A batch row may be this many times as long as needed if a program for that length exists already."""
_SMALL = 2
"""A run whose samples fill less than half of a batch gets a smaller batch."""


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def single_row_length(length: int) -> int:
    """Return the padded length of a batch row with one sample: at most an eighth longer, so few lengths occur."""
    step = max(64, (1 << max(length - 1, 1).bit_length() - 1) // 8)
    return -(-length // step) * step


@dataclass(frozen=True)
class Sizes:
    """How much is computed, held and written at once. No stored number depends on it."""

    batch_tokens: int
    """Computed tokens per group and batch, padding included."""
    batch_size: int | None
    """Most batch rows per group."""
    longest: int
    """The longest possible sample."""
    shard_bytes: float = 1e9
    writers: int = 1
    """Shards that are filled in parallel, each by one thread: one file takes about 2 GB/s, a fast device gives more."""
    finishers: int | None = None
    """Shards that are made durable in parallel; by default as many as ``writers``."""
    in_flight: int | None = None
    """Batches that are started and not yet written. Their rows are what a worker holds in memory."""
    groups: int = 1
    shortest_row: int = 64
    """Least length of a batch row. A row of several times the longest sample packs better."""
    short_tail: bool = False
    """Whether the last batch gets a smaller shape. That needs another program but computes less padding."""
    chunk_batches: int = _CHUNK
    """Most batches whose samples are read and packed together; they are computed in any order."""

    def for_samples(self, lengths: Sequence[int], groups: int) -> Sizes:
        """Return sizes for a run of just these samples: a small run gets a batch that is not mostly padding."""
        per_group = -(-sum(lengths) // groups) + (max(lengths, default=0) if groups > 1 else 0)
        small = _SMALL * per_group <= self.batch_tokens
        tokens = single_row_length(max(1, per_group)) if small else self.batch_tokens
        return replace(self, batch_tokens=tokens, groups=groups)

    def row_length(self, longest: int, known: Iterable[int] = ()) -> int:
        """Return the length of batch rows whose longest sample has ``longest`` tokens.

        Args:
            longest: The longest sample.
            known: Lengths that have a program already; one of them is used if it is not much longer than needed.

        """
        power = min(_power_of_two(longest), -(-max(self.longest, longest) // 64) * 64)
        needed = max(power, min(self.shortest_row, self.batch_tokens))
        return min((length for length in known if longest <= length <= _NEAR * needed), default=needed)

    def rows(self, length: int) -> int:
        """Return the number of batch rows of this length per group."""
        rows = max(1, self.batch_tokens // length)
        return rows if self.batch_size is None else min(rows, self.batch_size)

    @property
    def chunk_samples(self) -> int:
        """Most samples that are read before batches are formed."""
        return max(_CHUNK_SAMPLES, _GROUP_SAMPLES * self.groups)

    def short_shape(self, length: int, tail: Sequence[Row]) -> tuple[int, int]:
        """Return (rows per group, length) of a batch that holds just these batch rows, at most an eighth too many."""
        rows = self.rows(length)
        step = max(1, rows // 8)
        rows = min(rows, -(-len(tail) // (self.groups * step)) * step)
        filled = max(sum(map(len, row)) for row in tail)
        return rows, min(length, single_row_length(filled)) if len(tail) == 1 else length


@dataclass(frozen=True)
class Batch:
    """Samples that are computed together."""

    groups: tuple[tuple[Row, ...], ...]
    """The batch rows of each group, at most ``rows``; a group of the last batch may be empty."""
    rows: int
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, length) of a group: what a program is compiled for."""
        return self.rows, self.length

    def samples_of(self, group: int) -> list[Sample]:
        """Return the samples of a group in the order in which a shard stores them."""
        return [sample for row in self.groups[group] for sample in row]

    def stored_rows_of(self, group: int) -> int:
        """Return the number of activation rows that are stored of a group."""
        return sum(sample.rows for sample in self.samples_of(group))

    @property
    def samples(self) -> list[Sample]:
        """All samples, group after group: the order in which a shard stores them."""
        return [sample for group in self.groups for row in group for sample in row]

    @property
    def real_tokens(self) -> int:
        """Tokens of the samples, without padding."""
        return sum(map(len, self.samples))

    @property
    def stored_rows(self) -> int:
        """Tokens whose activation rows are stored."""
        return sum(sample.rows for sample in self.samples)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return len(self.groups) * self.rows * self.length

    def stored_bytes(self, bytes_per_token: int) -> int:
        """Return the bytes that the samples take in a shard."""
        return self.stored_rows * bytes_per_token

    def counts(self) -> dict[str, int]:
        """Return what a progress display adds once the batch is written."""
        return {
            "samples": len(self.samples),
            "tokens": self.real_tokens,
            "computed_tokens": self.computed_tokens,
        }

    def predictions(self) -> list[Prediction]:
        """Return the answers to the samples, if ``infer`` made any."""
        return []

    def halves(self) -> tuple[Batch, Batch]:
        """Return the same samples, in the same order, as two batches of half the rows."""
        rows, every = -(-self.rows // 2), [row for group in self.groups for row in group]
        middle = rows * len(self.groups)
        first, rest = (
            _make_batch(half, rows, self.length, len(self.groups)) for half in (every[:middle], every[middle:])
        )
        return first, rest


def batches(samples: Iterable[Sample], sizes: Sizes) -> Iterator[Batch]:
    """Yield batches that hold every sample once. The same samples always give the same batches."""
    known: list[int] = []
    waiting: list[Sample] = []
    for chunk, last in _chunks(samples, sizes):
        old = {id(sample) for sample in waiting}
        pool = sorted(waiting + chunk, key=lambda sample: (-len(sample), sample.index))
        waiting = []
        for length, members in _by_row_length(pool, sizes, known):
            # Samples that have waited once go first, so that no sample waits for ever; then the fullest batch rows.
            rows = _pack(sorted(members, key=lambda sample: id(sample) not in old), length)
            rows.sort(key=lambda row: (not last and id(row[0]) not in old, -sum(map(len, row)), row[0].index))
            size = sizes.rows(length) * sizes.groups
            full = sum(1 for row in rows if id(row[0]) in old or sum(map(len, row)) >= _FULL * length)
            ready = _ready_rows(len(rows), len(rows) if last else full, size, keep_one=last and sizes.short_tail)
            for start in range(0, ready, size):
                yield _make_batch(rows[start : start + size], sizes.rows(length), length, sizes.groups)
            tail = rows[ready:]
            many = sum(map(len, tail)) >= sizes.chunk_samples  # samples so short that a chunk fills no batch
            if tail and (last or many):
                short = sizes.short_shape(length, tail) if many or sizes.short_tail else (sizes.rows(length), length)
                yield _make_batch(tail, *short, sizes.groups)
            else:
                waiting += [sample for row in tail for sample in row]


def _ready_rows(rows: int, full: int, size: int, *, keep_one: bool) -> int:
    """Return how many batch rows go into full batches now: at least one batch, so that the device has work."""
    ready = min(rows - rows % size, max(size, -(-full // size) * size))
    return ready - size if keep_one and ready == rows else ready


def batches_in_order(samples: Sequence[Sample], sizes: Sizes, known: list[int]) -> Iterator[Batch]:
    """Yield batches of these samples in exactly this order.

    Args:
        samples: The samples of one shard.
        sizes: The limits of a batch.
        known: Row lengths that have a program already; a new length is appended.

    """
    length = sizes.row_length(max(map(len, samples), default=1), known)
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
    size = sizes.rows(length) * sizes.groups
    for start in range(0, len(rows), size):
        some = [tuple(row) for row in rows[start : start + size]]
        short = sizes.short_tail and len(some) < size
        yield _make_batch(
            some, *(sizes.short_shape(length, some) if short else (sizes.rows(length), length)), sizes.groups
        )


def _chunks(samples: Iterable[Sample], sizes: Sizes) -> Iterator[tuple[list[Sample], bool]]:
    """Yield lists of samples of bounded size, each with whether it is the last one."""
    chunk: list[Sample] = []
    tokens, size = 0, _FIRST_CHUNK
    batch = sizes.batch_tokens * sizes.groups
    for sample in samples:
        if tokens >= max(size * batch, _CHUNK_TOKENS) or len(chunk) >= sizes.chunk_samples:
            yield chunk, False
            chunk, tokens, size = [], 0, min(2 * size, sizes.chunk_batches)
        chunk.append(sample)
        tokens += len(sample)
    if chunk:
        yield chunk, True


def _by_row_length(pool: Sequence[Sample], sizes: Sizes, known: list[int]) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Split the pool, longest first, by row length. A part of its own is made only for far shorter samples.

    Attention costs the whole length of a row, so a document of 20,000 tokens shares no row with short texts.
    """
    while pool:
        length = sizes.row_length(len(pool[0]), known)
        if length not in known:
            known.append(length)
        short = length // (2 * _NEAR)
        split = len(pool) if short < sizes.row_length(1) else bisect_left(pool, -short, key=lambda sample: -len(sample))
        yield length, pool[:split]
        pool = pool[split:]


def _pack(samples: Sequence[Sample], length: int) -> list[Row]:
    """Pack by best fit: each sample, in this order, into the fullest batch row that has room for it."""
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


def _make_batch(rows: Sequence[Row], count: int, length: int, groups: int) -> Batch:
    return Batch(tuple(tuple(rows[g * count : (g + 1) * count]) for g in range(groups)), count, length)
