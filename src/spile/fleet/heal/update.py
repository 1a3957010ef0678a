"""How a fleet's history grows: from what is seen, and from what was done. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spile.errors import SpileError
from spile.fleet.cloud.provider import LostReply, Missing, Node, Operation, Quota, Stockout, Unavailable
from spile.fleet.cloud.states import Life, NodeState
from spile.fleet.heal.case import FleetCase, WorkerCase, past_of
from spile.fleet.heal.history import Bill, History, Pending, WorkerHistory, ZoneBlock
from spile.fleet.heal.observed import Observed
from spile.fleet.heal.reconcile import Action, delay, health_of, next_zone
from spile.fleet.spec import FleetSpec

__all__ = ["ActionOutcome", "begin", "intend", "record", "update_history"]

_NEVER_HEARD = (
    "may they read and write the bucket (--service-account)? Their startup log: journalctl -u google-startup-scripts"
)
_BILLED = frozenset({Life.ALIVE, Life.COMING})


@dataclass(frozen=True)
class ActionOutcome:
    """What came of an action: an operation, or an error."""

    operation: Operation | None = None
    error: SpileError | None = None


def begin(fleet: FleetSpec, history: History) -> History:
    """A new deployment: the bill goes on, what was finished or given up does not."""
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
    """What a look at the cloud and the bucket adds."""
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
            # A machine that is gone has given its quota back: no need to wait the block out.
            blocks.pop(before.zone, None)
        past = _verdicts(case.knowing(past))
        if not past.finished and not history.stopped:
            past = _deaths(case.knowing(past))
        name = case.worker.name
        if not case.nodes and (past.zone, name) in observed.foreign:
            past = replace(past, note=f"{name} in {past.zone} is a machine that is not of this fleet")
        workers[case.worker.id] = past.with_facts(used=_used(observed, past, case.nodes))
    history = _bills(replace(look, history=replace(history, workers=workers, blocks=blocks)))
    # Worked out anew each time, so that a budget that is raised lets the fleet go on.
    return replace(history, stopped=fleet.policy.stop or _spent(fleet.policy.budget, history.dollars))


def _spent(budget: float | None, dollars: float) -> str:
    return f"the budget of ${budget:.2f} is spent (${dollars:.2f})" if budget is not None and dollars >= budget else ""


def _used(observed: Observed, past: WorkerHistory, nodes: list[Node]) -> tuple[str, ...]:
    """The zones where a machine of the worker may be: those that did not answer stay, those that did tell."""
    waiting = [past.pending.zone] if past.pending else []
    unseen = [zone for zone in past.used if zone in observed.unanswered]
    return tuple(dict.fromkeys([past.zone, *waiting, *unseen, *(node.zone for node in nodes)]))


def _answers(case: WorkerCase) -> tuple[WorkerHistory, ZoneBlock | None]:
    """What became of a request that was without an answer."""
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
        # Nobody knows of it: it was never carried out, or has come and gone. The same zone again, so that a
        # latecomer and its successor could only collide in name, never live side by side.
        return replace(past, pending=None, retry_at=now), None
    return past, None


def _failed(case: WorkerCase, pending: Pending, error: SpileError) -> tuple[WorkerHistory, ZoneBlock | None]:
    """A request that the cloud refused for certain."""
    fleet, worker, now = case.fleet, case.worker, case.now
    past = replace(case.past, pending=None, note=error.line())
    if pending.verb == "delete":
        return replace(past, retry_at=now + delay(fleet.policy, worker.id, 1)), None
    if isinstance(error, Quota):
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
    """Count each machine's end once, and remember which one lives."""
    coming = [node for node in case.nodes if node.state.life is Life.COMING]
    past = case.past.with_facts(coming=(case.past.coming or case.now) if coming else 0.0)
    for node in case.nodes:
        if node.uid == past.last_dead or node.state.life is Life.LEAVING:
            continue
        current = case.knowing(past)
        health = health_of(current, node)
        if not health.fine:
            past = replace(_count_death(current, node, silent=health.silent), lost=health.reason)
        elif node.state.life is Life.ALIVE:
            heard = case.beat(node) is not None
            unheard = 0 if heard else past.never_heard
            past = past.with_facts(alive=node.uid, since=node.created, never_heard=unheard)
    vanished = past.alive and not case.nodes and past.alive != past.last_dead and not past.finished
    if vanished and not case.observed.unanswered.intersection(past.used):
        gone = Node(case.worker.name, past.zone, NodeState.NOT_FOUND, uid=past.alive, created=past.since)
        past = replace(_count_death(case.knowing(past), gone, silent=False), lost="it vanished")
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
    """A machine that went while nobody looked lived at least until its worker's last sign of life."""
    pulse = observed.pulse(bill.worker)
    last = max(pulse.beat or 0.0, pulse.said)
    alone = not observed.own.get(bill.worker)
    return replace(bill, seen=max(bill.seen, last)) if alone and last <= now else bill


def intend(fleet: FleetSpec, history: History, actions: Iterable[Action], now: float) -> History:
    """What is about to be asked for, as if every answer were lost: stored first, so a monitor's death leaves no gap."""
    unknown = ActionOutcome(error=LostReply("asked for, and no answer yet"))
    return record(fleet, history, [(action, unknown) for action in actions if action.verb == "create"], now)


def record(fleet: FleetSpec, history: History, done: Iterable[tuple[Action, ActionOutcome]], now: float) -> History:
    """What actions that were carried out add."""
    workers, blocks = dict(history.workers), dict(history.blocks)
    by_id = {worker.id: worker for worker in fleet.workers}
    for action, outcome in done:
        worker = by_id.get(action.worker)
        if worker is None:  # a leftover of an earlier deployment has no history
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
