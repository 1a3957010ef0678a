"""What a local folder is made of: files that are durable before they are named, and the disk's errors in our words."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spile.errors import Damaged, StoreError
from spile.objects.folder import NotFound, Unwritable

__all__ = [
    "ABSENT",
    "TEMPORARY",
    "MappedFile",
    "becomes",
    "hold",
    "is_abandoned",
    "make_folder",
    "open_plain",
    "read_into",
    "reading",
    "reserve",
    "sync_folder",
    "temporary_name",
    "write_all",
    "writing",
]

TEMPORARY = ".tmp-"
_POPULATE_READ = 22
"""MADV_POPULATE_READ, which the standard library does not name."""
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}-(.+)")
_RAM_DISKS = (0x01021994, 0x858458F6)
"""tmpfs and ramfs, as statfs numbers them."""

# What a user can change, as what was found and what to do about it; the rest is a failure of the disk.
_OWNERS_BUSINESS = {
    errno.ENOSPC: ("a full disk", "free some room or choose another --output, then run the same command again"),
    errno.EDQUOT: ("a used up quota", "free some room or choose another --output, then run the same command again"),
    errno.EROFS: ("a read-only file system", "choose another --output"),
    errno.EACCES: ("permission denied", "change its permissions or choose another --output"),
    errno.EPERM: ("permission denied", "change its permissions or choose another --output"),
    errno.ENOTDIR: ("a file where a folder should be", "choose another --output"),
    errno.EISDIR: ("a folder where a file should be", "choose another --output"),
    errno.EFBIG: ("a file larger than this file system takes", "choose a smaller --shard-size-gb"),
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def open_plain(path: Path, flags: int = 0) -> io.FileIO:
    """A file to read; OSError at once where it is a pipe or a device, which could keep a reader waiting for ever."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags))
    kind = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise _NotPlain(errno.EINVAL, "a pipe or a device")
    return file


class _NotPlain(OSError):
    """Something in the file system that is no file of ours."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the file system's errors into ours."""
    try:
        yield
    except ABSENT as error:
        raise NotFound(f"no such file {path}") from error
    except _NotPlain as error:
        raise Damaged(f"{path} cannot be read", expected="a file", found=error.strerror) from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(f"{path} cannot be read", found="a block that the disk does not give back") from error
        raise StoreError(f"cannot read {path}", found=error.strerror or str(error)) from error


@contextmanager
def writing(path: Path, *, full: type[StoreError] = StoreError) -> Iterator[None]:
    """Turns the file system's errors into ours. ``full``: what no room is; a disk that fills is nobody's mistake."""
    try:
        yield
    except OSError as error:
        found, fix = _OWNERS_BUSINESS.get(error.errno or 0, (None, None))
        if found is not None:
            kind = full if error.errno in _FULL else Unwritable
            raise kind(f"cannot write {path}", expected="a folder with room", found=found, fix=fix) from error
        raise StoreError(f"cannot write {path}", found=error.strerror or str(error)) from error


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot; they are durable on close or not at all
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create it and what is missing above it, each entry durable."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """Beside the file it will become, and garbage to everybody until then."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}-{path.name}")


def becomes(name: str) -> str | None:
    """The inverse of :func:`temporary_name`; None for any other name: a stranger's temporary file is not ours."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def write_all(handle: int, view: memoryview, offset: int) -> None:
    """However many calls it takes."""
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


class MappedFile:
    """A file in memory, as far as it can be: what is not there is read instead, which says why.

    To touch a page that the disk cannot give back, or that lies behind the end of a file that was cut, kills a process
    without a word. So nothing is handed out before the system has brought it in; it says so where it cannot.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self.view = memoryview(mapped)

    @classmethod
    def of(cls, path: Path, size: int) -> MappedFile | None:
        """A file of this size; None where it has another, cannot be opened, or there is no room to map it."""
        try:
            with open_plain(path) as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        return cls(mapped) if len(mapped) == size else None

    def is_there(self, start: int, length: int) -> bool:
        """Whether these bytes can be read now; False also where the system cannot tell (Linux before 5.14, others)."""
        begin = start - start % mmap.PAGESIZE
        try:
            self._map.madvise(_POPULATE_READ, begin, start + length - begin)
        except (OSError, ValueError, AttributeError):
            return False
        return True

    def forget(self, path: Path, start: int, length: int) -> None:
        """Ask the system to drop these bytes from the page cache. Reading them again is slower, and as correct."""
        page = mmap.PAGESIZE
        begin, end = -(-start // page) * page, (start + length) // page * page
        if begin >= end or not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)  # mapped pages cannot be dropped
            with open_plain(path) as file:
                os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


def read_into(path: Path, offset: int, target: memoryview) -> int:
    """Fill ``target`` from a file; how many bytes there were."""
    done = 0
    with reading(path), open_plain(path) as file:
        while done < len(target) and (count := os.preadv(file.fileno(), [target[done:]], offset + done)):
            done += count
    return done


def hold(handle: int) -> None:
    """Lock a temporary file for as long as its writer lives: the system lets go of it however that ends."""
    with suppress(OSError):  # a file system without locks: its temporary files are left to garbage collection
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_abandoned(path: Path) -> bool:
    """Whether the writer of a temporary file is gone: nobody holds the file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def reserve(handle: int, size: int) -> None:
    """Take the room now, so that a full disk shows before the work and not after it."""
    if size and sys.platform == "linux" and not _in_memory(handle):
        # Not os.posix_fallocate: where a file system cannot, the C library writes every block instead.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(number, os.strerror(number))
    status = os.fstatvfs(handle)
    if status.f_bavail * status.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(handle, size)


def _in_memory(handle: int) -> bool:
    """Whether a file lies on a RAM disk, where taking room is filling it with zeros: a quarter second per gigabyte."""
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None).fstatfs(handle, answer) != 0:
        return False
    kind = int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return kind in _RAM_DISKS
