"""The ledger of a stream: its commits, the records in them, and what they add up to.

Every record (``run.json``, ``stream.json``, a commit) is a JSON object that carries its own checksum. Its last field is
always ``"crc32c"``: the last 22 bytes are ``,"crc32c":"hhhhhhhh"}`` and a line feed, and the checksum covers every byte
before them. A reader therefore checks the bytes as they are, with any JSON library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from spile.errors import Damaged, untrusted
from spile.objects.crc import crc32c, from_hex, to_hex
from spile.objects.folder import Folder, NotFound
from spile.spec.ranges import Ranges
from spile.spec.sample import Skip
from spile.store.layout import COMMITS, commit_key, commit_number, is_shard, predictions_name

__all__ = [
    "FORMAT",
    "RUN_FORMATS",
    "Commit",
    "Ledger",
    "PredictionsRecord",
    "ShardFile",
    "ShardRecord",
    "commit_numbers",
    "has_commits",
    "read_commits",
    "read_entries",
    "read_ledger",
    "seal",
    "unseal",
]

FORMAT = 1
"""The version of the format; ``docs/format.md`` describes it."""
RUN_FORMATS = (1, 2)
"""Of ``run.json``, which every reader reads first: 2 keeps those out that would take its rows for something else."""
_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n')
_TAIL_LENGTH = 22


def seal(record: dict[str, Any], *, indent: int | None = None) -> bytes:
    """The record as JSON with its checksum."""
    separators = (",", ":") if indent is None else (",", ": ")
    body = json.dumps(record, separators=separators, indent=indent, allow_nan=False).encode()
    body = body[:-1].rstrip()
    return body + f',"crc32c":"{to_hex(crc32c(body))}"}}\n'.encode()


def unseal(data: bytes, where: str, formats: tuple[int, ...] = (FORMAT,)) -> dict[str, Any]:
    """The record, checked; :class:`Damaged` names the object where it is torn, garbled or of a later format."""
    tail = _TAIL.fullmatch(data[-_TAIL_LENGTH:])
    if tail is None:
        raise Damaged(
            f"{where} is torn", expected="a record that ends with its checksum", found=f"{len(data)} bytes that do not"
        )
    body = data[:-_TAIL_LENGTH]
    found = to_hex(crc32c(body))
    if found != tail[1].decode():
        raise Damaged(f"{where} is damaged", expected=f"crc32c {tail[1].decode()}", found=found)
    with untrusted(Damaged, f"{where} is no JSON object"):
        record = json.loads(body + b"}")
    version = record.get("format") if isinstance(record, dict) else None
    if version not in formats:
        raise Damaged(
            f"{where} has a format this version cannot read",
            expected=formats[-1],
            found=version,
            fix="upgrade spile to read it",
        )
    return dict(record)


_MOST = 1 << 53
"""No dataset has so many samples or bytes, and every JSON reader can tell the numbers below it apart."""


@dataclass(frozen=True)
class PredictionsRecord:
    """The answers to a shard's samples, a file of lines, as the commit names it."""

    name: str
    size: int
    crc32c: int
    count: int

    def to_json(self) -> dict[str, Any]:
        """As the commit stores it."""
        return {"name": self.name, "size": self.size, "crc32c": to_hex(self.crc32c), "count": self.count}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PredictionsRecord:
        """The inverse of :meth:`to_json`."""
        return cls(str(fields["name"]), int(fields["size"]), from_hex(fields["crc32c"]), int(fields["count"]))


