"""Folders in buckets: ``gs://``, ``s3://`` and ``az://``, through obstore.

obstore sends single requests; this module decides which failures are retried, counts the retries, and finds out
whether a write whose reply was lost took place. See ``docs/design/0009-object-store-client.md``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from spile.errors import StoreError
from spile.objects.clouds import Cloud, cloud_of, http_timeout
from spile.objects.folder import (
    NotFound,
    ObjectInfo,
    Stats,
    Unfinished,
    checked_key,
    is_valid_prefix,
    read_ahead,
    run_interruptibly,
)
from spile.objects.machine import positive_number
from spile.objects.retry import RequestFailure, Retry, from_obstore

PART = 16 << 20
"""Bytes of each part of a multipart upload."""
_PARALLEL_PARTS = 8
_PART_RETRIES = 8
"""How often obstore retries a part. Longer outages fail the upload, which is then started again and counted."""
_PART_TIMEOUT_FACTOR = 5
"""A part may take this many times ``SPILE_HTTP_TIMEOUT``, because the answer arrives after the whole part was sent."""
_PARALLEL_READS = 48
"""Small objects read in parallel from one bucket."""
_PAGE = 1000
_BLOCK = 2 << 20
_MAX_FREE_BLOCKS = 2

Result = TypeVar("Result")
Bytes = NDArray[np.uint8]

_first_process: int | None = None
"""The process in which obstore was first used."""
_copies: dict[int, Any] = {}
"""obstore's copies, by process."""


def _load_obstore() -> tuple[Any, Any]:
    """Return obstore's functions and its store classes for this process.

    obstore sends requests on threads of its own. A forked child, such as a worker of torch's DataLoader, does not have
    these threads, and its requests would wait for ever. A child therefore loads a second copy of the library, which
    starts its own. The system loads a file only once, so the copy is made in memory.
    """
    global _first_process
    import obstore.exceptions
    import obstore.store

    process = os.getpid()
    if _first_process in (None, process):
        _first_process = process
        return obstore, obstore.store
    if process not in _copies:
        source = Path(obstore._obstore.__file__)
        handle = os.memfd_create("obstore")
        with source.open("rb") as file:
            os.sendfile(handle, file.fileno(), 0, source.stat().st_size)
        path = f"/proc/self/fd/{handle}"
        loader = importlib.machinery.ExtensionFileLoader("_obstore", path)
        spec = importlib.machinery.ModuleSpec("_obstore", loader, origin=path)
        _copies[process] = importlib.util.module_from_spec(spec)
        loader.exec_module(_copies[process])
    return _copies[process], _copies[process]._store


class _Connection:
    """What one process uses to reach a bucket: obstore's stores and the threads that wait for small objects."""

    def __init__(self, cloud: Cloud) -> None:
        self.process = os.getpid()
        self.obstore, stores = _load_obstore()
        seconds = http_timeout()
        self.store = cloud.open(stores, seconds, 0)
        self.upload_store = cloud.open(stores, _PART_TIMEOUT_FACTOR * seconds, _PART_RETRIES)
        self.errors = (self.obstore.exceptions.BaseError, OSError, ValueError)


