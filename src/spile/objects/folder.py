"""The interface between spile and the places that hold its files: local folders and buckets.

A folder holds objects under relative keys such as ``commits/0001.json``. There are two implementations:
:mod:`~spile.objects.local` for disks and :mod:`~spile.objects.bucket` for ``gs://``, ``s3://`` and ``az://``. Each
retries by itself; a method that raises :class:`~spile.errors.StoreError` has failed for good, and the error names the
object and the cause.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from typing_extensions import Buffer

from spile.errors import SpecError, StoreError, UserError

_READ_AHEAD = 3
_FORBIDDEN_PARTS = ("", ".", "..")


class NotFound(StoreError):
    """The object does not exist."""


class Unwritable(StoreError, UserError):
    """The folder cannot be written for a reason that the user can change: read-only, forbidden, full or missing."""

    exit_code = UserError.exit_code


def is_valid_prefix(prefix: str) -> bool:
    """Return whether a valid key can start with ``prefix``. Prefixes with empty parts, ``.`` or ``..`` cannot."""
    return not any(part in _FORBIDDEN_PARTS for part in prefix.split("/")[:-1])


def checked_key(key: str) -> str:
    """Return ``key`` if it is a valid relative key.

    Raises:
        SpecError: The key is absolute, or has an empty part, ``.``, ``..`` or a NUL character.

    """
    if any(part in _FORBIDDEN_PARTS for part in key.split("/")) or "\0" in key:
        raise SpecError("not an object's name", expected="a relative path such as commits/0001.json", found=repr(key))
    return key


@dataclass
class Stats:
    """Traffic counters of a folder. Many threads add to them; read them at any time."""

    requests: int = 0
    retries: int = 0
    """Requests sent again after a temporary failure."""
    bytes_written: int = 0
    bytes_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, requests: int = 0, retries: int = 0, bytes_written: int = 0, bytes_read: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.bytes_written += bytes_written
            self.bytes_read += bytes_read


@dataclass(frozen=True)
class ObjectInfo:
    """An entry of a listing."""

    key: str
    size: int
    updated: float
    """Modification time, in seconds since the epoch."""
    etag: str | None = None
    linked: bool = False
    """Whether a symbolic link leads to it. Linked files are read, but not uploaded, and linked folders not emptied."""


@dataclass(frozen=True)
class Unfinished:
    """What an interrupted writer left behind: a temporary file or a multipart upload."""

    key: str
    """The object that was being written."""
    handle: str
    """The backend's name for the temporary file or upload."""
    started: float
    """Start time, in seconds since the epoch."""
    size: int | None = None
    """Bytes stored so far, if the backend reports them with the listing."""


@runtime_checkable
class Writer(Protocol):
    """A large object that is written at any offset by any thread and becomes visible in one step."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset. Several threads may call this at once for ranges that do not overlap."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move bytes that were already written to a lower offset. Used when a shard becomes shorter than planned."""

    def finish(self, size: int) -> None:
        """Make the object durable and visible with exactly ``size`` bytes. Blocks until that is done."""

    def abort(self) -> None:
        """Discard everything. May be called at any time and more than once; does nothing after ``finish``."""


@runtime_checkable
class Folder(Protocol):
    """A directory, or a prefix of a bucket."""

    @property
    def url(self) -> str:
        """The folder's address as a user would type it."""

    @property
    def local_path(self) -> Path | None:
        """The directory, or None for a bucket."""

    @property
    def stats(self) -> Stats:
        """Traffic counters of this folder and its children."""

    def child(self, path: str) -> Folder:
        """Return the folder below this one. Creates nothing."""

    def get(self, key: str) -> bytes:
        """Return the whole object; raise :class:`NotFound` if it does not exist."""

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Yield whole objects in the order of ``keys``, fetched in parallel with a bounded read-ahead."""

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """Return exactly ``length`` bytes from ``start``; raise :class:`StoreError` if the object is shorter."""

    def info(self, key: str) -> ObjectInfo:
        """Return the size and modification time of an object; raise :class:`NotFound` if it does not exist."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose key starts with ``prefix``, at any depth, sorted by key."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object, atomically and durably."""

    def create(self, key: str, data: bytes) -> bool:
        """Create an object only if it does not exist, atomically and durably; return whether this call created it.

        If a reply is lost, the object is read back and equal bytes count as created by this call. An object that
        must have a single author, such as a commit, therefore has to contain something unique to that author.
        """

    def delete(self, key: str) -> None:
        """Remove an object. Does nothing if it does not exist."""

    def writer(self, key: str, size: int) -> Writer:
        """Start a large object of at most ``size`` bytes. Blocks while open writers hold too much memory."""

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Yield what interrupted writers left behind, including the state of writers that are still running."""

    def discard(self, remains: Unfinished) -> None:
        """Remove an entry of :meth:`unfinished`. Does nothing if it no longer exists."""