@dataclass(frozen=True)
class ShardRecord:
    """One shard as its commit names it."""

    name: str
    size: int
    crc32c: int
    """Of the whole object."""
    header: tuple[int, int]
    """The header's length, its eight first bytes included, and its crc32c."""
    tensors: Mapping[str, int]
    """crc32c of each tensor's bytes."""
    samples: Ranges
    count: int
    """Samples."""
    tokens: int
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Of each tap's rows, where they were taken: see :mod:`spile.store.statistics`."""
    predictions: PredictionsRecord | None = None
    """Where answers were generated."""

    def to_json(self) -> dict[str, Any]:
        """As the commit stores it; also how a pod's host tells process 0 of it."""
        return {
            "name": self.name,
            "size": self.size,
            "crc32c": to_hex(self.crc32c),
            "header": {"size": self.header[0], "crc32c": to_hex(self.header[1])},
            "tensors": {name: to_hex(crc) for name, crc in self.tensors.items()},
            "samples": [list(pair) for pair in self.samples.pairs()],
            "count": self.count,
            "tokens": self.tokens,
            **({"statistics": dict(self.statistics)} if self.statistics else {}),
            **({} if self.predictions is None else {"predictions": self.predictions.to_json()}),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ShardRecord:
        """The inverse of :meth:`to_json`; ValueError, KeyError or TypeError where it is none."""
        record = cls(
            name=str(fields["name"]),
            size=int(fields["size"]),
            crc32c=from_hex(fields["crc32c"]),
            header=(int(fields["header"]["size"]), from_hex(fields["header"]["crc32c"])),
            tensors={str(name): from_hex(crc) for name, crc in fields["tensors"].items()},
            samples=Ranges((int(a), int(b)) for a, b in fields["samples"]),
            count=int(fields["count"]),
            tokens=int(fields["tokens"]),
            statistics=dict(fields.get("statistics") or {}),
            predictions=PredictionsRecord.from_json(fields["predictions"]) if "predictions" in fields else None,
        )
        numbers = (
            record.size,
            record.tokens,
            *record.header,
            *record.samples.bounds(),
        )
        if not 0 <= min(numbers) <= max(numbers) < _MOST or record.header[0] > record.size:
            raise ValueError(f"{record.name!r} has a number that is none of a shard's")
        answers = record.predictions
        if not is_shard(record.name) or (answers is not None and answers.name != predictions_name(record.name)):
            raise ValueError(f"{record.name!r} is no shard's name, or its answers have another's")
        if len(record.samples) != record.count:
            raise ValueError(f"{record.name} counts {record.count} samples and lists {len(record.samples)}")
        return record


@dataclass(frozen=True)
class Commit:
    """One entry of a stream's ledger."""

    number: int
    attempt: str
    stream: str
    """The id in ``stream.json``: a commit of an earlier life of the stream is never taken for one of this."""
    shards: tuple[ShardRecord, ...]
    skipped: tuple[Skip, ...]
    end: int | None
    """How many samples the stream has, once somebody has read it to its end."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    version: str = ""

    def to_bytes(self) -> bytes:
        """The object's content."""
        return seal(
            {
                "format": FORMAT,
                "number": self.number,
                "attempt": self.attempt,
                "stream": self.stream,
                "shards": [shard.to_json() for shard in self.shards],
                "skipped": [
                    {"index": skip.index, "task_id": skip.task_id, "reason": skip.reason, "detail": skip.detail}
                    for skip in self.skipped
                ],
                "end": self.end,
                "statistics": dict(self.statistics),
                "created": self.created,
                "version": self.version,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Commit:
        """The inverse of :meth:`to_bytes`; :class:`Damaged` names the object where it is none."""
        fields = unseal(data, where)
        with untrusted(Damaged, f"{where} is no commit"):
            commit = cls(
                number=int(fields["number"]),
                attempt=str(fields["attempt"]),
                stream=str(fields["stream"]),
                shards=tuple(ShardRecord.from_json(shard) for shard in fields["shards"]),
                skipped=tuple(
                    Skip(int(skip["index"]), str(skip["task_id"]), str(skip["reason"]), dict(skip["detail"]))
                    for skip in fields["skipped"]
                ),
                end=None if fields["end"] is None else int(fields["end"]),
                statistics=dict(fields["statistics"]),
                created=str(fields["created"]),
                version=str(fields["version"]),
            )
            numbers = (commit.number, commit.end or 0, *(skip.index for skip in commit.skipped))
            if not 0 <= min(numbers) <= max(numbers) < _MOST:
                raise ValueError("a number that is none of a sample's")
            if commit.created:
                datetime.fromisoformat(commit.created)
            return commit

    def pairs(self) -> list[tuple[int, int]]:
        """The ranges of samples that this commit makes done, stored and skipped, as it lists them."""
        stored = [pair for shard in self.shards for pair in shard.samples.pairs()]
        return stored + [(skip.index, skip.index + 1) for skip in self.skipped]

    def covered(self) -> Ranges:
        """The samples this commit makes done: stored and skipped."""
        return Ranges(self.pairs())

    def doubled(self) -> Ranges:
        """Samples that it names twice by itself."""
        return Ranges.twice(self.pairs())


_ASKED_FOR = 1000
"""Absent commits that are asked for by name before they are called a gap: far more than land during one listing."""


class ShardFile(NamedTuple):
    """What the ledger remembers of a shard: little, because a stream may have ten thousand."""

    name: str
    samples: int
    tokens: int
    size: int


@dataclass(frozen=True)
class Ledger:
    """What a stream's commits add up to."""

    done: Ranges = field(default_factory=Ranges)
    """Stored and skipped."""
    doubled: Ranges = field(default_factory=Ranges)
    """Samples that are there twice: always empty, unless somebody broke the rules."""
    commits: int = 0
    """The number of the last one."""
    files: tuple[ShardFile, ...] = ()
    samples: int = 0
    """Stored."""
    skipped: int = 0
    tokens: int = 0
    bytes: int = 0
    end: int | None = None
    """How many samples the stream has, where only reading it to its end tells."""
    created: str | None = None
    """When the last commit was made."""

    @property
    def shards(self) -> int:
        """How many."""
        return len(self.files)

    def plus(self, commits: Iterable[Commit]) -> Ledger:
        """The ledger with these commits after its own. All samples are sorted once, however scattered they are."""
        pairs = self.done.pairs()
        files: list[ShardFile] = []
        skipped, last, end, created = self.skipped, self.commits, self.end, self.created
        for commit in commits:
            pairs += commit.pairs()
            files += [ShardFile(shard.name, shard.count, shard.tokens, shard.size) for shard in commit.shards]
            skipped += len(commit.skipped)
            last = commit.number
            end = commit.end if commit.end is not None else end
            created = commit.created or created
        done, samples = Ranges(pairs), sum(file.samples for file in files)
        # As many as were named: then none was named twice, and nobody has to look which.
        single = len(done) == len(self.done) + samples + skipped - self.skipped
        return replace(
            self,
            done=done,
            doubled=self.doubled if single else self.doubled | Ranges.twice(pairs),
            commits=last,
            files=(*self.files, *files),
            samples=self.samples + samples,
            skipped=skipped,
            tokens=self.tokens + sum(file.tokens for file in files),
            bytes=self.bytes + sum(file.size for file in files),
            end=end,
            created=created,
        )


def has_commits(folder: Folder) -> bool:
    """Whether the stream in this folder has any commit."""
    return any(commit_number(info.key) is not None for info in folder.list(COMMITS))


def commit_numbers(folder: Folder) -> list[int]:
    """The numbers under which there is a commit of any life, in order."""
    return sorted(number for info in folder.list(COMMITS) if (number := commit_number(info.key)) is not None)


def read_commits(folder: Folder, stream: str | None, after: int = 0) -> Iterator[Commit]:
    """A stream's commits in order, many reads at a time. ``stream`` is its id; None takes those of any life."""
    return (commit for commit in read_entries(folder, stream, after) if commit.stream == (stream or commit.stream))


def read_entries(folder: Folder, stream: str | None, after: int = 0) -> Iterator[Commit]:
    """As :func:`read_commits`, with those of strangers: workers of an earlier life that did not know of its end.

    A stranger's commit keeps its number and counts for nothing. Up to the last commit of this life no number is
    missing: :class:`Damaged` where one is.
    """
    numbers = [number for number in commit_numbers(folder) if number > after]
    last = after
    absent: list[tuple[int, int]] = []
    for number, data in zip(numbers, folder.get_many(map(commit_key, numbers)), strict=True):
        if number > last + 1:
            absent.append((last + 1, number))
        commit = Commit.from_bytes(data, f"{folder.url}/{commit_key(number)}")
        if absent and (stream is None or commit.stream == stream):
            yield from _late(folder, Ranges(absent), numbers[-1])
            absent = []
        yield _checked(commit, number, folder.url)
        last = number


def _late(folder: Folder, absent: Ranges, last: int) -> Iterator[Commit]:
    """Commits that a listing missed: past 9999 names do not sort as numbers do, and one may land behind it."""
    lost = absent
    if len(absent) <= _ASKED_FOR:
        found = {number: data for number in absent if (data := _data(folder, commit_key(number))) is not None}
        lost = absent - Ranges.of(found)
    if lost:
        raise Damaged(
            f"the ledger of {folder.url} has a gap",
            expected=f"commits 1 to {last}",
            found=f"none numbered {lost.text()}",
            fix="restore them from a copy of it; without one give another --output, and what is stored here stays",
        )
    for number, data in found.items():
        yield _checked(Commit.from_bytes(data, f"{folder.url}/{commit_key(number)}"), number, folder.url)


def _data(folder: Folder, key: str) -> bytes | None:
    try:
        return folder.get(key)
    except NotFound:
        return None


def _checked(commit: Commit, number: int, url: str) -> Commit:
    if commit.number != number:
        raise Damaged(f"{url}/{commit_key(number)} is another commit", expected=f"number {number}", found=commit.number)
    return commit


def read_ledger(folder: Folder, stream: str | None) -> Ledger:
    """The ledger of the stream in this folder."""
    return Ledger().plus(read_commits(folder, stream))
