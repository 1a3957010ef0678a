"""The decisions about a fleet, as pure functions: they take the observation and the history and return actions.

:func:`update_history` and :func:`record` return a changed copy of the history; their helpers change that copy in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from spile.errors import SpileError
from spile.fleet.provider import LostReply, Missing, Node, NodeState, Operation, Quota, Stage, Stockout, Unavailable
from spile.fleet.spec import (
    Bill,
    FleetSpec,
    History,
    Observed,
    Pending,
    Policy,
    Verdict,
    Worker,
    WorkerHealth,
    WorkerHistory,
    ZoneBlock,
    dollars_per_hour,
)

_NEVER_HEARD = (
    "may they read and write the bucket (--service-account)? Their startup log: journalctl -u google-startup-scripts"
)
_NO_ADDRESS = "; without public addresses the subnetwork needs Private Google Access, and Cloud NAT to install packages"
_BILLED = frozenset({Stage.RUNNING, Stage.STARTING})


@dataclass(frozen=True)
class WorkerCase:
    """One worker in one round: what is wanted, observed and remembered."""

    fleet: FleetSpec
    worker: Worker
    observed: Observed
    history: History
    now: float

    @property
    def past(self) -> WorkerHistory:
        return history_of(self.history, self.worker)

    @property
    def policy(self) -> Policy:
        return self.fleet.policy

    @property
    def nodes(self) -> list[Node]:
        return self.observed.own.get(self.worker.id, [])

    @property
    def health(self) -> WorkerHealth:
        return self.observed.health_of(self.worker.id)

    @property
    def full_zones(self) -> set[str]:
        """The zones that have no quota now."""
        return {zone for zone, block in self.history.blocks.items() if self.now < block.until}

    @property
    def silent_zones(self) -> set[str]:
        """The zones that may contain a machine of the worker and did not answer."""
        return self.observed.unanswered.keys() & self.past.zones

    def heartbeat(self, node: Node) -> float | None:
        """Return the time of its heartbeat if it came from this machine and not from an earlier one."""
        beat = self.health.heartbeat
        return beat if beat is not None and beat > node.created else None

    def verdict(self, node: Node) -> Verdict:
        """Return its agent's verdict if it came from this machine."""
        return self.health.verdict if self.health.reported > node.created else ""

    def retry_time(self, attempt: int) -> float:
        return self.now + retry_delay(self.policy, self.worker.id, attempt)


def worker_cases(fleet: FleetSpec, observed: Observed, history: History, now: float) -> Iterator[WorkerCase]:
    for worker in fleet.workers:
        yield WorkerCase(fleet, worker, observed, history, now)


def history_of(history: History, worker: Worker) -> WorkerHistory:
    return history.workers.get(worker.id) or WorkerHistory(zone=worker.zone, other_zones=(worker.zone,))


def copy_history(fleet: FleetSpec, history: History) -> History:
    """Return a copy of the history. If the deployment is new, costs continue and verdicts are forgotten."""
    workers = {worker.id: replace(history_of(history, worker)) for worker in fleet.workers}
    copy = replace(history, workers=workers, blocks=dict(history.blocks), bills=dict(history.bills))
    if history.deployment != fleet.deployment:
        for past in workers.values():
            past.finished, past.gave_up, past.reported = False, "", False
            past.crashes = past.never_heard = past.failures = 0
            past.retry_at = 0.0
        copy.blocks, copy.stopped, copy.deployment = {}, "", fleet.deployment
    return copy


def update_history(fleet: FleetSpec, observed: Observed, history: History, now: float) -> History:
    history = copy_history(fleet, history)
    history.blocks = {zone: block for zone, block in history.blocks.items() if now < block.until}
    for case in worker_cases(fleet, observed, history, now):
        past, name = case.past, case.worker.name
        _check_pending(case)
        _record_verdict(case)
        if not past.finished and not history.stopped:
            _count_deaths(case)
        missing = not (case.nodes or past.finished or past.gave_up or history.stopped)
        past.no_machine_since = (past.no_machine_since or now) if missing else 0.0
        past.alarmed = missing and now - past.no_machine_since >= fleet.policy.no_machine_alarm
        if not case.nodes and (past.zone, name) in observed.foreign:
            past.note = f"{name} in {past.zone} is a machine that is not of this fleet"
        past.other_zones = tuple(sorted({*case.silent_zones, *(node.zone for node in case.nodes)}))
    _update_bills(observed, history, now)
    # Computed in every round, so that the fleet continues if the budget is raised.
    history.stopped = fleet.policy.stop or _budget_spent(fleet.policy.budget, history.dollars)
    return history


