"""The decisions about a fleet, as pure functions: they take the observation and the history and return actions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from spile.errors import SpileError
from spile.fleet.provider import Life, LostReply, Missing, Node, NodeState, Operation, Quota, Stockout, Unavailable
from spile.fleet.spec import (
    Bill,
    FleetSpec,
    History,
    Observed,
    Pending,
    Policy,
    Pulse,
    Verdict,
    Worker,
    WorkerHistory,
    ZoneBlock,
)


def past_of(history: History, worker: Worker) -> WorkerHistory:
    return history.workers.get(worker.id) or WorkerHistory(zone=worker.zone, used=(worker.zone,))


@dataclass(frozen=True)
class FleetCase:
    """The input of a decision: specification, observation, history and time."""

    fleet: FleetSpec
    observed: Observed
    history: History
    now: float

    def workers(self) -> Iterator[WorkerCase]:
        for worker in self.fleet.workers:
            yield WorkerCase(self.fleet, worker, past_of(self.history, worker), self.now, self.observed, self.history)


@dataclass(frozen=True)
class WorkerCase:
    """The case of one worker. ``past`` may be newer than the fleet's history."""

    fleet: FleetSpec
    worker: Worker
    past: WorkerHistory
    now: float
    observed: Observed = field(default_factory=lambda: Observed(""))
    history: History = field(default_factory=History)

    def with_history(self, past: WorkerHistory) -> WorkerCase:
        return self if past is self.past else replace(self, past=past)

    @property
    def policy(self) -> Policy:
        return self.fleet.policy

    @property
    def full_zones(self) -> frozenset[str]:
        """The zones that have no quota now."""
        return frozenset(zone for zone, block in self.history.blocks.items() if self.now < block.until)

    @property
    def nodes(self) -> list[Node]:
        return self.observed.own.get(self.worker.id, [])

    @property
    def pulse(self) -> Pulse:
        """The worker's heartbeat and agent report from the bucket."""
        return self.observed.pulse(self.worker.id)

    def beat(self, node: Node) -> float | None:
        """Return the time of its heartbeat if it came from this machine and not from an earlier one."""
        beat = self.pulse.beat
        return beat if beat is not None and beat > node.created else None

    def verdict(self, node: Node) -> Verdict:
        """Return its agent's verdict if it came from this machine."""
        return self.pulse.verdict if self.pulse.reported > node.created else ""


_NEVER_HEARD = (
    "may they read and write the bucket (--service-account)? Their startup log: journalctl -u google-startup-scripts"
)
_BILLED = frozenset({Life.ALIVE, Life.COMING})


@dataclass(frozen=True)
class ActionOutcome:
    """The result of an action: an operation or an error."""

    operation: Operation | None = None
    error: SpileError | None = None


def begin(fleet: FleetSpec, history: History) -> History:
    """Start a new deployment: costs continue, verdicts of the last one are forgotten."""
    if history.deployment == fleet.deployment:
        return history
    workers = {
        worker.id: replace(
            past_of(history, worker),
            finished=False,
            gave_up="",
            reported=False,
            crashes=0,
            never_heard=0,
            failures=0,
            retry_at=0.0,
        )
        for worker in fleet.workers
    }
    return replace(history, workers=workers, blocks={}, stopped="", deployment=fleet.deployment)


def update_history(look: FleetCase) -> History:
    look = replace(look, history=begin(look.fleet, look.history))
    fleet, observed, history, now = look.fleet, look.observed, look.history, look.now
    blocks = {zone: block for zone, block in history.blocks.items() if now < block.until}
    workers = dict(history.workers)
    for case in look.workers():
        before = case.past.pending
        past, block = _answers(case)
        if block is not None and before is not None:
            blocks[before.zone] = block
        elif before is not None and before.verb == "delete" and past.pending is None:
            # A machine that is gone has returned its quota, so the zone can be tried again.
            blocks.pop(before.zone, None)
        past = _verdicts(case.with_history(past))
        if not past.finished and not history.stopped:
            past = _deaths(case.with_history(past))
        past = _without_machine(case.with_history(past))
        name = case.worker.name
        if not case.nodes and (past.zone, name) in observed.foreign:
            past = replace(past, note=f"{name} in {past.zone} is a machine that is not of this fleet")
        workers[case.worker.id] = past.with_facts(used=_used(observed, past, case.nodes))
    history = _bills(replace(look, history=replace(history, workers=workers, blocks=blocks)))
    # Computed in every round, so that the fleet continues if the budget is raised.
    return replace(history, stopped=fleet.policy.stop or _spent(fleet.policy.budget, history.dollars))


