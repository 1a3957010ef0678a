"""What travels through the worker's pipeline, the queues it travels in, and the two seams: a control and a sink."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from spile.planning.batches import Batch
from spile.planning.shards import ShardBatches
from spile.runtime.pipes import Crew, Pipe, Stopped
from spile.runtime.producer import RowBlock
from spile.spec.sample import Sample, Skip
from spile.store.record import ShardRecord
from spile.store.shard import ShardBuilder

__all__ = ["AHEAD", "Close", "Control", "Countdown", "Flow", "Rows", "Shard", "ShardTask", "Sink", "Step", "Verdict"]

_PLANS = 1
"""Shards that wait with their samples; the feeder holds one more, and all are compiled for."""
AHEAD = 3
"""Batches beyond those being written, unless told: two on the device, and one on its way from it."""

Verdict = Literal["go", "commit", "stop"]
"""At a batch's boundary: go on; commit the shards as they are and go on; commit them and end."""


class Control(Protocol):
    """Who decides when shards end early. On a pod, all hosts must hear the same answer at the same batch."""

    def verdict(self) -> Verdict:
        """Asked before each batch."""

    def stopping(self) -> bool:
        """Whether a wait before the next batch is of no use any more. The verdict alone decides."""

    def committed(self) -> None:
        """Shards were closed: the clock of ``--commit-every`` starts again."""


class Sink(Protocol):
    """Where rows go: a stream's store, seen from the pipeline."""

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out a shard for these samples. May wait until an earlier one has left."""

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Make a shard and skipped samples part of the dataset."""


@dataclass(frozen=True)
class ShardTask:
    """A shard to make, and the samples skipped on the way to it."""

    plan: ShardBatches
    skipped: tuple[Skip, ...] = ()
    end: int | None = None
    """With the last work of a stream: how many samples the stream has."""
    undivided: bool = False
    """Committed whole or not at all."""


@dataclass(eq=False)
class Shard:
    """A shard being filled."""

    builder: ShardBuilder | None
    """None where this process stores no row of it."""
    lane: int
    waiting: deque[Batch]
    skipped: tuple[Skip, ...]
    end: int | None
    rows: int = 0
    samples: int = 0
    """Rows and samples that this process stores."""
    undivided: tuple[Batch, ...] = ()
    """All of its batches, where it is committed whole or not at all."""
    started: int = 0
    """Batches: the same on every host of a pod, whatever each stores of them, so decisions are made on it."""


class Step(NamedTuple):
    """A batch on its way: started, then fetched, then written."""

    shard: Shard
    batch: Batch
    pending: object
    first_row: int
    started: float


class Rows(NamedTuple):
    """A batch that was fetched."""

    step: Step
    blocks: Sequence[Sequence[RowBlock]]


class Close(NamedTuple):
    """The end of a shard; whole, or as far as it came."""

    shard: Shard
    whole: bool


@dataclass
class Flow:
    """The queues of one run."""

    crew: Crew
    lanes: int
    in_flight: int
    plans: Pipe[ShardTask] = field(init=False)
    steps: Pipe[Step | Close] = field(init=False)
    rows: list[Pipe[Rows | Close]] = field(init=False)
    closes: Pipe[Close] = field(init=False)

    def __post_init__(self) -> None:
        self.plans = Pipe(self.crew, _PLANS)
        most = 2 * self.in_flight + 1  # each batch may be the last of its shard; a full queue would hold up all lanes
        self.steps = Pipe(self.crew, most)
        self.rows = [Pipe(self.crew, most) for _ in range(self.lanes)]
        self.closes = Pipe(self.crew, 1)
        self.credits = threading.Semaphore(self.in_flight)
        # Batches of each lane, counted by the dispatcher and by the lane: each number has one writer and needs no lock.
        self.started = [0] * self.lanes
        self.written = [0] * self.lanes

    def waiting(self, lane: int) -> int:
        """Batches on their way to a lane's file."""
        return self.started[lane] - self.written[lane]

    def wait_for_room(self) -> None:
        """Wait until one more batch may be in flight. The dispatcher alone takes credits, so the room stays."""
        while not self.credits.acquire(timeout=0.1):
            if self.crew.failed:
                raise Stopped
        self.credits.release()


class Countdown:
    """Closes a pipe, once for each of its readers, when the last of its writers is done."""

    def __init__(self, writers: int, pipe: Pipe[Close], readers: int) -> None:
        self._left, self._pipe, self._readers = writers, pipe, readers
        self._lock = threading.Lock()

    def one_less(self) -> None:
        """A writer is done."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        for _ in range(self._readers):
            self._pipe.close()
