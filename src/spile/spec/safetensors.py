"""Parse and write the header of a safetensors file.

8 bytes   N, the length of the JSON, little-endian
N bytes   JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, …, "__metadata__": {…}}
the rest  the tensors' bytes, without a gap; offsets count from here
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
"""NumPy dtypes by their names in the format. Tensors of other types (bool, other float8) can only be located."""
_METADATA = "__metadata__"
_MOST = 100_000_000
"""The largest JSON header in bytes that the safetensors library accepts."""

_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor: ``start`` and ``stop`` are offsets from the start of the file."""

    name: str
    code: str
    """The dtype's name in the format."""
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype; raises KeyError if there is none."""
        return DTYPES[self.code]

    @property
    def length(self) -> int:
        """The length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors of a file in their order. They fill the file from the end of the header without gaps."""

    length: int
    """The length of the header including its first eight bytes, which is the start of the data."""
    places: dict[str, TensorPlace]
    metadata: dict[str, str]

    @property
    def size(self) -> int:
        """The size of the whole file."""
        return max((place.stop for place in self.places.values()), default=self.length)


def header_length(start: bytes, size: int) -> int:
    """Return the length of the JSON from the first eight bytes of a file; raise ValueError if it is impossible."""
    if len(start) < 8:
        raise ValueError(f"{size} bytes")
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= min(size - 8, _MOST):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return length


def parse_header(data: bytes, size: int) -> SafetensorsHeader:
    """Parse the header of a file of ``size`` bytes. ``data`` is the start of the file, at least the whole header.

    Raises:
        ValueError: If the header is malformed or its tensors do not fill the file.

    """
    length = 8 + header_length(data, size)
    if len(data) < length:
        raise ValueError(f"{len(data)} bytes of a header of {length}")
    try:
        fields = dict(json.loads(data[8:length].decode()))
        metadata = {str(key): str(value) for key, value in fields.pop(_METADATA, {}).items()}
        found = [_place(name, field, length) for name, field in fields.items()]
    except Exception as error:  # Parsers may also raise RecursionError and OverflowError.
        raise ValueError(f"a header that cannot be read ({type(error).__name__}: {error})") from error
    places = sorted(found, key=lambda place: (place.start, place.stop))
    due = length
    for place in places:
        if place.start != due:
            raise ValueError(f"{place.name} at byte {place.start} where {due} was due")
        due = place.stop
    if due != size:
        raise ValueError(f"{size} bytes where its header needs {due}")
    return SafetensorsHeader(length, {place.name: place for place in places}, metadata)


def _place(name: str, field: Mapping[str, Any], begin: int) -> TensorPlace:
    start, stop = (int(offset) for offset in field["data_offsets"])
    if len(field["shape"]) > _MOST_DIMENSIONS:  # the product of millions of sizes would take hours
        raise ValueError(f"{name} has {len(field['shape'])} dimensions")
    code, shape = str(field["dtype"]), tuple(int(size) for size in field["shape"])
    wanted = _bytes(code, shape) if code in DTYPES else stop - start
    if min((start, stop - start, *shape)) < 0 or stop - start != wanted:
        raise ValueError(f"{name} has {stop - start} bytes for the shape {list(shape)} of {code}")
    return TensorPlace(name, code, shape, begin + start, begin + stop)


def _bytes(code: str, shape: tuple[int, ...]) -> int:
    return DTYPES[code].itemsize * math.prod(shape)


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], *, align: int = 8
) -> tuple[bytes, SafetensorsHeader]:
    """Return the header's bytes and the place of each tensor (name, dtype code, shape), one after another.

    The data starts at a multiple of ``align``.

    Raises:
        ValueError: If the header would be longer than readers accept.

    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    stop = 0
    for name, code, shape in tensors:
        start, stop = stop, stop + _bytes(code, shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > _MOST:
        raise ValueError(f"a header of {len(text)} bytes")
    begin = 8 + len(text)
    places = {name: _place(name, field, begin) for name, field in header.items() if name != _METADATA}
    return len(text).to_bytes(8, "little") + text, SafetensorsHeader(begin, places, dict(metadata))