def read_chunks(folder: Folder, key: str, chunk: int = 8 << 20) -> Iterator[bytes]:
    """Yield an object's bytes in order, in pieces of ``chunk`` bytes, while the next three pieces are fetched."""
    size = folder.info(key).size
    pieces = (partial(folder.get_range, key, start, min(chunk, size - start)) for start in range(0, size, chunk))
    for piece in read_ahead(pieces, _READ_AHEAD):
        yield bytes(piece)


def remove_by_name(
    where: str, names: Iterable[str], *, ours: Callable[[str], bool], remove: Callable[[str], None], threads: int = 1
) -> None:
    """Remove objects by exact name. All code that removes stored data uses this function, after its fence.

    Args:
        where: The place that the names belong to, for error messages.
        names: With one thread, they are removed in this order.
        ours: Returns whether a name has exactly the form that spile gives. If any name does not, nothing is removed.
        remove: Removes one name.
        threads: The number of names that are removed at the same time.

    """
    wanted = list(names)
    for name in wanted:
        if not ours(name):
            raise StoreError(
                f"refused to remove {where}/{name}",
                expected="a name of the form that spile gives",
                found="a different name",
            )
    if threads == 1:  # Not in a pool, which would remove later names after a failure.
        for name in wanted:
            remove(name)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="remove") as pool:
        deque(pool.map(remove, wanted), maxlen=0)


T = TypeVar("T")


def get_if_present(folder: Folder, key: str) -> bytes | None:
    try:
        return folder.get(key)
    except NotFound:
        return None


def run_interruptibly(call: Callable[[], T]) -> T:
    """Run a call in another thread if this is the main thread, so that signals are handled while it waits.

    The thread is a daemon: after Ctrl+C the program does not wait for the request.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    return future.result()


def read_ahead(calls: Iterable[Callable[[], T]], depth: int, *, threads: int | None = None) -> Iterator[T]:
    """Yield the result of each call, in order, while the next calls run in threads.

    ``calls`` is consumed lazily, in the thread of the caller. The first exception of a call is raised when its result
    is due. Closing the generator cancels the calls that have not started and waits for the ones that have.

    Args:
        calls: Functions without arguments.
        depth: How many calls run, or hold a result, while the caller uses an earlier result.
        threads: How many calls run at the same time; ``depth`` unless given.
    """
    ending = sys.is_finalizing  # a generator may be closed after the globals of its module are gone
    pool = ThreadPoolExecutor(threads or depth, thread_name_prefix="spile-ahead")
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            if len(waiting) < depth:
                waiting.append(pool.submit(call))
                continue
            result = waiting.popleft().result()
            waiting.append(pool.submit(call))
            yield result
            del result  # otherwise the previous result stays in memory while the next one is awaited
        while waiting:
            yield waiting.popleft().result()
    finally:
        if not ending():  # at that point the interpreter has already joined the threads
            pool.shutdown(wait=True, cancel_futures=True)


def iterate_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the items of an iterator, which runs in a thread up to ``depth`` items ahead of the caller.

    An exception of the iterator is raised in its place. Closing the generator closes the iterator.
    """
    end: Any = object()
    try:
        for item in read_ahead(repeat(partial(next, items, end)), depth, threads=1):
            if item is end:
                return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()
