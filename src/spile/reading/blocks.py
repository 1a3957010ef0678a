"""Stored shards as the source of shuffle blocks, of one dataset or of several that have the same tokens.

A shard may also be in memory, for rows that are not stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from spile.objects.folder import read_ahead
from spile.objects.machine import local_cores
from spile.reading.rows import RowBatch, Selection, context_of
from spile.reading.shuffle_order import DataPlan, RowChunk, RowGroup, row_keys
from spile.spec.ranges import Ranges
from spile.spec.sample import Sample
from spile.store.ledger import ShardRecord
from spile.store.shard import notes_of
from spile.store.shard_reader import SMALL_SHARD, ShardReader
from spile.store.statistics import widened

if TYPE_CHECKING:
    from spile.store.streams import Stream

_OPEN_BYTES = 320_000_000
"""Bytes that open shards may hold: token ids and roles take five bytes per token, and a small shard is held whole."""
_RUN_BYTES = 4 << 20
"""Bytes that are read, checked and copied at once, approximately."""
_BUCKET_THREADS = 16
_DISK_THREADS = 4

_Array = npt.NDArray[Any]
_Numbers = npt.NDArray[np.int64]


class MemoryShard:
    """Samples and their rows in memory, with the part of the interface of a stored shard that readers use."""

    def __init__(self, samples: Sequence[Sample], rows: Mapping[str, _Array]) -> None:
        self.notes = notes_of(samples)
        lengths = [sample.rows for sample in samples]
        counting = [np.arange(len(sample)) for sample in samples]
        self._tensors: dict[str, _Array] = {
            "sample_index": np.array([sample.index for sample in samples], np.int64),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "tokens": np.concatenate([sample.of_rows(sample.tokens) for sample in samples]),
            "roles": np.concatenate([sample.of_rows(sample.roles) for sample in samples]),
        }
        self._positions = np.concatenate([sample.of_rows(each) for sample, each in zip(samples, counting, strict=True)])
        self._rows = rows
        indices = Ranges.of(sample.index for sample in samples)
        self.record = ShardRecord("", 0, 0, (0, 0), {}, indices, len(samples), sum(lengths))

    def read_tensor(self, name: str) -> _Array:
        """Return a tensor."""
        return self._tensors[name]

    def rows(self, tap: str, start: int, stop: int) -> _Array:
        """Return rows ``start`` to ``stop`` of a tap."""
        return self._rows[tap][start:stop]

    def row_type(self, tap: str) -> tuple[np.dtype[Any], int]:
        """Return the dtype and the width of a tap's rows."""
        return self._rows[tap].dtype, self._rows[tap].shape[1]

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the position of each row in its sample, from 0."""
        return self._positions[start:stop]

    def drop_cached(self, *_: object) -> None:
        """Do nothing: there is no page cache."""


class MemoryStream(NamedTuple):
    """A stream of one shard in memory."""

    number: int
    shard: MemoryShard
    local_path: Path = Path()

    @property
    def folder(self) -> MemoryStream:
        """The object itself, which readers only ask for ``local_path``."""
        return self

    def open(self, _record: ShardRecord) -> MemoryShard:
        """Return the shard."""
        return self.shard


_Shards = Sequence[tuple["Stream | MemoryStream", ShardRecord]]


class _SampleTable(NamedTuple):
    """Consecutive samples of a stream that are in one shard, sorted by stream and sample index."""

    shard: _Numbers
    first: _Numbers
    """Index of the first sample."""
    start: _Numbers
    """Number of the first sample, counted over all streams; one more entry at the end: the number of samples."""

    @classmethod
    def of(cls, shards: _Shards) -> _SampleTable:
        runs = sorted(
            (stream.number, first, last, number)
            for number, (stream, record) in enumerate(shards)
            for first, last in record.samples.pairs()
        )
        table = np.array(runs, np.int64).reshape(-1, 4)
        return cls(table[:, 3], table[:, 1], np.concatenate([[0], np.cumsum(table[:, 2] - table[:, 1])]))

    def find(self, samples: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the shard and the index in its stream of each sample."""
        at = np.searchsorted(self.start, samples, side="right") - 1
        return self.shard[at], self.first[at] + samples - self.start[at]


class _OpenShard(NamedTuple):
    """An open shard and the order of its samples by index."""

    stream: int
    reader: ShardReader
    sorter: list[_Numbers]
    """Empty until it is first needed: computing it reads the shard."""

    def ranges(self, indices: _Numbers, part: _Numbers, parts: int) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return for a part of each sample the first row, the row after the last, and the sample's first row."""
        index, offsets = self.reader.read_tensor("sample_index"), self.reader.read_tensor("offsets")
        if not self.sorter:
            self.sorter.append(np.argsort(index, kind="stable"))
        place = self.sorter[0][np.searchsorted(index, indices, sorter=self.sorter[0])]
        begin = offsets[place]
        length = offsets[place + 1] - begin
        return begin + length * part // parts, begin + length * (part + 1) // parts, begin


