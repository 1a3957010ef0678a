"""The ledger of a stream: its commits, the records in them, and their totals.

Every record (``run.json``, ``stream.json``, a commit) is a JSON object that carries its own checksum. Its last field is
always ``"crc32c"``: the last 22 bytes are ``,"crc32c":"hhhhhhhh"}`` and a line feed, and the checksum covers every byte
before them. A reader can therefore check the bytes with any JSON library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from spile.errors import Damaged, untrusted
from spile.objects.crc import crc32c, from_hex, to_hex
from spile.objects.folder import Folder, get_if_present
from spile.spec.ranges import Ranges
from spile.spec.sample import QUARANTINED, TOO_LONG, Part, Skip
from spile.store.layout import COMMITS, commit_key, commit_number, is_shard, predictions_name

FORMAT = 4
"""The version of the format; ``docs/format.md`` describes it. Development versions wrote 1 to 3."""
_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n')
_TAIL_LENGTH = 22


def iso_time(seconds: float | None = None) -> str:
    """Return a time in UTC as all records contain it; the default is now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def parse_time(text: str) -> float:
    """Return the seconds since the epoch of a time that :func:`iso_time` wrote; raise ValueError for other texts."""
    return datetime.fromisoformat(text).timestamp()


def seal(record: dict[str, Any], *, indent: int | None = None) -> bytes:
    """Return the record as JSON with its checksum."""
    separators = (",", ":") if indent is None else (",", ": ")
    body = json.dumps(record, separators=separators, indent=indent, allow_nan=False).encode()
    body = body[:-1].rstrip()
    return body + f',"crc32c":"{to_hex(crc32c(body))}"}}\n'.encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Check and parse a record.

    Raises:
        Damaged: If the record is cut, does not match its checksum, or has another format.

    """
    tail = _TAIL.fullmatch(data[-_TAIL_LENGTH:])
    if tail is None:
        raise Damaged(f"{where} is incomplete: its {len(data)} bytes do not end with a checksum")
    body = data[:-_TAIL_LENGTH]
    expected, found = tail[1].decode(), to_hex(crc32c(body))
    if found != expected:
        raise Damaged(f"{where} is damaged", expected=f"crc32c {expected}", found=found)
    with untrusted(Damaged, f"{where} is not a JSON object"):
        record = json.loads(body + b"}")
    version = record.get("format") if isinstance(record, dict) else None
    if version != FORMAT:
        raise other_version(where, version)
    return dict(record)


def other_version(where: str, found: object) -> Damaged:
    """Return the error for a record with another version of the format."""
    return Damaged(
        f"{where} was written by another version of spile",
        expected=f"format {FORMAT}",
        found=f"{found!r:.20}",
        fix="read it with that version, or extract again with another --output",
    )


_MAX_NUMBER = 1 << 53
"""An upper limit for counts and sizes. Every JSON reader represents smaller integers exactly."""


@dataclass(frozen=True)
class PredictionsRecord:
    """The commit's record of the file with the answers to a shard's samples."""

    name: str
    size: int
    crc32c: int
    count: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "crc32c": to_hex(self.crc32c), "count": self.count}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PredictionsRecord:
        return cls(str(fields["name"]), int(fields["size"]), from_hex(fields["crc32c"]), int(fields["count"]))


@dataclass(frozen=True)
class ShardRecord:
    """The commit's record of one shard."""

    name: str
    size: int
    crc32c: int
    """The crc32c of the whole object."""
    header: tuple[int, int]
    """The length of the header, including its first eight bytes, and its crc32c."""
    tensors: Mapping[str, int]
    """The crc32c of each tensor's bytes."""
    samples: Ranges
    count: int
    """The number of samples."""
    tokens: int
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """The statistics of each tap's rows, if they were computed: see :mod:`spile.store.statistics`."""
    predictions: PredictionsRecord | None = None
    """The file with the answers, if answers were generated."""
    cut: int = 0
    """The number of samples that were cut to the maximum length."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as the commit stores it, and as the hosts of a pod send it to process 0."""
        return {
            "name": self.name,
            "size": self.size,
            "crc32c": to_hex(self.crc32c),
            "header": {"size": self.header[0], "crc32c": to_hex(self.header[1])},
            "tensors": {name: to_hex(crc) for name, crc in self.tensors.items()},
            "samples": [list(pair) for pair in self.samples.pairs()],
            "count": self.count,
            "tokens": self.tokens,
            **({"cut": self.cut} if self.cut else {}),
            **({"statistics": dict(self.statistics)} if self.statistics else {}),
            **({} if self.predictions is None else {"predictions": self.predictions.to_json()}),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ShardRecord:
        """Return the record that :meth:`to_json` described.

        Raises:
            ValueError, KeyError, TypeError: If the fields are malformed.

        """
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
            cut=int(fields.get("cut", 0)),
        )
        numbers = (record.size, record.tokens, *record.header, *record.samples.bounds())
        if not 0 <= min(numbers) <= max(numbers) < _MAX_NUMBER or record.header[0] > record.size:
            raise ValueError(f"{record.name!r} has a number out of range")
        answers = record.predictions
        if not is_shard(record.name) or (answers is not None and answers.name != predictions_name(record.name)):
            raise ValueError(f"{record.name!r} is not the name of a shard, or its answers have a different name")
        if len(record.samples) != record.count or not 0 <= record.cut <= record.count:
            raise ValueError(
                f"{record.name} counts {record.count} samples, {record.cut} cut, and lists {len(record.samples)}"
            )
        return record


