"""What is decided from: a fleet at one moment, and one of its workers at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from spile.fleet.cloud.provider import Node
from spile.fleet.heal.history import History, WorkerHistory
from spile.fleet.heal.observed import Observed, Pulse, Verdict
from spile.fleet.spec import FleetSpec, Policy, Worker

__all__ = ["FleetCase", "WorkerCase", "past_of"]


def past_of(history: History, worker: Worker) -> WorkerHistory:
    """A worker's history; a fresh one where there is none."""
    return history.workers.get(worker.id) or WorkerHistory(zone=worker.zone, used=(worker.zone,))


@dataclass(frozen=True)
class FleetCase:
    """What the fleet shall be, what is seen of it, what it has lived through, and the time."""

    fleet: FleetSpec
    observed: Observed
    history: History
    now: float

    def workers(self) -> Iterator[WorkerCase]:
        """Each worker's case."""
        for worker in self.fleet.workers:
            yield WorkerCase(self.fleet, worker, past_of(self.history, worker), self.now, self.observed, self.history)


@dataclass(frozen=True)
class WorkerCase:
    """One worker of it. ``past`` is what is known by now, and may be newer than the fleet's history."""

    fleet: FleetSpec
    worker: Worker
    past: WorkerHistory
    now: float
    observed: Observed = field(default_factory=lambda: Observed(""))
    history: History = field(default_factory=History)

    def knowing(self, past: WorkerHistory) -> WorkerCase:
        """The same case, once more is known of its past."""
        return self if past is self.past else replace(self, past=past)

    @property
    def policy(self) -> Policy:
        """The fleet's."""
        return self.fleet.policy

    @property
    def full_zones(self) -> frozenset[str]:
        """The zones known to be without quota now."""
        return frozenset(zone for zone, block in self.history.blocks.items() if self.now < block.until)

    @property
    def nodes(self) -> list[Node]:
        """The worker's machines, as listed."""
        return self.observed.own.get(self.worker.id, [])

    @property
    def pulse(self) -> Pulse:
        """What the bucket knows of it."""
        return self.observed.pulse(self.worker.id)

    def beat(self, node: Node) -> float | None:
        """Its heartbeat, if it came from this machine."""
        return self.observed.beat(self.worker.id, node)

    def verdict(self, node: Node) -> Verdict:
        """Its agent's word, if it came from this machine."""
        return self.observed.verdict(self.worker.id, node)
