"""Stored shards as the source of shuffle blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spile.objects.ahead import read_ahead
from spile.objects.machine import local_cores
from spile.reading.rows import RowBatch, Selection, context_of
from spile.reading.shuffle_order import RowChunk
from spile.store.ledger import ShardRecord
from spile.store.shard_reader import SMALL_SHARD, ShardReader
from spile.store.statistics import widened
from spile.store.streams import Stream

_OPEN_BYTES = 320_000_000
"""Bytes that open shards may hold: token ids and roles take five bytes per token, and a small shard is held whole."""
_RUN_BYTES = 4 << 20
"""Bytes that are read, checked and copied at once, approximately."""
_BUCKET_THREADS = 16
_DISK_THREADS = 4

_Numbers = npt.NDArray[np.int64]


class _SampleTable(NamedTuple):
    """Consecutive samples of a stream that are in one shard, sorted by stream and sample index."""

    shard: _Numbers
    first: _Numbers
    """Index of the first sample."""
    start: _Numbers
    """Number of the first sample, counted over all streams; one more entry at the end: the number of samples."""

    @classmethod
    def of(cls, shards: Sequence[tuple[Stream, ShardRecord]]) -> _SampleTable:
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
        shards: Sequence[tuple[Stream, ShardRecord]],
        selection: Selection,
        *,
        context: bool = False,
        keep_cached: bool = True,
    ) -> None:
        self.taps, self.selection, self._shards = tuple(taps), selection, tuple(shards)
        self._context, self._keep_cached = context, keep_cached
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._open_bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def _table(self) -> _SampleTable:
        return _SampleTable.of(self._shards)

    @property
    def streams(self) -> list[Stream]:
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
        return {tap: reader.row_type(tap) for tap in self.taps}

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
        order = np.argsort(shards, kind="stable")
        mean = max(1, self.rows * self.row_bytes // max(1, self.samples * parts))
        most = max(1, _RUN_BYTES // mean)
        borders = np.flatnonzero(np.diff(shards[order])) + 1
        for mine in np.split(order, borders) if len(order) else []:
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
        ends = np.cumsum(lengths)
        offsets = np.arange(ends[-1]) - np.repeat(ends - lengths - starts + begins, lengths)
        gaps = np.flatnonzero(starts[1:] != stops[:-1])
        runs = zip(starts[[0, *gaps + 1]].tolist(), stops[[*gaps, -1]].tolist(), strict=True)
        self._pass_on(shard, list(runs), np.repeat(samples[order], lengths), offsets, put)

    def _pass_on(
        self,
        shard: _OpenShard,
        runs: list[tuple[int, int]],
        samples: _Numbers,
        offsets: _Numbers,
        put: Callable[[RowChunk], None],
    ) -> None:
        """Read runs of rows, select among them, and pass what is selected to ``put``."""
        reader, selection = shard.reader, self.selection
        masks: list[Any] = []
        if selection.by_tail:
            masks = [selection.mask(shard.stream, reader, *run) for run in runs]
            if not any(mask.any() for mask in masks):
                return
        rows = {tap: [reader.rows(tap, *run) for run in runs] for tap in self.taps}
        if selection.by_norm:
            near = [selection.of_norm(_norms(array)) for array in rows[self.taps[0]]]
            masks = [mask & each for mask, each in zip(masks, near, strict=True)] if masks else near
        known = RowBatch.join([context_of(shard.stream, reader, *run) for run in runs]) if self._context else None
        if masks:
            chosen = np.concatenate(masks)
            samples, offsets, known = samples[chosen], offsets[chosen], known and known.take(chosen)
            rows = {
                tap: [array[mask] for array, mask in zip(arrays, masks, strict=True)] for tap, arrays in rows.items()
            }
        put(RowChunk(samples, offsets, rows, known))
        if not self._keep_cached:
            for tap in self.taps:
                for run in runs:
                    reader.drop_cached(tap, *run)

    def counts(self, parts: int) -> _Numbers:
        """Return the number of selected rows ``[samples, parts]``, without reading rows."""
        found = np.zeros((self.samples, parts), np.int64)
        shards, indices = self._table.find(np.arange(self.samples))
        order = np.argsort(shards, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else []
        calls = (partial(self._count, int(shards[mine[0]]), indices[mine], parts) for mine in groups)
        for mine, counted in zip(groups, read_ahead(calls, self._threads), strict=True):
            found[mine] = counted
        return found

    def _count(self, number: int, indices: _Numbers, parts: int) -> _Numbers:
        shard = self._shard(number)
        part = np.tile(np.arange(parts), len(indices))
        starts, stops, _ = shard.ranges(np.repeat(indices, parts), part, parts)
        counted = stops - starts
        if self.selection.by_tail:
            mask = self.selection.mask(shard.stream, shard.reader, 0, shard.reader.record.tokens)
            before = np.concatenate([[0], np.cumsum(mask)])
            counted = before[stops] - before[starts]
        return np.asarray(counted.reshape(len(indices), parts))

    def _shard(self, number: int) -> _OpenShard:
        """Return a shard; the most recently used ones stay open."""
        stream, record = self._shards[number]
        with self._lock:
            found = self._open.pop(number, None)
            if found is None:
                found = _OpenShard(stream.number, stream.open(record), [])
                self._open_bytes += _held_bytes(record)
            self._open[number] = found
            while self._open_bytes > _OPEN_BYTES and len(self._open) > 1:
                old, _ = self._open.popitem(last=False)
                self._open_bytes -= _held_bytes(self._shards[old][1])
        return found


def _held_bytes(record: ShardRecord) -> int:
    return 5 * record.tokens + (record.size if record.size <= SMALL_SHARD else 0)


def _norms(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    wide = widened(rows, np.float32)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))
