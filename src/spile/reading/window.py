"""A window: rows of many pieces side by side in memory, read in parallel, checked, and gathered in any order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.planning.shuffle import RowPiece
from spile.reading.read_pool import ReadPool
from spile.reading.rows import RowBatch, context_of
from spile.reading.selection import Selection
from spile.store.record import ShardRecord
from spile.store.shard_reader import ShardReader
from spile.store.streams import Stream

__all__ = ["ShardCache", "TapSource", "Window", "WindowLoader"]

_Array = npt.NDArray[Any]
_MOST_TOKENS = 64_000_000
"""Of the shards that are open: their token ids, roles and offsets take about five bytes each."""


class ShardCache(Sequence[tuple[int, ShardReader]]):
    """Shards by number, each opened when it is asked for; what their tails take in memory is bounded."""

    def __init__(self, shards: Sequence[tuple[Stream, ShardRecord]]) -> None:
        self._shards = shards
        self._opened: OrderedDict[int, ShardReader] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: Any) -> Any:
        stream, record = self._shards[number]
        with self._lock:
            found = self._opened.pop(number, None)
            if found is None:
                found = stream.open(record)
                self._tokens += record.tokens
            self._opened[number] = found
            while self._tokens > _MOST_TOKENS and len(self._opened) > 1:
                old, _ = self._opened.popitem(last=False)
                self._tokens -= self._shards[old][1].tokens
        return stream.number, found


@dataclass(frozen=True)
class TapSource:
    """What is to be read: these taps of these shards."""

    taps: tuple[str, ...]
    shards: Sequence[tuple[int, ShardReader]]
    """Each with its stream's number."""

    def row_type(self, tap: str) -> tuple[np.dtype[Any], int]:
        """The dtype and the number of columns of a tap's rows, the same in every shard."""
        place = self.shards[0][1].place(tap)
        return place.dtype, place.shape[1]


class Window:
    """Rows in memory, and which of them are wanted."""

    def __init__(self, buffers: Mapping[str, _Array], pieces: Sequence[RowPiece], context: bool) -> None:
        self._buffers = buffers
        self._parts: list[tuple[_Array, RowBatch | None]] = [(np.empty(0, np.int64), None)] * len(pieces)
        self._starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        self._context = context
        self.chosen: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The places of wanted rows in the buffers."""
        self._known: RowBatch | None = None

    def slot(self, number: int, tap: str) -> _Array:
        """Where a piece's rows of a tap go."""
        return self._buffers[tap][self._starts[number] : self._starts[number + 1]]

    def keep(self, number: int, wanted: npt.NDArray[np.bool_] | None, known: RowBatch | None) -> None:
        """A piece was read: which of its rows are wanted (None: all), and what is known of them."""
        first, last = int(self._starts[number]), int(self._starts[number + 1])
        chosen = np.arange(first, last) if wanted is None else first + np.flatnonzero(wanted)
        self._parts[number] = (chosen, known if known is None or wanted is None else known.take(wanted))

    def seal(self) -> Window:
        """All pieces were read."""
        self.chosen = np.concatenate([chosen for chosen, _ in self._parts])
        if self._context:
            self._known = RowBatch.join([known for _, known in self._parts if known is not None])
        self._parts = []
        return self

    def gather(self, order: npt.NDArray[np.int64]) -> tuple[dict[str, _Array], RowBatch | None]:
        """The wanted rows numbered ``order``, copied out of every tap, and what is known of them."""
        places = self.chosen[order]
        # As bytes of whole rows: NumPy copies each with one memcpy, whatever the dtype.
        rows = {tap: np.take(buffer, places, axis=0) for tap, buffer in self._buffers.items()}
        return rows, None if self._known is None else self._known.take(order)


class WindowLoader:
    """Reads windows into buffers that it uses again: taking new memory from the system costs as much as a copy."""

    def __init__(
        self, source: TapSource, selection: Selection, pool: ReadPool, *, context: bool, scratch: str | None
    ) -> None:
        self._source, self._selection, self._pool = source, selection, pool
        self._context, self._scratch = context, scratch
        self._buffers: list[dict[str, _Array]] = [{}, {}]
        self._turn = 0

    def begin(self, pieces: Sequence[RowPiece]) -> _Loading:
        """Start to read a window. The window begun before the last one must be done with."""
        rows = sum(map(len, pieces))
        window = Window(self._room(rows), pieces, self._context)
        tasks = [self._pool.submit(partial(self._read, window, number, piece)) for number, piece in enumerate(pieces)]
        return _Loading(window, tasks)

    def _room(self, rows: int) -> dict[str, _Array]:
        self._turn = 1 - self._turn
        held = self._buffers[self._turn]
        for tap in self._source.taps:
            dtype, columns = self._source.row_type(tap)
            if tap not in held or len(held[tap]) < rows:
                held[tap] = self._allocate((rows, columns), dtype)
        return {tap: buffer[:rows] for tap, buffer in held.items()}

    def _allocate(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> _Array:
        if self._scratch is None:
            return np.empty(shape, dtype)
        import tempfile

        folder = Path(self._scratch)
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name: its room is free again when the reader ends, however it ends.
        with tempfile.TemporaryFile(dir=folder, prefix=".spile-") as file:
            return np.memmap(file, dtype, "w+", shape=shape)

    def _read(self, window: Window, number: int, piece: RowPiece) -> None:
        """One piece, every tap of it. In a thread of the pool."""
        stream, shard = self._source.shards[piece.shard]
        wanted = self._selection.mask(stream, shard, piece.start, piece.stop) if self._selection.by_tail else None
        if wanted is None or wanted.any():
            for tap in self._source.taps:
                shard.read_rows(tap, piece.start, piece.stop, window.slot(number, tap))
        if self._selection.by_norm:
            near = self._selection.of_norm(_norms(window.slot(number, self._source.taps[0])))
            wanted = near if wanted is None else wanted & near
        known = context_of(stream, shard, piece.start, piece.stop) if self._context else None
        window.keep(number, wanted, known)


@dataclass(frozen=True)
class _Loading:
    window: Window
    tasks: list[Future[None]]

    def result(self) -> Window:
        """Wait for all pieces; the first failure is raised."""
        for task in self.tasks:
            task.result()
        return self.window.seal()


def _norms(rows: _Array) -> npt.NDArray[np.float32]:
    wide = rows.astype(np.float32)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))
