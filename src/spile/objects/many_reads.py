"""Many parts of a file in one call that gives the interpreter's lock away once: Linux's asynchronous reads (AIO).

A thread that reads small parts one by one gives the lock away at each and waits for it after each, and the disk has one
request at a time. No library that Python's index has does this: they read one part a call, into memory of their own.
io_uring could, but containers forbid it by default.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ManyReads"]

_DEPTH = 64
"""Reads under way at once."""
_CALLS = {
    "x86_64": {"setup": 206, "destroy": 207, "wait": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "wait": 4, "submit": 2},
}
"""The system's calls by number: the C library does not name them."""
_REQUEST = np.dtype("u8, u4, u4, u2, i2, u4, u8, u8, i8, u8, u4, u4")
_REQUEST.names = (
    *("data", "key", "flags", "opcode", "priority", "handle"),
    *("memory", "length", "offset", "unused", "notify", "notified"),
)
"""The system's ``struct iocb``. An opcode of 0 is a read."""
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("second", "i8")])

_Numbers = npt.NDArray[np.int64]

_LIBC = ctypes.CDLL(None, use_errno=True)


class ManyReads:
    """One thread's reads under way."""

    def __init__(self, calls: dict[str, int]) -> None:
        self._calls = calls
        self._context = ctypes.c_ulong(0)
        self._ask("setup", ctypes.c_uint(_DEPTH), ctypes.byref(self._context))
        self._requests = np.zeros(_DEPTH, _REQUEST)
        self._requests["data"] = np.arange(_DEPTH)
        self._pointers = self._requests.ctypes.data + np.arange(_DEPTH, dtype=np.uint64) * _REQUEST.itemsize
        self._events = np.zeros(_DEPTH, _EVENT)
        self._end = weakref.finalize(self, _LIBC.syscall, ctypes.c_long(calls["destroy"]), self._context)

    @classmethod
    def here(cls) -> ManyReads | None:
        """None where the system has no such reads, or no room for more."""
        calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if calls is None:
            return None
        try:
            return cls(calls)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EAGAIN, errno.ENOMEM):
                raise
            return None

    def read(self, handle: int, memory: int, at: _Numbers, offsets: _Numbers, lengths: _Numbers) -> _Numbers:
        """Read ``lengths`` bytes from ``offsets`` on to ``at``, counted from an address; how many there were of each.

        A file without O_DIRECT is read while this is asked for, so what is in the page cache is copied at once.
        """
        found = np.empty(len(at), np.int64)
        for begin in range(0, len(at), _DEPTH):
            part = slice(begin, min(begin + _DEPTH, len(at)))
            requests = self._requests[: part.stop - begin]
            requests["handle"], requests["memory"] = handle, memory + at[part]
            requests["offset"], requests["length"] = offsets[part], lengths[part]
            found[part] = self._results(len(requests))
        failed = found[found < 0]
        if len(failed):
            raise OSError(-int(failed[0]), os.strerror(-int(failed[0])))
        return found

    def _results(self, count: int) -> _Numbers:
        """Ask for the first so many requests. Returns when none of them writes into memory any more."""
        results = np.empty(count, np.int64)
        asked = ended = 0
        refused: OSError | None = None
        while ended < count:
            if asked < count and refused is None:
                try:
                    asked += self._ask("submit", self._context, count - asked, _address(self._pointers[asked:]))
                except OSError as error:
                    refused = error
            if asked == ended:
                break
            got = self._ask("wait", self._context, 1, asked - ended, _address(self._events), None)
            results[self._events["data"][:got]] = self._events["result"][:got]
            ended += got
        if refused is not None:
            raise refused
        return results

    def _ask(self, call: str, *words: Any) -> int:
        sized = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
        while (found := int(_LIBC.syscall(ctypes.c_long(self._calls[call]), *sized))) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
        return found


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
