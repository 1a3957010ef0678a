"""``streams.json``: what a folder of streams holds, so that a stream that changed is noticed and named."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from spile.errors import DataError, untrusted
from spile.spec.records import known_fields

__all__ = ["MANIFEST", "STREAM", "StreamEntry", "StreamsManifest", "check_stream", "stream_name"]

MANIFEST = "streams.json"
VERSION = 1
STREAM = re.compile(r"stream_(\d{3,})\.jsonl", re.ASCII)


def stream_name(number: int) -> str:
    """``stream_005.jsonl``."""
    return f"stream_{number:03d}.jsonl"


@dataclass(frozen=True)
class StreamEntry:
    """One stream's file."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StreamsManifest:
    """All streams of a folder and where they came from."""

    source: dict[str, object]
    """The dataset's name and what was taken of it."""
    seed: int
    samples: int
    streams: tuple[StreamEntry, ...]
    rejected: dict[str, int]
    """Rows that could not be used, by reason."""
    version: int = VERSION

    def digest(self) -> str:
        """A short name for this split: the same streams, the same name."""
        listed = "".join(f"{entry.name} {entry.sha256}\n" for entry in self.streams)
        return hashlib.sha256(listed.encode()).hexdigest()[:32]

    def to_json(self) -> bytes:
        """As the file holds it; the same for the same content."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, raw: bytes, place: str) -> StreamsManifest:
        """A file's content, checked."""
        with untrusted(DataError, f"{place} is damaged", fix="make the streams again: spile data streams"):
            value: dict[str, Any] = orjson.loads(raw)
            if value["version"] != VERSION:
                raise DataError(f"{place} is of another version", expected=str(VERSION), found=str(value["version"]))
            streams = tuple(StreamEntry(**known_fields(StreamEntry, entry)) for entry in value["streams"])
            return cls(**{**known_fields(cls, value), "streams": streams})


def check_stream(
    name: str, raw: bytes | None, sha256: str, location: str, split: str | None = None
) -> StreamsManifest | None:
    """The ``streams.json`` that lists a file, if one does. A stream that is not of the split it describes is refused.

    ``split``: the one that was given out, by its :meth:`StreamsManifest.digest`; any other is refused too.
    """
    place = f"{location.removesuffix(name)}{MANIFEST}"
    manifest = None if raw is None else StreamsManifest.from_json(raw, place)
    found = None if manifest is None else manifest.digest()
    if split is not None and found != split:
        raise DataError(
            f"{location} is not the stream that was given out",
            expected=f"split {split}",
            found=f"split {found}" if found else f"no {place}",
            fix="put the streams back, or deploy again",
        )
    listed = {entry.name: entry for entry in manifest.streams} if manifest is not None else {}
    if name not in listed:
        if listed and STREAM.fullmatch(name):  # its samples are in the others too, or in none
            raise DataError(
                f"{location} is not of the split that {MANIFEST} describes",
                expected=f"one of its {len(listed)} streams",
                found=f"{name}, which it does not list",
                fix="make the streams again: spile data streams; or use another folder",
            )
        return None
    if listed[name].sha256 != sha256:
        raise DataError(
            f"{location} changed since {MANIFEST} was written",
            expected=f"sha256 {listed[name].sha256}",
            found=sha256,
            fix="make it again: spile data streams --streams …, or use the folder's own files",
        )
    return manifest
