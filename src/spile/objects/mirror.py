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


class _MirrorWriter:
    """Writes an object and its copy. The copy is finished first, so it exists when the object becomes visible."""

    def __init__(self, primary: Writer, copy: Writer, remove_copy: Callable[[], None]) -> None:
        self._primary, self._copy, self._remove_copy = primary, copy, remove_copy

    def write_at(self, offset: int, data: Buffer) -> None:
        self._copy.write_at(offset, data)
        self._primary.write_at(offset, data)

    def move(self, source: int, target: int, length: int) -> None:
        self._copy.move(source, target, length)
        self._primary.move(source, target, length)

    def finish(self, size: int) -> None:
        self._copy.finish(size)
        try:
            self._primary.finish(size)
        except BaseException:
            self._remove_copy()
            raise

    def abort(self) -> None:
        try:
            self._copy.abort()
        finally:
            self._primary.abort()


class MirrorFolder:
    """``primary``, which holds the dataset, and ``copy``, which is only written.

    Objects that are read whole or created here never change, so a copy with other bytes belongs to another dataset.
    """

    def __init__(self, primary: Folder, copy: Folder) -> None:
        self.primary, self.copy = primary, copy

    @property
    def url(self) -> str:
        return self.primary.url

    @property
    def local_path(self) -> Path | None:
        return self.primary.local_path

    @property
    def stats(self) -> Stats:
        return self.primary.stats

    def child(self, path: str) -> MirrorFolder:
        return MirrorFolder(self.primary.child(path), self.copy.child(path))

    def get(self, key: str) -> bytes:
        data = self.primary.get(key)
        self._complete_copy(key, data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        return self.primary.get_range(key, start, length)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        wanted, names = tee(keys)
        for key, data in zip(names, self.primary.get_many(wanted), strict=True):
            self._complete_copy(key, data)
            yield data

    def info(self, key: str) -> ObjectInfo:
        return self.primary.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.primary.list(prefix)

    def put(self, key: str, data: bytes) -> None:
        self.primary.put(key, data)
        self.copy.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Create in the primary folder if absent, and copy what was created there, also if the reply to it was lost."""
        created = self.primary.create(key, data)
        if created or self.primary.get(key) == data:
            self._complete_copy(key, data)
        return created

    def _complete_copy(self, key: str, data: bytes) -> None:
        """Write an object of the primary folder to the copy, unless another dataset's object is there."""
        found = get_if_present(self.copy, key)
        if found is None:
            self.copy.put(key, data)
        elif found != data:
            raise Unwritable(
                f"{self.copy.url} is not a copy of {self.primary.url}",
                expected=f"an empty folder, or one with the same {key}",
                found=f"a different {key}",
                fix="choose another --output-dir, or remove what is there; the dataset itself is complete",
            )

    def delete(self, key: str) -> None:
        self.primary.delete(key)
        self.copy.delete(key)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return self.primary.unfinished(prefix)

    def discard(self, remains: Unfinished) -> None:
        self.primary.discard(remains)

    def writer(self, key: str, size: int) -> Writer:
        writer = self.primary.writer(key, size)
        try:
            return _MirrorWriter(writer, self.copy.writer(key, size), lambda: self.copy.delete(key))
        except BaseException:
            writer.abort()
            raise


def without_copy(folder: Folder) -> Folder:
    """Return the folder that holds the dataset, without its copy."""
    return folder.primary if isinstance(folder, MirrorFolder) else folder
