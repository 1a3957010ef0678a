"""The seam between the store and where bytes live: a folder of named, immutable-by-habit objects.

Three backends stand behind it: a local folder, Google Cloud Storage and S3. Keys are relative, with ``/`` between
their parts, and never start with one. Every method raises :class:`~spile.errors.StoreError` when the
backend fails for good (retries are the backend's business), with the object's address and the cause in the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from typing_extensions import Buffer

from spile.errors import SpecError, StoreError, UserError
from spile.objects.stats import Stats

__all__ = ["Folder", "NotFound", "ObjectInfo", "Unfinished", "Unwritable", "Writer", "checked_key", "possible_prefix"]


class NotFound(StoreError):
    """There is no such object."""


class Unwritable(StoreError, UserError):
    """The place cannot take what is written, and its owner can change that: read-only, forbidden, full, missing."""

    exit_code = 2


_NO_PART = ("", ".", "..")


def possible_prefix(prefix: str) -> bool:
    """Whether any key could start so; a backend is not asked otherwise: ``/`` and ``..`` would lead out of a folder."""
    return not any(part in _NO_PART for part in prefix.split("/")[:-1])


def checked_key(key: str) -> str:
    """The key itself, or an error: relative, no empty part, no way up."""
    if any(part in _NO_PART for part in key.split("/")) or "\0" in key:
        raise SpecError("not an object's name", expected="a relative path such as commits/0001.json", found=repr(key))
    return key


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing knows of an object."""

    key: str
    size: int
    updated: float
    """Seconds since the epoch."""
    etag: str | None = None


@dataclass(frozen=True)
class Unfinished:
    """The remains of a writer that neither finished nor aborted: a temporary file, a multipart upload."""

    key: str
    """The object it would have become."""
    handle: str
    """What the backend calls it."""
    started: float
    """Seconds since the epoch."""
    size: int | None = None
    """Bytes it holds, where that is known without asking for each part."""


@runtime_checkable
class Writer(Protocol):
    """One large object, written at any offset, by any thread, then made visible at once."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Put bytes at an offset. Calls from several threads may overlap in time, not in range."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move bytes already written down to a lower offset, when a shard ends up shorter than planned."""

    def finish(self, size: int) -> None:
        """Make the object durable and visible with exactly this size. Blocks until it is."""

    def abort(self) -> None:
        """Leave no trace. Safe to call at any time, twice, and after ``finish`` (then it does nothing)."""


@runtime_checkable
class Folder(Protocol):
    """A place that holds objects: a directory, or a prefix of a bucket."""

    @property
    def url(self) -> str:
        """Where it is, as a user would type it."""

    @property
    def local_path(self) -> Path | None:
        """Its directory, where it is one of this machine's: what may be mapped, watched or named to other programs."""

    @property
    def stats(self) -> Stats:
        """Requests, retries and bytes of this folder and its children, since it was opened."""

    def child(self, path: str) -> Folder:
        """The folder below this one. Nothing is created."""

    def get(self, key: str) -> bytes:
        """The whole object, or :class:`NotFound`."""

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Whole objects, in the order of their keys, fetched many at a time; bounded in what it holds."""

    def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """Exactly ``length`` bytes from ``start``; fewer is a :class:`StoreError`."""

    def info(self, key: str) -> ObjectInfo:
        """Size and age of one object, or :class:`NotFound`."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``, at any depth, sorted by key."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace, atomically and durably."""

    def create(self, key: str, data: bytes) -> bool:
        """Create only if absent, atomically and durably. False: somebody else's object is there.

        After a reply that was lost the object is read back: the same bytes are taken for ours. So what must have one
        author (a commit) carries something that no other author writes.
        """

    def delete(self, key: str) -> None:
        """Remove; no error where there is none."""

    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object of about ``size`` bytes (its capacity). Blocks while too much is in flight."""

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """What interrupted writers left behind; live writers' too. No reader ever sees it, but it takes room."""

    def discard(self, remains: Unfinished) -> None:
        """Remove what ``unfinished`` named; no error where it is gone."""