def _budget_spent(budget: float | None, dollars: float) -> str:
    return f"the budget of ${budget:.2f} is spent (${dollars:.2f})" if budget is not None and dollars >= budget else ""


def _check_pending(case: WorkerCase) -> None:
    """Forget a request that was carried out, failed or got lost."""
    observed, policy, past = case.observed, case.policy, case.past
    pending = past.pending
    if pending is None or pending.zone in observed.unanswered:
        return
    operation = observed.operations.get(pending.operation or "")
    done = operation is not None and operation.done
    if operation is not None and done and operation.error is not None:
        _record_failure(case, pending, operation.error)
        return
    here = [node for node in case.nodes if node.zone == pending.zone]
    waited = case.now - pending.since
    if pending.verb == "delete":
        gone = done or all(node.uid != pending.uid for node in here)
        if gone or waited > (policy.settle if pending.operation is None else policy.create_timeout):
            past.pending = None
            # A machine that is gone has returned its quota, so the zone can be tried again.
            case.history.blocks.pop(pending.zone, None)
        return
    if any(node.state is NodeState.READY for node in here):
        past.pending, past.failures, past.note = None, 0, ""
    # The request was never carried out, or its machine has come and gone. The next request uses the same zone: if the
    # first machine appears late, the two collide by name and cannot run side by side.
    lost = not here and operation is None and waited > policy.settle
    if done or lost or (here and pending.operation is None):
        past.pending = None


def _record_failure(case: WorkerCase, pending: Pending, error: SpileError) -> None:
    """Note a request that the cloud refused, and the block of the zone if it has no quota."""
    fleet, policy, past = case.fleet, case.policy, case.past
    past.pending, past.note = None, error.line()
    if pending.verb == "delete":
        past.retry_at = case.retry_time(1)
    elif isinstance(error, Quota):
        case.history.blocks[pending.zone] = ZoneBlock(case.now + policy.quota_retry, error.line())
        past.zone = next_zone(fleet, pending.zone, case.full_zones)
    else:
        past.failures += 1
        past.retry_at = case.retry_time(past.failures)
        if isinstance(error, Stockout):
            past.stockouts += 1
            zone = next_zone(fleet, past.zone, case.full_zones)
            if past.failures >= policy.stockouts_before_move and zone != past.zone:
                past.zone, past.failures = zone, 0


def _record_verdict(case: WorkerCase) -> None:
    health, past = case.health, case.past
    if health.verdict == "finished" and not past.finished:
        past.finished, past.note, past.retry_at = True, "finished", 0.0
    elif health.verdict == "refused" and not past.gave_up:
        past.gave_up = f"its worker refused its task: {_tail(health.error)}"


def _count_deaths(case: WorkerCase) -> None:
    """Count the end of each machine once, and remember which one is alive."""
    past = case.past
    starting = any(node.state.stage is Stage.STARTING for node in case.nodes)
    past.starting_since = (past.starting_since or case.now) if starting else 0.0
    for node in case.nodes:
        if node.uid == past.last_dead or node.state.stage is Stage.ENDING:
            continue
        reason = reason_to_replace(case, node)
        if reason:
            _count_death(case, node, reason)
        elif node.state.stage is Stage.RUNNING:
            past.alive, past.since = node.uid, node.created
            if case.heartbeat(node) is not None:
                past.never_heard = 0
    disappeared = past.alive and not case.nodes and past.alive != past.last_dead
    if disappeared and not case.silent_zones:
        gone = Node(case.worker.name, past.zone, NodeState.NOT_FOUND, uid=past.alive, created=past.since)
        _count_death(case, gone, "it disappeared")


def _count_death(case: WorkerCase, node: Node, reason: str) -> None:
    policy, past, stage = case.policy, case.past, node.state.stage
    past.last_dead, past.lost = node.uid, reason
    past.early_deaths = past.early_deaths + 1 if case.now - node.created < policy.early_death else 0
    if past.early_deaths > 1:
        past.retry_at = max(past.retry_at, case.retry_time(past.early_deaths))
    verdict = case.verdict(node) if stage is Stage.RUNNING else ""
    if stage in (Stage.DEAD, Stage.ABSENT):
        past.preemptions += 1
    elif verdict == "crashed":
        past.crashes += 1
        past.retry_at = case.retry_time(past.crashes)
        if past.crashes >= policy.max_crashes:
            past.gave_up = f"its worker crashed on {past.crashes} machines: {_tail(case.health.error)}"
    elif verdict != "refused":
        past.silences += 1
        if stage is Stage.RUNNING and case.heartbeat(node) is None:
            past.never_heard += 1
            if past.never_heard >= policy.max_never_heard:
                past.gave_up = f"{past.never_heard} machines in a row never reported: {_NEVER_HEARD}"
                past.gave_up += "" if case.fleet.machine.external_ips else _NO_ADDRESS


