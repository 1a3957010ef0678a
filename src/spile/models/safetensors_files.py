"""Where a model's bytes lie: a folder on this machine, or one in a bucket. Read by range, never whole."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import ModelError, untrusted
from spile.models.families.weight_names import Order
from spile.spec.safetensors import DTYPES as ALL_DTYPES
from spile.spec.safetensors import header_length, parse_header

if TYPE_CHECKING:
    from spile.objects.folder import Folder

__all__ = [
    "DTYPES",
    "Bounds",
    "BucketSource",
    "ByteSource",
    "Bytes",
    "Change",
    "Entry",
    "LocalSource",
    "Piece",
    "PieceStack",
    "Values",
    "read_header",
    "read_index",
]


Bytes = npt.NDArray[np.uint8]


class ByteSource(Protocol):
    """A model's files, by name."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Exactly these bytes; a local file's are a read-only view of its pages, not a copy."""


@dataclass(frozen=True)
class LocalSource:
    """Files in a folder, mapped into memory."""

    folder: Path

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return (self.folder / name).stat().st_size

    def read(self, name: str, start: int, length: int) -> Bytes:
        """A view of the file's pages."""
        path = self.folder / name
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"cannot read {path}", found=error.strerror or str(error)) from error
        return _mapped(path, status.st_size, status.st_mtime_ns)[start : start + length]


@functools.lru_cache(maxsize=512)
def _mapped(path: Path, size: int, _modified: int) -> Bytes:
    """The whole file as bytes. Another size or age is another file; an empty one cannot be mapped."""
    if size == 0:
        return np.empty(0, np.uint8)
    try:
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise ModelError(f"cannot read {path}", found=error.strerror or str(error)) from error


@dataclass(frozen=True)
class BucketSource:
    """Files below a bucket's prefix, read by range."""

    folder: Folder

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return self.folder.info(name).size

    def read(self, name: str, start: int, length: int) -> Bytes:
        """A range of an object."""
        return np.frombuffer(self.folder.get_range(name, start, length), np.uint8)


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


Bounds = tuple[tuple[int, int], ...]
"""First and last + 1 in each dimension; a missing one: all of it."""
Values = npt.NDArray[Any]


class Change(Protocol):
    """What is added to a file's tensor as it is read: an adapter's part of it."""

    def apply(self, values: Values) -> Values:
        """The tensor with the change in it."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the tree, in the files."""

    entries: tuple[Entry, ...]
    """More than one: stacked along a first dimension."""
    shape: tuple[int, ...]
    """The tree's."""
    order: Order = "rows"
    first: int = 0
    """Its first row (or column) in a file's tensor that holds several."""
    groups: tuple[int, int, int] = (1, 1, 0)
    """Orders ``heads`` and ``interleaved``: the heads, the tensors in turn, and which of them this is."""
    changes: tuple[Change | None, ...] = (None,)
    """For each entry, what is added to it."""

    @property
    def file(self) -> str:
        """Where it lies, for errors."""
        return self.entries[0].file

    def read(self, source: ByteSource, bounds: Bounds = ()) -> Values:
        """A slice of it; of a tensor that lies as the tree's does, only the rows it spans are touched."""
        if len(self.shape) == 3 and len(self.entries[0].shape) == 2:
            chosen = range(self.shape[0])[slice(*bounds[0])] if bounds else range(self.shape[0])
            return np.stack([self._one(source, place, self.shape[1:], bounds[1:]) for place in chosen])
        return self._one(source, 0, self.shape, bounds)

    def _one(self, source: ByteSource, place: int, shape: Sequence[int], bounds: Bounds) -> Values:
        entry, change = self.entries[place], self.changes[place]
        start, stop = bounds[0] if bounds else (0, shape[0])
        rest = tuple(slice(*bound) for bound in bounds[1:])
        if change is None and self.order == "rows":
            return _rows(source, entry, self.first + start, self.first + stop)[(slice(None), *rest)]
        whole = _rows(source, entry, 0, entry.shape[0])
        whole = whole if change is None else change.apply(whole)
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
    """One tensor of each of several layers, as one with a dimension more in front."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tree's."""
        return len(self.pieces), *self.pieces[0].shape

    def read(self, source: ByteSource, bounds: Bounds = ()) -> Values:
        """A slice of it."""
        chosen = self.pieces[slice(*bounds[0])] if bounds else self.pieces
        return np.stack([piece.read(source, bounds[1:]) for piece in chosen])


def _rows(source: ByteSource, entry: Entry, first: int, last: int) -> Values:
    row = entry.length // max(entry.shape[0], 1)
    data = source.read(entry.file, entry.start + first * row, (last - first) * row)
    if len(data) != (last - first) * row:
        raise ModelError(f"{entry.file} ended inside {entry.name}", fix="it changed while it was read; run again")
    return data.view(DTYPES[entry.dtype]).reshape(last - first, *entry.shape[1:])
