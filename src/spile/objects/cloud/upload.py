"""Large objects: gathered in memory, sent in parallel parts, each checked and each tried again by itself.

Memory in flight is bounded: :meth:`Buffers.take` waits for a finished upload when too much is. That is how a slow
bucket slows the model down instead of filling the host.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from spile.errors import StoreError
from spile.objects.cloud.failures import RequestFailure, from_status, is_error_document
from spile.objects.cloud.rest import RestClient
from spile.objects.crc import crc32c, fold, to_base64
from spile.objects.environment import positive_number

__all__ = ["Buffers", "CloudWriter", "Uploader"]

PART = 16 << 20
_PARALLEL = 8
_PAGE = 2 << 20
_KEEP_FREE = 2

Result = TypeVar("Result")
Bytes = NDArray[np.uint8]


def _fresh(size: int) -> Bytes:
    """New memory. Each page costs a fault when it is first written (huge ones gained nothing): hence the reuse."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class Buffers:
    """Reused blocks of memory, under a budget (``SPILE_UPLOAD_GB``, 3). Two writers may always be open."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = int(positive_number("SPILE_UPLOAD_GB", 3) * 2**30) if budget is None else budget
        self._changed = threading.Condition()
        self._free: list[Bytes] = []
        self._taken: list[int] = []

    def take(self, size: int) -> Bytes:
        """At least so many bytes of anything. Waits while the budget is used up."""
        room = max(1, -(-size // _PAGE)) * _PAGE
        with self._changed:
            self._changed.wait_for(lambda: len(self._taken) < 2 or sum(self._taken) + room <= self.budget)
            self._taken.append(room)
            fitting = [index for index, buffer in enumerate(self._free) if room <= buffer.nbytes <= 2 * room]
            if fitting:
                return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        return _fresh(room)

    def give(self, buffer: Bytes, size: int) -> None:
        """Back for the next writer."""
        room = max(1, -(-size // _PAGE)) * _PAGE
        with self._changed:
            self._taken.remove(room)
            self._free = [*self._free, buffer][-_KEEP_FREE:]
            self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        """Bytes that open writers hold."""
        with self._changed:
            return sum(self._taken)


class _SentPart(NamedTuple):
    """A part that the store has."""

    tag: str
    crc: int
    size: int


class Uploader:
    """Sends large objects to one bucket. ``retry`` runs an attempt until it succeeds or is hopeless."""

    def __init__(self, client: RestClient, retry: Callable[[Callable[[], Any]], Any]) -> None:
        self._client = client
        self._retry = retry
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="upload")

    def send(self, key: str, data: Bytes) -> None:
        """Durable when it returns; :class:`RequestFailure` when it cannot be."""
        if data.nbytes <= PART:
            self._retry(lambda: self._client.put(key, data.data))
            return
        self._retry(lambda: self._send_in_parts(key, data))

    def _send_in_parts(self, key: str, data: Bytes) -> None:
        """One upload; a part that fails is sent again here, an object that arrived damaged by who calls."""
        handle = self._begin(key)
        try:
            parts = self._send_parts(key, handle, data)
            headers = self._complete(key, handle, parts)
        except BaseException:
            self._drop(key, handle)
            raise
        size = self._retry(lambda: self._client.head(key)).size
        if size != data.nbytes or (self._client.read_back and not self._is_there(key, data)):
            raise RequestFailure("damaged on the way: another object is there", code="Damaged", transient=True)
        reported = self._client.dialect.reported_checksum(headers)
        whole = fold((part.crc, part.size) for part in parts)
        if reported is not None and reported != to_base64(whole):
            raise RequestFailure("damaged on the way: the store's checksum is not ours", code="Damaged", transient=True)

    def _is_there(self, key: str, data: Bytes) -> bool:
        """Whether the object has these bytes; for a server that does not compare checksums."""
        starts = range(0, data.nbytes, PART)
        pieces = (self._client.get_range(key, start, min(PART, data.nbytes - start)) for start in starts)
        return all(piece == bytes(data[start : start + PART]) for start, piece in zip(starts, pieces, strict=True))

    def _begin(self, key: str) -> str:
        headers = {"x-amz-checksum-algorithm": "CRC32C"} if self._client.dialect.scheme == "s3" else {}

        def attempt() -> str:
            return _child(self._client.request("POST", key, query={"uploads": ""}, headers=headers).body, "UploadId")

        handle: str = self._retry(attempt)
        return handle

    def _send_parts(self, key: str, handle: str, data: Bytes) -> list[_SentPart]:
        stop = threading.Event()

        def send(number: int) -> _SentPart:
            piece = data[(number - 1) * PART : number * PART].data
            crc = crc32c(piece)
            checksum = self._client.dialect.sent_checksum(crc)
            query = {"partNumber": str(number), "uploadId": handle}

            def attempt() -> _SentPart:
                if stop.is_set():
                    raise RequestFailure("another part failed")
                reply = self._client.request("PUT", key, query=query, headers=checksum, body=piece)
                if not (tag := reply.headers.get("ETag")):
                    raise RequestFailure("a part's reply without its tag", transient=True)
                return _SentPart(tag, crc, len(piece))

            result: _SentPart = self._retry(attempt)
            return result

        futures = [self._pool.submit(send, number + 1) for number in range(-(-data.nbytes // PART))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((f for f in futures if f.done() and f.exception()), None)
            return [future.result() for future in ([failed] if failed is not None else futures)]
        finally:
            stop.set()
            _cancel(futures)  # and wait: the memory goes to another writer next

    def _complete(self, key: str, handle: str, parts: list[_SentPart]) -> Mapping[str, str]:
        """The headers of the object that the parts have become."""
        composite = self._client.dialect.scheme == "s3"
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{part.tag}</ETag>"
            + (f"<ChecksumCRC32C>{to_base64(part.crc)}</ChecksumCRC32C>" if composite else "")
            + "</Part>"
            for number, part in enumerate(parts, 1)
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        headers = {"content-type": "application/xml"}
        replies_lost = 0

        def attempt() -> Mapping[str, str]:
            nonlocal replies_lost
            try:
                reply = self._client.request("POST", key, query={"uploadId": handle}, headers=headers, body=body)
                if is_error_document(reply.body):
                    raise from_status(500, reply.body)
                _child(reply.body, "ETag")
            except RequestFailure as trouble:
                if trouble.code == "NoSuchUpload" and replies_lost:
                    return self._client.request("HEAD", key).headers  # it was done, and the reply was lost
                replies_lost += trouble.transient
                raise
            return reply.headers

        completed: Mapping[str, str] = self._retry(attempt)
        return completed

    def _drop(self, key: str, handle: str) -> None:
        """Remove the parts. Where that fails too, ``verify --gc`` finds them; the first error is the one to tell."""
        try:
            self._client.request("DELETE", key, query={"uploadId": handle})
        except RequestFailure:
            return


def _cancel(futures: list[Future[_SentPart]]) -> None:
    for future in futures:
        future.cancel()
    wait([future for future in futures if not future.cancelled()])


def _child(body: bytes, name: str) -> str:
    """A field of a reply. One without it was not the store's: it is asked again."""
    try:
        for child in ElementTree.fromstring(body):  # noqa: S314 - the store's own reply
            if child.tag.rpartition("}")[2] == name and child.text:
                return child.text
    except ElementTree.ParseError:
        pass
    raise RequestFailure(f"a reply without {name}", transient=True)


