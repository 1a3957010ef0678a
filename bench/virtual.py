"""A bucket in memory whose requests cost what a caller decides: real seconds, or seconds of a virtual clock."""

from __future__ import annotations

import hashlib
import itertools
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from spile.objects import ObjectInfo, Stats, Unfinished, Writer
from spile.objects.folder import NotFound

PAGE = 1000
"""Objects that a listing returns per request."""


@dataclass(frozen=True)
class _Stored:
    data: bytes
    size: int
    updated: float
    etag: str


@dataclass
class VirtualBucket:
    """Objects by key. ``request`` is called before each request with its kind (get, put, list, delete) and its key."""

    request: Callable[[str, str], None] = lambda _kind, _key: None
    clock: Callable[[], float] = lambda: 0.0
    objects: dict[str, _Stored] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def store(self, key: str, data: bytes, size: int | None = None) -> None:
        """Store an object without a request. ``size`` is its size if the content does not matter."""
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        with self.lock:
            if key not in self.objects:
                insort(self.keys, key)
            self.objects[key] = _Stored(data, len(data) if size is None else size, self.clock(), etag)

    def remove(self, key: str) -> None:
        with self.lock:
            if self.objects.pop(key, None) is not None:
                del self.keys[bisect_left(self.keys, key)]

    def page(self, prefix: str, after: str) -> list[tuple[str, _Stored]]:
        """Return at most ``PAGE`` objects with this prefix that follow a key."""
        with self.lock:
            start = bisect_left(self.keys, max(prefix, after + "\0" if after else ""))
            found = itertools.takewhile(
                lambda key: key.startswith(prefix), itertools.islice(self.keys, start, start + PAGE)
            )
            return [(key, self.objects[key]) for key in found]


class VirtualFolder:
    """A prefix of a :class:`VirtualBucket`, with the interface of every folder of spile."""

    local_path = None

    def __init__(self, bucket: VirtualBucket, prefix: str = "") -> None:
        self.bucket, self._prefix, self.stats = bucket, f"{prefix}/" if prefix else "", Stats()
        self.url = f"gs://virtual/{prefix}".rstrip("/")

    def child(self, path: str) -> VirtualFolder:
        return VirtualFolder(self.bucket, self._prefix + path)

    def get(self, key: str) -> bytes:
        return self._read(key).data

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        return map(self.get, keys)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def info(self, key: str) -> ObjectInfo:
        return self._info(key, self._read(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        wanted, after = self._prefix + prefix, ""
        while True:
            self.bucket.request("list", wanted)
            page = self.bucket.page(wanted, after)
            for key, stored in page:
                yield self._info(key.removeprefix(self._prefix), stored)
            if len(page) < PAGE:
                return
            after = page[-1][0]

    def put(self, key: str, data: bytes) -> None:
        self.bucket.request("put", self._prefix + key)
        self.bucket.store(self._prefix + key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.bucket.request("put", self._prefix + key)
        with self.bucket.lock:
            if self._prefix + key in self.bucket.objects:
                return False
            self.bucket.store(self._prefix + key, data)
            return True

    def delete(self, key: str) -> None:
        self.bucket.request("delete", self._prefix + key)
        self.bucket.remove(self._prefix + key)

    def writer(self, key: str, size: int) -> Writer:
        raise NotImplementedError

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:  # noqa: ARG002
        return iter(())

    def discard(self, remains: Unfinished) -> None: ...

    def _read(self, key: str) -> _Stored:
        self.bucket.request("get", self._prefix + key)
        stored = self.bucket.objects.get(self._prefix + key)
        if stored is None:
            raise NotFound(f"no such object {self.url}/{key}")
        return stored

    @staticmethod
    def _info(key: str, stored: _Stored) -> ObjectInfo:
        return ObjectInfo(key, stored.size, stored.updated, stored.etag)
