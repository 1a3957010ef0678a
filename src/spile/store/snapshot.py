"""The state of all streams of a dataset, from their ledgers and heartbeats."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from spile.errors import Damaged, SpileError
from spile.objects.folder import Folder
from spile.spec.lengths import cut_text
from spile.spec.phase import Phase
from spile.spec.ranges import Ranges
from spile.store.heartbeat import INTERVAL, Beat, Liveness, read_beat
from spile.store.layout import PROGRESS, existing_folder, find_streams
from spile.store.ledger import Commit, Ledger, parse_time, read_commits
from spile.store.run import read_run
from spile.store.writer import StreamRecord, read_stream


class State(enum.Enum):
    """The state of a stream. In ``silent``, ``stopped``, ``failed`` and ``damaged`` it does not finish by itself."""

    DONE = "done"
    """Every sample is stored or skipped."""
    WORKING = "working"
    """A worker's heartbeat is recent."""
    WAITING = "waiting"
    """The stream was started recently and has no heartbeat yet: its worker may be starting."""
    SILENT = "silent"
    """Unfinished, and its worker has sent no heartbeat for a while: it was preempted or killed."""
    STOPPED = "stopped"
    """Unfinished, and its worker ended without an error: it was interrupted, or asked to process only a part."""
    FAILED = "failed"
    """Its worker ended with an error."""
    DAMAGED = "damaged"
    """Its ledger cannot be read."""


_NEEDS_RECOVERY = {State.SILENT, State.STOPPED, State.FAILED, State.DAMAGED}
_HEALTHY = {State.DONE, State.WORKING, State.WAITING}


@dataclass(frozen=True)
class StreamView:
    """The progress of one stream at one moment."""

    number: int
    name: str
    """The machine's name if there is a fleet, else the stream's folder."""
    state: State
    samples: int = 0
    """The committed samples, skipped ones included, and those that the worker has computed but not committed."""
    expected: int | None = None
    shards: int = 0
    """The number of written shards, committed or not."""
    committed: int = 0
    """The number of committed shards."""
    tokens: int = 0
    bytes: int = 0
    tokens_per_second: float = 0.0
    seconds_left: float | None = None
    phase: Phase = Phase.UNKNOWN
    host: str = ""
    age: float | None = None
    """Seconds since the last heartbeat."""
    interval: float = INTERVAL
    """Seconds between two heartbeats of the worker."""
    idle: float | None = None
    """Seconds since the worker's last progress."""
    retries: int = 0
    last_error: str | None = None
    log_tail: tuple[str, ...] = ()
    streams: int | None = None
    """The number of streams of the split; None if the stream's record does not state it."""
    quarantined: tuple[str, ...] = ()
    """The samples that were set aside because workers end when they compute them, with the causes."""
    skipped: int = 0
    """The samples that were skipped."""
    limits: str = ""
    """The flags that ended the stream before the end of its data, according to its commits."""
    cut: int = 0
    """The committed samples that were cut to the maximum length."""
    too_long: int = 0
    """The skipped samples that are longer than that."""

    @property
    def percent(self) -> float | None:
        return None if not self.expected else min(100.0, 100.0 * self.samples / self.expected)

    @property
    def status(self) -> str:
        """The status for tables: the worker's phase if it is working, else the state."""
        return self.phase if self.state is State.WORKING and self.phase else self.state.value


