"""The weight files of a model, in a local folder or in a bucket, and where each tensor is in them.

Files are read by range, never as a whole.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import ModelError, untrusted
from spile.models.families.base import Order
from spile.spec.safetensors import DTYPES as ALL_DTYPES
from spile.spec.safetensors import header_length, parse_header

if TYPE_CHECKING:
    from spile.objects.folder import Folder

Bytes = npt.NDArray[np.uint8]


class ByteSource(Protocol):
    """The files of a model, by name."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Return a range of bytes; for a local file a read-only view of its pages, not a copy."""


@dataclass(frozen=True)
class LocalSource:
    """Files in a folder, mapped into memory."""

    folder: Path

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Map the range. Its pages leave this process's memory with the last reference to the array."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                length = min(length, os.fstat(file.fileno()).st_size - start)
                if length <= 0:  # an empty range cannot be mapped
                    return np.empty(0, np.uint8)
                skipped = start % mmap.ALLOCATIONGRANULARITY
                pages = mmap.mmap(file.fileno(), skipped + length, access=mmap.ACCESS_READ, offset=start - skipped)
        except OSError as error:
            raise ModelError(f"cannot read {path}", found=error.strerror or str(error)) from error
        return np.frombuffer(pages, np.uint8, length, skipped)


@dataclass(frozen=True)
class BucketSource:
    """Files below a bucket's prefix, read by range."""

    folder: Folder

    def size(self, name: str) -> int:
        return self.folder.info(name).size

    def read(self, name: str, start: int, length: int) -> Bytes:
        return np.frombuffer(self.folder.get_range(name, start, length), np.uint8)


DTYPES = {code: ALL_DTYPES[code] for code in ("BF16", "F16", "F32")}
"""The dtypes of weights; others (quantized, integers) are refused if their tensor is needed."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The position of its first byte in the file."""
    length: int


def read_header(source: ByteSource, file: str) -> list[Entry]:
    """Return all tensors of a file, or raise a ModelError that names the file and the problem."""
    size = source.size(file)
    try:
        length = header_length(source.read(file, 0, min(8, size)).tobytes(), size)
        header = parse_header(source.read(file, 0, 8 + length).tobytes(), size)
    except ValueError as error:
        raise ModelError(
            f"{file} is not a complete safetensors file",
            found=str(error),
            fix="download or copy it again, then run the same command",
        ) from error
    return [
        Entry(file, name, place.code, place.shape, place.start, place.length) for name, place in header.places.items()
    ]


def read_index(content: bytes, where: str) -> dict[str, str]:
    """Read ``model.safetensors.index.json``, and return the file of each tensor."""
    with untrusted(ModelError, f"{where} is not an index of weights", expected='JSON with a "weight_map"'):
        index = json.loads(content)["weight_map"]
        names = {str(name): str(file) for name, file in index.items()}
    outside = sorted(file for file in names.values() if "/" in file or "\\" in file or file.startswith("."))
    if outside:
        raise ModelError(f"{where} names a file outside its folder", found=outside[0])
    return names


Bounds = tuple[tuple[int, int], ...]
"""Start and stop in each dimension; a missing dimension is taken as a whole."""
Values = npt.NDArray[Any]


Change = Callable[[Values], Values]
"""Returns a tensor of a file with the change of an adapter."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the model and its place in the files."""

    entries: tuple[Entry, ...]
    """Several entries are stacked along a first dimension."""
    shape: tuple[int, ...]
    """The shape in the model."""
    order: Order = "rows"
    first: int = 0
    """The first row (or column) in a file's tensor that contains several."""
    groups: tuple[int, int, int] = (1, 1, 0)
    """Orders ``heads`` and ``interleaved``: the number of heads, the number of tensors in alternation, and this one."""
    changes: tuple[Change | None, ...] = (None,)
    """The change to each entry."""

    @property
    def file(self) -> str:
        return self.entries[0].file

    def read(self, source: ByteSource, bounds: Bounds = ()) -> Values:
        if len(self.shape) == 3 and len(self.entries[0].shape) == 2:
            chosen = range(self.shape[0])[slice(*bounds[0])] if bounds else range(self.shape[0])
            return _stack(len(chosen), (self._one(source, place, self.shape[1:], bounds[1:]) for place in chosen))
        return self._one(source, 0, self.shape, bounds)

    def _one(self, source: ByteSource, place: int, shape: Sequence[int], bounds: Bounds) -> Values:
        entry, change = self.entries[place], self.changes[place]
        start, stop = bounds[0] if bounds else (0, shape[0])
        rest = tuple(slice(*bound) for bound in bounds[1:])
        if change is None and self.order == "rows":
            return _rows(source, entry, self.first + start, self.first + stop)[(slice(None), *rest)]
        whole = _rows(source, entry, 0, entry.shape[0])
        whole = whole if change is None else change(whole)
        return self._cut(whole, shape[0])[(slice(start, stop), *rest)]

    def _cut(self, whole: Values, outer: int) -> Values:
        if self.order == "heads":
            heads, parts, place = self.groups
            return whole.reshape(heads, parts, outer // heads, *whole.shape[1:])[:, place].reshape(
                outer, *whole.shape[1:]
            )
        if self.order == "interleaved":
            _, parts, place = self.groups
            own = whole[..., place::parts]
            return np.swapaxes(own, -1, -2) if own.ndim == 3 else own
        turned = np.swapaxes(whole, -1, -2) if self.order == "columns" else whole
        return turned[self.first : self.first + outer]


@dataclass(frozen=True)
class PieceStack:
    """The same tensor of several layers, stacked along a new first dimension."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.pieces), *self.pieces[0].shape

    def read(self, source: ByteSource, bounds: Bounds = ()) -> Values:
        chosen = self.pieces[slice(*bounds[0])] if bounds else self.pieces
        return _stack(len(chosen), (piece.read(source, bounds[1:]) for piece in chosen))


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Values:
    """Return an uninitialised array that JAX uses on a CPU without a copy, because it begins at a multiple of 64."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(kind).reshape(shape)


def _stack(count: int, parts: Iterable[Values]) -> Values:
    """Copy arrays into one, and release each before the next is read."""
    whole: Values | None = None
    for place, part in enumerate(parts):
        whole = aligned((count, *part.shape), part.dtype) if whole is None else whole
        whole[place] = part
    return np.empty(0) if whole is None else whole


def _rows(source: ByteSource, entry: Entry, first: int, last: int) -> Values:
    row = entry.length // max(entry.shape[0], 1)
    data = source.read(entry.file, entry.start + first * row, (last - first) * row)
    if len(data) != (last - first) * row:
        raise ModelError(
            f"{entry.file} ended inside {entry.name}", fix="the file changed while it was read; run the command again"
        )
    return data.view(DTYPES[entry.dtype]).reshape(last - first, *entry.shape[1:])
