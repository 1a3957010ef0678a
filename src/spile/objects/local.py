"""Folders on a local or mounted disk: files are durable before they are visible, and never half written.

Everything is written under a temporary name (``.tmp-…``, which listings leave out), synced, and then linked or renamed
to its own name, after which the directory is synced. A process that is killed leaves at most a temporary file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from typing_extensions import Buffer

from spile.errors import Damaged, DataError, StoreError
from spile.objects.folder import NotFound, ObjectInfo, Stats, Unfinished, Unwritable, checked_key, is_valid_prefix

_TEMPORARY = ".tmp-"
_TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]{16}-(.+)")
_MOVE_CHUNK = 8 << 20
_RAM_DISKS = (0x01021994, 0x858458F6)
"""tmpfs and ramfs, as numbered by statfs."""
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors that the user can fix, with cause and fix. All others are failures of the disk.
_USER_ERRORS = {
    errno.ENOSPC: ("a full disk", "free some room or choose another --output, then run the same command again"),
    errno.EDQUOT: ("a used up quota", "free some room or choose another --output, then run the same command again"),
    errno.EROFS: ("a read-only file system", "choose another --output"),
    errno.EACCES: ("permission denied", "change its permissions or choose another --output"),
    errno.EPERM: ("permission denied", "change its permissions or choose another --output"),
    errno.ENOTDIR: ("a file where a folder should be", "choose another --output"),
    errno.EISDIR: ("a folder where a file should be", "choose another --output"),
    errno.EFBIG: ("a file larger than this file system allows", "choose a smaller --shard-size-gb"),
}


class _NotRegularFile(OSError):
    """A pipe or a device in place of a file."""


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn the file system's errors into :class:`NotFound`, :class:`Damaged` or :class:`StoreError`."""
    try:
        yield
    except _ABSENT as error:
        raise NotFound(f"no such file {path}") from error
    except _NotRegularFile as error:
        raise Damaged(f"{path} cannot be read", expected="a file", found=error.strerror) from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(f"{path} cannot be read", found="a block that the disk cannot return") from error
        raise StoreError(f"cannot read {path}", found=error.strerror or str(error)) from error


@contextmanager
def write_errors(path: Path, *, full: type[StoreError] = StoreError) -> Iterator[None]:
    """Turn the file system's errors into :class:`Unwritable` or :class:`StoreError`.

    A full disk raises ``full``: a disk that fills up during a run is not the user's mistake.
    """
    try:
        yield
    except OSError as error:
        found, fix = _USER_ERRORS.get(error.errno or 0, (None, None))
        if found is not None:
            kind = full if error.errno in _FULL else Unwritable
            raise kind(f"cannot write {path}", expected="a folder with room", found=found, fix=fix) from error
        raise StoreError(f"cannot write {path}", found=error.strerror or str(error)) from error


def open_regular_file(path: Path) -> io.FileIO:
    """Open a regular file for reading. A pipe or a device is an error, because reading it could block for ever."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    kind = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise _NotRegularFile(errno.EINVAL, "a pipe or a device")
    return file


def read_into(path: Path, offset: int, target: memoryview) -> int:
    """Fill ``target`` from a file; return the number of bytes read."""
    done = 0
    with read_errors(path), open_regular_file(path) as file:
        while done < len(target) and (count := os.preadv(file.fileno(), [target[done:]], offset + done)):
            done += count
    return done


def is_abandoned(path: Path) -> bool:
    """Return whether the process that wrote a temporary file has ended. A running writer holds a lock on the file."""
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


def sync_folder(path: Path) -> None:
    """Make a directory's entries durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot sync a directory
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _make_folder(path: Path) -> None:
    """Create a directory and its parents, each durably."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    sync_folder(path.parent)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}-{path.name}")


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


def reserve(handle: int, size: int) -> None:
    """Allocate the file's space now, so that a full disk is noticed before the work and not after it."""
    if size and sys.platform == "linux" and not _on_ram_disk(handle):
        # Not os.posix_fallocate: on file systems without support, the C library writes every block.
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


