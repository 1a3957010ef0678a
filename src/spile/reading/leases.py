"""Memory that is given out and comes back with the last array, tensor or view that shares it.

New memory from the system costs as much as a copy, or more: so it is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BatchMemory", "MemoryLease"]

_KEPT = 8
"""Blocks of each size that wait for their next use."""

_Bytes = npt.NDArray[np.uint8]


class MemoryLease:
    """Calls ``end`` when nobody has any of its arrays any more, in whatever thread that is."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def array(self, memory: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The same memory, contiguous, as an array that the lease lives as long as."""
        return np.asarray(_Lent(memory.view(np.uint8), self)).view(memory.dtype).reshape(memory.shape)

    def __del__(self) -> None:
        self._end()


class _Lent:
    """What an array names as its owner."""

    def __init__(self, memory: _Bytes, lease: MemoryLease) -> None:
        self._memory, self._lease = memory, lease
        self.__array_interface__ = memory.__array_interface__


class BatchMemory:
    """Blocks of memory by their size."""

    def __init__(self) -> None:
        self._free: dict[int, deque[_Bytes]] = {}

    def array(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Of any content."""
        size = shape[0] * shape[1] * dtype.itemsize
        free = self._free.setdefault(size, deque(maxlen=_KEPT))
        memory = free.pop() if free else np.empty(size, np.uint8)
        return MemoryLease(lambda: free.append(memory)).array(memory.view(dtype).reshape(shape))