class StoredBlocks:
    """Taps of committed shards, as a :class:`~spile.reading.shuffle_order.BlockSource`."""

    def __init__(
        self,
        taps: Sequence[str],
        shards: _Shards,
        selection: Selection,
        *,
        context: bool = False,
        window: int = 1,
        keep_cached: bool = True,
    ) -> None:
        self.taps, self.selection, self._shards = tuple(taps), selection, tuple(shards)
        self.window, self._context, self._keep_cached = window, context, keep_cached
        """``window``: tokens of a row. With 2, a row is the rows of a token's predecessor and of the token itself."""
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._open_bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def _table(self) -> _SampleTable:
        return _SampleTable.of(self._shards)

    @property
    def streams(self) -> list[Any]:
        """The streams that have shards, in order."""
        return list(dict.fromkeys(stream for stream, _ in self._shards))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(record.count for _, record in self._shards)

    @property
    def rows(self) -> int:
        """Number of rows of all samples, before the selection."""
        return sum(record.tokens for _, record in self._shards)

    @property
    def remote(self) -> bool:
        """Whether the shards are in a bucket."""
        return bool(self._shards) and self._shards[0][0].folder.local_path is None

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of all taps together."""
        return sum(dtype.itemsize * columns for dtype, columns in self.types().values())

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return the dtype and the number of columns of each tap; every shard has the same."""
        if not self._shards:
            return {}
        reader = self._shard(0).reader
        types = {tap: reader.row_type(tap) for tap in self.taps}
        return {tap: (dtype, self.window * columns) for tap, (dtype, columns) in types.items()}

    def load(self, samples: _Numbers, part: _Numbers, parts: int, put: Callable[[RowChunk], None]) -> None:
        """Pass the selected rows of a part of each sample to ``put``, from several threads."""
        for _ in read_ahead(self._reads(samples, part, parts, put), self._threads):
            pass

    @property
    def _threads(self) -> int:
        return _BUCKET_THREADS if self.remote else min(_DISK_THREADS, max(2, len(local_cores())))

    def _reads(
        self, samples: _Numbers, part: _Numbers, parts: int, put: Callable[[RowChunk], None]
    ) -> Iterator[Callable[[], None]]:
        """Yield one call for each shard, or several if the shard has much to read."""
        shards, indices = self._table.find(samples)
        mean = max(1, self.rows * self.row_bytes // max(1, self.samples * parts))
        most = max(1, _RUN_BYTES // mean)
        for mine in _by_shard(shards):
            for begin in range(0, len(mine), most):
                few = mine[begin : begin + most]
                yield partial(self._read, int(shards[few[0]]), samples[few], indices[few], part[few], parts, put)

    def _read(
        self,
        number: int,
        samples: _Numbers,
        indices: _Numbers,
        part: _Numbers,
        parts: int,
        put: Callable[[RowChunk], None],
    ) -> None:
        """Read parts of samples of one shard, neighbours together."""
        shard = self._shard(number)
        starts, stops, begins = shard.ranges(indices, part, parts)
        order = np.argsort(starts, kind="stable")
        order = order[stops[order] > starts[order]]
        if not len(order):
            return
        starts, stops, begins = starts[order], stops[order], begins[order]
        lengths = stops - starts
        numbers = _ranges(starts, lengths)
        offsets = numbers - np.repeat(begins, lengths)
        starts = np.maximum(begins, starts - (self.window - 1))  # the predecessors of the first row of a part
        gaps = np.flatnonzero(starts[1:] > stops[:-1])
        runs = _Runs(starts[[0, *gaps + 1]], stops[[*gaps, -1]])
        self._pass_on(shard, runs, numbers, np.repeat(samples[order], lengths), offsets, put)

    def _pass_on(
        self,
        shard: _OpenShard,
        runs: _Runs,
        numbers: _Numbers,
        samples: _Numbers,
        offsets: _Numbers,
        put: Callable[[RowChunk], None],
    ) -> None:
        """Read runs of rows, select among them, and pass what is selected to ``put``."""
        reader, selection, pairs = shard.reader, self.selection, runs.pairs()
        chosen: npt.NDArray[np.bool_] | None = None
        if selection.by_tail or self.window > 1:
            chosen = np.concatenate([self._mask(shard, *run) for run in pairs])
            if not chosen.any():
                return
        rows = {tap: [reader.rows(tap, *run) for run in pairs] for tap in self.taps}
        if selection.by_norm:
            near = np.concatenate([selection.of_norm(_norms(array)) for array in rows[self.taps[0]]])
            chosen = near if chosen is None else chosen & _all_of_window(near, self.window)
        known = RowBatch.join([context_of(shard.stream, reader, *run) for run in pairs]) if self._context else None
        if chosen is not None:
            at = runs.find(numbers)
            wanted = chosen[at]
            at, samples, offsets, known = at[wanted], samples[wanted], offsets[wanted], known and known.take(at[wanted])
            masks = np.split(chosen, runs.ends[:-1])
            rows = {tap: self._chosen(arrays, masks, at) for tap, arrays in rows.items()}
        put(RowChunk(samples, offsets, rows, known))
        if not self._keep_cached:
            for tap in self.taps:
                for run in pairs:
                    reader.drop_cached(tap, *run)

    def _chosen(self, arrays: list[_Array], masks: list[_Array], at: _Numbers) -> list[_Array]:
        """Return the chosen rows of some runs, with their predecessors in the order of the tokens."""
        if self.window == 1:
            return [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        rows = np.concatenate(arrays)
        return [np.concatenate([rows[at - before] for before in range(self.window - 1, -1, -1)], axis=1)]

    def _mask(self, shard: _OpenShard, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Return which rows are selected by all conditions but norms, and have selected predecessors for a window."""
        mask = self.selection.mask(shard.stream, shard.reader, first, last)
        if self.window > 1:
            before, rows, offsets = self.window - 1, np.arange(first, last), shard.reader.read_tensor("offsets")
            mask = _all_of_window(mask, self.window)
            mask &= rows - offsets[np.searchsorted(offsets, rows, side="right") - 1] >= before
            positions = shard.reader.positions(first, last)  # a run may store some tokens only
            mask[before:] &= positions[before:] - positions[: len(positions) - before] == before
        return mask

    def counts(self, parts: int) -> _Numbers:
        """Return the number of selected rows ``[samples, parts]``, without reading rows."""
        return self._per_sample(np.zeros((self.samples, parts), np.int64), partial(self._count, parts))

    def _per_sample(self, found: _Array, call: Callable[[int, _Numbers], _Array]) -> _Array:
        """Fill an array with what ``call`` returns for the samples of each shard, given by their indices."""
        shards, indices = self._table.find(np.arange(self.samples))
        groups = _by_shard(shards)
        calls = (partial(call, int(shards[mine[0]]), indices[mine]) for mine in groups)
        for mine, values in zip(groups, read_ahead(calls, self._threads), strict=True):
            found[mine] = values
        return found

    def _count(self, parts: int, number: int, indices: _Numbers) -> _Numbers:
        shard = self._shard(number)
        part = np.tile(np.arange(parts), len(indices))
        starts, stops, _ = shard.ranges(np.repeat(indices, parts), part, parts)
        counted = stops - starts
        if self.selection.by_tail or self.window > 1:
            mask = self._mask(shard, 0, shard.reader.record.tokens)
            before = np.concatenate([[0], np.cumsum(mask)])
            counted = before[stops] - before[starts]
        return np.asarray(counted.reshape(len(indices), parts))

    def groups(self, plan: DataPlan, first: int, load: Callable[..., None] | None = None) -> Iterator[RowGroup]:
        """Yield the groups of samples in the order of the data, from the one that begins with sample ``first`` on.

        ``load`` passes on the rows of a group; by default :meth:`load`.
        """
        index = self._table.find(np.arange(self.samples))[1]
        mine = np.flatnonzero(index % plan.spec.parts == plan.spec.part)
        numbers = mine[mine >= first]
        for members, last in plan.cut(zip(numbers.tolist(), self._lengths[numbers].tolist(), strict=True)):
            some = np.array(members, np.int64)
            yield RowGroup(members[0], last, partial(load or self.load, some, np.zeros_like(some), 1))

    @cached_property
    def _lengths(self) -> _Numbers:
        """The number of rows of each sample, before the selection."""
        return StoredBlocks(self.taps, self._shards, Selection()).counts(1)[:, 0]

    def cancel(self) -> None:
        """Do nothing: reads end soon."""

    def gather(self, samples: _Numbers, part: _Numbers, parts: int) -> tuple[_Numbers, RowChunk] | None:
        """Return the selected rows of a part of each sample, ordered by the keys that are returned with them."""
        chunks: list[RowChunk] = []

        def keep(chunk: RowChunk) -> None:
            chunks.append(chunk._replace(rows={tap: [np.concatenate(each)] for tap, each in chunk.rows.items()}))

        for read in self._reads(samples, part, parts, keep):
            read()
        if not chunks:
            return None
        numbers, offsets = (np.concatenate([chunk[field] for chunk in chunks]) for field in (0, 1))
        keys = row_keys(numbers, offsets)
        order = np.argsort(keys, kind="stable")
        rows = {tap: [np.concatenate([chunk.rows[tap][0] for chunk in chunks])[order]] for tap in self.taps}
        known = [chunk.known for chunk in chunks if chunk.known is not None]
        joined = RowBatch.join(known).take(order) if known else None
        return keys[order], RowChunk(numbers[order], offsets[order], rows, joined)

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return a hash of the tokens of each sample and of the positions that have rows."""
        return self._per_sample(np.zeros(self.samples, np.uint64), self._digests)

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
                found = _OpenShard(stream.number, cast(ShardReader, stream.open(record)), [])
                self._open_bytes += _held_bytes(record)
            self._open[number] = found
            while self._open_bytes > _OPEN_BYTES and len(self._open) > 1:
                old, _ = self._open.popitem(last=False)
                self._open_bytes -= _held_bytes(self._shards[old][1])
        return found


def _by_shard(shards: _Numbers) -> list[_Numbers]:
    """Return the places of the entries of each shard."""
    order = np.argsort(shards, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else []


def _held_bytes(record: ShardRecord) -> int:
    return 5 * record.tokens + (record.size if record.size <= SMALL_SHARD else 0)


def _norms(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    wide = widened(rows, np.float32)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))


class _Runs(NamedTuple):
    """Ranges of rows of a shard, in order and apart from each other."""

    starts: _Numbers
    stops: _Numbers

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    @property
    def ends(self) -> _Numbers:
        """The number of rows up to the end of each run."""
        return np.cumsum(self.stops - self.starts)

    def find(self, numbers: _Numbers) -> _Numbers:
        """Return the place of each row among the rows of all runs."""
        run = np.searchsorted(self.starts, numbers, side="right") - 1
        return np.asarray(numbers - self.stops[run] + self.ends[run])


def _ranges(starts: _Numbers, lengths: _Numbers) -> _Numbers:
    """Return the numbers of all ranges, one range after another."""
    ends = np.cumsum(lengths)
    return np.asarray(np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths))


def _all_of_window(mask: npt.NDArray[np.bool_], window: int) -> npt.NDArray[np.bool_]:
    """Return which rows are selected together with their ``window - 1`` predecessors."""
    found = mask.copy()
    found[: window - 1] = False
    for before in range(1, window):
        found[before:] &= mask[:-before]
    return found


class JointBlocks:
    """Taps of several datasets with the same tokens, as one source: rows of the same token belong together.

    The first dataset decides which rows are selected, so that all datasets give the same ones.
    """

    def __init__(self, sources: Mapping[str, StoredBlocks]) -> None:
        self._sources = dict(sources)
        self._first = next(iter(self._sources.values()))
        self.selection, self.window = self._first.selection, self._first.window
        self.samples, self.rows = self._first.samples, self._first.rows
        self.remote = any(source.remote for source in self._sources.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all taps of all datasets together."""
        return sum(source.row_bytes for source in self._sources.values())

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return the dtype and the number of columns of each tap of each dataset."""
        return {f"{name}/{tap}": kind for name, source in self._sources.items() for tap, kind in source.types().items()}

    def counts(self, parts: int) -> _Numbers:
        """Return the number of selected rows ``[samples, parts]``, without reading rows."""
        return self._first.counts(parts)

    def groups(self, plan: DataPlan, first: int) -> Iterator[RowGroup]:
        """Yield the groups of samples in the order of the data, from the one that begins with sample ``first`` on."""
        return self._first.groups(plan, first, self.load)

    def cancel(self) -> None:
        """Do nothing: reads end soon."""

    def load(self, samples: _Numbers, part: _Numbers, parts: int, put: Callable[[RowChunk], None]) -> None:
        """Pass the selected rows of a part of each sample to ``put``, from several threads."""
        mean = max(1, self.rows * self.row_bytes // max(1, self.samples * parts))
        step = max(1, _RUN_BYTES // mean)
        calls = (
            partial(self._load, samples[first : first + step], part[first : first + step], parts, put)
            for first in range(0, len(samples), step)
        )
        for _ in read_ahead(calls, _BUCKET_THREADS if self.remote else _DISK_THREADS):
            pass

    def _load(self, samples: _Numbers, part: _Numbers, parts: int, put: Callable[[RowChunk], None]) -> None:
        found = self._first.gather(samples, part, parts)
        if found is None:
            return
        keys, chunk = found
        rows: dict[str, Sequence[npt.NDArray[Any]]] = {}
        for name, source in self._sources.items():
            if source is self._first:
                rows |= {f"{name}/{tap}": arrays for tap, arrays in chunk.rows.items()}
                continue
            other = source.gather(samples, part, parts)
            assert other is not None  # noqa: S101  the tokens are equal, and nothing is left out
            at = np.searchsorted(other[0], keys)
            rows |= {f"{name}/{tap}": [arrays[0][at]] for tap, arrays in other[1].rows.items()}
        put(chunk._replace(rows=rows))