def _on_ram_disk(handle: int) -> bool:
    """Return whether a file is on a RAM disk, where allocation fills it with zeros at 4 GB/s."""
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None).fstatfs(handle, answer) != 0:
        return False
    kind = int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return kind in _RAM_DISKS


class LocalWriter:
    """A temporary file that gets its own name when it is finished."""

    def __init__(self, path: Path, size: int, stats: Stats) -> None:
        self._path = path
        self._stats = stats
        self._handle: int | None = None
        with write_errors(path):
            _make_folder(path.parent)
            self._temporary = _temporary_path(path)
            self._handle = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with suppress(OSError):  # a file system without locks leaves its temporary files to verify --gc
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                reserve(self._handle, size)
            except OSError:
                self.abort()
                raise

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with write_errors(self._path):
            _write_all(self._open(), view, offset)
        self._stats.add(bytes_written=view.nbytes)

    def move(self, source: int, target: int, length: int) -> None:
        """Move bytes to a lower offset, from the front, so that the ranges may overlap."""
        if target > source:
            raise ValueError("bytes can only be moved to a lower offset")
        handle = self._open()
        with write_errors(self._path):
            for done in range(0, length, _MOVE_CHUNK):
                chunk = os.pread(handle, min(_MOVE_CHUNK, length - done), source + done)
                _write_all(handle, memoryview(chunk), target + done)

    def finish(self, size: int) -> None:
        """Truncate, sync once, rename, and sync the directory."""
        handle = self._open()
        with write_errors(self._path):
            os.ftruncate(handle, size)
            os.fsync(handle)
            self._temporary.rename(self._path)
            self._close()
            sync_folder(self._path.parent)

    def abort(self) -> None:
        if self._handle is not None:
            self._close()
            with suppress(OSError):  # the error that led here says more; verify --gc finds the file
                self._temporary.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._handle is None:
            raise StoreError(f"cannot write {self._path}", found="a writer that was finished or aborted")
        return self._handle

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class LocalFolder:
    """A directory. It is created by the first write.

    The directory itself may be a symbolic link: the user named it. Links to folders below it are followed to read and
    to write, and not to delete: another dataset may be there.
    """

    def __init__(self, path: Path, url: str | None = None, stats: Stats | None = None, top: Path | None = None) -> None:
        self.path = self.local_path = path
        self._top = path if top is None else top
        self.url = url if url is not None else str(path)
        self.stats = stats if stats is not None else Stats()

    def child(self, path: str) -> LocalFolder:
        checked_key(path)
        return LocalFolder(self.path / path, f"{self.url.rstrip('/')}/{path}", self.stats, self._top)

    def get(self, key: str) -> bytes:
        path = self._at(key)
        with read_errors(path), open_regular_file(path) as file:
            data = file.readall()
        self.stats.add(requests=1, bytes_read=len(data))
        return data

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Yield whole files one after the other; threads would not make a disk faster here."""
        return map(self.get, keys)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        path, target = self._at(key), np.empty(length, np.uint8).data
        done = read_into(path, start, target)
        if done < length:
            raise StoreError(f"{path} is cut short", expected=f"{start + length} bytes", found=start + done)
        self.stats.add(requests=1, bytes_read=length)
        return target

    def info(self, key: str) -> ObjectInfo:
        path = self._at(key)
        with read_errors(path):
            found = path.stat()
            if not path.is_file():
                raise NotFound(f"no such file {path}")
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key, entry, linked in self._walk(prefix):
            if not entry.name.startswith(_TEMPORARY):
                with suppress(FileNotFoundError):  # deleted in the meantime
                    found = entry.stat()
                    yield ObjectInfo(key, found.st_size, found.st_mtime, linked=linked)

    def put(self, key: str, data: bytes) -> None:
        """Write a temporary file, sync it and rename it."""
        path = self._at(key)
        with write_errors(path), self._temporary_file(path, data) as temporary:
            temporary.rename(path)
        self.stats.add(requests=1, bytes_written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """Write a temporary file, sync it and link it: the file system lets one of several creators succeed."""
        path = self._at(key)
        with write_errors(path), self._temporary_file(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        self.stats.add(requests=1, bytes_written=len(data))
        return True

    def delete(self, key: str) -> None:
        path = self._at(key)
        if self._is_linked(path.parent):
            raise Unwritable(
                f"refused to delete {path}",
                found=f"a symbolic link that leads to {path.parent.resolve()}",
                fix="remove the link, or choose another --output",
            )
        with write_errors(path), suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            sync_folder(path.parent)

    def writer(self, key: str, size: int) -> LocalWriter:
        return LocalWriter(self._at(key), size, self.stats)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Yield temporary files with exactly our form of name, including those of running writers."""
        above, slash, _ = prefix.rpartition("/")
        for found, entry, linked in self._walk(above + slash):
            name = _TEMPORARY_NAME.fullmatch(entry.name)
            if name is not None and not linked:
                key = found.removesuffix(entry.name) + name[1]
                if key.startswith(prefix):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield Unfinished(key, found, status.st_mtime, status.st_size)

    def discard(self, remains: Unfinished) -> None:
        self.delete(remains.handle)

    def _at(self, key: str) -> Path:
        return self.path / checked_key(key)

    @contextmanager
    def _temporary_file(self, path: Path, data: bytes) -> Iterator[Path]:
        """Yield a durable temporary file with these bytes for the caller to rename or link, then sync the directory."""
        _make_folder(path.parent)
        temporary = _temporary_path(path)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                _write_all(handle, memoryview(data), 0)
                os.fsync(handle)
            finally:
                os.close(handle)
            yield temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def _is_linked(self, path: Path) -> bool:
        """Return whether this path below the folder that the user named is a symbolic link, or in a linked folder."""
        below = path.relative_to(self._top).parts
        return any(self._top.joinpath(*below[:count]).is_symlink() for count in range(1, len(below) + 1))

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str], bool]]:
        """Yield the files whose key starts with the prefix, ordered by key, and whether a link leads to each."""
        above = prefix.rpartition("/")[0]
        if is_valid_prefix(prefix):
            linked = self._is_linked(self.path / above)
            yield from self._walk_folder(above + "/" if above else "", prefix, set(), linked)

    def _walk_folder(
        self, folder: str, prefix: str, links: set[tuple[int, int]], linked: bool
    ) -> Iterator[tuple[str, os.DirEntry[str], bool]]:
        found: dict[str, os.DirEntry[str]] = {}
        with read_errors(self.path / folder), suppress(*_ABSENT), os.scandir(self.path / folder) as entries:
            for entry in entries:
                key = f"{folder}{entry.name}/"
                if not key.startswith(prefix) or not _is_first_visit(entry, links):
                    continue
                # The key of a directory ends with "/", so that it sorts like its files.
                found[key if entry.is_dir() else key[:-1]] = entry
        for key in sorted(found):
            entry = found[key]
            if key.endswith("/"):
                yield from self._walk_folder(key, prefix, links, linked or entry.is_symlink())
            elif key.startswith(prefix):
                yield key, entry, linked or entry.is_symlink()


def refuse_links(folder: Path, files: Iterable[Path]) -> None:
    """Refuse files below a folder that are somewhere else, because a symbolic link leads there.

    The folder itself may be a link: the user named it.
    """
    home, inside = folder.resolve(), set[Path]()
    for file in files:
        linked = file.is_symlink()
        if file.parent in inside and not linked:
            continue
        found = file.resolve()
        if not found.is_relative_to(home):
            fix = "name that file or its folder, or copy the data with cp -rL"
            raise DataError(f"{file} is a symbolic link out of {folder}", found=str(found), fix=fix)
        if not linked:
            inside.add(file.parent)


def _is_first_visit(entry: os.DirEntry[str], links: set[tuple[int, int]]) -> bool:
    """Return False for a broken link, and for a second link to the same directory, because links can form a circle."""
    if not entry.is_symlink():
        return True
    try:
        found = entry.stat()
    except OSError:
        return False
    identity = (found.st_dev, found.st_ino)
    if stat.S_ISDIR(found.st_mode) and identity in links:
        return False
    links.add(identity)
    return True
