"""Memory that parts of files are read into, one after the other: past the page cache where that has none of them.

To bring a part of a file into the page cache and copy it from there costs a processor two to four times as much as to
have the disk write it where it is wanted, and pushes out what others cached. So what is read once goes past it.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spile.objects.disk import open_plain, reading
from spile.objects.many_reads import ManyReads

__all__ = ["StagedFiles", "Staging", "new_memory"]

_BLOCK = 4096
"""What places, lengths and addresses must be multiples of for a disk to write into a program's memory."""
_STEP = 1 << 20
"""Bytes of a read: larger ones are slower."""
_LARGE_PAGE = 2 << 20
_MOST_OPEN = 64
"""Files: each may take two of the 1,024 handles that a process usually has."""
_LIBC = ctypes.CDLL(None)
_DIRECT = getattr(os, "O_DIRECT", 0)


class Staging:
    """One thread's. What :meth:`read` gives is overwritten by the next."""

    def __init__(self, files: StagedFiles) -> None:
        self._files = files
        self._memory = new_memory(_BLOCK)
        self._many = ManyReads.here()

    def room(self, length: int) -> memoryview:
        """So much memory, the same as the last time where that was as large."""
        if len(self._memory) < length:
            self._memory = new_memory(-(-length // _LARGE_PAGE) * _LARGE_PAGE)
        return memoryview(self._memory)[:length]

    def read(self, path: Path, offset: int, length: int) -> memoryview:
        """A part of a file, or as much of it as there is."""
        found = self.blocks(path, np.array([offset]), length)
        if found is not None:
            return found.reshape(-1).data
        memory = self.room(length)
        with reading(path):
            return memory[: _read(self._files.open(path).plain.fileno(), memory, offset)]

    def blocks(self, path: Path, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8] | None:
        """``length`` bytes from each of these places of a file on, ``[places, length]``; None where it ends before."""
        if len(offsets) > 1 and (np.diff(offsets) == length).all():  # neighbours: one read
            found = self.blocks(path, offsets[:1], len(offsets) * length)
            return None if found is None else found.reshape(len(offsets), length)
        with reading(path):
            file = self._files.open(path)
            if file.direct is not None and not file.was_cached(offsets, length):
                try:
                    found = self._read(file.direct.fileno(), offsets, length, _BLOCK)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # this file system does not do it
                        raise
                    file.close_direct()
                else:
                    if found is not None:
                        return found
            return self._read(file.plain.fileno(), offsets, length, 1)

    def _read(
        self, handle: int, offsets: npt.NDArray[np.int64], length: int, align: int
    ) -> npt.NDArray[np.uint8] | None:
        """Each from the multiple of ``align`` before it to the one after it."""
        leads = offsets % align
        lengths = -(-(leads + length) // align) * align
        stride = int(lengths.max())
        memory = self.room(stride * len(offsets))
        at = np.arange(len(offsets)) * stride
        counts = np.zeros_like(offsets)
        if self._many is not None:
            counts = self._many.read(handle, _address(memory), at, offsets - leads, lengths)
        if align == 1 or self._many is None:  # less than was asked for may come, and the rest when asked again
            for place in np.flatnonzero(counts < leads + length).tolist():
                done = int(counts[place])
                rest = memory[int(at[place]) + done : int(at[place] + lengths[place])]
                counts[place] += _read(handle, rest, int(offsets[place] - leads[place]) + done)
        if (counts < leads + length).any():
            return None
        blocks = np.frombuffer(memory, np.uint8).reshape(len(offsets), stride)
        lead = int(leads[0])
        if (leads == lead).all():
            return blocks[:, lead : lead + length]
        return np.stack([block[lead : lead + length] for block, lead in zip(blocks, leads.tolist(), strict=True)])


class StagedFiles:
    """Files that several threads read parts of, open as long as few are: small parts of many are read in a row.

    Of each it is known which of its pages were in the page cache when it was first asked for. What is read past the
    cache brings no more; where it is not true any more, a read takes longer and is as right.
    """

    def __init__(self, *, past_cache: bool) -> None:
        self._past_cache = past_cache and _DIRECT != 0 and sys.platform == "linux"
        self._open: OrderedDict[Path, _StagedFile] = OrderedDict()
        self._pages: dict[Path, npt.NDArray[np.bool_]] = {}
        self._lock = threading.Lock()

    def open(self, path: Path) -> _StagedFile:
        """It stays open while anybody has it."""
        with self._lock:
            found = self._open.pop(path, None)
            if found is None:
                found = _StagedFile(path, past_cache=self._past_cache, pages=self._pages.get(path))
                self._pages[path] = found.pages
            self._open[path] = found
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return found


class _StagedFile:
    """Open, through the page cache and past it."""

    def __init__(self, path: Path, *, past_cache: bool, pages: npt.NDArray[np.bool_] | None) -> None:
        self.direct: io.FileIO | None = None
        self.plain = open_plain(path)
        self.pages = np.empty(0, np.bool_)
        if past_cache:
            self.direct = _open_directly(path)
            self.pages = _pages_in_cache(self.plain.fileno()) if pages is None else pages

    def was_cached(self, offsets: npt.NDArray[np.int64], length: int) -> bool:
        """Whether the first and the last page of all of these parts were; also True where nobody tells."""
        ends = np.concatenate([offsets, offsets + (length - 1)]) // mmap.PAGESIZE
        return not len(self.pages) or bool(self.pages[np.minimum(ends, len(self.pages) - 1)].all())

    def close_direct(self) -> None:
        """It cannot be read so."""
        if self.direct is not None:
            self.direct.close()
            self.direct = None

    def __del__(self) -> None:
        self.close_direct()
        if hasattr(self, "plain"):
            self.plain.close()


def _open_directly(path: Path) -> io.FileIO | None:
    try:
        return open_plain(path, _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def new_memory(length: int) -> mmap.mmap:
    """From the system, in large pages where it has them."""
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _read(handle: int, memory: memoryview, offset: int) -> int:
    done = 0
    while done < len(memory) and (count := os.preadv(handle, [memory[done : done + _STEP]], offset + done)):
        done += count
    return done


def _pages_in_cache(handle: int) -> npt.NDArray[np.bool_]:
    """Of each page of a file, whether it is; none where the system does not tell."""
    try:
        mapped = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return np.empty(0, np.bool_)
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    with mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        told = _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data))
    return (pages & 1).astype(np.bool_) if told == 0 else np.empty(0, np.bool_)
