"""Names: where everything of a dataset lies below its root. The inverse of each name is here too."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

from spile.errors import SpecError

__all__ = [
    "COMMITS",
    "METADATA",
    "PREDICTIONS",
    "PROGRESS",
    "RUN",
    "SPEC",
    "STREAM",
    "SUBMISSION",
    "addition_folder",
    "commit_key",
    "commit_number",
    "is_addition",
    "is_data",
    "is_shard",
    "new_attempt",
    "predictions_name",
    "shard_host",
    "shard_name",
    "stray_key",
    "stream_folder",
    "stream_number",
    "valid_attempt",
]

RUN = "run.json"
SPEC = "spec.json"
STREAM = "stream.json"
PROGRESS = "progress.json"
METADATA = "metadata.json"
PREDICTIONS = "predictions.jsonl"
SUBMISSION = "submission.json"
COMMITS = "commits/"

_ADDITION = re.compile(r"added_[0-9a-f]{8}")
# No stream or ledger comes near these lengths; a number without end would be a loop without end.
_STREAM_FOLDER = re.compile(r"tpu_(0|[1-9]\d{0,8})", re.ASCII)
_COMMIT = re.compile(r"commits/(\d{4}|[1-9]\d{4,11})\.json", re.ASCII)
_SHARD = re.compile(r"shard_(\d{4,})-([a-z0-9]+)(?:-h(\d{2,}))?\.safetensors")
_PREDICTIONS = re.compile(r"predictions_(\d{4,})-([a-z0-9]+)(?:-h(\d{2,}))?\.jsonl")
_ATTEMPT = re.compile(r"[a-z0-9]{4,32}")


def stream_folder(worker_id: int) -> str:
    """Worker 5 writes ``tpu_5``."""
    return f"tpu_{worker_id}"


def stream_number(folder: str) -> int | None:
    """``tpu_5`` → 5; None for a name that is no stream's."""
    match = _STREAM_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def addition_folder(taps: Iterable[str]) -> str:
    """In a stream's folder, that of these taps added to it: the same for the same taps, whoever adds them."""
    return f"added_{hashlib.sha256(' '.join(taps).encode()).hexdigest()[:8]}"


def is_addition(folder: str) -> bool:
    """Whether a folder of a stream's could be that of added taps."""
    return _ADDITION.fullmatch(folder) is not None


def commit_key(number: int) -> str:
    """``commits/0001.json``. Past 9999 the name grows a digit; readers sort by number, not by text."""
    return f"{COMMITS}{number:04d}.json"


def commit_number(key: str) -> int | None:
    """The inverse of :func:`commit_key`; None for any other name (a temporary file, a stranger's)."""
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match and int(match[1]) > 0 else None


def stray_key(number: int, stream: str) -> str:
    """Where a commit of another life is kept when it is taken out of the ledger: no reader looks there."""
    return f"strays/{number:04d}-{stream}.json"


def shard_name(number: int, attempt: str, host: int | None = None) -> str:
    """``shard_0001-<attempt>.safetensors``, or ``…-h03.safetensors`` for host 3 of a pod."""
    tail = "" if host is None else f"-h{host:02d}"
    return f"shard_{number:04d}-{attempt}{tail}.safetensors"


def predictions_name(shard: str) -> str:
    """Of a shard's answers: ``predictions_0001-<attempt>.jsonl`` beside ``shard_0001-<attempt>.safetensors``."""
    return f"predictions_{shard.removeprefix('shard_').removesuffix('.safetensors')}.jsonl"


def shard_host(name: str) -> int | None:
    """The host of a pod that wrote a shard; None where one process did."""
    found = re.search(r"-h(\d{2,})\.safetensors$", name)
    return None if found is None else int(found[1])


def is_shard(name: str) -> bool:
    """Whether a name could be one of our shards."""
    return _SHARD.fullmatch(name) is not None


def is_data(name: str) -> bool:
    """Whether a name could be a shard's or that of its answers: what garbage collection may look at."""
    return is_shard(name) or _PREDICTIONS.fullmatch(name) is not None


def new_attempt() -> str:
    """A name for one life of one worker. Two lives never share one."""
    return secrets.token_hex(6)


def valid_attempt(attempt: str) -> str:
    """The attempt, or an error where it could not be part of a file's name."""
    if not _ATTEMPT.fullmatch(attempt):
        raise SpecError("attempt", expected="4 to 32 lower-case letters and digits", found=repr(attempt))
    return attempt
