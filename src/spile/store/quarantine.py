"""Find the sample that kills workers and quarantine it: the record of trials, and the rules of the search.

A sample can end the process that computes it: a fault in a runtime, an allocation that makes the system kill the
process, or an endless loop. Each worker writes what it is working on to ``suspects.json`` in the stream's folder, for
the worker after it. After a worker was killed, the next one works in *trials*: it writes the samples of a trial into
the record, computes and commits them, and continues with the next trial. If it is killed too, the next worker divides
those samples into smaller groups, and so on. A sample that ends workers when it is computed alone is committed as
skipped, with the reason ``quarantined``.

The record only guides the search. The quarantine itself is a commit: it is durable, fenced and exactly once.

A sample is suspected only if the worker was neither stopped nor lost with its machine. A supervisor sets
:data:`VARIABLE` in the environment of a worker that it restarts, which says whether the previous launch was killed by a
signal. If a machine is lost, its supervisor is lost too and sets nothing, and a worker that was stopped is not reported
as killed. Before a sample is tried alone, the worker computes a sample that is already stored (the control). If that
fails, no sample is suspected.
"""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spile.errors import ExitCode
from spile.objects.folder import Folder
from spile.spec.ranges import Ranges
from spile.spec.records import read_record
from spile.store.layout import SUSPECTS

VARIABLE = "SPILE_SUPERVISOR"
"""``TOKEN:KILLS:OTHERS:HOW``: the supervisor, how many of its earlier launches of this worker were killed by a signal,
how many ended in another way, and how the last one was killed: ``signal 9``, :data:`UNKNOWN`, or empty if it was not.
"""
UNKNOWN = "?"
PARTS = 32
"""A group that ended a worker is divided into this many groups. More groups need fewer attempts and more shards."""
CAREFUL_TRIALS = 16
"""Trials in the order of the stream after a worker was killed: about the shards that a worker has in flight."""
_ALONE, _DEATHS = 2, 3
"""A sample is quarantined after it ended ``_DEATHS`` workers, ``_ALONE`` of them alone after a successful control."""
_SECTION = (256, 16_384)
"""The smallest and largest number of samples of a trial in the order of the stream."""
MAX_QUARANTINED = 16
"""Samples of one stream. If more of them fail, the machine or the model is at fault."""
_EVERYTHING = Ranges([(0, 1 << 53)])


