"""A folder that looks remote to the reader and counts the bytes read from each object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from spile.objects import Folder, ObjectInfo, Stats, Unfinished, Writer

__all__ = ["Counting"]


class Counting:
    """Passes everything on. ``ranges`` are the (key, start, length) of all range reads; ``spoil`` may change bytes."""

    def __init__(self, inner: Folder, prefix: str = "", shared: Counting | None = None) -> None:
        self.inner, self.prefix = inner, prefix
        self.ranges: list[tuple[str, int, int]] = shared.ranges if shared else []
        self.gets: list[str] = shared.gets if shared else []
        self.holder: Counting = shared.holder if shared else self
        self.spoil: Callable[[str, int, bytes], bytes] | None = None

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def local_path(self) -> None:
        return None

    @property
    def stats(self) -> Stats:
        return self.inner.stats

    def read_of(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for key, _, length in self.ranges:
            total[key] += length
        return total

    def child(self, path: str) -> Counting:
        return Counting(self.inner.child(path), f"{self.prefix}{path}/", self)

    def get(self, key: str) -> bytes:
        self.gets.append(self.prefix + key)
        return self.inner.get(key)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        return map(self.get, keys)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges.append((self.prefix + key, start, length))
        data = self.inner.get_range(key, start, length)
        return self.holder.spoil(key, start, data) if self.holder.spoil else data

    def info(self, key: str) -> ObjectInfo:
        return self.inner.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        return self.inner.create(key, data)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def writer(self, key: str, size: int) -> Writer:
        return self.inner.writer(key, size)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return self.inner.unfinished(prefix)

    def discard(self, remains: Unfinished) -> None:
        self.inner.discard(remains)
