"""``streams.json``: the streams of a folder, so that a stream that changed is noticed and named."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from spile.errors import DataError, untrusted
from spile.spec.records import known_fields

MANIFEST = "streams.json"
VERSION = 1
STREAM = re.compile(r"stream_(\d{3,})\.jsonl", re.ASCII)


def stream_name(number: int) -> str:
    """Return the file name of a stream, such as ``stream_005.jsonl``."""
    return f"stream_{number:03d}.jsonl"


@dataclass(frozen=True)
class StreamEntry:
    """The entry of one stream in ``streams.json``."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StreamsManifest:
    """The content of ``streams.json``: all streams of a folder and their source."""

    source: dict[str, object]
    """The dataset's name and the selection of rows."""
    seed: int
    samples: int
    streams: tuple[StreamEntry, ...]
    rejected: dict[str, int]
    """The number of rejected rows by reason."""
    version: int = VERSION

    def digest(self) -> str:
        """Return a short hash that identifies this split."""
        listed = "".join(f"{entry.name} {entry.sha256}\n" for entry in self.streams)
        return hashlib.sha256(listed.encode()).hexdigest()[:32]

    def to_json(self) -> bytes:
        """Serialise; equal content gives equal bytes."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, raw: bytes, place: str) -> StreamsManifest:
        """Parse and check the content of the file."""
        with untrusted(DataError, f"{place} is damaged", fix="make the streams again: spile data streams"):
            value: dict[str, Any] = orjson.loads(raw)
            if value["version"] != VERSION:
                raise DataError(f"{place} has a different version", expected=str(VERSION), found=str(value["version"]))
            streams = tuple(StreamEntry(**known_fields(StreamEntry, entry)) for entry in value["streams"])
            return cls(**{**known_fields(cls, value), "streams": streams})


def check_stream(
    name: str, raw: bytes | None, sha256: str, location: str, split: str | None = None
) -> StreamsManifest | None:
    """Return the ``streams.json`` that lists a file, if there is one.

    Raises:
        DataError: The file differs from its entry, is not listed, or belongs to another split than ``split``, which is
            the :meth:`StreamsManifest.digest` that the worker was given.
    """
    place = f"{location.removesuffix(name)}{MANIFEST}"
    manifest = None if raw is None else StreamsManifest.from_json(raw, place)
    found = None if manifest is None else manifest.digest()
    if split is not None and found != split:
        raise DataError(
            f"{location} is not the stream that was assigned",
            expected=f"split {split}",
            found=f"split {found}" if found else f"no {place}",
            fix="put the streams back, or deploy again",
        )
    listed = {entry.name: entry for entry in manifest.streams} if manifest is not None else {}
    if name not in listed:
        if listed and STREAM.fullmatch(name):  # its samples may be in other streams too
            raise DataError(
                f"{location} does not belong to the split that {MANIFEST} describes",
                expected=f"one of its {len(listed)} streams",
                found=f"{name}, which it does not list",
                fix="make the streams again with spile data streams, or use another folder",
            )
        return None
    if listed[name].sha256 != sha256:
        raise DataError(
            f"{location} changed since {MANIFEST} was written",
            expected=f"sha256 {listed[name].sha256}",
            found=sha256,
            fix="make it again with spile data streams --streams …, or use the folder's own files",
        )
    return manifest
