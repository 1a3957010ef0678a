"""Sources of shuffled rows: stored shards of one dataset, or of several that have the same tokens.

A shard may also be in memory, for rows that are not stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from spile.objects.folder import iterate_ahead, read_ahead
from spile.reading.rows import (
    ROW_BITS,
    BlockOptions,
    BlockSource,
    InputStream,
    OrderedRows,
    Read,
    RowBatch,
    RowChunk,
    Selection,
    context_of,
)
from spile.spec.identity import place_in_turn
from spile.spec.ranges import Ranges
from spile.spec.sample import Sample
from spile.store.ledger import ShardRecord
from spile.store.shard import notes_of
from spile.store.shard_reader import SMALL_SHARD, ShardReader
from spile.store.statistics import widened

if TYPE_CHECKING:
    from spile.store.stored_stream import Stream

_OPEN_BYTES = 320_000_000
"""Bytes that open shards may hold: token ids, roles and masks take six bytes per token, and a small shard is held
whole."""
_WINDOW = 1 << 14
"""Samples whose lengths are read at once by a reader in the order of the data."""
_THREAD_BYTES, _STREAM_BYTES, _MOST_GROUP_BYTES = 4 << 20, 1 << 20, 128 << 20
"""The rows that it loads at once: for each thread or, if that is more, for each stream; and at most."""

_Array = npt.NDArray[Any]
_Mask = npt.NDArray[np.bool_]
_Numbers = npt.NDArray[np.int64]


class MemoryShard:
    """Samples and their rows in memory. It has the methods of a stream and of its shard that readers use."""

    def __init__(self, stream: int, samples: Sequence[Sample], rows: Mapping[str, _Array]) -> None:
        self.number, self.notes, self._rows = stream, notes_of(samples), rows
        lengths = [sample.rows for sample in samples]
        counting = [np.arange(len(sample)) for sample in samples]
        self._tensors: dict[str, _Array] = {
            "sample_index": np.array([sample.index for sample in samples], np.int64),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "tokens": np.concatenate([sample.of_rows(sample.tokens) for sample in samples]),
            "roles": np.concatenate([sample.of_rows(sample.roles) for sample in samples]),
        }
        self._positions = np.concatenate([sample.of_rows(each) for sample, each in zip(samples, counting, strict=True)])
        indices = Ranges.of(sample.index for sample in samples)
        self.record = ShardRecord("", 0, 0, (0, 0), {}, indices, len(samples), sum(lengths))

    input_turns: tuple[int, int] | None = None

    def place(self, index: Any) -> Any:
        return index

    def open(self, _record: ShardRecord) -> MemoryShard:
        return self

    def read_tensor(self, name: str) -> _Array:
        return self._tensors[name]

    def rows(self, tap: str, start: int, stop: int) -> _Array:
        return self._rows[tap][start:stop]

    def row_type(self, tap: str) -> tuple[np.dtype[Any], int]:
        return self._rows[tap].dtype, self._rows[tap].shape[1]

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._positions[start:stop]


_Shards = Sequence[tuple["Stream | MemoryShard", ShardRecord]]


class SampleTable(NamedTuple):
    """Numbers the samples of all shards in the order of the data, which is defined here and nowhere else.

    It is the order of the input if all streams are parts of one input; otherwise the streams follow one another. Each
    entry stands for samples that are consecutive in this order, in their stream, and in one shard.
    """

    shard: _Numbers
    first: _Numbers  # index of the first sample
    start: _Numbers
    """Number of the first sample, counted over all streams; one more entry at the end: the number of samples."""
    place: _Numbers
    """Number of the first sample in the input."""

    @classmethod
    def of(cls, shards: _Shards) -> SampleTable:
        runs = [
            (stream.number, first, last, number)
            for number, (stream, record) in enumerate(shards)
            for first, last in record.samples.pairs()
        ]
        stream, first, last, shard = np.array(runs, np.int64).reshape(-1, 4).T
        inputs = {each.input_turns for each, _ in shards}
        streams, turn = (inputs.pop() if len(inputs) == 1 else None) or (1, 0)
        if turn:  # The streams have `turn` samples each in turn, so runs are cut at the ends of the turns.
            begins, ends = first // turn, (last - 1) // turn + 1
            run = np.repeat(np.arange(len(first)), ends - begins)
            number = begins[run] + np.arange(len(run)) - np.cumsum(ends - begins)[run] + (ends - begins)[run]
            first, last = np.maximum(first[run], number * turn), np.minimum(last[run], (number + 1) * turn)
            stream, shard = stream[run], shard[run]
            place = place_in_turn(first, stream, streams, turn)
            order = np.argsort(place, kind="stable")
        else:
            place, order = first, np.lexsort((first, stream))
        count = (last - first)[order]
        return cls(shard[order], first[order], np.concatenate([[0], np.cumsum(count)]), place[order])

    def find(self, samples: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the shard and the index in its stream of each sample."""
        at = np.searchsorted(self.start, samples, side="right") - 1
        return self.shard[at], self.first[at] + samples - self.start[at]

    def places(self, samples: _Numbers) -> _Numbers:
        """Return the number of each sample in the input, which counts skipped samples too."""
        at = np.searchsorted(self.start, samples, side="right") - 1
        return self.place[at] + samples - self.start[at]

    def by_shard(self, samples: _Numbers) -> list[tuple[int, _Numbers, _Numbers]]:
        """Return for each shard that has some of these samples: its number, and their numbers and indices."""
        shard, index = self.find(samples)
        return [(int(shard[group[0]]), samples[group], index[group]) for group in _by_shard(shard)]


