"""A folder with a copy: what is written to its home is written to a second folder too. Reads come from the home.

A home that is older than its copy has objects that the copy lacks. Small ones, which are read whole (records), are
copied when they are read; large ones are not: a worker that resumes a terabyte must not fetch it first.
``store.copies`` tells which those are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import tee
from pathlib import Path

from typing_extensions import Buffer

from spile.objects.folder import Folder, NotFound, ObjectInfo, Unfinished, Unwritable, Writer
from spile.objects.stats import Stats

__all__ = ["MirrorFolder", "home_of"]


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
    """``home``, where the dataset lives, and ``copy``, which is never believed: the ledger at home is the only truth.

    What is read whole or created through it never changes, so a copy that has other bytes is another dataset's.
    """

    def __init__(self, home: Folder, copy: Folder) -> None:
        self.home, self.copy = home, copy

    @property
    def url(self) -> str:
        """The home's."""
        return self.home.url

    @property
    def local_path(self) -> Path | None:
        """The home's: the copy is never read."""
        return self.home.local_path

    @property
    def stats(self) -> Stats:
        """The home's."""
        return self.home.stats

    def child(self, path: str) -> MirrorFolder:
        """Both folders below."""
        return MirrorFolder(self.home.child(path), self.copy.child(path))

    def get(self, key: str) -> bytes:
        """From the home; the copy gets it too."""
        data = self.home.get(key)
        self._follow(key, data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """From the home."""
        return self.home.get_range(key, start, length)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """From the home; the copy gets them too."""
        wanted, names = tee(keys)
        for key, data in zip(names, self.home.get_many(wanted), strict=True):
            self._follow(key, data)
            yield data

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
            self._follow(key, data)
        return created

    def _follow(self, key: str, data: bytes) -> None:
        """The copy gets what the home has; never in the place of somebody's other dataset."""
        try:
            found = self.copy.get(key)
        except NotFound:
            self.copy.put(key, data)
            return
        if found != data:
            raise Unwritable(
                f"{self.copy.url} is no copy of {self.home.url}",
                expected=f"an empty folder, or one with the same {key}",
                found="another",
                fix="give an --output-dir of its own, or remove what is there; the dataset itself is whole",
            )

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


def home_of(folder: Folder) -> Folder:
    """Where the dataset lives, past its copy: for a record that is compared and not followed."""
    return folder.home if isinstance(folder, MirrorFolder) else folder
