"""A shard and the shards of taps that were added to it, row for row, read as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.objects.staging import Staging
from spile.spec.safetensors import TensorPlace
from spile.store.encoding import SCALE
from spile.store.shard_reader import ShardReader
from spile.store.statistics import SUMS

__all__ = ["JoinedShard"]

_Array = npt.NDArray[Any]


class JoinedShard(ShardReader):
    """The stream's own shard, which gives what is asked of an added tap to the shard that has it."""

    def __init__(self, own: ShardReader, added: Mapping[str, ShardReader]) -> None:
        super().__init__(own.folder, own.record, **own.belongs)
        self._added = added
        """By tap."""

    def _beside(self, name: str) -> ShardReader | None:
        return self._added.get(name.removesuffix(SUMS).removesuffix(SCALE))

    def of(self, name: str) -> ShardReader:
        """The shard whose file has a tensor."""
        return self._beside(name) or self

    def place(self, name: str) -> TensorPlace:
        """Where a tensor lies, in the file that has it."""
        other = self._beside(name)
        return super().place(name) if other is None else other.place(name)

    def whole(self, name: str) -> _Array:
        """A whole tensor that is no tap."""
        other = self._beside(name)
        return super().whole(name) if other is None else other.whole(name)

    def rows(self, name: str, start: int, stop: int, staging: Staging | None = None) -> _Array:
        """Rows ``start`` to ``stop`` of a tensor."""
        other = self._beside(name)
        return super().rows(name, start, stop, staging) if other is None else other.rows(name, start, stop, staging)

    def row_type(self, name: str) -> tuple[np.dtype[Any], int]:
        """The dtype that a tap's rows are given in, and how many numbers each has."""
        other = self._beside(name)
        return super().row_type(name) if other is None else other.row_type(name)

    def decoded(self, name: str, start: int, rows: _Array) -> _Array:
        """Stored rows as the numbers that they stand for."""
        other = self._beside(name)
        return super().decoded(name, start, rows) if other is None else other.decoded(name, start, rows)

    def chunk_bytes(self, name: str) -> int:
        """The length of a tensor's chunks, in the file that has it."""
        other = self._beside(name)
        return super().chunk_bytes(name) if other is None else other.chunk_bytes(name)

    def chunk_rows(self, name: str) -> int | None:
        """Rows in each of them; None where a tensor is cut in bytes."""
        other = self._beside(name)
        return super().chunk_rows(name) if other is None else other.chunk_rows(name)

    def chunks(self, name: str, begin: int, end: int, staging: Staging | None = None) -> memoryview:
        """The bytes of chunks ``begin`` to ``end`` of a tensor, checked."""
        other = self._beside(name)
        return super().chunks(name, begin, end, staging) if other is None else other.chunks(name, begin, end, staging)