class Bucket:
    """What all folders of one bucket share: connections, memory for uploads, counters and the retry policy."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self.cloud = cloud_of(scheme, bucket)
        self.url = f"{scheme}://{bucket}"
        self.stats = Stats()
        self.retry = Retry.from_environment()
        self.buffers = Buffers()
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    @property
    def connection(self) -> _Connection:
        with self._lock:
            if self._connection is None or self._connection.process != os.getpid():
                self._connection = _Connection(self.cloud)
            return self._connection

    def attempt(self, call: Callable[[_Connection], Result]) -> Result:
        """Make one attempt; raise :class:`RequestFailure` if it fails."""
        # obstore calls for credentials too, but would bury an error about them in one of its own.
        self.cloud.check_credentials()
        connection = self.connection
        try:
            return run_interruptibly(lambda: call(connection))
        except connection.errors as error:
            raise from_obstore(error) from error


class BucketFolder:
    """A prefix of a bucket."""

    local_path = None

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self.bucket, self.stats = bucket, bucket.stats
        self.url = f"{bucket.url}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def child(self, path: str) -> BucketFolder:
        return BucketFolder(self.bucket, self._prefix + checked_key(path))

    def get(self, key: str) -> bytes:
        name = self._name(key)
        data = self._run("read", key, lambda: self._get(name))
        self.stats.add(bytes_read=len(data))
        return data

    def _get(self, name: str) -> bytes:
        return self.bucket.attempt(lambda c: bytes(c.obstore.get(c.store, name).bytes()))

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        return read_ahead((partial(self.get, key) for key in keys), 4 * _PARALLEL_READS, threads=_PARALLEL_READS)

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        name = self._name(key)
        if length == 0:
            return b""

        def attempt() -> memoryview:
            data = self.bucket.attempt(lambda c: c.obstore.get_range(c.store, name, start=start, length=length))
            if len(data) != length:
                raise RequestFailure(f"cut short: expected {start + length} bytes, found {start + len(data)}")
            return memoryview(data)

        data = self._run("read", key, attempt)
        self.stats.add(bytes_read=length)
        return data

    def info(self, key: str) -> ObjectInfo:
        name = self._name(key)
        return self._info(self._run("read", key, lambda: self.bucket.attempt(lambda c: c.obstore.head(c.store, name))))

    def _info(self, found: Any) -> ObjectInfo:
        key = found["path"].removeprefix(self._prefix)
        return ObjectInfo(key, found["size"], found["last_modified"].timestamp(), found["e_tag"])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield objects page by page. A page that fails is requested again by itself.

        obstore lists whole folders, so a prefix that ends within a name becomes an offset and an early end. It refuses
        a page with a name that is no valid key, such as ``a//b``; from there on the cloud's own client lists the rest.
        Such names are yielded, and every other method refuses them.
        """
        if not is_valid_prefix(prefix):
            return
        wanted = self._prefix + prefix
        folder, _, rest = wanted.rpartition("/")
        after = _just_before(wanted) if rest[:-1] not in ("", ".", "..") else None  # obstore refuses these as offsets
        stream: Any = None
        refused: RequestFailure | None = None

        def page() -> Any:
            nonlocal stream, refused
            if refused is None:
                try:
                    return self.bucket.attempt(next_page)
                except RequestFailure as failure:
                    stream = None
                    if failure.code != "InvalidPath":
                        raise
                    refused = failure
            names = run_interruptibly(lambda: self.bucket.cloud.list_any_names(wanted, after or ""))
            if names is None:
                raise refused
            return names

        def next_page(c: _Connection) -> Any:
            nonlocal stream
            if stream is None:
                stream = iter(c.obstore.list(c.store, folder or None, offset=after, chunk_size=_PAGE))
            return next(stream, None)

        while found := self._run("list", prefix, page):
            for each in found:
                after = each["path"]
                if after.startswith(wanted):
                    yield self._info(each)
                elif after > wanted:
                    return

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)
        self._run("write", key, lambda: self._put(name, data, "overwrite"))
        self.stats.add(bytes_written=len(data))

    def _put(self, name: str, data: bytes, mode: str) -> None:
        self.bucket.attempt(lambda c: c.obstore.put(c.store, name, data, mode=mode, use_multipart=False))

    def create(self, key: str, data: bytes) -> bool:
        """Create an object if it is absent. If an earlier reply was lost, compare the object in place with ours."""
        name = self._name(key)
        reply_lost = False

        def attempt() -> bool:
            nonlocal reply_lost
            try:
                self._put(name, data, "create")
            except RequestFailure as failure:
                if failure.exists:
                    return reply_lost and self._get(name) == data
                reply_lost |= failure.transient
                raise
            return True

        created = self._run("write", key, attempt)
        self.stats.add(bytes_written=len(data) * created)
        return created

    def delete(self, key: str) -> None:
        name = self._name(key)
        with suppress(NotFound):
            self._run("delete", key, lambda: self.bucket.attempt(lambda c: c.obstore.delete(c.store, name)))

    def writer(self, key: str, size: int) -> BucketWriter:
        name = self._name(key)

        def send(data: Bytes) -> None:
            self._run("write", key, lambda: self.bucket.attempt(lambda c: upload(c, data)))
            self.stats.add(bytes_written=data.nbytes)

        def upload(c: _Connection, data: Bytes) -> None:
            if data.nbytes <= PART:
                c.obstore.put(c.store, name, data, use_multipart=False)
            else:
                c.obstore.put(c.upload_store, name, data, chunk_size=PART, max_concurrency=_PARALLEL_PARTS)

        return BucketWriter(f"{self.url}/{key}", size, self.bucket.buffers, send)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        cloud, wanted = self.bucket.cloud, self._prefix + prefix
        for upload in self._run("list", prefix, lambda: [*cloud.unfinished(wanted)]):
            yield replace(upload, key=upload.key.removeprefix(self._prefix))

    def discard(self, remains: Unfinished) -> None:
        name = self._name(remains.key)

        def attempt() -> None:
            try:
                self.bucket.cloud.discard(name, remains.handle)
            except (
                RequestFailure
            ) as failure:  # Not retried, although a missing upload is temporary while it is written.
                if not failure.absent:
                    raise

        self._run("delete", remains.key, attempt)

    def region(self) -> str | None:
        return self._run("read", "", self.bucket.cloud.region)

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _run(self, verb: str, key: str, attempt: Callable[[], Result]) -> Result:
        """Retry an attempt; turn its last failure into one line that names the object, the cause and the fix."""
        try:
            return self.bucket.retry.call(attempt, self.stats)
        except RequestFailure as failure:
            address = f"{self.url}/{key}".rstrip("/")
            if failure.absent and verb in ("read", "delete"):
                raise NotFound(f"no such object {address}") from failure
            fix = _fix(self.bucket.cloud, failure)
            raise StoreError(f"cannot {verb} {address}", found=failure.cause, fix=fix) from failure


