"""Rows of many pieces side by side in memory, read in parallel, checked, and gathered in any order."""

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

from spile.objects.staging import Staging
from spile.planning.shuffle import RowPiece
from spile.reading.read_pool import ReadPool
from spile.reading.rows import RowBatch, context_of
from spile.reading.selection import Selection
from spile.store.record import ShardRecord
from spile.store.shard_reader import SMALL_SHARD, ShardReader
from spile.store.statistics import widened
from spile.store.streams import Stream

__all__ = ["Group", "GroupLoader", "LoadingGroup", "ShardCache", "TapSource", "Window"]

_Array = npt.NDArray[Any]
_Places = npt.NDArray[np.int64]
_RUN = 4 << 20
"""Bytes of small pieces that one task reads."""
_MOST_HELD = 320_000_000
"""Bytes of the shards that are open: token ids and roles take five per token, and a small one is held whole."""


class ShardCache(Sequence[tuple[int, ShardReader]]):
    """Shards by number, each opened when it is asked for; what their tails take in memory is bounded."""

    def __init__(self, shards: Sequence[tuple[Stream, ShardRecord]]) -> None:
        self._shards = shards
        self._opened: OrderedDict[int, ShardReader] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: Any) -> Any:
        stream, record = self._shards[number]
        with self._lock:
            found = self._opened.pop(number, None)
            if found is None:
                found = stream.open(record)
                self._held += _weight(record)
            self._opened[number] = found
            while self._held > _MOST_HELD and len(self._opened) > 1:
                old, _ = self._opened.popitem(last=False)
                self._held -= _weight(self._shards[old][1])
        return stream.number, found


def _weight(record: ShardRecord) -> int:
    return 5 * record.tokens + (record.size if record.size <= SMALL_SHARD else 0)


@dataclass(frozen=True)
class TapSource:
    """What is to be read: these taps of these shards."""

    taps: tuple[str, ...]
    shards: Sequence[tuple[int, ShardReader]]
    """Each with its stream's number."""

    def row_type(self, tap: str) -> tuple[np.dtype[Any], int]:
        """The dtype and the number of columns of a tap's rows, the same in every shard."""
        shard: ShardReader = self.shards[0][1]
        return shard.row_type(tap)

    @property
    def widths(self) -> list[int]:
        """The bytes of a row of each tap."""
        return [dtype.itemsize * columns for dtype, columns in map(self.row_type, self.taps)]

    @property
    def width(self) -> int:
        """The bytes of a row of all taps together."""
        return sum(self.widths)


class Group:
    """Runs of pieces that were read side by side: where their wanted rows lie in memory, and what is known of them."""

    def __init__(self, runs: Sequence[Sequence[RowPiece]], base: int, order: _Places | None) -> None:
        self._starts = np.concatenate([[0], np.cumsum([sum(map(len, run)) for run in runs])])
        self._base = base
        self._target: _Places | None = None
        """Where each row goes, if not one after the other."""
        if order is not None:
            self._target = np.empty_like(order)
            self._target[order] = np.arange(base, base + len(order))
        self._parts: list[tuple[_Places, RowBatch | None]] = [(np.empty(0, np.int64), None)] * len(runs)
        self.places: _Places = np.empty(0, np.int64)
        self.known: RowBatch | None = None

    def slot(self, number: int) -> slice | _Places:
        """Where a run's rows go."""
        begin, end = self._starts[number : number + 2].tolist()
        return slice(self._base + begin, self._base + end) if self._target is None else self._target[begin:end]

    def keep(self, number: int, wanted: npt.NDArray[np.bool_] | None, known: RowBatch | None) -> None:
        """A run was read: which of its rows are wanted (None: all), and what is known of them."""
        slot = self.slot(number)
        places = np.arange(slot.start, slot.stop) if isinstance(slot, slice) else slot
        chosen = places if wanted is None else places[wanted]
        self._parts[number] = (chosen, known if known is None or wanted is None else known.take(wanted))

    def seal(self) -> None:
        """All runs were read."""
        self.places = np.concatenate([chosen for chosen, _ in self._parts])
        known = [known for _, known in self._parts if known is not None]
        self.known = RowBatch.join(known) if known else None
        self._parts = []

    def deal(self, order: _Places) -> None:
        """Put its rows into this order."""
        self.places = self.places[order]
        self.known = None if self.known is None else self.known.take(order)


