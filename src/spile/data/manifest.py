"""``streams.json``: the streams of a folder, so that a stream that changed is noticed and named; and their upload."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from spile.errors import DataError, untrusted
from spile.objects import Folder, NotFound, read_chunks
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


_CHUNK = 8 << 20
_AT_ONCE = 8


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload."""

    url: str
    uploaded: tuple[str, ...]
    skipped: tuple[str, ...]
    bytes: int
    """The size of the uploaded files."""


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    sha256: str


def upload(local_dir: Path, folder: Folder, progress: Callable[[str, bool, int, int], None] | None = None) -> Uploaded:
    """Upload the streams of a folder, ``streams.json`` last, so that a bucket that has it has all streams it lists.

    ``progress`` is called for each file with its name, whether it was uploaded, the number done and the total.
    """
    files = _local(local_dir)
    listed = _listed(folder)
    done = 0

    def finished(file: _File, put: bool) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(file.path.name, put, done, len(files))

    streams = [file for file in files if file.path.name != MANIFEST]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spile-upload") as pool:
        same = list(pool.map(lambda file: _same(folder, file, listed.get(file.path.name)), streams))
        if listed and not all(same):
            folder.delete(MANIFEST)  # it must not list streams that are being replaced
        changed = [file for file, known in zip(streams, same, strict=True) if not known]
        for file in streams:
            if file not in changed:
                finished(file, False)
        puts = pool.map(lambda file: put_file(folder, file.path.name, file.path), changed)
        for file, _ in zip(list(changed), puts, strict=True):
            finished(file, True)
    for file in [file for file in files if file.path.name == MANIFEST]:
        put = bool(changed) or not _same(folder, file, None)
        if put:
            put_file(folder, file.path.name, file.path)
            changed.append(file)
        finished(file, put)
    names = {file.path.name for file in changed}
    return Uploaded(
        url=folder.url,
        uploaded=tuple(sorted(names)),
        skipped=tuple(sorted(file.path.name for file in files if file.path.name not in names)),
        bytes=sum(file.size for file in changed),
    )


def _local(folder: Path) -> list[_File]:
    """Return the files to upload; refuse a stream that differs from its entry in ``streams.json``."""
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}", fix="make streams first: spile data streams")
    manifest = folder / MANIFEST
    raw = manifest.read_bytes() if manifest.is_file() else None
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".json") and path.is_file())
    if raw is not None:
        names = [entry.name for entry in StreamsManifest.from_json(raw, str(manifest)).streams]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise DataError(
                f"{folder} does not contain {missing[0]}",
                expected=f"the {len(names)} streams of {MANIFEST}",
                found=f"{len(names) - len(missing)}",
                fix="make the missing ones: spile data streams --streams …",
            )
    if not paths:
        raise DataError(
            f"{folder} holds no streams", expected="*.jsonl", found="none", fix="make them with: spile data streams"
        )
    files = [_File(path, path.stat().st_size, _sha256(_chunks(path))) for path in paths]
    for file in files:
        check_stream(file.path.name, raw, file.sha256, str(file.path))
    return files


def _listed(folder: Folder) -> dict[str, str]:
    """Return the hashes in the bucket's ``streams.json``."""
    manifest = read_manifest(folder)
    return {} if manifest is None else {entry.name: entry.sha256 for entry in manifest.streams}


def read_manifest(folder: Folder) -> StreamsManifest | None:
    """Return the folder's ``streams.json``, or None."""
    try:
        return StreamsManifest.from_json(folder.get(MANIFEST), f"{folder.url}/{MANIFEST}")
    except NotFound:
        return None


def _same(folder: Folder, file: _File, listed: str | None) -> bool:
    """Return whether the bucket has this file, by its listed hash or by reading it."""
    try:
        if folder.info(file.path.name).size != file.size:
            return False
    except NotFound:
        return False
    return listed == file.sha256 or _sha256(read_chunks(folder, file.path.name)) == file.sha256


def put_file(folder: Folder, key: str, path: Path) -> None:
    """Upload a file, in parts if it is large."""
    size = path.stat().st_size
    if size <= _CHUNK:
        folder.put(key, path.read_bytes())
        return
    writer = folder.writer(key, size)
    try:
        offset = 0
        for chunk in _chunks(path):
            writer.write_at(offset, chunk)
            offset += len(chunk)
        writer.finish(size)
    finally:
        writer.abort()


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
