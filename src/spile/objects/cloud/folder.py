"""Folders in buckets: ``gs://`` and ``s3://``.

Everything goes over plain requests (``rest``), which send checksums along and see those that the services report;
large objects go in parts (``upload``), so that each part is tried again and counted by itself. Trying again, and
knowing what a lost reply means, happens here. Why no client library: ``docs/design/0009-object-store-client.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from spile.errors import Damaged, StoreError
from spile.objects.cloud.bucket import READERS, Bucket
from spile.objects.cloud.failures import RequestFailure
from spile.objects.cloud.listing import ListedObject, parse_location, parse_objects, parse_uploads
from spile.objects.cloud.upload import CloudWriter
from spile.objects.folder import NotFound, ObjectInfo, Unfinished, checked_key, possible_prefix
from spile.objects.stats import Stats

__all__ = ["CloudFolder", "open_cloud"]


Result = TypeVar("Result")


def open_cloud(scheme: str, bucket: str, prefix: str) -> CloudFolder:
    """A folder in a bucket. Nothing is asked of the bucket yet."""
    return CloudFolder(Bucket(scheme, bucket), prefix)


class CloudFolder:
    """A prefix of a bucket."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def url(self) -> str:
        """``gs://bucket/prefix``."""
        return f"{self._bucket.url}/{self._prefix}".rstrip("/")

    @property
    def bucket_url(self) -> str:
        """``gs://bucket``."""
        return self._bucket.url

    @property
    def local_path(self) -> None:
        """None: it is no directory."""
        return None

    @property
    def stats(self) -> Stats:
        """Counters shared by all folders that were opened from one."""
        return self._bucket.stats

    def child(self, path: str) -> CloudFolder:
        """The folder below this one."""
        return CloudFolder(self._bucket, self._prefix + checked_key(path))

    def get(self, key: str) -> bytes:
        """The whole object, its checksum compared."""
        name = self._name(key)
        data = self._run("read", key, lambda: self._bucket.rest.get(name))
        self.stats.add(bytes_read=len(data))
        return data

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Dozens at a time, because each waits for the network; a few hundred ahead of who reads them."""
        waiting: deque[Future[bytes]] = deque()
        try:
            for key in keys:
                waiting.append(self._bucket.readers.submit(self.get, key))
                if len(waiting) >= 4 * READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """Exactly these bytes: large ones the fast way, where that works."""
        name = self._name(key)
        if length == 0:
            return b""
        data: bytes | memoryview | None = self._bucket.ranges.get(name, start, length)
        if data is None:
            data = self._run("read", key, lambda: self._bucket.rest.get_range(name, start, length))
        self.stats.add(bytes_read=length)
        return data

    def info(self, key: str) -> ObjectInfo:
        """Size and time of one object."""
        name = self._name(key)
        found = self._run("read", key, lambda: self._bucket.rest.head(name))
        return ObjectInfo(key, found.size, found.modified, found.tag)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Page by page; a page that fails is asked for again by itself."""
        if not possible_prefix(prefix):
            return
        token: str | None = ""
        while token is not None:
            page, token = self._page(prefix, token)
            for found in page:
                yield ObjectInfo(found.key.removeprefix(self._prefix), found.size, found.modified, found.tag)

    def _page(self, prefix: str, token: str) -> tuple[Sequence[ListedObject], str | None]:
        """One page, and the token of the next."""
        query = {"list-type": "2", "prefix": self._prefix + prefix, **({"continuation-token": token} if token else {})}
        return self._run("list", prefix, lambda: parse_objects(self._bucket.rest.request("GET", query=query).body))

    def put(self, key: str, data: bytes) -> None:
        """Create or replace."""
        name = self._name(key)
        self._run("write", key, lambda: self._bucket.rest.put(name, data))
        self.stats.add(bytes_written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """Create only if absent. After a lost reply the object that is there is compared with ours."""
        name = self._name(key)
        replies_lost = 0

        def attempt() -> bool:
            nonlocal replies_lost
            try:
                self._bucket.rest.put(name, data, if_absent=True)
            except RequestFailure as trouble:
                if trouble.exists:
                    return replies_lost > 0 and self._bucket.rest.get(name) == data
                replies_lost += trouble.transient
                raise
            return True

        created = self._run("write", key, attempt)
        self.stats.add(bytes_written=len(data) * created)
        return created

    def delete(self, key: str) -> None:
        """Remove."""
        name = self._name(key)
        try:
            self._bucket.again(lambda: self._bucket.rest.request("DELETE", name))
        except RequestFailure as trouble:
            if not trouble.absent:
                raise self._error("delete", key, trouble) from trouble

    def writer(self, key: str, size: int) -> CloudWriter:
        """Memory of this size; waits while open writers hold too much."""
        name = self._name(key)

        def send(data: Any) -> None:
            try:
                self._bucket.uploader.send(name, data)
            except RequestFailure as trouble:
                raise self._error("write", key, trouble) from trouble
            self.stats.add(bytes_written=data.nbytes)

        return CloudWriter(f"{self.url}/{key}", size, self._bucket.buffers, send)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Multipart uploads that nobody completed or aborted."""
        query = {"uploads": "", "prefix": self._prefix + prefix}
        while True:
            fields, uploads = self._run(
                "list", prefix, lambda: parse_uploads(self._bucket.rest.request("GET", query=query).body)
            )
            for name, handle, started in uploads:
                yield Unfinished(name.removeprefix(self._prefix), handle, started)
            if fields.get("IsTruncated") != "true":
                return
            query["key-marker"] = fields.get("NextKeyMarker", "")
            query["upload-id-marker"] = fields.get("NextUploadIdMarker", "")

    def discard(self, remains: Unfinished) -> None:
        """Abort a multipart upload."""
        name = self._name(remains.key)
        try:
            self._bucket.again(lambda: self._bucket.rest.request("DELETE", name, query={"uploadId": remains.handle}))
        except RequestFailure as trouble:
            if not trouble.absent:
                raise self._error("delete", remains.key, trouble) from trouble

    def compares_checksums(self, key: str) -> bool:
        """Whether the store compares the checksums that are sent along; where it does not, we read back and compare."""
        name = self._name(key)
        compares = self._run("write", key, lambda: self._bucket.rest.compares_checksums(name))
        self._bucket.rest.read_back = not compares
        return compares

    def location(self) -> str:
        """The bucket's region, in lower case."""
        query = {"location": ""}
        found = self._run("read", "", lambda: parse_location(self._bucket.rest.request("GET", query=query).body))
        return (found or "us-east-1").lower()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _run(self, verb: str, key: str, attempt: Callable[[], Result]) -> Result:
        try:
            return self._bucket.again(attempt)
        except RequestFailure as trouble:
            raise self._error(verb, key, trouble) from trouble

    def _error(self, verb: str, key: str, trouble: RequestFailure) -> StoreError | Damaged:
        """One line that names the object and the cause."""
        address = f"{self.url}/{key}".rstrip("/")
        if trouble.absent and verb == "read":
            return NotFound(f"no such object {address}")
        if trouble.code == "Damaged":
            return Damaged(f"cannot {verb} {address}", found=trouble.cause)
        return StoreError(f"cannot {verb} {address}", found=trouble.cause, fix=_fix(self._bucket.url, trouble))


def _fix(bucket: str, trouble: RequestFailure) -> str | None:
    if trouble.no_bucket:
        make = "gcloud storage buckets create" if bucket.startswith("gs:") else "aws s3 mb"
        return f"make it ({make} {bucket}) and run the same command again"
    if trouble.status in (401, 403):
        return f"let this account read and write {bucket}, then run the same command again"
    return "run the same command again: what is committed stays" if trouble.transient else None
