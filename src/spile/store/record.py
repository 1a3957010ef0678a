"""What a commit says: its shards, with every checksum, and its skipped samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from spile.errors import Damaged, untrusted
from spile.objects.crc import from_hex, to_hex
from spile.spec.ranges import Ranges
from spile.spec.sample import Skip
from spile.store.layout import is_shard, predictions_name
from spile.store.sealed import FORMAT, seal, unseal

__all__ = ["Commit", "PredictionsRecord", "ShardRecord"]

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