def _without_machine(case: WorkerCase) -> WorkerHistory:
    """Remember since when a worker that needs a machine has none, and whether that is too long."""
    past = case.past
    missing = not (case.nodes or past.finished or past.gave_up or case.history.stopped)
    since = (past.without or case.now) if missing else 0.0
    return past.with_facts(without=since, alarmed=missing and case.now - since >= case.policy.no_machine_alarm)


def _spent(budget: float | None, dollars: float) -> str:
    return f"the budget of ${budget:.2f} is spent (${dollars:.2f})" if budget is not None and dollars >= budget else ""


def _used(observed: Observed, past: WorkerHistory, nodes: list[Node]) -> tuple[str, ...]:
    """Return the zones where a machine of the worker may exist."""
    waiting = [past.pending.zone] if past.pending else []
    unseen = [zone for zone in past.used if zone in observed.unanswered]
    return tuple(dict.fromkeys([past.zone, *waiting, *unseen, *(node.zone for node in nodes)]))


def _answers(case: WorkerCase) -> tuple[WorkerHistory, ZoneBlock | None]:
    """Return the history after a check on the pending request, and the block of its zone if it failed for quota."""
    observed, policy, past, now = case.observed, case.policy, case.past, case.now
    pending = past.pending
    if pending is None or pending.zone in observed.unanswered:
        return past, None
    here = [node for node in case.nodes if node.zone == pending.zone]
    operation = observed.operations.get(pending.operation or "")
    if operation is not None and operation.done and operation.error is not None:
        return _failed(case, pending, operation.error)
    if pending.verb == "delete":
        gone = all(node.uid != pending.uid for node in here)
        if gone or (operation is not None and operation.done) or now - pending.since > policy.create_timeout:
            return replace(past, pending=None), None
        if pending.operation is None and now - pending.since > policy.settle:
            return replace(past, pending=None), None
        return past, None
    if any(node.state is NodeState.READY for node in here):
        return replace(past, pending=None, failures=0, note=""), None
    if here and (pending.operation is None or (operation is not None and operation.done)):
        return replace(past, pending=None), None
    if not here and (operation is not None and operation.done):
        return replace(past, pending=None), None
    if not here and operation is None and now - pending.since > policy.settle:
        # The request was never carried out, or its machine has come and gone. Use the same zone again: if the first
        # machine appears late, the two collide by name and cannot run side by side.
        return replace(past, pending=None, retry_at=now), None
    return past, None


def _failed(case: WorkerCase, pending: Pending, error: SpileError) -> tuple[WorkerHistory, ZoneBlock | None]:
    """Return the history after a request that the cloud refused, and the block of the zone if it has no quota."""
    fleet, worker, now = case.fleet, case.worker, case.now
    past = replace(case.past, pending=None, note=error.line())
    if pending.verb == "delete":
        return replace(past, retry_at=now + delay(fleet.policy, worker.id, 1)), None
    if isinstance(error, Quota):
        zone = next_zone(fleet, pending.zone, {*case.full_zones, pending.zone})
        past = replace(past, zone=zone, used=tuple(dict.fromkeys([*past.used, zone])))
        return past, ZoneBlock(now + fleet.policy.quota_retry, error.line())
    failures = past.failures + 1
    past = replace(past, failures=failures, retry_at=now + delay(fleet.policy, worker.id, failures))
    if isinstance(error, Stockout):
        past = replace(past, stockouts=past.stockouts + 1)
        if failures >= fleet.policy.stockouts_before_move:
            zone = next_zone(fleet, past.zone, case.full_zones)
            used = tuple(dict.fromkeys([*past.used, zone]))
            past = replace(past, zone=zone, used=used, failures=0 if zone != past.zone else failures)
    return past, None


