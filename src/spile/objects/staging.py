"""Memory that parts of files are read into, one after the other: past the page cache where that has none of them.

To bring a part of a file into the page cache and copy it from there costs a processor two to four times as much as to
have the disk write it where it is wanted, and pushes out what others cached. So what is read once goes past it.
"""

from __future__ import annotations

import ctypes
import errno
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
_DIRECT = getattr(os, "O_DIRECT", 0)


class Staging:
    """One thread's. What :meth:`read` gives is overwritten by the next."""

    def __init__(self, *, past_cache: bool) -> None:
        self._past_cache = past_cache and bool(_DIRECT) and sys.platform == "linux"
        self._memory = _new_memory(_BLOCK)

    def room(self, length: int) -> memoryview:
        """So much memory, the same as the last time where that was as large."""
        if len(self._memory) < length:
            self._memory = _new_memory(-(-length // _LARGE_PAGE) * _LARGE_PAGE)
        return memoryview(self._memory)[:length]

    def read(self, path: Path, offset: int, length: int) -> memoryview:
        """A part of a file, or as much of it as there is."""
        with reading(path), open_plain(path) as file:
            if self._past_cache and not _in_page_cache(file.fileno(), offset, length):
                lead = offset % _BLOCK
                memory = self.room(-(-(lead + length) // _BLOCK) * _BLOCK)
                if (count := _read_directly(path, memory, offset - lead)) is not None:
                    return memory[lead : min(lead + length, max(count, lead))]
            memory = self.room(length)
            return memory[: _read(file.fileno(), memory, offset)]


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


def _read_directly(path: Path, memory: memoryview, offset: int) -> int | None:
    """How many bytes there were; None: this file system does not do it."""
    try:
        with open_plain(path, _DIRECT) as file:
            return _read(file.fileno(), memory, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


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
        told = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)
        )
    return told != 0 or bool((pages & 1).all())
