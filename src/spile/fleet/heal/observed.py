"""What is seen of a fleet at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from spile.fleet.cloud.provider import Node, Operation
from spile.fleet.spec import FleetSpec, owns, worker_of
from spile.spec.phase import Phase

__all__ = ["Observed", "Pulse", "Verdict", "spec_zones"]

Verdict = Literal["", "finished", "crashed", "refused"]


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
    """When it last got further."""


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
