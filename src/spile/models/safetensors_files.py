"""The tensors of a model's safetensors files, and the parts of them that make up the tensors of the model.

Files are read by range, never as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import ModelError, StoreError
from spile.models.families.base import Order
from spile.objects import Folder
from spile.objects.local import read_into
from spile.spec.safetensors import DTYPES as ALL_DTYPES
from spile.spec.safetensors import TensorPlace, header_length, parse_header

Values = npt.NDArray[Any]
Bounds = tuple[tuple[int, int], ...]
"""Start and stop in each dimension; a missing dimension is taken as a whole."""
Change = Callable[[Values], Values]
"""Returns a tensor of a file with the change of an adapter."""

DTYPES = {code: ALL_DTYPES[code] for code in ("BF16", "F16", "F32")}
"""The dtypes of weights; others (quantized, integers) are refused if their tensor is needed."""


def read_bytes(folder: Folder, file: str, start: int, length: int) -> npt.NDArray[np.uint8]:
    """Return a range of a file."""
    if folder.local_path is None:
        return np.frombuffer(folder.get_range(file, start, length), np.uint8)
    memory = aligned((length,), np.uint8)
    if read_into(folder.local_path / file, start, memory.data) < length:
        raise StoreError(f"{file} became shorter while it was read", fix="run the command again")
    return memory


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Values:
    """Return an uninitialised array that JAX uses on a CPU without a copy, because it begins at a multiple of 64."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(kind).reshape(shape)


@dataclass(frozen=True)
class Entry(TensorPlace):
    """A tensor of a file."""

    file: str


def read_header(folder: Folder, file: str) -> list[Entry]:
    """Return all tensors of a file, or raise a ModelError that names the file and the problem."""
    size = folder.info(file).size
    try:
        length = header_length(read_bytes(folder, file, 0, min(8, size)).tobytes(), size)
        header = parse_header(read_bytes(folder, file, 0, 8 + length).tobytes(), size)
    except ValueError as error:
        raise ModelError(
            f"{file} is not a complete safetensors file",
            found=str(error),
            fix="download or copy it again, then run the same command",
        ) from error
    return [Entry(**vars(place), file=file) for place in header.places.values()]


@dataclass(frozen=True)
class Piece:
    """A tensor of the model that is a file's tensor or a part of it."""

    entry: Entry
    shape: tuple[int, ...]
    """The shape in the model."""
    order: Order = "rows"
    first: int = 0
    """The first row (or column) in the file's tensor."""
    groups: tuple[int, int, int] = (1, 1, 0)
    """Orders ``heads`` and ``interleaved``: the number of heads, the number of tensors in alternation, and this one."""
    change: Change | None = None

    def read(self, folder: Folder, bounds: Bounds = ()) -> Values:
        start, stop = bounds[0] if bounds else (0, self.shape[0])
        rest = tuple(slice(*bound) for bound in bounds[1:])
        if self.change is None and self.order == "rows":
            return self._rows(folder, self.first + start, self.first + stop)[(slice(None), *rest)]
        whole = self._rows(folder, 0, self.entry.shape[0])
        whole = whole if self.change is None else self.change(whole)
        return self._cut(whole)[(slice(start, stop), *rest)]

    def _rows(self, folder: Folder, first: int, last: int) -> Values:
        row = self.entry.length // max(self.entry.shape[0], 1)
        data = read_bytes(folder, self.entry.file, self.entry.start + first * row, (last - first) * row)
        return data.view(self.entry.dtype).reshape(last - first, *self.entry.shape[1:])

    def _cut(self, whole: Values) -> Values:
        """Return this tensor out of the file's tensor."""
        heads, parts, place = self.groups
        if self.order == "heads":
            by_head = whole.reshape(heads, parts, self.shape[0] // heads, *whole.shape[1:])
            return by_head[:, place].reshape(self.shape)
        if self.order == "interleaved":
            own = whole[..., place::parts]
            return np.swapaxes(own, -1, -2) if own.ndim == 3 else own
        turned = np.swapaxes(whole, -1, -2) if self.order == "columns" and whole.ndim > 1 else whole
        return turned[self.first : self.first + self.shape[0]]


@dataclass(frozen=True)
class Stack:
    """Tensors of several experts or layers, stacked along a new first dimension."""

    parts: tuple[Piece | Stack, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].shape

    def read(self, folder: Folder, bounds: Bounds = ()) -> Values:
        chosen = self.parts[slice(*bounds[0])] if bounds else self.parts
        return _stack(len(chosen), (part.read(folder, bounds[1:]) for part in chosen))


def _stack(count: int, parts: Iterable[Values]) -> Values:
    """Copy arrays into one, and release each before the next is read."""
    whole: Values | None = None
    for place, part in enumerate(parts):
        whole = aligned((count, *part.shape), part.dtype) if whole is None else whole
        whole[place] = part
    return np.empty(0) if whole is None else whole
