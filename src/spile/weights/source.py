"""Where a model's bytes lie: a folder on this machine, or one in a bucket. Read by range, never whole."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import ModelError

if TYPE_CHECKING:  # a model on disk needs no object-store library
    from spile.objects.folder import Folder

__all__ = ["BucketSource", "ByteSource", "Bytes", "LocalSource"]

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
