"""The seam between the store and where bytes live: a folder of named, immutable-by-habit objects.

Three backends stand behind it: a local folder, Google Cloud Storage and S3. Keys are relative, with ``/`` between
their parts, and never start with one. Every method raises :class:`~spile.errors.StoreError` when the
backend fails for good (retries are the backend's business), with the object's address and the cause in the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from typing_extensions import Buffer

from spile.errors import StoreError

__all__ = ["Folder", "NotFound", "ObjectInfo", "Writer"]


class NotFound(StoreError):
    """There is no such object."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing knows of an object."""

    key: str
    size: int
    updated: float
    """Seconds since the epoch."""
    etag: str | None = None


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

    def child(self, path: str) -> Folder:
        """The folder below this one. Nothing is created."""

    def get(self, key: str) -> bytes:
        """The whole object, or :class:`NotFound`."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``; fewer is a :class:`StoreError`."""

    def info(self, key: str) -> ObjectInfo:
        """Size and age of one object, or :class:`NotFound`."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``, at any depth, sorted by key."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace, atomically and durably."""

    def create(self, key: str, data: bytes) -> bool:
        """Create only if absent, atomically and durably. False: somebody else's object is there."""

    def delete(self, key: str) -> None:
        """Remove; no error where there is none."""

    def writer(self, key: str, size: int) -> Writer:
        """Begin a large object of about ``size`` bytes (its capacity). Blocks while too much is in flight."""
