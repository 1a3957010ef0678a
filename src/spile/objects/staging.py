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
from pathlib import Path

import numpy as np

from spile.objects.disk import open_plain, reading

__all__ = ["Staging"]

_BLOCK = 4096
"""What places, lengths and addresses must be multiples of for a disk to write into a program's memory."""
_STEP = 1 << 20
"""Bytes of a read: larger ones are slower."""
_LARGE_PAGE = 2 << 20
_LIBC = ctypes.CDLL(None)
_DIRECT = getattr(os, "O_DIRECT", 0)


class Staging:
    """One thread's. What :meth:`read` gives is overwritten by the next."""

    def __init__(self, *, past_cache: bool) -> None:
        self._past_cache = past_cache and bool(_DIRECT) and sys.platform == "linux"
        self._memory = _new_memory(_BLOCK)
        self._file: _StagedFile | None = None

    def room(self, length: int) -> memoryview:
        """So much memory, the same as the last time where that was as large."""
        if len(self._memory) < length:
            self._memory = _new_memory(-(-length // _LARGE_PAGE) * _LARGE_PAGE)
        return memoryview(self._memory)[:length]

    def read(self, path: Path, offset: int, length: int) -> memoryview:
        """A part of a file, or as much of it as there is."""
        with reading(path):
            if self._file is None or self._file.path != path:
                self._file = _StagedFile(path, past_cache=self._past_cache)
            file = self._file
            if file.direct is not None and not _in_page_cache(file.plain.fileno(), offset, length):
                lead = offset % _BLOCK
                memory = self.room(-(-(lead + length) // _BLOCK) * _BLOCK)
                try:
                    count = _read(file.direct.fileno(), memory, offset - lead)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # this file system does not do it
                        raise
                    file.direct.close()
                    file.direct = None
                else:
                    return memory[lead : min(lead + length, max(count, lead))]
            memory = self.room(length)
            return memory[: _read(file.plain.fileno(), memory, offset)]


class _StagedFile:
    """Open, through the page cache and past it: many small parts of one are read in a row."""

    def __init__(self, path: Path, *, past_cache: bool) -> None:
        self.path = path
        self.direct: io.FileIO | None = None
        self.plain = open_plain(path)
        if past_cache:
            self.direct = _open_directly(path)

    def __del__(self) -> None:
        for file in (getattr(self, "plain", None), self.direct):
            if file is not None:
                file.close()


def _open_directly(path: Path) -> io.FileIO | None:
    try:
        return open_plain(path, _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _new_memory(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _read(handle: int, memory: memoryview, offset: int) -> int:
    done = 0
    while count := os.preadv(handle, [memory[done : done + _STEP]], offset + done):
        done += count
    return done


def _in_page_cache(handle: int, offset: int, length: int) -> bool:
    """Whether all of this part of a file is; also True where the system does not tell."""
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(handle, offset + length - begin, prot=mmap.PROT_READ, offset=begin)
    except (OSError, ValueError):
        return True
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    with mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        told = _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data))
    return told != 0 or bool((pages & 1).all())
