"""The names of all files of a dataset below its root, and the functions that parse them."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from spile.errors import Damaged
from spile.objects.folder import read_ahead

if TYPE_CHECKING:
    from spile.objects.folder import Folder, ObjectInfo

RUN = "run.json"
SPEC = "spec.json"
STREAM = "stream.json"
PROGRESS = "progress.json"
SUSPECTS = "suspects.json"
METADATA = "metadata.json"
PREDICTIONS = "predictions.jsonl"
SUBMISSION = "submission.json"
ANSWERS = "answers.json"
COMMITS = "commits/"
CLAIMS = "claims/"
INDEX = "index/"
SPLIT = "streams"
"""The folder of the input, split into streams, if a launcher has split it."""

_ADDITION = re.compile(r"added_[0-9a-f]{8}")
# The number of digits is limited, because code loops over the numbers that it finds.
_STREAM_FOLDER = re.compile(r"(?:stream|tpu)_(0|[1-9]\d{0,8})", re.ASCII)
_PREFIXES = ("stream_", "tpu_")
_PAGE = 1000
"""The number of objects that a bucket lists per request."""
_COMMIT = re.compile(r"commits/(\d{4}|[1-9]\d{4,11})\.json", re.ASCII)
_STALE_COMMIT = re.compile(r"strays/(\d{4}|[1-9]\d{4,11})-[\w-]+\.json", re.ASCII)
_SHARD = re.compile(r"shard_(\d{4,})-([a-z0-9]+)(?:-h(\d{2,}))?\.safetensors", re.ASCII)
_PREDICTIONS = re.compile(r"predictions_(\d{4,})-([a-z0-9]+)(?:-h(\d{2,}))?\.jsonl", re.ASCII)
_CLAIM = re.compile(r"claims/(\d{4,9})/(\d{6,9})\.(json|released|done-[0-9a-f]{8})", re.ASCII)
_INDEX = re.compile(r"index/\d{4,}\.json\.z", re.ASCII)
_SPLIT = re.compile(r"streams/(?:streams\.json|stream_\d{3,9}\.jsonl)", re.ASCII)
_ACCESS_CHECK = re.compile(r"\.spile-home-[0-9a-f]{16}")


class FileKind(StrEnum):
    """What a file of a dataset is for."""

    RECORD = "record"
    """Created once and never changed: ``run.json``, ``stream.json`` and commits. Proofs rely on these alone."""
    DATA = "data"
    """A shard or its answers. It is part of the dataset only if a commit names it."""
    DERIVED = "derived"
    """Overwritten, for people and launchers: ``spec.json``, ``metadata.json`` and all answers of a stream or a run."""
    LOCAL = "local"
    """Of use only in this place: heartbeats, claims, the search for suspects, the index, the input of a launcher."""


_ROOT_FILES = {
    RUN: FileKind.RECORD,
    SPEC: FileKind.DERIVED,
    PREDICTIONS: FileKind.DERIVED,
    SUBMISSION: FileKind.DERIVED,
    ANSWERS: FileKind.LOCAL,
}
_STREAM_FILES = {
    STREAM: FileKind.RECORD,
    METADATA: FileKind.DERIVED,
    PREDICTIONS: FileKind.DERIVED,
    SUBMISSION: FileKind.DERIVED,
    PROGRESS: FileKind.LOCAL,
    SUSPECTS: FileKind.LOCAL,
}


@dataclass(frozen=True)
class DatasetFile:
    """A name below the root of a dataset that has exactly the form of a name that spile gives."""

    kind: FileKind
    ledger: str
    """The folder of its ledger: ``stream_5`` or ``stream_5/added_1f3a90c2``; empty for a file of the root."""
    name: str
    """Its name in that folder."""


def parse_key(key: str) -> DatasetFile | None:
    """Return which file of a dataset a key below its root names, or None if spile gives no file that name.

    Everything that uploads, copies or deletes files of a dataset decides by this function which files these are.
    """
    top, _, rest = key.partition("/")
    if stream_number(top) is None:
        kind = _ROOT_FILES.get(key)
        if kind is None and any(form.fullmatch(key) for form in (_CLAIM, _INDEX, _SPLIT, _ACCESS_CHECK)):
            kind = FileKind.LOCAL
        return None if kind is None else DatasetFile(kind, "", key)
    added, name = split_addition(rest)
    kind = ledger_file_kind(name)
    return None if kind is None else DatasetFile(kind, f"{top}/{added}" if added else top, name)


def ledger_file_kind(name: str) -> FileKind | None:
    """Return the kind of a file in the folder of a stream or of added taps, or None if spile gives no such name."""
    if commit_number(name) is not None or _STALE_COMMIT.fullmatch(name):
        return FileKind.RECORD
    return FileKind.DATA if is_data_file(name) else _STREAM_FILES.get(name)


def stream_folder(worker_id: int, names: str) -> str:
    """Return the folder of a stream: ``stream_5``, or ``tpu_5`` if the run's ``names`` are ``tpu``."""
    return f"{names}_{worker_id}"


def stream_number(folder: str) -> int | None:
    """Return 5 for ``stream_5`` and ``tpu_5``, or None if the name is not that of a stream's folder."""
    match = _STREAM_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def list_stream_files(root: Folder) -> Iterator[ObjectInfo]:
    """List the files of all streams, under both names.

    A bucket lists one page after another, so the streams of a large dataset are listed by their first digit at once.
    """
    for prefix in _PREFIXES:
        listed = root.list(prefix)
        first = list(islice(listed, _PAGE))
        if root.local_path is not None or len(first) < _PAGE:
            yield from first
            yield from listed
            continue
        for part in read_ahead((partial(_list, root, f"{prefix}{digit}") for digit in range(10)), 10):
            yield from part