class _OpenShard:
    """An open shard, the order of its samples by index, and which of its rows are selected."""

    def __init__(self, stream: InputStream, reader: ShardReader, selection: Selection, window: int) -> None:
        self.stream, self.reader = stream, reader
        self._selection, self._window = selection, window
        self._sorter: _Numbers | None = None
        self._mask: _Mask | None = None

    def ranges(self, indices: _Numbers, part: _Numbers, parts: int) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return for a part of each sample the first row, the row after the last, and the sample's first row."""
        index, offsets = self.reader.read_tensor("sample_index"), self.reader.read_tensor("offsets")
        if self._sorter is None:
            self._sorter = np.argsort(index, kind="stable")
        place = self._sorter[np.searchsorted(index, indices, sorter=self._sorter)]
        begin = offsets[place]
        length = offsets[place + 1] - begin
        return begin + length * part // parts, begin + length * (part + 1) // parts, begin

    def mask(self) -> _Mask | None:
        """Return which rows all conditions but norms select, with all of their window; None: every row."""
        if not self._selection.by_metadata and self._window == 1:
            return None
        if self._mask is None:
            reader, before = self.reader, self._window - 1
            total = reader.record.tokens
            mask = _all_of_window(self._selection.mask(self.stream, reader, 0, total), self._window)
            if before:
                rows, offsets = np.arange(total), reader.read_tensor("offsets")
                mask &= rows - offsets[np.searchsorted(offsets, rows, side="right") - 1] >= before
                positions = reader.positions(0, total)  # a run may store some tokens only
                mask[before:] &= positions[before:] - positions[: total - before] == before
            self._mask = mask
        return self._mask