class Window:
    """Rows of one or several groups that are given out together.

    ``last``: nobody reads this memory again, so that rows which lie as they are wanted can be given without a copy.
    """

    def __init__(self, buffers: Mapping[str, _Array], parts: Sequence[tuple[Group, slice]], *, last: bool) -> None:
        self._buffers, self._last = buffers, last
        self._places = np.concatenate([group.places[share] for group, share in parts])
        known = [group.known.take(share) for group, share in parts if group.known is not None]
        self._known = RowBatch.join(known) if known else None

    def __len__(self) -> int:
        return len(self._places)

    def gather(self, order: _Places) -> tuple[dict[str, _Array], RowBatch | None]:
        """The rows numbered ``order`` of every tap, and what is known of them."""
        places = self._places[order]
        if self._last and (np.diff(places) == 1).all():
            rows = {tap: buffer[places[0] : places[-1] + 1] for tap, buffer in self._buffers.items()}
            return rows, self._known_of(order)
        rows = self.room(len(order))
        return rows, self.gather_into(rows, order)

    def room(self, count: int) -> dict[str, _Array]:
        """Memory for so many rows of every tap."""
        return {tap: np.empty((count, buffer.shape[1]), buffer.dtype) for tap, buffer in self._buffers.items()}

    def gather_into(self, rows: Mapping[str, _Array], order: _Places) -> RowBatch | None:
        """The same into memory that is there already."""
        places = self._places[order]
        for tap, buffer in self._buffers.items():
            # Every place is there: to say so spares NumPy a copy, which it makes to leave ``out`` alone if one is not.
            np.take(_plain(buffer), places, axis=0, out=_plain(rows[tap]), mode="clip")
        return self._known_of(order)

    def _known_of(self, order: _Places) -> RowBatch | None:
        return None if self._known is None else self._known.take(order)


class GroupLoader:
    """Reads groups into memory that it uses again: taking new memory from the system costs as much as a copy."""

    def __init__(
        self,
        source: TapSource,
        selection: Selection,
        pool: ReadPool,
        *,
        context: bool,
        scratch: str | None,
        past_cache: bool,
    ) -> None:
        self._source, self._selection, self._pool = source, selection, pool
        self._context, self._scratch = context, scratch
        self._begun = 0
        self._own = threading.local()
        self._past_cache = past_cache
        self.buffers: dict[str, _Array] = {}
        """Each tap's rows, of all groups that are in memory."""

    def begin(self, pieces: Sequence[RowPiece], room: int, slots: int, order: _Places | None = None) -> LoadingGroup:
        """Start to read a group, into the memory of the one that was begun ``slots`` before, which must be done with.

        ``room``: the rows of the largest that will come. ``order``: in which rows are put there, each as it is read.
        """
        if not self.buffers:
            for tap in self._source.taps:
                dtype, columns = self._source.row_type(tap)
                self.buffers[tap] = self._allocate((room * slots, columns), dtype)
        runs = self._runs(pieces)
        group = Group(runs, self._begun % slots * room, order)
        self._begun += 1
        tasks = [self._pool.submit(partial(self._read, group, number, run)) for number, run in enumerate(runs)]
        return LoadingGroup(group, tasks)

    def _runs(self, pieces: Sequence[RowPiece]) -> list[list[RowPiece]]:
        """Neighbours of one shard together, as far as one task should go: small pieces cost little each."""
        width = self._source.width
        runs: list[list[RowPiece]] = []
        rows = 0
        for piece in pieces:
            if runs and runs[-1][0].shard == piece.shard and (rows + len(piece)) * width <= _RUN:
                runs[-1].append(piece)
                rows += len(piece)
            else:
                runs.append([piece])
                rows = len(piece)
        return runs

    def _allocate(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> _Array:
        if self._scratch is None:
            return np.empty(shape, dtype)
        import tempfile

        folder = Path(self._scratch)
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name: its room is free again when the reader ends, however it ends.
        with tempfile.TemporaryFile(dir=folder, prefix=".spile-") as file:
            return np.memmap(file, dtype, "w+", shape=shape)

    @property
    def orders(self) -> bool:
        """Whether rows can be put in order while they are read: each is wanted, and its place is written at once."""
        return self._scratch is None and not self._selection.by_tail and not self._selection.by_norm

    def _read(self, group: Group, number: int, run: Sequence[RowPiece]) -> None:
        """One run, every tap of it. In a thread of the pool."""
        if not hasattr(self._own, "staging"):
            self._own.staging = Staging(past_cache=self._past_cache)
        stream, shard = self._source.shards[run[0].shard]
        slot, ranges, wanted = group.slot(number), [(piece.start, piece.stop) for piece in run], None
        if self._selection.by_tail:
            wanted = np.concatenate([self._selection.mask(stream, shard, *each) for each in ranges])
        if wanted is None or wanted.any():
            for tap in self._source.taps:
                _plain(self.buffers[tap])[slot] = _plain(shard.ranges(tap, ranges, self._own.staging))
        if self._selection.by_norm:
            near = self._selection.of_norm(_norms(self.buffers[self._source.taps[0]][slot]))
            wanted = near if wanted is None else wanted & near
        known = RowBatch.join([context_of(stream, shard, *each) for each in ranges]) if self._context else None
        group.keep(number, wanted, known)


@dataclass(frozen=True)
class LoadingGroup:
    """A group on its way."""

    group: Group
    tasks: list[Future[None]]

    def result(self) -> Group:
        """Wait for all pieces; the first failure is raised."""
        for task in self.tasks:
            task.result()
        self.group.seal()
        return self.group


def _plain(rows: _Array) -> _Array:
    """As integers: NumPy holds the interpreter's lock over a dtype that it does not know, and readers would wait."""
    return rows.view(f"u{rows.dtype.itemsize}")


def _norms(rows: _Array) -> npt.NDArray[np.float32]:
    wide = widened(rows, np.float32)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))
