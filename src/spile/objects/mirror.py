"""A folder with a copy: what is written to its home is written to a second folder too. Reads come from the home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from typing_extensions import Buffer

from spile.objects.folder import Folder, ObjectInfo, Unfinished, Writer
from spile.objects.stats import Stats

__all__ = ["MirrorFolder"]


class _BothWriters:
    """The copy first: when the home's object is visible, its copy is there."""

    def __init__(self, home: Writer, copy: Writer, forget: Callable[[], None]) -> None:
        self._home, self._copy, self._forget = home, copy, forget

    def write_at(self, offset: int, data: Buffer) -> None:
        """To both."""
        self._copy.write_at(offset, data)
        self._home.write_at(offset, data)

    def move(self, source: int, target: int, length: int) -> None:
        """In both."""
        self._copy.move(source, target, length)
        self._home.move(source, target, length)

    def finish(self, size: int) -> None:
        """The copy, then the home; a copy of what never came to be at home goes again."""
        self._copy.finish(size)
        try:
            self._home.finish(size)
        except BaseException:
            self._forget()
            raise

    def abort(self) -> None:
        """Both."""
        try:
            self._copy.abort()
        finally:
            self._home.abort()


class MirrorFolder:
    """``home``, where the dataset lives, and ``copy``, which is never read: the ledger at home is the only truth."""

    def __init__(self, home: Folder, copy: Folder) -> None:
        self.home, self.copy = home, copy

    @property
    def url(self) -> str:
        """The home's."""
        return self.home.url

    @property
    def stats(self) -> Stats:
        """The home's."""
        return self.home.stats

    def child(self, path: str) -> MirrorFolder:
        """Both folders below."""
        return MirrorFolder(self.home.child(path), self.copy.child(path))

    def get(self, key: str) -> bytes:
        """From the home."""
        return self.home.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """From the home."""
        return self.home.get_range(key, start, length)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """From the home."""
        return self.home.get_many(keys)

    def info(self, key: str) -> ObjectInfo:
        """The home's."""
        return self.home.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The home's."""
        return self.home.list(prefix)

    def put(self, key: str, data: bytes) -> None:
        """To both."""
        self.home.put(key, data)
        self.copy.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """At home if absent; what was created there is copied, also where the reply that says so was lost."""
        created = self.home.create(key, data)
        if created or self.home.get(key) == data:
            self.copy.put(key, data)
        return created

    def delete(self, key: str) -> None:
        """From both."""
        self.home.delete(key)
        self.copy.delete(key)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """The home's."""
        return self.home.unfinished(prefix)

    def discard(self, remains: Unfinished) -> None:
        """The home's."""
        self.home.discard(remains)

    def writer(self, key: str, size: int) -> Writer:
        """To both."""
        home = self.home.writer(key, size)
        try:
            return _BothWriters(home, self.copy.writer(key, size), lambda: self.copy.delete(key))
        except BaseException:
            home.abort()
            raise