class StoredBlocks(BlockSource):
    """Taps of committed shards."""

    def __init__(
        self,
        taps: Sequence[str],
        shards: _Shards,
        options: BlockOptions,
        identity: str = "",
        *,
        remote: bool = False,
    ) -> None:
        self.taps, self._shards, self.identity, self.remote = tuple(taps), tuple(shards), identity, remote
        self.selection, self._context, self.window, _ = options
        self.samples = sum(record.count for _, record in self._shards)
        self.rows = sum(record.tokens for _, record in self._shards)
        self._counts: dict[int, _Numbers] = {}
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._open_bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def _table(self) -> SampleTable:
        return SampleTable.of(self._shards)

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        if not self._shards:
            return {}
        reader = self._shard(0).reader
        types = {tap: reader.row_type(tap) for tap in self.taps}
        return {tap: (dtype, self.window * columns) for tap, (dtype, columns) in types.items()}

    def reads(self, samples: _Numbers, part: _Numbers, parts: int) -> Iterator[Read]:
        shards, indices = self._table.find(samples)
        most = self.samples_per_read(parts)
        for group in _by_shard(shards):
            for begin in range(0, len(group), most):
                some = group[begin : begin + most]
                yield partial(self._read, int(shards[some[0]]), samples[some], indices[some], part[some], parts)

    def _read(self, number: int, samples: _Numbers, indices: _Numbers, part: _Numbers, parts: int) -> RowChunk | None:
        """Read parts of samples of one shard, neighbours together."""
        shard = self._shard(number)
        starts, stops, begins = shard.ranges(indices, part, parts)
        order = np.argsort(starts, kind="stable")
        order = order[stops[order] > starts[order]]
        if not len(order):
            return None
        starts, stops, lengths = starts[order], stops[order], (stops - starts)[order]
        ends = np.cumsum(lengths)
        numbers = np.arange(ends[-1]) + np.repeat(stops - ends, lengths)
        keys = numbers + np.repeat((samples << ROW_BITS)[order] - begins[order], lengths)
        mask, selection = shard.mask(), self.selection
        wanted = None if mask is None else mask[numbers]
        if wanted is not None and not wanted.any():
            return None
        gaps = np.flatnonzero(starts[1:] > stops[:-1])
        runs = list(zip(starts[[0, *gaps + 1]].tolist(), stops[[*gaps, -1]].tolist(), strict=True))
        rows = {tap: [shard.reader.rows(tap, *run) for run in runs] for tap in self.taps}
        context = None
        if self._context:
            context = RowBatch.join([context_of(shard.stream, shard.reader, *run) for run in runs])
        if selection.by_norm:
            by_norm = np.concatenate([selection.norm_mask(_norms(array)) for array in rows[self.taps[0]]])
            by_norm = _all_of_window(by_norm, self.window)
            wanted = by_norm if wanted is None else by_norm & wanted
        if wanted is not None:
            keys, context = keys[wanted], context and context.take(wanted)
            rows = {tap: self._select(arrays, wanted) for tap, arrays in rows.items()}
        return RowChunk(keys, rows, context)

    def _select(self, arrays: list[_Array], wanted: _Mask) -> list[_Array]:
        """Return the wanted rows of some arrays, with their predecessors in the order of the tokens."""
        if self.window == 1:
            masks = np.split(wanted, np.cumsum([len(array) for array in arrays[:-1]]))
            return [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        rows, at = np.concatenate(arrays), np.flatnonzero(wanted)
        return [np.concatenate([rows[at - before] for before in range(self.window - 1, -1, -1)], axis=1)]

    def read(self, samples: _Numbers, part: _Numbers, parts: int) -> RowChunk | None:
        """Return the selected rows of a part of each sample, ordered by their keys."""
        return _merged([chunk for read in self.reads(samples, part, parts) if (chunk := read()) is not None])

    def in_order(self, first: int = 0, last: int | None = None) -> Iterator[OrderedRows]:
        """Yield the selected rows of the samples from number ``first`` to before ``last`` in the order of the data.

        The shards of all streams are merged. What is held does not grow with the dataset: the next rows are loaded
        while the caller uses some, and a long sample comes in several parts.
        """
        return iterate_ahead(self._load_in_order(first, self.samples if last is None else last), 1)

    def _load_in_order(self, first: int, last: int) -> Iterator[OrderedRows]:
        streams = len({stream.number for stream, _ in self._shards})
        held = min(max(self.threads * _THREAD_BYTES, streams * _STREAM_BYTES), _MOST_GROUP_BYTES)
        most = max(1, held // max(16, self.row_bytes))
        for begin in range(first, last, _WINDOW):
            window = np.arange(begin, min(begin + _WINDOW, last))
            lengths = self._per_sample(np.zeros((len(window), 1), np.int64), self._lengths, window)[:, 0]
            for start, stop, parts in _cut(lengths, most):
                samples = window[start:stop]
                for part in range(parts):
                    reads = self.reads(samples, np.full_like(samples, part), parts)
                    chunks = [chunk for chunk in read_ahead(reads, self.threads) if chunk is not None]
                    yield OrderedRows(samples, part, part + 1 == parts, _merged(chunks))

    def notes(self, samples: _Numbers) -> list[dict[str, Any]]:
        """Return the note of each of these samples, with its stream and its number in the input."""
        found: dict[int, dict[str, Any]] = {}
        for number, wanted, indices in self._table.by_shard(samples):
            stream, reader = self._shard(number).stream, self._shard(number).reader
            places, at = stream.place(indices).tolist(), reader.places_of(indices).tolist()
            for sample, place, each in zip(wanted.tolist(), places, at, strict=True):
                found[sample] = {"stream": stream.number, "place": place, **reader.notes[each]}
        return [found[number] for number in samples.tolist()]

    def counts(self, parts: int) -> _Numbers:
        if parts not in self._counts:
            found = np.zeros((self.samples, parts), np.int64)
            call = partial(self._count, parts, selected=True)
            self._counts[parts] = self._per_sample(found, call, np.arange(self.samples))
        return self._counts[parts]

    def data_order(self) -> tuple[_Numbers, _Numbers]:
        samples = np.arange(self.samples)
        lengths = self._per_sample(np.zeros((self.samples, 1), np.int64), self._lengths, samples)
        return self._table.places(samples), lengths[:, 0]

    def _lengths(self, number: int, indices: _Numbers) -> _Numbers:
        return self._count(1, number, indices, selected=False)

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return a hash of the tokens of each sample and of the positions that have rows."""
        return self._per_sample(np.zeros(self.samples, np.uint64), self._digests, np.arange(self.samples))

    def _per_sample(self, found: _Array, call: Callable[[int, _Numbers], _Array], samples: _Numbers) -> _Array:
        """Fill an array with what ``call`` returns for consecutive samples of each shard, given by their indices."""
        groups = self._table.by_shard(samples)
        calls = (partial(call, shard, indices) for shard, _, indices in groups)
        for (_, numbers, _), values in zip(groups, read_ahead(calls, self.threads), strict=True):
            found[numbers - samples[0]] = values
        return found

    def _count(self, parts: int, number: int, indices: _Numbers, *, selected: bool) -> _Numbers:
        shard = self._shard(number)
        part = np.tile(np.arange(parts), len(indices))
        starts, stops, _ = shard.ranges(np.repeat(indices, parts), part, parts)
        mask = shard.mask() if selected else None
        if mask is not None:
            before = np.concatenate([[0], np.cumsum(mask)])
            starts, stops = before[starts], before[stops]
        return np.asarray((stops - starts).reshape(len(indices), parts))

    def _digests(self, number: int, indices: _Numbers) -> npt.NDArray[np.uint64]:
        reader = self._shard(number).reader
        positions = reader.positions(0, reader.record.tokens).astype("<i4")
        found = []
        for index in indices.tolist():
            place = reader.place_of(index)
            content = reader.context(place).tobytes() + positions[slice(*reader.bounds(place))].tobytes()
            found.append(int.from_bytes(blake2b(content, digest_size=8).digest(), "little"))
        return np.array(found, np.uint64)

    def _shard(self, number: int) -> _OpenShard:
        """Return a shard; the most recently used ones stay open."""
        stream, record = self._shards[number]
        with self._lock:
            found = self._open.pop(number, None)
            if found is None:
                reader = cast(ShardReader, stream.open(record))
                found = _OpenShard(stream, reader, self.selection, self.window)
                self._open_bytes += _held_bytes(record)
            self._open[number] = found
            while self._open_bytes > _OPEN_BYTES and len(self._open) > 1:
                old, _ = self._open.popitem(last=False)
                self._open_bytes -= _held_bytes(self._shards[old][1])
        return found


def _cut(lengths: _Numbers, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield first, last + 1 and 1 for samples with at most ``most`` rows, or the number of parts of a longer sample."""
    ends, begin = np.cumsum(lengths), 0
    while begin < len(lengths):
        parts = max(1, -(-int(lengths[begin]) // most))
        before = int(ends[begin] - lengths[begin])
        end = begin + 1 if parts > 1 else int(np.searchsorted(ends, before + most, side="right"))
        yield begin, end, parts
        begin = end


def _merged(chunks: Sequence[RowChunk]) -> RowChunk | None:
    """Return the rows of all chunks, ordered by their keys; None if there is none."""
    if not chunks:
        return None
    keys = np.concatenate([chunk.keys for chunk in chunks])
    (first, *others), every = chunks, (np.diff(keys) > 0).all()
    if not others and every and all(len(arrays) == 1 for arrays in first.rows.values()):
        return first
    order = np.argsort(keys, kind="stable")
    target = np.empty_like(order)
    target[order] = np.arange(len(order))
    rows = {}
    for tap in first.rows:
        arrays = [array for chunk in chunks for array in chunk.rows[tap]]
        rows[tap] = [np.empty((len(keys), *arrays[0].shape[1:]), arrays[0].dtype)]
        for array, at in zip(arrays, np.split(target, np.cumsum([len(array) for array in arrays[:-1]])), strict=True):
            rows[tap][0][at] = array
    contexts = [chunk.context for chunk in chunks if chunk.context is not None]
    return RowChunk(keys[order], rows, RowBatch.join(contexts).take(order) if contexts else None)


def _by_shard(shards: _Numbers) -> list[_Numbers]:
    """Return the places of the entries of each shard."""
    order = np.argsort(shards, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else []


def _held_bytes(record: ShardRecord) -> int:
    return 6 * record.tokens + (record.size if record.size <= SMALL_SHARD else 0)


def _norms(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    wide = widened(rows, np.float32)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))


def _all_of_window(mask: _Mask, window: int) -> _Mask:
    """Return which rows are selected together with their ``window - 1`` predecessors."""
    found = mask.copy()
    found[: window - 1] = False
    for before in range(1, window):
        found[before:] &= mask[:-before]
    return found


class JointBlocks(BlockSource):
    """Taps of several datasets with the same tokens, as one source: rows of the same token belong together.

    The first dataset decides which rows are selected, so that all datasets give the same ones.
    """

    def __init__(self, sources: Mapping[str, StoredBlocks], identity: str) -> None:
        self._sources, self.identity = dict(sources), identity
        self._first = next(iter(self._sources.values()))
        self.selection, self.window = self._first.selection, self._first.window
        self.samples, self.rows = self._first.samples, self._first.rows
        self.remote = any(source.remote for source in self._sources.values())

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        return {f"{name}/{tap}": kind for name, source in self._sources.items() for tap, kind in source.types().items()}

    def counts(self, parts: int) -> _Numbers:
        return self._first.counts(parts)

    def data_order(self) -> tuple[_Numbers, _Numbers]:
        return self._first.data_order()

    def reads(self, samples: _Numbers, part: _Numbers, parts: int) -> Iterator[Read]:
        step = self.samples_per_read(parts)
        for begin in range(0, len(samples), step):
            yield partial(self._read, samples[begin : begin + step], part[begin : begin + step], parts)

    def _read(self, samples: _Numbers, part: _Numbers, parts: int) -> RowChunk | None:
        chunk = self._first.read(samples, part, parts)
        if chunk is None:
            return None
        rows: dict[str, Sequence[_Array]] = {}
        for name, source in self._sources.items():
            other = chunk if source is self._first else source.read(samples, part, parts)
            assert other is not None  # noqa: S101  the tokens are equal, and nothing is left out
            at = np.searchsorted(other.keys, chunk.keys)
            rows |= {
                f"{name}/{tap}": arrays if other is chunk else [arrays[0][at]] for tap, arrays in other.rows.items()
            }
        return chunk._replace(rows=rows)
