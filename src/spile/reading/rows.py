"""A tap's rows, batch by batch: chunk-aligned pieces read ahead, checked, cut into rows, filtered, gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.reading.opening import ShardOpener
from spile.reading.read_pool import ReadPool
from spile.reading.selection import Selection, kept_fields, positions_of
from spile.store.shard_reader import ShardReader

__all__ = ["RowBatch", "context_of", "iterate"]

_PIECE = 8 << 20
"""Bytes of one read, in whole chunks: at least one."""
_AHEAD = 6
"""Reads under way while one piece is consumed: bounds what is held to (1 + _AHEAD) × 8 MiB, and a batch."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows of one tap. The other fields are None where they were not asked for."""

    rows: _Array
    tokens: _Array | None = None
    roles: _Array | None = None
    streams: _Array | None = None
    samples: _Array | None = None
    """Each row's sample, by its index in its stream."""
    positions: _Array | None = None
    """Each row's place in its sample, from 0."""
    kept: Mapping[str, _Array] | None = None
    """What ``--keep`` named of each row's sample: an array of numbers where all are, else of objects."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Any) -> RowBatch:
        """These rows, with all that is known of them."""
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return RowBatch(**{name: _mapped(lambda part: part[which], part) for name, part in parts if part is not None})

    @staticmethod
    def join(parts: list[RowBatch]) -> RowBatch:
        """One batch after the other; one alone is not copied."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(RowBatch) if getattr(parts[0], field.name) is not None]
        return RowBatch(**{name: _concatenated([getattr(part, name) for part in parts]) for name in names})


def _mapped(change: Callable[[_Array], _Array], part: Any) -> Any:
    """Of an array, or of each array by its name."""
    return {name: change(array) for name, array in part.items()} if isinstance(part, Mapping) else change(part)


def _concatenated(parts: list[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def iterate(
    shards: Iterable[tuple[int, ShardReader]],
    tap: str,
    batch_rows: int,
    *,
    include: int | None,
    exclude: int | None,
    context: bool,
) -> Iterator[RowBatch]:
    """Batches of ``batch_rows`` rows, over the shards' borders; the last is shorter."""
    waiting: list[RowBatch] = []
    held = 0
    for part in _parts(shards, tap, include, exclude, context):
        waiting.append(part)
        held += len(part)
        while held >= batch_rows:
            joined = RowBatch.join(waiting)
            # Many batches may lie in one part: slice it, copy nothing.
            yield joined.take(slice(0, batch_rows))
            rest = joined.take(slice(batch_rows, None))
            waiting, held = ([rest], len(rest)) if len(rest) else ([], 0)
    if waiting:
        yield RowBatch.join(waiting)


def _parts(
    shards: Iterable[tuple[int, ShardReader]], tap: str, include: int | None, exclude: int | None, context: bool
) -> Iterator[RowBatch]:
    selection = Selection(include, exclude)
    filtered = selection.by_tail
    for stream, shard, first, rows in _row_pieces(shards, tap):
        last = first + len(rows)
        keep: Any = slice(None)
        if filtered:
            keep = selection.mask(stream, shard, first, last)
            if not keep.any():
                continue
        part = replace(context_of(stream, shard, first, last), rows=rows) if context else RowBatch(rows)
        yield part.take(keep) if filtered else part


def context_of(stream: int, shard: ShardReader, first: int, last: int) -> RowBatch:
    """What is known of rows ``first`` to ``last`` of a shard; no rows are read."""
    place = np.arange(first, last)
    offsets = shard.whole("offsets")
    sample = np.searchsorted(offsets, place, side="right") - 1
    begin, end = (int(sample[0]), int(sample[-1]) + 1) if len(sample) else (0, 0)
    return RowBatch(
        rows=np.empty((len(place), 0), np.float32),
        tokens=shard.whole("tokens")[first:last],
        roles=shard.whole("roles")[first:last],
        streams=np.full(len(place), stream),
        samples=shard.whole("sample_index")[sample],
        positions=positions_of(shard, first, last),
        kept={name: values[sample - begin] for name, values in kept_fields(shard, begin, end).items()} or None,
    )


def _row_pieces(shards: Iterable[tuple[int, ShardReader]], tap: str) -> Iterator[tuple[int, ShardReader, int, _Array]]:
    """(stream, shard, number of the first row, rows): a row that two pieces share comes by itself."""
    rest = b""
    row = 0
    for stream, shard, begin, data in _read_ahead(shards, tap):
        place = shard.place(tap)
        width = place.length // place.shape[0]
        if begin == 0:
            rest, row = b"", 0
        at = 0
        if rest:
            at = width - len(rest)
            shared = np.frombuffer(rest + bytes(data[:at]), place.dtype).reshape(1, -1)
            yield stream, shard, row, shard.decoded(tap, row, shared)
            row += 1
        count = (len(data) - at) // width
        if count:
            whole = data[at : at + count * width]
            yield stream, shard, row, shard.decoded(tap, row, np.frombuffer(whole, place.dtype).reshape(count, -1))
            row += count
        rest = bytes(data[at + count * width :])


def _read_ahead(
    shards: Iterable[tuple[int, ShardReader]], tap: str
) -> Iterator[tuple[int, ShardReader, int, memoryview]]:
    """(stream, shard, number of the first chunk, bytes) in order, with the next pieces already on their way."""
    pool, opener = ReadPool(_AHEAD), ShardOpener([tap])
    waiting: deque[tuple[int, ShardReader, int, Future[memoryview]]] = deque()
    try:
        for stream, shard in opener.in_turn(shards):
            for begin, end in shard.pieces(tap, _PIECE):
                waiting.append((stream, shard, begin, pool.submit(partial(shard.chunks, tap, begin, end))))
                if len(waiting) > _AHEAD:
                    number, source, at, future = waiting.popleft()
                    yield number, source, at, future.result()
        while waiting:
            number, source, at, future = waiting.popleft()
            yield number, source, at, future.result()
    finally:
        opener.close()
        pool.close()