RESUMABLE = (ExitCode.HOST_LOST, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""Exit codes of a worker that was asked to stop or lost another host of its pod: it is started again."""
_SIGNALS = 128


def is_kill(code: int | None) -> bool:
    """Return whether an exit code, 128 + n for signal n, means that something other than a request ended the worker."""
    return code is not None and code > _SIGNALS and code not in (*RESUMABLE, _SIGNALS + signal.SIGHUP)


@dataclass(frozen=True)
class Supervision:
    """What a supervisor tells a worker about the earlier launches of this worker."""

    token: str = ""
    kills: int = 0
    others: int = 0
    how: str = ""

    @classmethod
    def begin(cls) -> Supervision:
        """Return the message for the first launch.

        A supervisor that dies with its machine begins again, so the loss of a machine is never taken for a kill.
        """
        return cls(token=secrets.token_hex(8))

    def after(self, code: int | None) -> Supervision:
        """Return the message for the next launch. ``code``: the exit code of the last one; None if it was lost."""
        if code is not None and is_kill(code):
            return replace(self, kills=self.kills + 1, how=f"signal {code - _SIGNALS}")
        return replace(self, others=self.others + 1, how="")

    def environment(self) -> dict[str, str]:
        """Return the variable for the next launch, which :meth:`from_environment` reads."""
        return {VARIABLE: f"{self.token}:{self.kills}:{self.others}:{self.how}"}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Supervision:
        """Read :data:`VARIABLE`; return an empty object if it is absent or malformed."""
        token, *rest = environment.get(VARIABLE, "").split(":", 3)
        try:
            kills, others, how = rest
            return cls(token, int(kills or 0), int(others or 0), how) if token else cls()
        except ValueError:
            return cls()

    @property
    def launch(self) -> str:
        """The name of this launch; empty without a supervisor."""
        return f"{self.token}:{self.kills}:{self.others}" if self.token else ""

    @property
    def killed_launch(self) -> str:
        """The name of the launch before this one if it was killed, else an empty string."""
        return f"{self.token}:{self.kills - 1}:{self.others}" if self.kills and self.how else ""

    @property
    def cause(self) -> str:
        """How the last launch was killed, as a clause."""
        return "worker killed" if self.how == UNKNOWN else f"worker killed by {self.how}"


@dataclass(frozen=True)
class Suspects:
    """Samples of which at least one may end a worker."""

    samples: Ranges
    causes: tuple[str, ...] = ()
    """How each worker ended that was working on them."""
    alone: int = 0
    """How many of those were working on a single sample, after a successful control."""

    @property
    def must_be_quarantined(self) -> bool:
        """Whether this is one sample that is to be quarantined."""
        return len(self.samples) == 1 and self.alone >= _ALONE and len(self.causes) >= _DEATHS

    @property
    def causes_text(self) -> str:
        """The causes as one clause: ``worker killed by signal 9 three times``."""
        counts = {cause: self.causes.count(cause) for cause in self.causes}
        return ", ".join(cause if count == 1 else f"{cause} {_times(count)}" for cause, count in counts.items())

    def divided(self) -> list[Suspects]:
        """Return the same samples as up to :data:`PARTS` groups."""
        size = -(-len(self.samples) // PARTS)
        return [replace(self, samples=part) for part in _parts(self.samples, size)]


@dataclass(frozen=True)
class Trials:
    """The content of ``suspects.json``."""

    stream: str
    """The id of the stream. A record from before the stream was started again is ignored."""
    groups: tuple[Suspects, ...] = ()
    careful: int = 0
    """Trials in the order of the stream that are left before the rest is computed without trials."""
    trial: Ranges = field(default_factory=Ranges)
    """The samples that the writer of this record is working on; empty between trials."""
    controlled: bool = False
    """Whether a stored sample was computed again successfully right before this trial."""
    launch: str = ""
    """The launch that wrote this record: see :attr:`Supervision.launch`."""
    ended: str = ""
    """Why the writer ended, if it was able to record it."""

    @property
    def suspects(self) -> Ranges:
        return Ranges(pair for group in self.groups for pair in group.samples.pairs())

    def with_trial(self, samples: Ranges, *, controlled: bool = False) -> Trials:
        """Return the record to write before these samples are tried."""
        fresh = samples & self.suspects != samples
        return replace(self, trial=samples, controlled=controlled, careful=max(0, self.careful - fresh))

    def after_success(self) -> Trials:
        """Return the record after the samples on trial were committed."""
        groups = tuple(group for group in self.groups if group.samples != self.trial)
        return replace(self, groups=groups, trial=Ranges(), controlled=False)

    def after_failure(self, cause: str) -> Trials:
        """Return the record after a worker ended while it was working on the trial."""
        known = next((group for group in self.groups if group.samples == self.trial), Suspects(self.trial))
        others = tuple(group for group in self.groups if group.samples != self.trial)
        alone = len(self.trial) == 1 and self.controlled
        group = replace(known, causes=(*known.causes, cause), alone=known.alone + alone)
        parts = () if not self.trial else (group,) if len(self.trial) == 1 else group.divided()
        return replace(
            self, groups=(*others, *parts), trial=Ranges(), controlled=False, careful=CAREFUL_TRIALS, ended=""
        )

    def without(self, done: Ranges) -> Trials:
        """Return the record without the samples that are in the ledger."""
        left = (replace(group, samples=group.samples - done) for group in self.groups)
        return replace(self, groups=tuple(group for group in left if group.samples))

    def choose(self, left: Ranges, section: int) -> Step:
        """Return what to do next.

        Samples that are not suspected come first, so that only suspects are delayed.

        Args:
            left: The samples that are not in the ledger.
            section: The number of samples of a trial in the order of the stream.

        """
        for group in self.groups:
            if group.must_be_quarantined:
                return Step("quarantine", group.samples)
        free = left - self.suspects
        if free and self.careful:
            return Step("trial", next(_parts(free, section)))
        if free:
            return Step("rest", free)
        return Step("trial", self.groups[0].samples) if self.groups else Step("done")


@dataclass(frozen=True)
class Step:
    """What a worker does next."""

    kind: str
    """``trial``, ``rest`` (all samples that are not suspected, without a trial), ``quarantine`` or ``done``."""
    samples: Ranges = field(default_factory=Ranges)
    all_remaining: bool = False
    """Whether these are all samples that were left when the worker started."""
    control_samples: Ranges = field(default_factory=Ranges)
    """Stored samples of which one is computed again before a suspect is tried alone."""

    @property
    def others(self) -> Ranges:
        return _EVERYTHING - self.samples


def resume_trials(stored: Trials | None, supervision: Supervision, stream: str, done: Ranges) -> Trials:
    """Return the record with which a worker begins; ``done`` contains the samples in the ledger."""
    trials = stored if stored is not None and stored.stream == stream else Trials(stream)
    unfinished = bool(trials.trial - done) or not trials.trial
    if trials.ended:
        trials = trials.after_failure(trials.ended) if unfinished else replace(trials, ended="")
    elif supervision.killed_launch:
        if trials.launch == supervision.killed_launch and unfinished:
            trials = trials.after_failure(supervision.cause)
        trials = replace(trials, careful=CAREFUL_TRIALS)
    return replace(trials, trial=Ranges(), controlled=False, launch=supervision.launch).without(done)


def section_size(samples: int, shards: int) -> int:
    """Return the samples of a trial in the order of the stream: about one shard, judged by those that exist."""
    least, most = _SECTION
    return min(most, max(least, samples // shards if shards else 0))


def read_trials(folder: Folder) -> Trials | None:
    """Read ``suspects.json``; return None if there is none, or if it cannot be read: it only guides the search."""
    try:
        found = json.loads(folder.get(SUSPECTS))
        groups = [{**each, "samples": _ranges(each["samples"])} for each in found["groups"]]
        return read_record(Trials, {**found, "groups": groups, "trial": _ranges(found["trial"])})
    except Exception:  # noqa: BLE001 - a forged record can raise anything, and the search can begin again without it
        return None


def write_trials(folder: Folder, trials: Trials) -> None:
    groups = [{**vars(group), "samples": group.samples.pairs()} for group in trials.groups]
    record = {**vars(trials), "trial": trials.trial.pairs(), "groups": groups}
    folder.put(SUSPECTS, json.dumps(record).encode() + b"\n")


def _ranges(found: Any) -> Ranges:
    made = Ranges((int(start), int(stop)) for start, stop in found)
    if made - _EVERYTHING:
        raise ValueError(f"samples {made.text()}")
    return made


def _parts(samples: Ranges, size: int) -> Iterator[Ranges]:
    """Yield the samples in order, ``size`` at a time, without listing them one by one."""
    part: list[tuple[int, int]] = []
    room = size
    for start, stop in samples.pairs():
        begin = start
        while begin < stop:
            end = min(stop, begin + room)
            part.append((begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield Ranges(part)
                part, room = [], size
    if part:
        yield Ranges(part)


def _times(count: int) -> str:
    return {2: "twice", 3: "three times", 4: "four times", 5: "five times"}.get(count, f"{count} times")
