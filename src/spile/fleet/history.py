"""The state from which decisions are made: what is observed now, and the stored history of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import orjson

from spile.errors import Damaged, untrusted
from spile.fleet.provider import Node, Operation
from spile.fleet.spec import FleetSpec, owns, worker_of
from spile.spec.phase import Phase
from spile.spec.records import typed_fields

Verdict = Literal["", "finished", "crashed", "refused", "stopped"]


@dataclass(frozen=True)
class Pulse:
    """A worker as the bucket shows it: its heartbeat and its agent's report."""

    beat: float | None = None
    """The time of the last heartbeat or report."""
    phase: Phase = Phase.UNKNOWN
    verdict: Verdict = ""
    """How the worker ended in this deployment, by its agent's report."""
    reported: float = 0.0
    """The time of that report."""
    error: str = ""
    """The last lines of its log."""
    progress: float | None = None
    """The time at which the worker last made progress."""
    crash_loop: str = ""
    """A description of the crash loop of a worker that its agent keeps restarting; empty if there is none."""


@dataclass(frozen=True)
class Observed:
    """One observation of the cloud and the bucket."""

    fleet: str
    nodes: tuple[Node, ...] = ()
    """All nodes of the zones that answered, of this fleet and of others."""
    unanswered: frozenset[str] = frozenset()
    """The zones that did not answer."""
    operations: Mapping[str, Operation] = field(default_factory=dict)
    """The operations that the history waits for, by name."""
    pulses: Mapping[int, Pulse] = field(default_factory=dict)

    @cached_property
    def own(self) -> dict[int, list[Node]]:
        """The fleet's own machines, by worker."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            worker = worker_of(node)
            if owns(self.fleet, node) and worker is not None:
                found.setdefault(worker, []).append(node)
        return found

    @cached_property
    def foreign(self) -> frozenset[tuple[str, str]]:
        """The (zone, name) pairs of machines that do not belong to the fleet."""
        return frozenset((node.zone, node.name) for node in self.nodes if not owns(self.fleet, node))

    def pulse(self, worker: int) -> Pulse:
        """Return a worker's pulse; an empty one if there is none."""
        return self.pulses.get(worker, Pulse())

    def beat(self, worker: int, node: Node) -> float | None:
        """Return the time of the heartbeat if it came from this machine and not from an earlier one."""
        beat = self.pulse(worker).beat
        return beat if beat is not None and beat > node.created else None

    def verdict(self, worker: int, node: Node) -> Verdict:
        """Return the agent's verdict if it came from this machine."""
        pulse = self.pulse(worker)
        return pulse.verdict if pulse.reported > node.created else ""


def spec_zones(fleet: FleetSpec) -> tuple[str, ...]:
    """Return every zone where a machine of the fleet may exist."""
    return tuple(dict.fromkeys([*fleet.zones, *(worker.zone for worker in fleet.workers), *fleet.former_zones]))


@dataclass(frozen=True)
class Pending:
    """A request whose result is not known yet."""

    verb: Literal["create", "delete"]
    zone: str
    since: float
    operation: str | None = None
    """None if the answer was lost, so that only a listing can tell."""
    uid: str = ""
    """The uid of the machine that is being deleted."""


@dataclass(frozen=True)
class WorkerHistory:
    """The history of one worker."""

    zone: str
    """The zone of its next machine."""
    used: tuple[str, ...] = ()
    """Every zone where one of its machines may exist."""
    pending: Pending | None = None
    failures: int = 0
    """Consecutive failed requests in this zone."""
    early_deaths: int = 0
    """Consecutive machines that lived only a short time."""
    retry_at: float = 0.0
    alive: str = ""
    """The uid of the machine that was last seen alive. If it disappears, that counts as a preemption."""
    since: float = 0.0
    """When that machine was created."""
    coming: float = 0.0
    """The time since when its machine has been starting; 0 if it is not starting."""
    without: float = 0.0
    """The time since when it has had no machine; 0 if it has one or needs none."""
    alarmed: bool = False
    """Whether that is longer than ``Policy.no_machine_alarm``."""
    last_dead: str = ""
    """The uid of the machine whose end was counted last."""
    preemptions: int = 0
    stockouts: int = 0
    silences: int = 0
    never_heard: int = 0
    """Consecutive machines that never reported."""
    crashes: int = 0
    creates: int = 0
    finished: bool = False
    gave_up: str = ""
    reported: bool = False
    note: str = ""
    """The reason why it waits, as text."""
    lost: str = ""
    """Why its last machine was replaced. It is kept when the next one exists."""

    def with_facts(self, **facts: Any) -> WorkerHistory:
        """Return this history with these facts; the same object if nothing changes."""
        known = all(getattr(self, name) == value for name, value in facts.items())
        return self if known else replace(self, **facts)


@dataclass(frozen=True)
class ZoneBlock:
    """Why no machine is requested in a zone, and until when."""

    until: float
    why: str


@dataclass(frozen=True)
class Bill:
    """The cost of one machine so far."""

    worker: int
    zone: str
    started: float
    seen: float
    dollars_per_hour: float

    @property
    def dollars(self) -> float:
        """The cost until the machine was last seen alive."""
        return max(0.0, self.seen - self.started) / 3600.0 * self.dollars_per_hour


@dataclass(frozen=True)
class History:
    """The history of a fleet, as monitors store it."""

    workers: Mapping[int, WorkerHistory] = field(default_factory=dict)
    blocks: Mapping[str, ZoneBlock] = field(default_factory=dict)
    bills: Mapping[str, Bill] = field(default_factory=dict)
    settled: float = 0.0
    """The cost of machines that no longer exist."""
    stopped: str = ""
    """Why the whole fleet is being deleted."""
    deployment: str = ""

    @property
    def dollars(self) -> float:
        return self.settled + sum(bill.dollars for bill in self.bills.values())

    def to_json(self) -> bytes:
        """Return the content of ``history/NNNNNN.json``."""
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS)

    @classmethod
    def from_json(cls, data: bytes) -> History:
        """Parse a stored history. Fields that only a newer version knows are ignored."""
        with untrusted(Damaged, "the fleet's history cannot be read", fix="remove the last of its history/*.json"):
            raw: dict[str, Any] = orjson.loads(data)
            known = typed_fields(cls, raw)
            known.update(
                workers={int(number): _worker(value) for number, value in raw["workers"].items()},
                blocks={zone: ZoneBlock(**typed_fields(ZoneBlock, block)) for zone, block in raw["blocks"].items()},
                bills={uid: Bill(**typed_fields(Bill, bill)) for uid, bill in raw["bills"].items()},
            )
            return cls(**known)


def _worker(value: Mapping[str, Any]) -> WorkerHistory:
    known = typed_fields(WorkerHistory, value)
    pending = known.get("pending")
    return WorkerHistory(**{**known, "pending": Pending(**typed_fields(Pending, pending)) if pending else None})
