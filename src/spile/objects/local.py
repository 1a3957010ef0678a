"""A folder on a local disk (or a mounted one): durable before it is visible, and never half there.

Everything is written under a temporary name (``.tmp-…``, which no listing shows), synced, and only then linked or
renamed to its own name, with the directory synced after. A process that dies leaves a temporary file at most.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Buffer

from spile.errors import StoreError
from spile.objects.disk import (
    ABSENT,
    TEMPORARY,
    becomes,
    hold,
    make_folder,
    open_plain,
    reading,
    reserve,
    sync_folder,
    temporary_name,
    write_all,
    writing,
)
from spile.objects.folder import NotFound, ObjectInfo, Unfinished, checked_key, possible_prefix
from spile.objects.stats import Stats

__all__ = ["LocalFolder", "LocalWriter"]

_MOVE_CHUNK = 8 << 20


class LocalWriter:
    """A temporary file that becomes the object when it is finished."""

    def __init__(self, path: Path, size: int, stats: Stats) -> None:
        self._path = path
        self._stats = stats
        self._handle: int | None = None
        with writing(path):
            make_folder(path.parent)
            self._temporary = temporary_name(path)
            self._handle = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            hold(self._handle)
            try:
                reserve(self._handle, size)
            except OSError:
                self.abort()
                raise

    def write_at(self, offset: int, data: Buffer) -> None:
        """Put bytes at an offset."""
        view = memoryview(data).cast("B")
        with writing(self._path):
            write_all(self._open(), view, offset)
        self._stats.add(bytes_written=view.nbytes)

    def move(self, source: int, target: int, length: int) -> None:
        """Move bytes down, from the front, so that ranges may overlap."""
        if target > source:
            raise ValueError("a move goes down")
        handle = self._open()
        with writing(self._path):
            for done in range(0, length, _MOVE_CHUNK):
                chunk = os.pread(handle, min(_MOVE_CHUNK, length - done), source + done)
                write_all(handle, memoryview(chunk), target + done)

    def finish(self, size: int) -> None:
        """Cut, sync once, rename, sync the folder."""
        handle = self._open()
        with writing(self._path):
            os.ftruncate(handle, size)
            os.fsync(handle)
            self._temporary.rename(self._path)
            self._close()
            sync_folder(self._path.parent)

    def abort(self) -> None:
        """Remove the temporary file, unless it was finished."""
        if self._handle is not None:
            self._close()
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
    """A directory. It need not exist until something is written."""

    def __init__(self, path: Path, url: str | None = None, stats: Stats | None = None) -> None:
        self.path = path
        self._url = url if url is not None else str(path)
        self._stats = stats if stats is not None else Stats()

    @property
    def url(self) -> str:
        """The path, as it was typed."""
        return self._url

    @property
    def local_path(self) -> Path:
        """The directory."""
        return self.path

    @property
    def stats(self) -> Stats:
        """Counters shared with the folders above and below."""
        return self._stats

    def child(self, path: str) -> LocalFolder:
        """The folder below this one."""
        checked_key(path)
        return LocalFolder(self.path / path, f"{self._url.rstrip('/')}/{path}", self._stats)

    def get(self, key: str) -> bytes:
        """The whole file."""
        path = self._at(key)
        with reading(path), open_plain(path) as file:
            data = file.readall()
        self._stats.add(requests=1, bytes_read=len(data))
        return data

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """One after the other: a disk gains nothing from threads here."""
        return map(self.get, keys)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly these bytes."""
        path = self._at(key)
        with reading(path), open_plain(path) as file:
            pieces: list[bytes] = []
            missing, offset = length, start
            while missing and (piece := os.pread(file.fileno(), missing, offset)):
                pieces.append(piece)
                missing, offset = missing - len(piece), offset + len(piece)
        if missing:
            raise StoreError(f"{path} is cut short", expected=f"{start + length} bytes", found=start + length - missing)
        self._stats.add(requests=1, bytes_read=length)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def info(self, key: str) -> ObjectInfo:
        """Size and time of one file."""
        path = self._at(key)
        with reading(path):
            found = path.stat()
            if not path.is_file():
                raise NotFound(f"no such file {path}")
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All files below, sorted by key, without temporary ones."""
        for key, entry in self._walk(prefix):
            if not entry.name.startswith(TEMPORARY):
                with suppress(FileNotFoundError):  # deleted while we look
                    found = entry.stat()
                    yield ObjectInfo(key, found.st_size, found.st_mtime)

    def put(self, key: str, data: bytes) -> None:
        """Write aside, sync, rename."""
        path = self._at(key)
        with writing(path), self._aside(path, data) as temporary:
            temporary.rename(path)
        self._stats.add(requests=1, bytes_written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """Write aside, sync, link: the file system lets one of many through."""
        path = self._at(key)
        with writing(path), self._aside(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        self._stats.add(requests=1, bytes_written=len(data))
        return True

    def delete(self, key: str) -> None:
        """Remove a file."""
        path = self._at(key)
        with writing(path), suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            sync_folder(path.parent)

    def writer(self, key: str, size: int) -> LocalWriter:
        """A file of about this size; its room is taken now."""
        return LocalWriter(self._at(key), size, self._stats)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Temporary files of exactly our names, a live writer's too."""
        above, slash, _ = prefix.rpartition("/")
        for found, entry in self._walk(above + slash):
            name = becomes(entry.name)
            if name is not None:
                key = found.removesuffix(entry.name) + name
                if key.startswith(prefix):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield Unfinished(key, found, status.st_mtime, status.st_size)

    def discard(self, remains: Unfinished) -> None:
        """Remove a temporary file."""
        self.delete(remains.handle)

    def _at(self, key: str) -> Path:
        return self.path / checked_key(key)

    @contextmanager
    def _aside(self, path: Path, data: bytes) -> Iterator[Path]:
        """The bytes, durable under a temporary name; the folder is synced after the caller has named them."""
        make_folder(path.parent)
        temporary = temporary_name(path)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                write_all(handle, memoryview(data), 0)
                os.fsync(handle)
            finally:
                os.close(handle)
            yield temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Files whose key starts with the prefix, in the order of their keys."""
        above = prefix.rpartition("/")[0]
        if not possible_prefix(prefix):
            return
        stack = [above + "/" if above else ""]
        files: dict[str, os.DirEntry[str]] = {}
        links: set[tuple[int, int]] = set()
        # A stack of keys still to visit, smallest on top; a folder's key ends with "/", which sorts as its files do.
        while stack:
            key = stack.pop()
            if key in files:
                yield key, files.pop(key)
                continue
            with reading(self.path / key), suppress(*ABSENT), os.scandir(self.path / key) as entries:
                found: list[str] = []
                for entry in entries:
                    name = f"{key}{entry.name}/"
                    if not name.startswith(prefix) or not _leads_on(entry, links):
                        continue
                    if not entry.is_dir():
                        name = name[:-1]
                        files[name] = entry
                    if name.startswith(prefix):
                        found.append(name)
                stack.extend(sorted(found, reverse=True))


def _leads_on(entry: os.DirEntry[str], links: set[tuple[int, int]]) -> bool:
    """Whether there is something behind a name. A folder that links lead to is there once: links can go in circles."""
    if not entry.is_symlink():
        return True
    try:
        found = entry.stat()
    except OSError:  # it leads nowhere, or to itself
        return False
    place = (found.st_dev, found.st_ino)
    if stat.S_ISDIR(found.st_mode) and place in links:
        return False
    links.add(place)
    return True