@dataclass(frozen=True)
class Limit:
    """Why a stream ended before the end of its data."""

    samples: int
    """The number of samples, from the first on, that the stream holds."""
    flags: str
    """The flags that limited the run, such as ``--max-samples 100``."""


@dataclass(frozen=True)
class Commit:
    """One entry of a stream's ledger."""

    number: int
    attempt: str
    stream: str
    """The id in ``stream.json``. A commit with another id is stale: its stream was started again, and it is ignored."""
    shards: tuple[ShardRecord, ...] = ()
    skipped: tuple[Skip, ...] = ()
    end: int | None = None
    """The number of samples of the stream, once a worker has read it to its end."""
    purpose: str = ""
    """Why a commit without samples was created."""
    created: str = ""
    version: str = ""
    parts: tuple[Part, ...] = ()
    """The rows of a streamed dataset that were read since the last commit."""
    limit: Limit | None = None
    """The limits that ended the stream here. A later run with larger limits continues behind this commit."""

    def to_bytes(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "number": self.number,
                "attempt": self.attempt,
                "stream": self.stream,
                "shards": [shard.to_json() for shard in self.shards],
                "skipped": [asdict(skip) for skip in self.skipped],
                "end": self.end,
                "created": self.created,
                "version": self.version,
                **({"purpose": self.purpose} if self.purpose else {}),
                **({"parts": [astuple(part) for part in self.parts]} if self.parts else {}),
                **({"limit": asdict(self.limit)} if self.limit else {}),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Commit:
        """Return the commit that :meth:`to_bytes` wrote; raise :class:`Damaged` if the content is malformed."""
        fields = unseal(data, where)
        with untrusted(Damaged, f"{where} is not a commit"):
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
                purpose=str(fields.get("purpose", "")),
                created=str(fields["created"]),
                version=str(fields["version"]),
                parts=tuple(Part(int(first), int(rows), str(hash_)) for first, rows, hash_ in fields.get("parts", ())),
                limit=Limit(int(limit["samples"]), str(limit["flags"])) if (limit := fields.get("limit")) else None,
            )
            ends = commit.end or 0, commit.limit.samples if commit.limit else 0
            numbers = (commit.number, *ends, *(skip.index for skip in commit.skipped))
            if not 0 <= min(numbers) <= max(numbers) < _MAX_NUMBER:
                raise ValueError("a number is out of range")
            if commit.created:
                parse_time(commit.created)
            return commit

    def pairs(self) -> list[tuple[int, int]]:
        """Return the ranges of stored and skipped samples in the order in which the commit lists them."""
        stored = [pair for shard in self.shards for pair in shard.samples.pairs()]
        return stored + [(skip.index, skip.index + 1) for skip in self.skipped]


_MAX_REQUESTS = 1000
"""The largest number of missing commits that are requested by name before they are reported as a gap. Far fewer
commits are created during one listing."""


class ShardFile(NamedTuple):
    """The part of a shard's record that is kept in memory: a stream may have ten thousand shards."""

    name: str
    samples: int
    tokens: int
    size: int


