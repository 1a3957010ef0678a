"""What is seen of a fleet at one moment."""

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

__all__ = [
    "Bill",
    "History",
    "Observed",
    "Pending",
    "Pulse",
    "Verdict",
    "WorkerHistory",
    "ZoneBlock",
    "spec_zones",
]


Verdict = Literal["", "finished", "crashed", "refused", "stopped"]


@dataclass(frozen=True)
class Pulse:
    """A worker as the bucket knows it: its heartbeat and its agent's word."""

    beat: float | None = None
    """When it last gave a sign of life."""
    phase: Phase = Phase.UNKNOWN
    verdict: Verdict = ""
    """How its agent says that it ended, in this deployment."""
    said: float = 0.0
    """When the agent said so."""
    error: str = ""
    """Its log's last lines."""
    progress: float | None = None
    """When it last made progress."""
    crash_loop: str = ""
    """What to tell about a worker that its agent restarts again and again."""


@dataclass(frozen=True)
class Observed:
    """One look at the cloud and the bucket."""

    fleet: str
    nodes: tuple[Node, ...] = ()
    """Of all zones that answered: ours and foreign ones."""
    unanswered: frozenset[str] = frozenset()
    """The zones that did not answer."""
    operations: Mapping[str, Operation] = field(default_factory=dict)
    """Those that the history waits for, by name."""
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
        """The places, (zone, name), that belong to somebody else."""
        return frozenset((node.zone, node.name) for node in self.nodes if not owns(self.fleet, node))

    def pulse(self, worker: int) -> Pulse:
        """A worker's pulse; an empty one where there is none."""
        return self.pulses.get(worker, Pulse())

    def beat(self, worker: int, node: Node) -> float | None:
        """The heartbeat, if it came from this machine and not from the one before."""
        beat = self.pulse(worker).beat
        return beat if beat is not None and beat > node.created else None

    def verdict(self, worker: int, node: Node) -> Verdict:
        """The agent's word, if it came from this machine."""
        pulse = self.pulse(worker)
        return pulse.verdict if pulse.said > node.created else ""


def spec_zones(fleet: FleetSpec) -> tuple[str, ...]:
    """Every zone where a machine of the fleet may be."""
    return tuple(dict.fromkeys([*fleet.zones, *(worker.zone for worker in fleet.workers), *fleet.former_zones]))


@dataclass(frozen=True)
class Pending:
    """A request that was sent and whose end has not been seen."""

    verb: Literal["create", "delete"]
    zone: str
    since: float
    operation: str | None = None
    """None: the answer was lost, so that only a listing can tell."""
    uid: str = ""
    """Of the machine that is being deleted."""


@dataclass(frozen=True)
class WorkerHistory:
    """One worker's past."""

    zone: str
    """Where its next machine will be asked for."""
    used: tuple[str, ...] = ()
    """Every zone where a machine of its may be."""
    pending: Pending | None = None
    failures: int = 0
    """Creates that failed in this zone, one after another."""
    early_deaths: int = 0
    """Machines that died young, one after another."""
    retry_at: float = 0.0
    alive: str = ""
    """The machine that was last seen alive; gone without a word counts as a preemption."""
    since: float = 0.0
    """When that one was created."""
    coming: float = 0.0
    """Since when its machine has been on its way; 0 when it is not."""
    without: float = 0.0
    """Since when it has had no machine; 0 if it has one or needs none."""
    alarmed: bool = False
    """Whether that is longer than ``Policy.no_machine_alarm``."""
    last_dead: str = ""
    """The machine whose end was counted last."""
    preemptions: int = 0
    stockouts: int = 0
    silences: int = 0
    never_heard: int = 0
    """Machines in a row that never gave a sign of life."""
    crashes: int = 0
    creates: int = 0
    finished: bool = False
    gave_up: str = ""
    reported: bool = False
    note: str = ""
    """What it waits for, for people."""
    lost: str = ""
    """Why its last machine was replaced; stays when the next one is there."""

    def with_facts(self, **facts: Any) -> WorkerHistory:
        """With these; itself where they are known already, as of a worker that is well, round after round."""
        known = all(getattr(self, name) == value for name, value in facts.items())
        return self if known else replace(self, **facts)


@dataclass(frozen=True)
class ZoneBlock:
    """Why no machine is asked for in a zone, and until when."""

    until: float
    why: str


@dataclass(frozen=True)
class Bill:
    """One machine's cost so far."""

    worker: int
    zone: str
    started: float
    seen: float
    dollars_per_hour: float

    @property
    def dollars(self) -> float:
        """Until it was last seen alive."""
        return max(0.0, self.seen - self.started) / 3600.0 * self.dollars_per_hour


@dataclass(frozen=True)
class History:
    """The fleet's past."""

    workers: Mapping[int, WorkerHistory] = field(default_factory=dict)
    blocks: Mapping[str, ZoneBlock] = field(default_factory=dict)
    bills: Mapping[str, Bill] = field(default_factory=dict)
    settled: float = 0.0
    """Dollars of machines that are gone."""
    stopped: str = ""
    """Why the whole fleet is being taken down."""
    deployment: str = ""

    @property
    def dollars(self) -> float:
        """Spent so far."""
        return self.settled + sum(bill.dollars for bill in self.bills.values())

    def to_json(self) -> bytes:
        """As stored."""
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS)

    @classmethod
    def from_json(cls, data: bytes) -> History:
        """As stored; what a newer version adds is left out."""
        with untrusted(Damaged, "a fleet's history that cannot be read", fix="remove the last of its history/*.json"):
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