def _tail(text: str) -> str:
    return text.strip()[-2000:] or "it left no log"


def _update_bills(observed: Observed, history: History, now: float) -> None:
    bills = history.bills
    listed = {node.uid for nodes in observed.own.values() for node in nodes}
    for worker, nodes in observed.own.items():
        for node in nodes:
            if node.state.stage in _BILLED and node.state is not NodeState.QUEUED:
                started = bills[node.uid].started if node.uid in bills else min(node.created or now, now)
                price = dollars_per_hour(node.accelerator_type, node.preemptible)
                bills[node.uid] = Bill(worker, node.zone, started, now, price)
    for uid, bill in list(bills.items()):
        if uid not in listed and bill.zone not in observed.unanswered:
            history.settled += _final_bill(bills.pop(uid), observed, now).dollars
            history.blocks.pop(bill.zone, None)


def _final_bill(bill: Bill, observed: Observed, now: float) -> Bill:
    """Extend the bill of a machine that disappeared between two rounds to its worker's last report."""
    health = observed.health_of(bill.worker)
    last = max(health.heartbeat or 0.0, health.reported)
    alone = not observed.own.get(bill.worker)
    return replace(bill, seen=max(bill.seen, last)) if alone and last <= now else bill


def record_unanswered(fleet: FleetSpec, history: History, actions: Iterable[Action], now: float) -> History:
    """Return the history as if every answer were lost. It is stored before the requests are sent."""
    unknown = Operation(error=LostReply("requested; no answer yet"))
    return record(fleet, history, [(action, unknown) for action in actions if action.verb == "create"], now)


def record(fleet: FleetSpec, history: History, done: Iterable[tuple[Action, Operation]], now: float) -> History:
    """Return the history with the results of actions."""
    history = copy_history(fleet, history)
    cases = {case.worker.id: case for case in worker_cases(fleet, Observed(fleet.name), history, now)}
    for action, operation in done:
        if action.worker in cases:  # A machine of an earlier deployment has no history.
            _record(cases[action.worker], action, operation)
    return history


def _record(case: WorkerCase, action: Action, operation: Operation) -> None:
    past, error = case.past, operation.error
    if action.verb == "report":
        past.reported = True
        return
    if action.verb == "create":
        past.creates, past.zone = past.creates + 1, action.zone
    pending = Pending(action.verb, action.zone, case.now, operation.name or None, action.uid)
    if isinstance(error, Missing) and action.verb == "delete":
        past.pending = None
    elif error is None or isinstance(error, LostReply | Unavailable):
        past.pending, past.note = pending, error.line() if error else past.note
    else:
        _record_failure(case, pending, error)


@dataclass(frozen=True)
class Action:
    """An action and its reason."""

    verb: Literal["create", "delete", "report"]
    worker: int
    zone: str
    name: str
    reason: str
    uid: str = ""
    """The uid of the machine to delete."""
    queued: str | None = None
    """The queued resource that it belongs to."""


def retry_delay(policy: Policy, worker: int, attempt: int) -> float:
    """Return the seconds before the next request: doubling, capped, and with jitter that depends on the worker."""
    chance = int.from_bytes(hashlib.blake2b(f"{worker}:{attempt}".encode(), digest_size=4).digest()) / 2**32
    # A monitor with a shorter interval may retry sooner at first.
    base = min(policy.backoff_base, policy.interval)
    grown = base * 2.0 ** min(max(attempt - 1, 0), 20)
    return float(min(policy.backoff_cap, grown) * (0.5 + 0.5 * chance))


def next_zone(fleet: FleetSpec, zone: str, full: Collection[str] = ()) -> str:
    """Return the next zone that is not known to have no quota; the same zone if there is none."""
    zones = fleet.zones
    if not fleet.policy.move or zone not in zones:
        return zone
    place = zones.index(zone)
    return next((each for each in (*zones[place + 1 :], *zones[:place]) if each not in full), zone)


