"""Where each tensor of a model's files lies. Checked in full before any tensor is read."""

from __future__ import annotations

import json
from dataclasses import dataclass

from spile.errors import ModelError, untrusted
from spile.spec.safetensors import DTYPES as ALL_DTYPES
from spile.spec.safetensors import header_length, parse_header
from spile.weights.source import ByteSource

__all__ = ["DTYPES", "Entry", "read_header", "read_index"]

DTYPES = {code: ALL_DTYPES[code] for code in ("BF16", "F16", "F32")}
"""The dtypes weights may have; others (quantized, integers) are refused when their tensor is needed."""


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


def read_header(source: ByteSource, file: str) -> list[Entry]:
    """Every tensor of a file, or a ModelError that names the file and what is wrong with it."""
    size = source.size(file)
    try:
        length = header_length(source.read(file, 0, min(8, size)).tobytes(), size)
        header = parse_header(source.read(file, 0, 8 + length).tobytes(), size)
    except ValueError as error:
        raise ModelError(
            f"{file} is no whole safetensors file",
            found=str(error),
            fix="download or copy it again, then run the same command",
        ) from error
    return [
        Entry(file, name, place.code, place.shape, place.start, place.length) for name, place in header.places.items()
    ]


def read_index(content: bytes, where: str) -> dict[str, str]:
    """``model.safetensors.index.json`` → which file holds which tensor."""
    with untrusted(ModelError, f"{where} is no index of weights", expected='JSON with a "weight_map"'):
        index = json.loads(content)["weight_map"]
        names = {str(name): str(file) for name, file in index.items()}
    outside = sorted(file for file in names.values() if "/" in file or "\\" in file or file.startswith("."))
    if outside:
        raise ModelError(f"{where} names a file outside its folder", found=outside[0])
    return names