def _list(root: Folder, prefix: str) -> list[ObjectInfo]:
    return list(root.list(prefix))


def existing_folder(root: Folder, worker_id: int) -> str:
    """Return the name of a stream's folder: the one that has files, or the first name if none has."""
    names = [f"{prefix}{worker_id}" for prefix in _PREFIXES]
    return next((name for name in names if any(True for _ in root.list(f"{name}/"))), names[0])


@dataclass
class ListedStream:
    """What a listing of the dataset shows about one stream."""

    folder: str
    started: bool = False
    """Whether there is a ``stream.json``."""
    added: list[str] = field(default_factory=list)
    """The folders of added taps."""
    _hash: Any = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """A hash of the names, sizes and versions of all objects of the ledger."""
        return str(self._hash.hexdigest()[:32])

    def add(self, key: str, info: ObjectInfo) -> None:
        """Take an object of the stream into account: its ``stream.json``, a commit or a shard."""
        added, name = split_addition(key)
        if added and added not in self.added:
            self.added.append(added)
        self.started |= key == STREAM
        if name == STREAM or name.startswith(COMMITS):
            self._hash.update(f"{key}\0{info.size}\0{info.etag or repr(info.updated)}\n".encode())


def scan_streams(root: Folder, infos: Iterable[ObjectInfo] | None = None) -> dict[int, ListedStream]:
    """Return the streams of a dataset by number, from one listing, even those without a ``stream.json``."""
    found: dict[int, ListedStream] = {}
    previous = ""
    for info in list_stream_files(root) if infos is None else infos:
        folder, _, key = info.key.partition("/")
        if folder == previous and key.startswith("shard_"):
            continue  # Most objects are shards of known streams.
        number, (_, name) = stream_number(folder), split_addition(key)
        if number is None or not (name == STREAM or name.startswith(COMMITS) or is_shard(name)):
            continue
        files = found.setdefault(number, ListedStream(folder))
        if files.folder != folder:
            both = f"stream {number} of {root.url} has two folders: {files.folder} and {folder}"
            raise Damaged(both, fix="move the one that does not belong to this run out of the dataset")
        files.add(key, info)
        previous = folder
    return dict(sorted(found.items()))


def find_streams(root: Folder) -> dict[int, str]:
    """Return the folder of each stream that was started, by the numbers of the streams, in their order."""
    return {number: files.folder for number, files in scan_streams(root).items() if files.started}


def addition_folder(taps: Iterable[str]) -> str:
    """Return the name of the folder for these added taps, which depends only on the taps."""
    return f"added_{hashlib.sha256(' '.join(taps).encode()).hexdigest()[:8]}"


def is_addition(folder: str) -> bool:
    """Return whether a name has the form of a folder of added taps."""
    return _ADDITION.fullmatch(folder) is not None


def split_addition(key: str) -> tuple[str, str]:
    """Split a key in a stream's folder into the folder of added taps, or an empty string, and the name in it."""
    added, _, name = key.partition("/")
    return (added, name) if is_addition(added) else ("", key)


def commit_key(number: int) -> str:
    """Return ``commits/0001.json`` for 1. Beyond 9999 the name has more digits; readers sort by number, not by text."""
    return f"{COMMITS}{number:04d}.json"


def commit_number(key: str) -> int | None:
    """Return the number in a name that :func:`commit_key` returned, or None for any other name."""
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match and int(match[1]) > 0 else None


def claim_key(stream: int, number: int, suffix: str = "json") -> str:
    """Return ``claims/0005/000003.json`` for the third claim on stream 5."""
    return f"{CLAIMS}{stream:04d}/{number:06d}.{suffix}"


def parse_claim(key: str) -> tuple[int, int, str] | None:
    """Return the stream, the number and the suffix of a name that :func:`claim_key` returned, or None."""
    match = _CLAIM.fullmatch(key)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def index_key(group: int) -> str:
    """Return ``index/0003.json.z`` for the third group of streams, counted from 0."""
    return f"{INDEX}{group:04d}.json.z"


def access_check_name() -> str:
    """Return a new name for the object with which a launcher checks that its workers reach the dataset."""
    return f".spile-home-{secrets.token_hex(8)}"


def stale_commit_key(number: int, stream: str) -> str:
    """Return the key for the copy of a stale commit that was removed from the ledger."""
    return f"strays/{number:04d}-{stream}.json"


def shard_name(number: int, attempt: str, host: int | None = None) -> str:
    """Return ``shard_0001-<attempt>.safetensors``, or ``…-h03.safetensors`` for host 3 of a pod."""
    tail = "" if host is None else f"-h{host:02d}"
    return f"shard_{number:04d}-{attempt}{tail}.safetensors"


def predictions_name(shard: str) -> str:
    """Return ``predictions_0001-<attempt>.jsonl`` for ``shard_0001-<attempt>.safetensors``."""
    return f"predictions_{shard.removeprefix('shard_').removesuffix('.safetensors')}.jsonl"


def shard_host(name: str) -> int | None:
    """Return the number of the pod host that wrote a shard, or None if the worker was a single process."""
    found = re.search(r"-h(\d{2,9})\.safetensors$", name, re.ASCII)
    return None if found is None else int(found[1])


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def is_data_file(name: str) -> bool:
    """Return whether a name has the form of a shard's or an answer file's name, which garbage collection may remove."""
    return is_shard(name) or _PREDICTIONS.fullmatch(name) is not None


def new_attempt() -> str:
    """Return a unique name for one execution of a worker."""
    return secrets.token_hex(6)