def _just_before(key: str) -> str:
    """Return a key that sorts before ``key`` and, if names are ASCII, after the keys that lack its last character."""
    last = ord(key[-1])
    return key[:-1] + (f"{chr(last - 1)}~" if 0x30 < last < 0x7F else "")


def _fix(cloud: Cloud, failure: RequestFailure) -> str | None:
    url = f"{cloud.scheme}://{cloud.bucket}"
    if failure.no_bucket:
        command = cloud.create_command.format(name=cloud.bucket, region="REGION")
        return f"create it ({command}) and run the same command again"
    if failure.status in (401, 403):
        return f"let this account read and write {url}, then run the same command again"
    if failure.code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return f"set AWS_REGION to the region of {url}"
    if failure.code == "InvalidPath":
        own = ", or: pip install 'spile[s3]'" if cloud.scheme == "s3" else ""
        return f'rename or remove that object; a name must not contain an empty part, "." or ".."{own}'
    return "run the same command again; what is committed stays" if failure.transient else None


class Buffers:
    """Reused blocks of memory for uploads, within a budget (``SPILE_UPLOAD_GB``, 3). Two writers are always allowed.

    The budget is what lets a slow bucket slow the model down instead of filling the host's memory.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = int(positive_number("SPILE_UPLOAD_GB", 3) * 2**30) if budget is None else budget
        self._changed = threading.Condition()
        self._free: list[Bytes] = []
        self._taken: list[int] = []

    def take(self, size: int) -> Bytes:
        """Return a block of at least ``size`` bytes. Waits while the budget is used up."""
        room = _round_up(size)
        with self._changed:
            self._changed.wait_for(lambda: len(self._taken) < 2 or sum(self._taken) + room <= self.budget)
            self._taken.append(room)
            fitting = [index for index, buffer in enumerate(self._free) if room <= buffer.nbytes <= 2 * room]
            if fitting:
                return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        return np.frombuffer(mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)

    def give_back(self, buffer: Bytes | None, size: int) -> None:
        """End the use of ``size`` bytes. The block is reused, unless it is None."""
        with self._changed:
            self._taken.remove(_round_up(size))
            if buffer is not None:  # reused because the first write to each new page costs a page fault
                self._free = [*self._free, buffer][-_MAX_FREE_BLOCKS:]
            self._changed.notify_all()


def _round_up(size: int) -> int:
    return max(1, -(-size // _BLOCK)) * _BLOCK


class BucketWriter:
    """A block of memory that is uploaded when it is finished."""

    def __init__(self, address: str, size: int, buffers: Buffers, send: Callable[[Bytes], None]) -> None:
        self._address = address
        self._size = size
        self._buffers = buffers
        self._send = send
        self._lock = threading.Lock()
        self._finishing = False
        self._buffer: Bytes | None = buffers.take(size)

    def write_at(self, offset: int, data: Buffer) -> None:
        piece = np.asarray(memoryview(data).cast("B"))
        self._checked_buffer(offset + piece.nbytes)[offset : offset + piece.nbytes] = piece

    def move(self, source: int, target: int, length: int) -> None:
        if target > source:
            raise ValueError("bytes can only be moved to a lower offset")
        buffer = self._checked_buffer(source + length)
        buffer[target : target + length] = buffer[source : source + length]

    def finish(self, size: int) -> None:
        with self._lock:
            data = self._checked_buffer(size)[:size]
            self._finishing = True
        sent = False
        try:
            self._send(data)
            sent = True
        finally:
            del data
            # After a failure obstore's threads may still be sending from this block, so it is not reused.
            self._release(reuse=sent)

    def abort(self) -> None:
        """Release the memory. Does nothing while another thread is in ``finish``."""
        with self._lock:
            if self._finishing:
                return
        self._release(reuse=True)

    def _checked_buffer(self, end: int) -> Bytes:
        buffer = self._buffer
        if buffer is None:
            raise StoreError(f"cannot write {self._address}", found="a writer that was finished or aborted")
        if end > self._size:
            raise StoreError(f"cannot write {self._address}", expected=f"at most {self._size} bytes", found=end)
        return buffer

    def _release(self, *, reuse: bool) -> None:
        with self._lock:
            buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._buffers.give_back(buffer if reuse else None, self._size)
