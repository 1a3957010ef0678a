"""Upload streams to a bucket, skipping files that are already there with the same checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from spile.data.manifest import MANIFEST, StreamsManifest, check_stream
from spile.errors import DataError
from spile.objects import Folder, NotFound, read_chunks

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
    streams = [file for file in files if file.path.name != MANIFEST]
    manifests = [file for file in files if file.path.name == MANIFEST]
    known: dict[str, bool] = {}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spile-upload") as pool:
        waiting = {pool.submit(_same, folder, file, listed.get(file.path.name)): file for file in streams}
        for future in as_completed(waiting):
            known[waiting[future].path.name] = future.result()
        if listed and not all(known.values()):
            # What is about to change must not be check_pinned for while it does.
            folder.delete(MANIFEST)
        changed = [file for file in streams if not known[file.path.name]]
        _tell(progress, (file.path.name for file in streams if known[file.path.name]), False, 0, len(files))
        done = len(streams) - len(changed)
        puts = {pool.submit(put_file, folder, file.path.name, file.path): file for file in changed}
        for put in as_completed(puts):
            put.result()
            done += 1
            _tell(progress, [puts[put].path.name], True, done - 1, len(files))
    for file in manifests:
        same = not changed and _same(folder, file, None)
        if not same:
            put_file(folder, file.path.name, file.path)
            changed.append(file)
        _tell(progress, [file.path.name], not same, done, len(files))
    names = {file.path.name for file in changed}
    return Uploaded(
        url=folder.url,
        uploaded=tuple(sorted(names)),
        skipped=tuple(sorted(file.path.name for file in files if file.path.name not in names)),
        bytes=sum(file.size for file in changed),
    )


def _tell(
    progress: Callable[[str, bool, int, int], None] | None, names: Iterable[str], put: bool, done: int, total: int
) -> None:
    for number, name in enumerate(names, done + 1):
        if progress is not None:
            progress(name, put, number, total)


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