def _verdicts(case: WorkerCase) -> WorkerHistory:
    pulse, past = case.pulse, case.past
    if pulse.verdict == "finished" and not past.finished:
        return replace(past, finished=True, note="finished", retry_at=0.0)
    if pulse.verdict == "refused" and not past.gave_up:
        return replace(past, gave_up=f"its worker refused its task: {_tail(pulse.error)}")
    return past


def _deaths(case: WorkerCase) -> WorkerHistory:
    """Count the end of each machine once, and remember which one is alive."""
    coming = [node for node in case.nodes if node.state.life is Life.COMING]
    past = case.past.with_facts(coming=(case.past.coming or case.now) if coming else 0.0)
    for node in case.nodes:
        if node.uid == past.last_dead or node.state.life is Life.LEAVING:
            continue
        current = case.with_history(past)
        health = health_of(current, node)
        if not health.fine:
            past = replace(_count_death(current, node, silent=health.silent), lost=health.reason)
        elif node.state.life is Life.ALIVE:
            heard = case.beat(node) is not None
            never_heard = 0 if heard else past.never_heard
            past = past.with_facts(alive=node.uid, since=node.created, never_heard=never_heard)
    vanished = past.alive and not case.nodes and past.alive != past.last_dead and not past.finished
    if vanished and not case.observed.unanswered.intersection(past.used):
        gone = Node(case.worker.name, past.zone, NodeState.NOT_FOUND, uid=past.alive, created=past.since)
        past = replace(_count_death(case.with_history(past), gone, silent=False), lost="it vanished")
    return past


def _count_death(case: WorkerCase, node: Node, *, silent: bool) -> WorkerHistory:
    policy, worker, past, now = case.policy, case.worker, case.past, case.now
    early = past.early_deaths + 1 if now - node.created < policy.early_death else 0
    wait = now + delay(policy, worker.id, early) if early > 1 else past.retry_at
    past = replace(past, last_dead=node.uid, early_deaths=early, retry_at=max(past.retry_at, wait))
    if case.verdict(node) == "crashed" and node.state.life is Life.ALIVE:
        crashes = past.crashes + 1
        past = replace(past, crashes=crashes, retry_at=now + delay(policy, worker.id, crashes))
        if crashes >= policy.max_crashes:
            tail = _tail(case.pulse.error)
            past = replace(past, gave_up=f"its worker crashed on {crashes} machines: {tail}")
        return past
    if silent:
        past = replace(past, silences=past.silences + 1)
        if node.state.life is Life.ALIVE and case.beat(node) is None:
            count = past.never_heard + 1
            past = replace(past, never_heard=count)
            if count >= policy.max_never_heard:
                past = replace(past, gave_up=f"{count} machines in a row gave no sign of life: {_NEVER_HEARD}")
        return past
    if node.state.life in (Life.DEAD, Life.ABSENT):
        return replace(past, preemptions=past.preemptions + 1)
    return past


def _tail(text: str) -> str:
    return text.strip()[-2000:] or "it left no log"


def _bills(case: FleetCase) -> History:
    fleet, observed, history, now = case.fleet, case.observed, case.history, case.now
    bills, blocks = dict(history.bills), dict(history.blocks)
    listed = {node.uid for nodes in observed.own.values() for node in nodes}
    for worker, nodes in observed.own.items():
        for node in nodes:
            if node.state.life not in _BILLED or node.state is NodeState.QUEUED:
                continue
            old = bills.get(node.uid)
            started = old.started if old else min(node.created or now, now)
            bills[node.uid] = Bill(worker, node.zone, started, now, fleet.dollars_per_hour(node))
    settled = history.settled
    for uid, bill in list(bills.items()):
        if uid not in listed and bill.zone not in observed.unanswered:
            settled += _final(bills.pop(uid), observed, now).dollars
            blocks.pop(bill.zone, None)
    return replace(history, bills=bills, settled=settled, blocks=blocks)


def _final(bill: Bill, observed: Observed, now: float) -> Bill:
    """Extend the bill of a machine that disappeared between two rounds to its worker's last report."""
    pulse = observed.pulse(bill.worker)
    last = max(pulse.beat or 0.0, pulse.reported)
    alone = not observed.own.get(bill.worker)
    return replace(bill, seen=max(bill.seen, last)) if alone and last <= now else bill