@dataclass(frozen=True)
class Snapshot:
    """The progress of all streams of a dataset at one moment."""

    root: str
    taken: float
    """The time of the snapshot, in seconds since the epoch."""
    streams: tuple[StreamView, ...]
    max_seq_length: int = 0
    """The longest sample that the run stores, in tokens; 0 if no sample is longer."""

    def total(self, field: str) -> float:
        """Return the sum of a field over all streams where it is known."""
        return sum(getattr(stream, field) or 0 for stream in self.streams)

    @property
    def percent(self) -> float | None:
        """The percentage of finished samples; None if the size of a stream is unknown or a stream was never started."""
        if not self.streams or self.never_begun or any(stream.expected is None for stream in self.streams):
            return None
        expected = self.total("expected")
        return min(100.0, 100.0 * self.total("samples") / expected) if expected else 100.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the slowest stream is done; None if the time of a stream is unknown or nothing is left."""
        if self.never_begun:
            return None
        left = [stream.seconds_left for stream in self.streams if stream.state is not State.DONE]
        known = [seconds for seconds in left if seconds is not None]
        return None if not left or len(known) < len(left) else max(known)

    @property
    def done(self) -> bool:
        return (
            bool(self.streams) and not self.never_begun and all(stream.state is State.DONE for stream in self.streams)
        )

    @property
    def never_begun(self) -> int:
        """The number of streams of the split that no worker has started."""
        return max(0, max((stream.streams or 0 for stream in self.streams), default=0) - len(self.streams))

    @property
    def quarantined(self) -> list[str]:
        return [f"quarantined in {each.name}: {sample}" for each in self.streams for sample in each.quarantined]

    @property
    def cut(self) -> str:
        """What the limit of length did, according to the commits; empty if no sample is longer."""
        cut, too_long, samples = (round(self.total(name)) for name in ("cut", "too_long", "samples"))
        return cut_text(cut, too_long, samples, self.max_seq_length)

    @property
    def notes(self) -> list[str]:
        """Lines about samples that are not stored, or not whole."""
        return [*self.quarantined, *filter(None, [self.cut])]

    def count(self, *states: State) -> int:
        return sum(stream.state in states for stream in self.streams)

    @property
    def healthy(self) -> int:
        """The number of streams that are done, working or waiting for their worker to start."""
        return self.count(*_HEALTHY)

    @property
    def working(self) -> int:
        return self.count(State.WORKING)

    @property
    def needs_recovery(self) -> int:
        """The number of unfinished streams without a live worker."""
        return self.count(*_NEEDS_RECOVERY)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        totals = {name: self.total(name) for name in ("samples", "shards", "committed", "tokens", "bytes")}
        return {
            "root": self.root,
            "taken": self.taken,
            "streams": [
                {**vars(stream), "state": stream.state.value, "percent": stream.percent} for stream in self.streams
            ],
            "totals": {**totals, "tokens_per_second": self.total("tokens_per_second")},
            "percent": self.percent,
            "seconds_left": self.seconds_left,
            "healthy": self.healthy,
            "working": self.working,
            "needs_recovery": self.needs_recovery,
            "never_begun": self.never_begun,
            "done": self.done,
            "cut": self.cut,
        }


class CommitPoint(NamedTuple):
    """When a commit was made and what it added: the history of a stream."""

    time: float
    attempt: str
    samples: int
    tokens: int
    bytes: int


class SnapshotReader:
    """Takes repeated snapshots of a dataset. Each one reads only new commits."""

    def __init__(self, root: Folder, clock: Callable[[], float] = time.time) -> None:
        self._root, self._clock = root, clock
        self._ledgers: dict[int, tuple[str, Ledger]] = {}
        self._max_seq_length = 0
        self.history: dict[int, list[CommitPoint]] = {}
        """The commits of each stream that record their time."""
        self.beats: dict[int, Beat] = {}
        """The last heartbeat of each stream."""

    def take(self) -> Snapshot:
        folders = find_streams(self._root)
        with ThreadPoolExecutor(16, thread_name_prefix="snapshot") as pool:
            views = tuple(pool.map(self._view, folders, folders.values()))
        if not self._max_seq_length and any(view.cut or view.too_long for view in views):
            run = read_run(self._root)
            self._max_seq_length = 0 if run is None else run.max_seq_length
        return Snapshot(self._root.url, self._clock(), views, self._max_seq_length)

    def stream(self, number: int) -> StreamView:
        """Return the state of one stream, without a listing of the others."""
        return self._view(number, existing_folder(self._root, number))

    def _view(self, number: int, name: str) -> StreamView:
        folder = self._root.child(name)
        try:
            record = read_stream(folder)
            ledger = self._ledger(number, folder, record)
        except Damaged as error:  # Other errors of the store do not mean that the stream is damaged.
            return StreamView(number, name, State.DAMAGED, last_error=str(error))
        beat, now = read_beat(folder), self._clock()
        if beat is not None:
            self.beats[number] = beat
        return _view_stream(number, name, record, ledger, beat, now - _clock_error(folder, beat, now))

    def _ledger(self, number: int, folder: Folder, record: StreamRecord | None) -> Ledger:
        if record is None:
            return Ledger()
        known_id, known = self._ledgers.get(number, (record.id, Ledger()))
        if known_id != record.id:  # The stream was cleared and started again.
            known = Ledger()
        if not known.commits:
            self.history[number] = []
        added = list(read_commits(folder, record.id, after=known.commits))
        self.history[number] += [_point(commit) for commit in added if commit.created]
        ledger = known.plus(added)
        self._ledgers[number] = record.id, ledger
        return ledger


def _point(commit: Commit) -> CommitPoint:
    shards = commit.shards
    return CommitPoint(
        parse_time(commit.created),
        commit.attempt,
        sum(shard.count for shard in shards) + len(commit.skipped),
        sum(shard.tokens for shard in shards),
        sum(shard.size for shard in shards),
    )


def _clock_error(folder: Folder, beat: Beat | None, now: float) -> float:
    """Return by how many seconds the clock of the worker is behind this one.

    It is computed only if the heartbeat seems to be old or from the future: then the time at which the bucket received
    the heartbeat is used instead of the time that the worker wrote into it.
    """
    if beat is None or abs(beat.age(now)) <= Liveness(beat.interval).silent:
        return 0.0
    try:
        return folder.info(PROGRESS).updated - (now - beat.age(now))
    except SpileError:
        return 0.0


_NO_BEAT = Beat(phase=Phase.UNKNOWN, attempt="", host="", started="", updated="", version="")


def _view_stream(
    number: int, name: str, record: StreamRecord | None, ledger: Ledger, beat: Beat | None, now: float
) -> StreamView:
    """Return the view of one stream. The ledger is authoritative; the heartbeat adds what is not committed yet."""
    seen = beat or _NO_BEAT
    total = ledger.required(None if record is None else record.identity.samples)
    expected = total if seen.expected is None else seen.expected
    done = total is not None and not Ranges([(0, total)]) - ledger.done
    state = State.DONE if done else _state(beat, ledger, now)
    working = state is State.WORKING
    rate = seen.tokens_per_second if working else 0.0
    samples = len(ledger.done) + (max(0, seen.samples - seen.samples_committed) if working else 0)
    counted = ledger if ledger.samples else seen
    left = 0.0 if done else None
    if not done and expected is not None and rate and counted.samples:
        left = max(0, expected - samples) * counted.tokens / counted.samples / rate
    return StreamView(
        number=number,
        name=name,
        state=state,
        samples=samples,
        expected=expected,
        shards=ledger.shards + (max(0, seen.shards_written - seen.shards_committed) if working else 0),
        committed=ledger.shards,
        tokens=ledger.tokens,
        bytes=ledger.bytes,
        tokens_per_second=rate,
        seconds_left=left,
        phase=seen.phase,
        host=seen.host,
        age=None if beat is None else max(0.0, beat.age(now)),
        interval=seen.interval,
        idle=seen.idle(now),
        retries=seen.retries,
        last_error=seen.last_error,
        log_tail=seen.log_tail,
        streams=record.identity.streams if record is not None else None,
        quarantined=tuple(map(str, ledger.quarantined)),
        skipped=ledger.skipped,
        limits="" if ledger.limit is None else ledger.limit.flags,
        cut=ledger.cut,
        too_long=ledger.too_long,
    )


def _state(beat: Beat | None, ledger: Ledger, now: float) -> State:
    if beat is None:
        quiet = ledger.created is not None and now - parse_time(ledger.created) > Liveness().silent
        return State.SILENT if quiet else State.WAITING
    if beat.phase.ended:  # A worker may be done with its part while the stream is not.
        return State.FAILED if beat.phase is Phase.FAILED else State.STOPPED
    return State.WORKING if beat.age(now) <= Liveness(beat.interval).silent else State.SILENT
