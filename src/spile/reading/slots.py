"""Room for rows in slots of a batch each: one that is full is given out as it is, and used again when it comes back."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.objects.staging import new_memory
from spile.reading.leases import MemoryLease

__all__ = ["RowSlots"]

_Array = npt.NDArray[Any]


class RowSlots:
    """``slots`` times ``rows`` rows of each tap, side by side in memory, or in a file of the folder ``scratch``.

    ``types``: tap, dtype and number of columns.
    """

    def __init__(
        self, types: Sequence[tuple[str, np.dtype[Any], int]], slots: int, rows: int, scratch: str | None
    ) -> None:
        self.rows = rows
        self._count, self._lent = slots, set[int]()
        self._free = deque(reversed(range(slots)))  # what came back last is given first, before untouched memory
        self._memory: list[tuple[mmap.mmap, int]] = []
        self.nobodys = slots * rows
        """A row of its own, for what need not be kept."""
        self.taps = {tap: self._allocate((slots * rows + 1, columns), dtype, scratch) for tap, dtype, columns in types}

    def _allocate(self, shape: tuple[int, int], dtype: np.dtype[Any], scratch: str | None) -> _Array:
        size = shape[0] * shape[1] * dtype.itemsize
        if scratch is not None:
            return _on_disk(shape, dtype, scratch)
        memory = new_memory(max(1, size))
        self._memory.append((memory, self.rows * shape[1] * dtype.itemsize))
        return np.frombuffer(memory, np.uint8)[:size].view(dtype).reshape(shape)

    def take(self) -> int:
        """One that nobody has. There must be one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Its rows are not wanted any more."""
        self._free.append(slot)

    def lend(self, slot: int, count: int) -> dict[str, _Array]:
        """Its first so many rows of every tap, the memory itself. It comes back when nobody has any of them."""
        free, lent, begin = self._free, self._lent, slot * self.rows

        def back() -> None:
            lent.discard(slot)
            free.append(slot)

        lent.add(slot)
        lease = MemoryLease(back)
        return {tap: lease.array(rows[begin : begin + count]) for tap, rows in self.taps.items()}

    @property
    def lent(self) -> int:
        """How many are out."""
        return len(self._lent)

    def __del__(self) -> None:
        """Whoever kept a batch keeps the addresses of all of them: give the memory behind the others back."""
        page, kept = mmap.PAGESIZE, set(self._lent)
        for memory, length in self._memory if kept else []:
            for slot in set(range(self._count)) - kept:
                begin, end = -(-slot * length // page), (slot + 1) * length // page
                if begin < end:
                    memory.madvise(mmap.MADV_DONTNEED, begin * page, (end - begin) * page)


def _on_disk(shape: tuple[int, int], dtype: np.dtype[Any], folder: str) -> _Array:
    import tempfile

    Path(folder).mkdir(parents=True, exist_ok=True)
    # Without a name: its room is free again when the reader ends, however it ends.
    with tempfile.TemporaryFile(dir=folder, prefix=".spile-") as file:
        return np.memmap(file, dtype, "w+", shape=shape)
