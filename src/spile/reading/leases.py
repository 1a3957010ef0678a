"""Memory for batches, given again when nobody has it any more: new memory from the system costs as much as a copy."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BatchMemory"]

_KEPT = 8
"""Blocks of each size that wait for their next use."""

_Blocks = deque[npt.NDArray[np.uint8]]


class BatchMemory:
    """Gives arrays whose memory comes back here with the last array, tensor or view that shares it."""

    def __init__(self) -> None:
        self._free: dict[int, _Blocks] = {}

    def array(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Of any content."""
        size = shape[0] * shape[1] * dtype.itemsize
        free = self._free.setdefault(size, deque(maxlen=_KEPT))
        memory = free.pop() if free else np.empty(size, np.uint8)
        return np.asarray(_Lease(memory, free)).view(dtype).reshape(shape)


class _Lease:
    """What an array names as its owner: it ends with the last that refers to it."""

    def __init__(self, memory: npt.NDArray[np.uint8], free: _Blocks) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)
