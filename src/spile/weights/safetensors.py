"""The header of a safetensors file: where each tensor lies. Checked in full before any tensor is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from spile.errors import ModelError
from spile.weights.source import ByteSource

__all__ = ["DTYPES", "Entry", "read_header", "read_index"]

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""The dtypes weights may have; others (quantized, integers) are refused when their tensor is needed."""

_SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "F32": 4, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One tensor of one file."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    length: int


def _damaged(file: str, what: str) -> ModelError:
    return ModelError(
        f"{file} is no whole safetensors file", found=what, fix="download or copy it again, then run the same command"
    )


def read_header(source: ByteSource, file: str) -> list[Entry]:
    """Every tensor of a file, or a ModelError that names the file and what is wrong with it."""
    size = source.size(file)
    if size < 8:
        raise _damaged(file, f"{size} bytes")
    length = int.from_bytes(source.read(file, 0, 8).tobytes(), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise _damaged(file, f"a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(source.read(file, 8, length).tobytes().decode())
        entries = [
            _entry(file, name, about, 8 + length) for name, about in dict(header).items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"a header that cannot be read ({type(error).__name__})") from error
    position = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.length)):
        if entry.start != position:
            raise _damaged(file, f"{entry.name} at byte {entry.start} where {position} was due")
        position += entry.length
    if position != size:
        raise _damaged(file, f"{size} bytes where its header needs {position}")
    return entries


def _entry(file: str, name: str, about: dict[str, Any], base: int) -> Entry:
    begin, end = (int(offset) for offset in about["data_offsets"])
    shape = tuple(int(size) for size in about["shape"])
    dtype = str(about["dtype"])
    width = _SIZES.get(dtype)
    if min((begin, end, *shape), default=0) < 0 or (width and end - begin != width * math.prod(shape)):
        raise ValueError(name)
    return Entry(file=file, name=name, dtype=dtype, shape=shape, start=base + begin, length=end - begin)


def read_index(content: bytes, where: str) -> dict[str, str]:
    """``model.safetensors.index.json`` → which file holds which tensor."""
    try:
        index = json.loads(content)["weight_map"]
        names = {str(name): str(file) for name, file in index.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{where} is no index of weights", expected='JSON with a "weight_map"') from error
    outside = sorted(file for file in names.values() if "/" in file or "\\" in file or file.startswith("."))
    if outside:
        raise ModelError(f"{where} names a file outside its folder", found=outside[0])
    return names
