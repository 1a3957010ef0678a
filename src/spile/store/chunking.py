"""How a shard's tensors are cut into chunks, each of which has a checksum: what must be read whole to be checked.

A tap is cut at whole rows, so that a reader of some rows reads little beside them; everything else is cut in bytes. The
header says both, because shards of earlier versions have every tensor cut in bytes, and longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spile.errors import Damaged, untrusted
from spile.spec.safetensors import DTYPES, TensorPlace

__all__ = ["Chunking"]

_BYTES, _ROWS = "chunk_bytes", "chunk_rows"
_MOST = 64 << 20
"""Bytes of a chunk, unless it is one row: nobody should have to read more to be given a row."""
_SHOWN = 80
"""Characters of a forged value that an error shows."""


@dataclass(frozen=True)
class Chunking:
    """The length of the chunks of each tensor; the last one of a tensor is shorter."""

    bytes: int
    """Of the chunks of a tensor that ``rows`` does not name."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Tensor → rows in a chunk."""

    def length(self, name: str, code: str, shape: Sequence[int]) -> int:
        """Bytes of a chunk of this tensor."""
        rows = self.rows.get(name)
        return self.bytes if rows is None else rows * _row_bytes(code, shape)

    def count(self, name: str, code: str, shape: Sequence[int]) -> int:
        """Chunks of this tensor; none of an empty one."""
        return -(-DTYPES[code].itemsize * math.prod(shape) // self.length(name, code, shape))

    def metadata(self) -> dict[str, str]:
        """What a header says of it."""
        rows = {_ROWS: json.dumps(dict(self.rows), separators=(",", ":"), ensure_ascii=False)} if self.rows else {}
        return {_BYTES: str(self.bytes), **rows}

    @classmethod
    def of(cls, metadata: Mapping[str, str], places: Mapping[str, TensorPlace], where: str) -> Chunking:
        """What a header says, which may be anything; :class:`Damaged` where no shard can be cut so."""
        with untrusted(Damaged, f"{where} has a header that does not say how it is cut into chunks"):
            size, rows = int(metadata[_BYTES]), dict(json.loads(metadata.get(_ROWS, "{}")))
        if not 1 <= size <= _MOST:
            found = metadata[_BYTES][:_SHOWN]
            raise Damaged(f"{where} has a header of impossible {_BYTES}", expected=f"1 to {_MOST}", found=found)
        for name, count in rows.items():
            if expected := _wanted(count, places.get(name)):
                found = f"{name[:_SHOWN]!r}: {str(count)[:_SHOWN]}"
                raise Damaged(f"{where} has a header of impossible {_ROWS}", expected=expected, found=found)
        return cls(size, rows)


def _row_bytes(code: str, shape: Sequence[int]) -> int:
    return DTYPES[code].itemsize * shape[1]


def _wanted(count: object, place: TensorPlace | None) -> str | None:
    """What is expected instead, where a tensor cannot have so many rows in a chunk."""
    if place is None or len(place.shape) != 2 or not place.shape[1]:
        return "a tensor of rows"
    if type(count) is not int or count < 1:
        return "a positive number of rows"
    if count > 1 and count * _row_bytes(place.code, place.shape) > _MOST:
        return f"one row, or rows of at most {_MOST} bytes together"
    return None
