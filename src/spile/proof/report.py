"""The result of ``spile verify``, stream by stream, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spile.spec.amounts import counted
from spile.spec.lengths import cut_text
from spile.spec.ranges import Ranges
from spile.spec.sample import Skip

Kind = Literal["missing", "doubled", "damaged", "wrong"]
"""``damaged``: bytes or records differ from what was committed. ``wrong``: a recomputed row differs, or the streams
belong to different splits."""


@dataclass(frozen=True)
class Problem:
    """One reason why the dataset is not verified."""

    kind: Kind
    where: str
    text: str

    def line(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


@dataclass(frozen=True)
class Garbage:
    """Bytes that belong to no commit: an orphaned shard or an unfinished upload."""

    kind: Literal["shard", "upload"]
    stream: int
    key: str
    size: int | None
    age: float
    """The age in seconds."""
    handle: str
    state: str = "found"
    """``found``, ``too young``, ``a worker is alive`` or ``removed``."""


@dataclass(frozen=True)
class TapNoise:
    """What recomputation measured at one tap. Distances are relative to the norms of the reference rows."""

    tap: str
    rows: int
    fresh: float
    """The median distance of a new computation in the run's dtype: the noise."""
    stored: float
    """The median distance of the stored rows."""
    worst: float
    """The largest distance in units of what noise explains: above 1 is wrong."""
    row_limit: float
    """The smallest error of a single row that is found, unless the row itself is noisier than others."""
    sample_limit: float
    """The smallest median distance of a whole sample that is found, for a sample of median length."""
    gain_limit: float
    """The smallest factor that is found, as its distance from 1, when all rows of a sample have it."""
    unjudged: int
    """Rows that are too noisy to be judged alone: replacing them by zeros would not be found."""

    @staticmethod
    def merged(parts: Sequence[TapNoise]) -> TapNoise:
        """Return one entry for several groups of streams: the largest of each figure, and the sum of the counts."""
        largest = {name: max(getattr(part, name) for part in parts) for name in _MERGED_BY_MAXIMUM}
        rows, unjudged = (sum(getattr(part, name) for part in parts) for name in ("rows", "unjudged"))
        return TapNoise(tap=parts[0].tap, rows=rows, unjudged=unjudged, **largest)


_MERGED_BY_MAXIMUM = ("fresh", "stored", "worst", "row_limit", "sample_limit", "gain_limit")


@dataclass(frozen=True)
class Recomputed:
    """How far stored rows are from a recomputation, tap by tap."""

    samples: int
    dtype: str
    """The compute dtype of the run, in which the noise was measured."""
    taps: dict[str, TapNoise]

    @property
    def worst(self) -> dict[str, float]:
        """The largest distance at each tap in units of what noise explains."""
        return {tap: noise.worst for tap, noise in self.taps.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "samples": self.samples,
            "dtype": self.dtype,
            "worst": self.worst,
            "taps": {tap: vars(noise) for tap, noise in self.taps.items()},
        }


@dataclass(frozen=True)
class StreamReport:
    """The result for one stream."""

    number: int
    expected: int | None
    """The number of samples that it must have; None if its end is not known."""
    samples: int = 0
    skipped: int = 0
    skip_reasons: dict[str, int] = field(default_factory=dict)
    """The number of skipped samples by reason."""
    bad_rows: tuple[str, ...] = ()
    """The first rows that ``--bad-rows skip`` left out, each with its place and the reason."""
    shards: int = 0
    tokens: int = 0
    bytes: int = 0
    predictions: int = 0
    """The number of verified answers; 0 if none were generated."""
    added: tuple[str, ...] = ()
    """Taps that were added to the finished stream."""
    missing: Ranges = field(default_factory=Ranges)
    doubled: Ranges = field(default_factory=Ranges)
    problems: tuple[Problem, ...] = ()
    stale_commits: Ranges = field(default_factory=Ranges)
    """The numbers of commits from before the stream was started again. They are ignored and are not a problem."""
    quarantined: tuple[Skip, ...] = ()
    """The skipped samples that ended their workers."""
    kept: tuple[str, ...] | None = None
    """The locations of the copies of commits that a repair removed from the ledger; None if there was no repair."""
    name: str = ""
    """The name of the stream's folder."""
    limits: str = ""
    """The flags that ended the stream before the end of its data, such as ``--max-samples 100``."""
    cut: int = 0
    """The stored samples that were cut to the maximum length."""
    too_long: int = 0
    """The skipped samples that are longer than that."""

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Report:
    """The result for a whole dataset."""

    root: str
    fingerprint: str
    streams: tuple[StreamReport, ...]
    garbage: tuple[Garbage, ...] = ()
    recomputed: Recomputed | None = None
    problems: tuple[Problem, ...] = ()
    """The problems that belong to no single stream."""
    streams_expected: int | None = None
    """The number of streams of the split; None if no stream's record states it."""
    never_begun: Ranges = field(default_factory=Ranges)
    """The streams that must exist but were never started."""
    unchecked: tuple[str, ...] = ()
    """What could not be checked, and why."""
    max_seq_length: int = 0
    """The longest sample that the run stores, in tokens."""

    def __repr__(self) -> str:
        found = counted(len(self.all_problems), "problem") if self.all_problems else "proven"
        samples = counted(sum(stream.samples for stream in self.streams), "sample")
        return f"<report on {self.root}, {found}: {samples} in {counted(len(self.streams), 'stream')}>"

    @property
    def all_problems(self) -> tuple[Problem, ...]:
        """The problems of the dataset and of all its streams."""
        return (*self.problems, *(problem for stream in self.streams for problem in stream.problems))

    @property
    def limits(self) -> str:
        """The flags that ended streams before the end of their data, according to the commits."""
        return ", ".join(dict.fromkeys(stream.limits for stream in self.streams if stream.limits))

    @property
    def cut(self) -> str:
        """What the limit of length did, according to the commits; empty if no sample is longer."""
        cut, too_long, stored, skipped = (
            sum(getattr(stream, name) for stream in self.streams) for name in ("cut", "too_long", "samples", "skipped")
        )
        return cut_text(cut, too_long, stored + skipped, self.max_seq_length)

    @property
    def quarantined(self) -> tuple[Skip, ...]:
        """The quarantined samples of all streams. They are recorded, so they are not a problem."""
        return tuple(skip for stream in self.streams for skip in stream.quarantined)

    @property
    def ok(self) -> bool:
        """Whether the dataset is verified. Garbage is not a problem, because readers ignore it."""
        return not self.all_problems

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "root": self.root,
            "fingerprint": self.fingerprint,
            "ok": self.ok,
            "streams": [_stream_json(stream) for stream in self.streams],
            "streams_expected": self.streams_expected,
            "limits": self.limits,
            "max_seq_length": self.max_seq_length,
            "cut": self.cut,
            "never_begun": self.never_begun.pairs(),
            "problems": [vars(problem) for problem in self.all_problems],
            "unchecked": list(self.unchecked),
            "garbage": [vars(item) for item in self.garbage],
            "recomputed": None if self.recomputed is None else self.recomputed.to_json(),
        }


def _stream_json(stream: StreamReport) -> dict[str, Any]:
    plain = {name: value for name, value in vars(stream).items() if name != "problems"}
    ranges = {name: getattr(stream, name).pairs() for name in ("missing", "doubled", "stale_commits")}
    quarantined = [{"index": skip.index, "task_id": skip.task_id, **skip.detail} for skip in stream.quarantined]
    return {**plain, **ranges, "quarantined": quarantined, "ok": stream.ok}