def intend(fleet: FleetSpec, history: History, actions: Iterable[Action], now: float) -> History:
    """Return the history as if every answer were lost. It is stored before the requests are sent."""
    unknown = ActionOutcome(error=LostReply("asked for, and no answer yet"))
    return record(fleet, history, [(action, unknown) for action in actions if action.verb == "create"], now)


def record(fleet: FleetSpec, history: History, done: Iterable[tuple[Action, ActionOutcome]], now: float) -> History:
    workers, blocks = dict(history.workers), dict(history.blocks)
    by_id = {worker.id: worker for worker in fleet.workers}
    for action, outcome in done:
        worker = by_id.get(action.worker)
        if worker is None:  # A machine of an earlier deployment has no history.
            continue
        past = workers.get(worker.id) or past_of(history, worker)
        workers[worker.id], block = _recorded(
            WorkerCase(fleet, worker, past, now, history=replace(history, blocks=blocks)), action, outcome
        )
        if block is not None:
            blocks[action.zone] = block
    return replace(history, workers=workers, blocks=blocks)


def _recorded(case: WorkerCase, action: Action, outcome: ActionOutcome) -> tuple[WorkerHistory, ZoneBlock | None]:
    past = case.past
    if action.verb == "report":
        return replace(past, reported=True), None
    error, operation = outcome.error, outcome.operation
    pending = Pending(action.verb, action.zone, case.now, operation.name if operation else None, action.uid)
    if action.verb == "create":
        used = tuple(dict.fromkeys([*past.used, action.zone]))
        past = replace(past, creates=past.creates + 1, zone=action.zone, used=used)
    if isinstance(error, Missing) and action.verb == "delete":
        return replace(past, pending=None), None
    if error is None or isinstance(error, LostReply | Unavailable):
        return replace(past, pending=pending, note=error.line() if error else past.note), None
    return _failed(replace(case, past=past), pending, error)


Verb = Literal["create", "delete", "report"]


@dataclass(frozen=True)
class Action:
    """An action and its reason."""

    verb: Verb
    worker: int
    zone: str
    name: str
    reason: str
    uid: str = ""
    """The uid of the machine to delete."""
    queued: str | None = None
    """The queued resource that it belongs to."""


@dataclass(frozen=True)
class Health:
    """The judgement of a machine."""

    fine: bool
    reason: str = ""
    """Why the machine is not kept."""
    silent: bool = False


def delay(policy: Policy, worker: int, attempt: int) -> float:
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


def health_of(case: WorkerCase, node: Node) -> Health:
    """Return whether a machine is kept, and why not."""
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
    """Return everything that has to be done now. The same input gives the same actions."""
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
    """Delete machines of workers that this deployment does not have."""
    known = {worker.id for worker in case.fleet.workers}
    for worker, nodes in case.observed.own.items():
        if worker in known:
            continue
        for node in nodes:
            if node.state.life is not Life.LEAVING:
                reason = "no worker of this deployment needs it"
                yield Action("delete", worker, node.zone, node.name, reason, uid=node.uid, queued=node.queued)


def _over(case: WorkerCase) -> str:
    """Return why this worker needs no machine; empty if it needs one."""
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
    """Keep one good machine of a worker and delete the others."""
    if case.past.finished:
        return
    for place, node in enumerate(sorted(case.nodes, key=lambda node: _rank(case, node))):
        health = health_of(case, node)
        reason = health.reason if not health.fine else "another machine serves this worker" if place else ""
        if reason and _deletable(case, node):
            yield _delete(case, node, reason)


def _rank(case: WorkerCase, node: Node) -> tuple[int, float, str]:
    """Sort the best machine first: alive with a heartbeat, alive, starting, others; then the oldest."""
    order = {Life.ALIVE: 1, Life.COMING: 2, Life.LEAVING: 3, Life.DEAD: 4, Life.ABSENT: 5}[node.state.life]
    if order == 1 and case.beat(node) is not None:
        order = 0
    return order, node.created, node.zone


def _make(case: WorkerCase) -> Iterator[Action]:
    """Request a machine for a worker that has none, if nothing prevents it."""
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
        times = f"capacity {past.stockouts} times" if past.stockouts else "quota"
        reason += f"; {worker.zone} had no {times}"
    yield Action("create", worker.id, zone, worker.name, reason)