def reason_to_replace(case: WorkerCase, node: Node) -> str:
    """Return why a machine is not kept; empty if it is."""
    policy, now, state = case.policy, case.now, node.state
    if state.stage is Stage.DEAD:
        return f"it is {state.value}: {state.meaning}"
    if state.stage is Stage.STARTING:
        waited = now - case.past.starting_since if case.past.starting_since else 0.0
        late = state is not NodeState.QUEUED and waited > policy.create_timeout
        return f"it has been {state.value} for {waited:.0f} s" if late else ""
    if state.stage is not Stage.RUNNING:
        return ""
    verdict, beat, progress = case.verdict(node), case.heartbeat(node), case.health.progress
    if verdict == "crashed":
        return "its worker crashed again and again"
    if verdict == "refused":
        return "its worker refused its task"
    if beat is None and now - node.created > policy.heartbeat_limit():
        age = f"{now - node.created:.0f} s ago (limit {policy.heartbeat_limit():.0f})"
        return f"no heartbeat since it was created, {age}"
    limit = policy.heartbeat_limit(case.health.interval, slow=case.health.phase.slow)
    if beat is not None and now - beat > limit:
        return f"its heartbeat is {now - beat:.0f} s old (limit {limit:.0f})"
    idle = now - max(progress, node.created) if progress is not None else 0.0
    if idle > policy.stall:
        return f"it sends heartbeats but has made no progress for {idle:.0f} s (limit {policy.stall:.0f})"
    return ""


def decide(fleet: FleetSpec, observed: Observed, history: History, now: float) -> tuple[Action, ...]:
    """Return everything that has to be done now. The same input gives the same actions."""
    actions: list[Action] = []
    for case in worker_cases(fleet, observed, history, now):
        past, worker = case.past, case.worker
        if past.gave_up and not past.reported:
            actions.append(Action("report", worker.id, past.zone, worker.name, past.gave_up))
        over = _reason_to_end(case)
        if over:
            actions.extend(_delete(worker.id, node, over) for node in case.nodes if _deletable(case, node))
        elif past.finished:
            continue
        elif case.nodes:
            actions.extend(_keep_one(case))
        else:
            actions.extend(_create(case))
    known = {worker.id for worker in fleet.workers}
    left = [(worker, node) for worker, nodes in observed.own.items() if worker not in known for node in nodes]
    for number, node in left:
        if node.state.stage is not Stage.ENDING:
            actions.append(_delete(number, node, "no worker of this deployment needs it"))
    return tuple(actions)


def _reason_to_end(case: WorkerCase) -> str:
    """Return why this worker needs no machine; empty if it needs one."""
    if case.history.stopped:
        return case.history.stopped
    if case.past.finished:
        return "its work is finished" if case.policy.delete_finished else ""
    return f"given up: {case.past.gave_up}" if case.past.gave_up else ""


def _deletable(case: WorkerCase, node: Node) -> bool:
    pending = case.past.pending
    asked = pending is not None and pending.verb == "delete" and pending.uid == node.uid
    return node.state.stage is not Stage.ENDING and not asked


def _delete(worker: int, node: Node, reason: str) -> Action:
    return Action("delete", worker, node.zone, node.name, reason, uid=node.uid, queued=node.queued)


def _keep_one(case: WorkerCase) -> Iterator[Action]:
    """Keep one good machine of a worker and delete the others."""
    for place, node in enumerate(sorted(case.nodes, key=lambda node: _rank(case, node))):
        reason = reason_to_replace(case, node) or ("another machine serves this worker" if place else "")
        if reason and _deletable(case, node):
            yield _delete(case.worker.id, node, reason)


def _rank(case: WorkerCase, node: Node) -> tuple[int, float, str]:
    """Sort the best machine first: alive with a heartbeat, alive, starting, others; then the oldest."""
    order = {Stage.RUNNING: 1, Stage.STARTING: 2, Stage.ENDING: 3, Stage.DEAD: 4, Stage.ABSENT: 5}[node.state.stage]
    if order == 1 and case.heartbeat(node) is not None:
        order = 0
    return order, node.created, node.zone


def _create(case: WorkerCase) -> Iterator[Action]:
    """Request a machine for a worker that has none, if nothing prevents it."""
    observed, worker, past = case.observed, case.worker, case.past
    if past.pending is not None or case.now < past.retry_at or case.silent_zones:
        return
    zone, full = past.zone, case.full_zones
    if (zone, worker.name) in observed.foreign:
        free = [each for each in case.fleet.zones if (each, worker.name) not in observed.foreign and each not in full]
        if not free or not case.policy.move or free[0] in observed.unanswered:
            return
        zone = free[0]
    if zone in full:
        return
    reason = "it has no machine"
    if past.preemptions or past.silences or past.crashes:
        reason += f" (preempted {past.preemptions}, silent {past.silences}, crashed {past.crashes} times)"
    if zone != worker.zone:
        times = f"capacity {past.stockouts} times" if past.stockouts else "quota"
        reason += f"; {worker.zone} had no {times}"
    yield Action("create", worker.id, zone, worker.name, reason)
