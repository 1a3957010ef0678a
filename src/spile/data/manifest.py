"""``streams.json``: the streams of a folder, so that a stream that changed is noticed and named; and their upload."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from spile.errors import DataError, untrusted
from spile.objects import Folder, NotFound, read_chunks
from spile.objects.folder import get_if_present
from spile.objects.local import refuse_links
from spile.spec.records import read_record
from spile.spec.run import stream_file_number

MANIFEST = "streams.json"
CHALLENGES, ANSWERS = "arc_format_train.json", "test_outputs_train.json"
"""The pair of files of an ARC challenge."""
VERSION = 1


def list_streams(folder: Folder) -> dict[int, int]:
    """Return the size of each ``stream_NNN.jsonl`` in a folder or bucket, by its number."""
    found = {}
    for info in folder.list("stream_"):
        number = stream_file_number(info.key)
        if number is not None and "/" not in info.key:
            found[number] = info.size
    return found


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
    seed: int | None
    """None: the rows were dealt to the streams in turn, not shuffled."""
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
            return read_record(cls, value)


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
        if listed and stream_file_number(name) is not None:  # its samples may be in other streams too
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


def read_manifest(folder: Folder) -> StreamsManifest | None:
    """Return the folder's ``streams.json``, or None."""
    raw = get_if_present(folder, MANIFEST)
    return None if raw is None else StreamsManifest.from_json(raw, f"{folder.url}/{MANIFEST}")


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
    left_out: tuple[str, ...]
    """Other files in the folder."""


def upload(local_dir: Path, folder: Folder, progress: Callable[[str, bool, int, int], None] | None = None) -> Uploaded:
    """Upload the streams of a folder, ``streams.json`` last, so that a bucket that has it has all streams it lists.

    ``progress`` is called for each file with its name, whether it was uploaded, the number done and the total.
    """
    hashes = _local_files(local_dir)
    manifest = read_manifest(folder)
    listed = {} if manifest is None else {entry.name: entry.sha256 for entry in manifest.streams}
    uploaded, skipped = list[Path](), list[Path]()

    def finish(path: Path, put: bool) -> None:
        (uploaded if put else skipped).append(path)
        if progress is not None:
            progress(path.name, put, len(uploaded) + len(skipped), len(hashes))

    streams = [path for path in hashes if path.name != MANIFEST]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spile-upload") as pool:
        same = list(pool.map(lambda path: _same(folder, path, hashes[path], listed.get(path.name)), streams))
        if manifest is not None and not all(same):
            folder.delete(MANIFEST)  # it must not list streams that are being replaced
        for path in [path for path, known in zip(streams, same, strict=True) if known]:
            finish(path, False)
        changed = [path for path, known in zip(streams, same, strict=True) if not known]
        for path, _ in zip(changed, pool.map(lambda path: put_file(folder, path.name, path), changed), strict=True):
            finish(path, True)
    for path in [path for path in hashes if path.name == MANIFEST]:
        put = bool(changed) or not _same(folder, path, hashes[path], None)
        if put:
            put_file(folder, path.name, path)
        finish(path, put)
    return Uploaded(
        url=folder.url,
        uploaded=tuple(sorted(path.name for path in uploaded)),
        skipped=tuple(sorted(path.name for path in skipped)),
        bytes=sum(path.stat().st_size for path in uploaded),
        left_out=tuple(sorted(path.name for path in local_dir.iterdir() if path not in hashes)),
    )


def _local_files(folder: Path) -> dict[Path, str]:
    """Return the files to upload and their hashes; refuse a stream that differs from its entry in ``streams.json``."""
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}", fix="make streams first: spile data streams")
    written = (MANIFEST, CHALLENGES, ANSWERS)
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".jsonl" or path.name in written)
    refuse_links(folder, paths)
    if not paths:
        raise DataError(
            f"{folder} holds no streams", expected="*.jsonl", found="none", fix="make them with: spile data streams"
        )
    manifest = folder / MANIFEST
    raw = manifest.read_bytes() if manifest in paths else None
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
    hashes = {path: sha256_of(path) for path in paths}
    for path, sha256 in hashes.items():
        check_stream(path.name, raw, sha256, str(path))
    return hashes


def _same(folder: Folder, path: Path, sha256: str, listed: str | None) -> bool:
    """Return whether the bucket has this file, by its listed hash or by reading it."""
    try:
        if folder.info(path.name).size != path.stat().st_size:
            return False
    except NotFound:
        return False
    if listed == sha256:
        return True
    digest = hashlib.sha256()
    for chunk in read_chunks(folder, path.name):
        digest.update(chunk)
    return digest.hexdigest() == sha256


def put_file(folder: Folder, key: str, path: Path) -> None:
    """Upload a file, in parts if it is large."""
    size = path.stat().st_size
    if size <= _CHUNK:
        folder.put(key, path.read_bytes())
        return
    writer = folder.writer(key, size)
    try:
        with path.open("rb") as file:
            for offset in range(0, size, _CHUNK):
                writer.write_at(offset, file.read(_CHUNK))
        writer.finish(size)
    finally:
        writer.abort()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