class CloudWriter:
    """Memory of the planned size that becomes the object when it is finished."""

    def __init__(self, address: str, size: int, buffers: Buffers, send: Callable[[Bytes], None]) -> None:
        self._address = address
        self._size = size
        self._buffers = buffers
        self._send = send
        self._lock = threading.Lock()
        self._finishing = False
        self._buffer: Bytes | None = buffers.take(size)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Copy bytes to their place."""
        piece = np.asarray(memoryview(data).cast("B"))
        self._room(offset + piece.nbytes)[offset : offset + piece.nbytes] = piece

    def move(self, source: int, target: int, length: int) -> None:
        """Move bytes down; NumPy copies overlapping ranges as if through another array."""
        if target > source:
            raise ValueError("a move goes down")
        buffer = self._room(source + length)
        buffer[target : target + length] = buffer[source : source + length]

    def finish(self, size: int) -> None:
        """Upload; the memory is free again whatever happens."""
        with self._lock:
            data = self._room(size)[:size]
            self._finishing = True
        try:
            self._send(data)
        finally:
            del data
            self._release()

    def abort(self) -> None:
        """Nothing was sent, so nothing is left. While another thread is in ``finish`` that one ends it."""
        with self._lock:
            if self._finishing:
                return
        self._release()

    def _room(self, end: int) -> Bytes:
        buffer = self._buffer
        if buffer is None:
            raise StoreError(f"cannot write {self._address}", found="a writer that was finished or aborted")
        if end > self._size:
            raise StoreError(f"cannot write {self._address}", expected=f"at most {self._size} bytes", found=end)
        return buffer

    def _release(self) -> None:
        with self._lock:
            buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._buffers.give(buffer, self._size)