@dataclass(frozen=True)
class Ledger:
    """The totals of a stream's commits."""

    done: Ranges = field(default_factory=Ranges)
    """The stored and skipped samples."""
    doubled: Ranges = field(default_factory=Ranges)
    """The samples that are committed twice. It is empty unless the ledger was tampered with."""
    commits: int = 0
    """The number of the last commit."""
    files: tuple[ShardFile, ...] = ()
    skipped: int = 0
    quarantined: tuple[Skip, ...] = ()
    """The skipped samples that ended workers."""
    end: int | None = None
    """The number of samples of the stream, if it was only known after reading the stream to its end."""
    created: str | None = None
    """The time of the last commit that is not empty."""
    parts: tuple[Part, ...] = ()
    """The rows of a streamed dataset that were read, from its first row on."""
    limit: Limit | None = None
    """The limits that ended the stream; None if they did not, or if samples were committed after that."""
    cut: int = 0
    """The stored samples that were cut to the maximum length."""
    too_long: int = 0
    """The samples that were skipped because they are longer than that."""

    @property
    def rows(self) -> int | None:
        """The number of rows, from the first one on, whose hashes are recorded; None if some are doubled or missing."""
        stops = [0, *(part.stop for part in self.parts)]
        tiled = all(part.first == stop for part, stop in zip(self.parts, stops, strict=False))
        return stops[-1] if tiled else None

    @property
    def shards(self) -> int:
        return len(self.files)

    @property
    def samples(self) -> int:
        """The number of stored samples."""
        return sum(file.samples for file in self.files)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def expected(self, total: int | None, max_samples: int | None = None, max_tokens: int | None = None) -> int | None:
        """Return the number of samples that the stream must hold, or None if it is not known yet.

        Args:
            total: The number of samples of the data; None if it is only known after reading them.
            max_samples: The limit of the run in samples.
            max_tokens: The limit of the run in stored tokens. A stream that holds as many must hold every sample up to
                its last one.

        """
        known = [self.end if total is None else total, max_samples]
        if max_tokens is not None and self.tokens >= max_tokens:
            known.append(max(self.done.bounds(), default=0))
        return min((count for count in known if count is not None), default=None)

    def required(self, total: int | None) -> int | None:
        """Return the number of samples that the stream must hold according to its commits, or None if it is not known.

        ``total`` is the number of samples of the data; None if it is only known after reading them.
        """
        return self.expected(total, None if self.limit is None else self.limit.samples)

    def plus(self, commits: Iterable[Commit]) -> Ledger:
        """Return the ledger with these commits appended. All samples are sorted only once."""
        pairs, files, parts = self.done.pairs(), list(self.files), list(self.parts)
        quarantined = list(self.quarantined)
        listed, skipped, cut, too_long = len(self.done), self.skipped, self.cut, self.too_long
        last, end, created, limit = self.commits, self.end, self.created, self.limit
        for commit in commits:
            own = commit.pairs()
            pairs += own
            limit = commit.limit or (None if own else limit)
            files += [ShardFile(shard.name, shard.count, shard.tokens, shard.size) for shard in commit.shards]
            listed += sum(shard.count for shard in commit.shards) + len(commit.skipped)
            skipped += len(commit.skipped)
            cut += sum(shard.cut for shard in commit.shards)
            too_long += sum(skip.reason == TOO_LONG for skip in commit.skipped)
            quarantined += [skip for skip in commit.skipped if skip.reason == QUARANTINED]
            parts += commit.parts
            last = commit.number
            end = commit.end if commit.end is not None else end
            if own or commit.limit or commit.end is not None:
                created = commit.created or created
        done = Ranges(pairs)
        # If the counts agree, no sample is listed twice, and the slower search for duplicates is not needed.
        doubled = self.doubled if len(done) == listed else self.doubled | Ranges.repeated(pairs)
        return Ledger(
            done,
            doubled,
            last,
            tuple(files),
            skipped,
            tuple(quarantined),
            end,
            created,
            tuple(parts),
            limit,
            cut,
            too_long,
        )


def commit_numbers(folder: Folder) -> list[int]:
    """Return the sorted numbers of all commits, including stale ones."""
    return sorted(number for info in folder.list(COMMITS) if (number := commit_number(info.key)) is not None)


def read_ledger(folder: Folder, stream: str) -> Ledger:
    return Ledger().plus(read_commits(folder, stream))


def read_commits(folder: Folder, stream: str, after: int = 0) -> Iterator[Commit]:
    """Yield the commits of the stream with this id that follow number ``after``, in order, read concurrently."""
    return (commit for commit in read_all_commits(folder, stream, after) if commit.stream == stream)


def read_all_commits(folder: Folder, stream: str, after: int = 0) -> Iterator[Commit]:
    """Yield commits like :func:`read_commits`, and stale ones too.

    Raises:
        Damaged: If a number before the last commit of this stream is missing.

    """
    numbers = [number for number in commit_numbers(folder) if number > after]
    last = after
    absent: list[tuple[int, int]] = []
    for number, data in zip(numbers, folder.get_many(map(commit_key, numbers)), strict=True):
        commit = _parse_commit(folder, number, data)
        absent.append((last + 1, number))
        if commit.stream == stream:
            yield from _read_unlisted(folder, Ranges(absent), numbers[-1])
            absent = []
        yield commit
        last = number


def _read_unlisted(folder: Folder, absent: Ranges, last: int) -> Iterator[Commit]:
    """Yield commits that a listing missed: beyond 9999, a new name may sort before those already listed."""
    found: dict[int, bytes] = {}
    if len(absent) <= _MAX_REQUESTS:
        found = {number: data for number in absent if (data := get_if_present(folder, commit_key(number))) is not None}
    if lost := absent - Ranges.of(found):
        raise Damaged(
            f"the ledger of {folder.url} has a gap",
            expected=f"commits 1 to {last}",
            found=f"none numbered {lost.text()}",
            fix="restore them from a copy, or give another --output, which keeps what is stored here",
        )
    for number, data in found.items():
        yield _parse_commit(folder, number, data)


def _parse_commit(folder: Folder, number: int, data: bytes) -> Commit:
    where = f"{folder.url}/{commit_key(number)}"
    commit = Commit.from_bytes(data, where)
    if commit.number != number:
        raise Damaged(f"{where} holds another commit", expected=f"number {number}", found=commit.number)
    return commit
