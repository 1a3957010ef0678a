"""The one place where it is decided what to do: a fleet's case → actions, with their reasons.

Pure. A worker has at most one machine: a new one is asked for only when every zone where an old one could be has
answered, none was listed there, and no request for one is without an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from spile.fleet.cloud.provider import Node
from spile.fleet.cloud.states import Life, NodeState
from spile.fleet.heal.case import FleetCase, WorkerCase
from spile.fleet.spec import FleetSpec, Policy

__all__ = ["Action", "Health", "decide", "delay", "health_of", "next_zone"]

Verb = Literal["create", "delete", "report"]


@dataclass(frozen=True)
class Action:
    """Something to do, and why."""

    verb: Verb
    worker: int
    zone: str
    name: str
    reason: str
    uid: str = ""
    """Of the machine to delete."""
    queued: str | None = None
    """The queued resource that it belongs to."""


@dataclass(frozen=True)
class Health:
    """A machine as we judge it."""

    fine: bool
    reason: str = ""
    """Why not."""
    silent: bool = False


def delay(policy: Policy, worker: int, attempt: int) -> float:
    """Seconds before a create's next try: doubling, capped, jittered so that workers do not march in step."""
    chance = int.from_bytes(hashlib.blake2b(f"{worker}:{attempt}".encode(), digest_size=4).digest()) / 2**32
    # A monitor that looks more often may ask again sooner, at first.
    base = min(policy.backoff_base, policy.interval)
    grown = base * 2.0 ** min(max(attempt - 1, 0), 20)
    return float(min(policy.backoff_cap, grown) * (0.5 + 0.5 * chance))


def next_zone(fleet: FleetSpec, zone: str, full: Collection[str] = ()) -> str:
    """The zone to try after this one: the next that is not known to be without quota; itself where there is none."""
    zones = fleet.zones
    if not fleet.policy.move or zone not in zones:
        return zone
    place = zones.index(zone)
    return next((each for each in (*zones[place + 1 :], *zones[:place]) if each not in full), zone)


def health_of(case: WorkerCase, node: Node) -> Health:
    """Whether a machine shall stay."""
    policy, now, coming = case.policy, case.now, case.past.coming
    if node.state.life is Life.DEAD:
        return Health(False, f"it is {node.state.value}: {node.state.meaning}")
    if node.state.life is Life.COMING:
        waited = now - coming if coming else 0.0
        if node.state is not NodeState.QUEUED and waited > policy.create_timeout:
            return Health(False, f"it has been {node.state.value} for {waited:.0f} s", silent=True)
        return Health(True)
    if node.state.life is Life.ALIVE:
        verdict = case.verdict(node)
        if verdict == "crashed":
            return Health(False, "its worker crashed again and again")
        if verdict == "refused":
            return Health(False, "its worker refused its task")
        beat = case.beat(node)
        grace = beat is None or case.pulse.phase.slow
        limit = max(policy.patience, policy.compile_grace) if grace else policy.patience
        age = now - (node.created if beat is None else beat)
        if age > limit:
            what = "no heartbeat since it was created," if beat is None else "its heartbeat is"
            return Health(
                False, f"{what} {age:.0f} s {'ago' if beat is None else 'old'} (limit {limit:.0f})", silent=True
            )
        progress = case.pulse.progress
        idle = now - max(progress, node.created) if progress is not None else 0.0
        if idle > policy.stall:
            why = f"it gives signs of life and got no further for {idle:.0f} s (limit {policy.stall:.0f})"
            return Health(False, why, silent=True)
    return Health(True)


def decide(fleet_case: FleetCase) -> tuple[Action, ...]:
    """Everything that should be done now. The same inputs give the same actions."""
    actions: list[Action] = []
    for case in fleet_case.workers():
        past, worker = case.past, case.worker
        if past.gave_up and not past.reported:
            actions.append(Action("report", worker.id, past.zone, worker.name, past.gave_up))
        over = _over(case)
        if over:
            actions.extend(_delete(case, node, over) for node in case.nodes if _deletable(case, node))
        elif case.nodes:
            actions.extend(_tend(case))
        else:
            actions.extend(_make(case))
    return (*actions, *_leftovers(fleet_case))


def _leftovers(case: FleetCase) -> Iterator[Action]:
    """Machines that an earlier, larger deployment left: no worker needs them."""
    known = {worker.id for worker in case.fleet.workers}
    for worker, nodes in case.observed.own.items():
        if worker in known:
            continue
        for node in nodes:
            if node.state.life is not Life.LEAVING:
                reason = "no worker of this deployment needs it"
                yield Action("delete", worker, node.zone, node.name, reason, uid=node.uid, queued=node.queued)


def _over(case: WorkerCase) -> str:
    """Why this worker needs no machine any more; empty: it does."""
    if case.history.stopped:
        return case.history.stopped
    if case.past.finished:
        return "its work is finished" if case.policy.delete_finished else ""
    return f"given up: {case.past.gave_up}" if case.past.gave_up else ""


def _deletable(case: WorkerCase, node: Node) -> bool:
    pending = case.past.pending
    asked = pending is not None and pending.verb == "delete" and pending.uid == node.uid
    return node.state.life is not Life.LEAVING and not asked


def _delete(case: WorkerCase, node: Node, reason: str) -> Action:
    return Action("delete", case.worker.id, node.zone, node.name, reason, uid=node.uid, queued=node.queued)


def _tend(case: WorkerCase) -> Iterator[Action]:
    """A worker that has a machine: keep one that is well, delete the rest."""
    if case.past.finished:
        return
    for place, node in enumerate(sorted(case.nodes, key=lambda node: _rank(case, node))):
        health = health_of(case, node)
        reason = health.reason if not health.fine else "another machine serves this worker" if place else ""
        if reason and _deletable(case, node):
            yield _delete(case, node, reason)


def _rank(case: WorkerCase, node: Node) -> tuple[int, float, str]:
    """The best machine first: alive with a heartbeat, alive, on its way, the others; the oldest of equals."""
    order = {Life.ALIVE: 1, Life.COMING: 2, Life.LEAVING: 3, Life.DEAD: 4, Life.ABSENT: 5}[node.state.life]
    if order == 1 and case.beat(node) is not None:
        order = 0
    return order, node.created, node.zone


def _make(case: WorkerCase) -> Iterator[Action]:
    """A worker without a machine: ask for one, if nothing speaks against it."""
    fleet, observed, worker, past, now = case.fleet, case.observed, case.worker, case.past, case.now
    if past.finished or past.pending is not None or now < past.retry_at:
        return
    if observed.unanswered.intersection({*past.used, past.zone}):
        return
    zone = past.zone
    if (zone, worker.name) in observed.foreign:
        full = case.full_zones
        free = [each for each in fleet.zones if (each, worker.name) not in observed.foreign and each not in full]
        if not free or not fleet.policy.move or free[0] in observed.unanswered:
            return
        zone = free[0]
    block = case.history.blocks.get(zone)
    if block is not None and now < block.until:
        return
    reason = "it has no machine"
    if past.preemptions or past.silences or past.crashes:
        reason += f" (preempted {past.preemptions}, silent {past.silences}, crashed {past.crashes} times)"
    if zone != worker.zone:
        reason += f"; {worker.zone} had no capacity {past.stockouts} times"
    yield Action("create", worker.id, zone, worker.name, reason)
