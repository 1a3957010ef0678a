"""A folder with a copy: everything written to the first folder is written to a second one as well.

Reads come from the first folder only. If it already has objects that the copy does not have, small records are copied
when they are read. Large objects are not: a worker that resumes a run of a terabyte must not download it first.
``store.copies`` reports which are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import tee
from pathlib import Path

from typing_extensions import Buffer

from spile.objects.folder import Folder, ObjectInfo, Stats, Unfinished, Unwritable, Writer, get_if_present


class _BothWriters:
    """Writes an object and its copy. The copy is finished first, so it exists when the object becomes visible."""

    def __init__(self, home: Writer, copy: Writer, remove_copy: Callable[[], None]) -> None:
        self._home, self._copy, self._remove_copy = home, copy, remove_copy

    def write_at(self, offset: int, data: Buffer) -> None:
        self._copy.write_at(offset, data)
        self._home.write_at(offset, data)

    def move(self, source: int, target: int, length: int) -> None:
        self._copy.move(source, target, length)
        self._home.move(source, target, length)

    def finish(self, size: int) -> None:
        self._copy.finish(size)
        try:
            self._home.finish(size)
        except BaseException:
            self._remove_copy()
            raise

    def abort(self) -> None:
        try:
            self._copy.abort()
        finally:
            self._home.abort()


class MirrorFolder:
    """``home``, which holds the dataset, and ``copy``, which is only written.

    Objects that are read whole or created here never change, so a copy with other bytes belongs to another dataset.
    """

    def __init__(self, home: Folder, copy: Folder) -> None:
        self.home, self.copy = home, copy

    @property
    def url(self) -> str:
        return self.home.url

    @property
    def local_path(self) -> Path | None:
        return self.home.local_path

    @property
    def stats(self) -> Stats:
        return self.home.stats

    def child(self, path: str) -> MirrorFolder:
        return MirrorFolder(self.home.child(path), self.copy.child(path))

    def get(self, key: str) -> bytes:
        data = self.home.get(key)
        self._complete_copy(key, data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        return self.home.get_range(key, start, length)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        wanted, names = tee(keys)
        for key, data in zip(names, self.home.get_many(wanted), strict=True):
            self._complete_copy(key, data)
            yield data

    def info(self, key: str) -> ObjectInfo:
        return self.home.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.home.list(prefix)

    def put(self, key: str, data: bytes) -> None:
        self.home.put(key, data)
        self.copy.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Create in the home if absent, and copy what was created there, also if the reply to it was lost."""
        created = self.home.create(key, data)
        if created or self.home.get(key) == data:
            self._complete_copy(key, data)
        return created

    def _complete_copy(self, key: str, data: bytes) -> None:
        """Write an object of the home to the copy, unless another dataset's object is there."""
        found = get_if_present(self.copy, key)
        if found is None:
            self.copy.put(key, data)
        elif found != data:
            raise Unwritable(
                f"{self.copy.url} is not a copy of {self.home.url}",
                expected=f"an empty folder, or one with the same {key}",
                found=f"a different {key}",
                fix="choose another --output-dir, or remove what is there; the dataset itself is complete",
            )

    def delete(self, key: str) -> None:
        self.home.delete(key)
        self.copy.delete(key)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return self.home.unfinished(prefix)

    def discard(self, remains: Unfinished) -> None:
        self.home.discard(remains)

    def writer(self, key: str, size: int) -> Writer:
        home = self.home.writer(key, size)
        try:
            return _BothWriters(home, self.copy.writer(key, size), lambda: self.copy.delete(key))
        except BaseException:
            home.abort()
            raise


def home_of(folder: Folder) -> Folder:
    """Return the folder that holds the dataset, without its copy."""
    return folder.home if isinstance(folder, MirrorFolder) else folder
