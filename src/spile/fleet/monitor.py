"""Watch a fleet and keep its machines running: one round after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import requests

from spile.errors import CloudError, SpecError, SpileError, UserError
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.home import (
    FleetHome,
    Holder,
    Lease,
    WorkerReport,
    bucket_clock,
    check_pinned,
    machine_metadata,
)
from spile.fleet.manage import Metadata, delete_machine, queued_without_nodes, request_machine
from spile.fleet.provider import Missing, Node, NodeState, Operation, QueuedResource, Quota, Stage
from spile.fleet.reconcile import (
    Action,
    WorkerCase,
    copy_history,
    decide,
    history_of,
    reason_to_replace,
    record,
    record_unanswered,
    update_history,
    worker_cases,
)
from spile.fleet.spec import FleetSpec, History, Observed, Worker, WorkerHealth, WorkerHistory, owns
from spile.objects import open_folder
from spile.spec.amounts import duration
from spile.spec.phase import Phase
from spile.store.claims import ClaimOwner, ClaimReader
from spile.store.heartbeat import INTERVAL
from spile.store.snapshot import Snapshot, SnapshotReader, State, StreamView

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class RoundResult:
    """The result of one round."""

    observed: Observed
    history: History
    done: tuple[tuple[Action, Operation], ...] = ()


def _attempt(request: Callable[..., Out], *arguments: Any) -> Out | SpileError:
    """Return the answer of the cloud, or its error."""
    try:
        return request(*arguments)
    except (CloudError, UserError) as error:
        return error


def _each(pool: Executor | None, function: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
    return list(pool.map(function, items) if pool is not None else map(function, items))


def zone_nodes(fleet: FleetSpec, provider: CloudTpu, zone: str) -> list[Node]:
    """Return the nodes of a zone; a queued resource without a node is shown as one."""
    nodes = provider.nodes(zone)
    if not fleet.queued:
        return nodes
    return [*nodes, *(_node_of(each) for each in queued_without_nodes(provider.queued(zone), nodes))]


def _node_of(queued: QueuedResource) -> Node:
    return Node(
        name=queued.nodes[0] if queued.nodes else queued.name,
        zone=queued.zone,
        state=queued.state.node,
        accelerator_type=queued.accelerator_type,
        uid=f"queued-{queued.name}-{queued.created}",
        created=queued.created,
        labels=queued.labels,
        queued=queued.name,
    )


def observe(
    fleet: FleetSpec,
    provider: CloudTpu,
    history: History,
    health: Mapping[int, WorkerHealth],
    pool: Executor | None = None,
    *,
    home: str = "",
) -> Observed:
    """List every zone, and request the state of every pending operation. Zones fail independently."""
    zones = fleet.possible_zones
    listed = _each(pool, partial(_attempt, zone_nodes, fleet, provider), zones)
    found = dict(zip(zones, listed, strict=True))
    waiting = [past.pending for past in history.workers.values() if past.pending and past.pending.operation]
    # The state of an operation that cannot be read shows in the next listing.
    asked = _each(pool, lambda each: _attempt(provider.operation, each.zone, each.operation), waiting)
    return Observed(
        fleet=fleet.name,
        home=home,
        nodes=tuple(node for nodes in found.values() if isinstance(nodes, list) for node in nodes),
        unanswered={zone: error for zone, error in found.items() if isinstance(error, SpileError)},
        operations={each.name: each for each in asked if isinstance(each, Operation)},
        health=health,
    )


def perform(
    fleet: FleetSpec,
    provider: CloudTpu,
    actions: Iterable[Action],
    metadata: Metadata,
    held: Callable[[], bool],
    pool: Executor | None = None,
) -> tuple[tuple[Action, Operation], ...]:
    """Carry out actions, zones in parallel. After a quota error no more machines are requested in that zone."""
    zones: dict[str, list[Action]] = {}
    for action in actions:
        zones.setdefault(action.zone, []).append(action)

    def one_zone(mine: list[Action]) -> list[tuple[Action, Operation]]:
        done: list[tuple[Action, Operation]] = []
        full = False
        for action in mine:
            if not held():
                break
            if full and action.verb == "create":
                continue
            performed = _attempt(_perform_one, fleet, provider, action, metadata)
            operation = performed if isinstance(performed, Operation) else Operation(error=performed)
            full = full or isinstance(operation.error, Quota)
            done.append((action, operation))
        return done

    return tuple(pair for done in _each(pool, one_zone, zones.values()) for pair in done)


def _perform_one(fleet: FleetSpec, provider: CloudTpu, action: Action, metadata: Metadata) -> Operation:
    zone, name = action.zone, action.name
    if action.verb == "create":
        return request_machine(provider, fleet, action.worker, zone, name, metadata)
    if action.verb == "delete":
        node = provider.node(zone, name) if action.queued is None else None
        if node is not None and (node.uid != action.uid or not owns(fleet.name, node)):
            raise Missing(f"{name} in {zone} was replaced by a new machine")
        return delete_machine(provider, fleet.name, zone, name, action.queued)
    return Operation()


def run_round(
    fleet: FleetSpec,
    provider: CloudTpu,
    history: History,
    health: Mapping[int, WorkerHealth],
    *,
    clock: Callable[[], float],
    held: Callable[[], bool],
    metadata: Metadata,
    save: Callable[[History], None],
    may_create: bool = True,
    pool: Executor | None = None,
    home: str = "",
) -> RoundResult:
    """Run one round: observe, decide and act. Without the lease it only observes.

    Requests are stored in the history before they are sent. If ``may_create`` is False, no machine is created.
    Machines of a fleet of the same name with another ``home`` are not touched.
    """
    observed = observe(fleet, provider, history, health, pool, home=home)
    history = update_history(fleet, observed, history, clock())
    if not held():
        return RoundResult(observed, history)
    actions = [each for each in decide(fleet, observed, history, clock()) if may_create or each.verb != "create"]
    if any(action.verb == "create" for action in actions):
        save(record_unanswered(fleet, history, actions, clock()))
    done = perform(fleet, provider, actions, metadata, held, pool)
    history = record(fleet, history, done, clock())
    if held():
        save(history)
    return RoundResult(observed, history, done)


def views_by_worker(snapshot: Snapshot, owners: Mapping[int, ClaimOwner]) -> dict[str, StreamView]:
    """Return what each worker has done: the streams that it held last, added up, with the state of the newest one."""
    held: dict[str, list[tuple[bool, StreamView]]] = {}
    for view in snapshot.streams:
        owner = owners.get(view.number)
        if owner is not None:
            held.setdefault(owner.worker, []).append((owner.active, view))
    found = {}
    for worker, views in held.items():
        _, current = max(views, key=lambda each: (each[0], -(math.inf if each[1].age is None else each[1].age)))
        sums = {name: sum(getattr(view, name) for _, view in views) for name in _SUMS}
        rate = sum(view.tokens_per_second for active, view in views if active)
        sizes = [view.expected for _, view in views]
        expected = None if None in sizes else sum(size for size in sizes if size is not None)
        found[worker] = replace(current, tokens_per_second=rate, expected=expected, **sums)
    return found


_SUMS = ("samples", "shards", "committed", "tokens", "bytes", "retries")


def worker_health(
    fleet: FleetSpec, reports: Mapping[str, WorkerReport], snapshot: Snapshot, owners: Mapping[int, ClaimOwner]
) -> dict[int, WorkerHealth]:
    """Return the health of each worker: from its agent's report or its own heartbeat, whichever is newer."""
    views = views_by_worker(snapshot, owners)
    found = {}
    for worker in fleet.workers:
        report, view = reports.get(worker.name), views.get(worker.name)
        if report is None or report.deployment not in ("", fleet.deployment):
            report = WorkerReport(worker.name)
        beats = [(report.updated, report.phase)] if report.updated else []
        steps = [moment for moment, _ in beats]
        if view is not None and view.age is not None:
            beats.append((snapshot.taken - view.age, view.phase))
            steps.append(snapshot.taken - (view.age if view.idle is None else view.idle))
        beat, phase = max(beats, default=(None, Phase.UNKNOWN))
        error = report.error or (view and view.last_error) or ""
        progress = max(steps, default=None)
        interval = INTERVAL if view is None else view.interval
        found[worker.id] = WorkerHealth(
            beat, phase, report.verdict, report.updated, error, interval, progress, crash_loop(report)
        )
    return found


def crash_loop(report: WorkerReport | None) -> str:
    """Return the note for a worker that its agent keeps restarting; empty if it runs."""
    if report is None or report.verdict or report.exit_code in (None, 0):
        return ""
    line = report.error.strip().rpartition("\n")[2].removeprefix("spile: ")
    return f"restarted {report.launches - 1}×, exit code {report.exit_code}" + (f": {line}" if line else "")


def worker_problems(fleet: FleetSpec, reports: Mapping[str, WorkerReport], history: History) -> Iterator[str]:
    """Yield a line for each worker that does not work, from the reports of this deployment and the stored history."""
    for worker in fleet.workers:
        report = reports.get(worker.name)
        past = history_of(history if history.deployment == fleet.deployment else History(), worker)
        if report is None and not past.finished:
            why = past.gave_up or past.note or past.lost
            yield f"{worker.name} has not reported" + (f": {why}" if why else "")
        elif report is not None and report.verdict in ("crashed", "refused"):
            yield f"{worker.name} {report.verdict}"
        elif loop := crash_loop(report):
            yield f"{worker.name}: {loop}"


@dataclass(frozen=True)
class WorkerStatus:
    """One line of the table."""

    worker: Worker
    zone: str
    machine: NodeState
    view: StreamView
    past: WorkerHistory
    healthy: bool
    """READY with a fresh heartbeat, or finished."""
    failing: bool
    """Whether its machine has to be replaced, or its worker keeps crashing."""
    note: str

    @property
    def working(self) -> bool:
        return self.healthy and not self.past.finished

    @property
    def needs_recovery(self) -> bool:
        """Whether it is not finished and its machine is dead, gone, silent or its worker keeps crashing."""
        return self.failing and not self.past.finished


_COUNTS = ("samples", "shards", "committed")
_PAST = ("finished", "gave_up", "preemptions", "crashes", "stockouts")


@dataclass(frozen=True)
class FleetStatus:
    """The state of a fleet at one moment."""

    fleet: FleetSpec
    snapshot: Snapshot
    history: History
    workers: tuple[WorkerStatus, ...]
    actions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    holder: Holder | None = None
    """The active monitor, if it is another one."""
    machines: int = 0
    """The number of machines of this fleet, in any state."""
    taken: float = 0.0
    refusal: UserError | None = None
    """The error, if the cloud refuses every request."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do and no machine is left."""
        pasts = [worker.past for worker in self.workers]
        ended = bool(self.history.stopped) or all(past.finished or past.gave_up for past in pasts)
        left = self.machines if self.fleet.policy.delete_finished or self.history.stopped else 0
        return ended and not left and all(past.pending is None for past in pasts)

    @property
    def failed(self) -> bool:
        """Whether it ended before the run was complete."""
        if all(worker.past.finished for worker in self.workers):
            return False
        return bool(self.history.stopped) or any(worker.past.gave_up for worker in self.workers)

    @property
    def percent(self) -> float | None:
        """Percent of all samples; None while the number of samples is not known."""
        if len(self.snapshot.streams) < self.fleet.stream_count:
            return None
        return self.snapshot.percent

    @property
    def healthy(self) -> int:
        return sum(worker.healthy for worker in self.workers)

    @property
    def working(self) -> int:
        return sum(worker.working for worker in self.workers)

    @property
    def needs_recovery(self) -> int:
        return sum(worker.needs_recovery for worker in self.workers)

    def to_json(self) -> dict[str, Any]:
        return {
            "fleet": self.fleet.name,
            "root": self.fleet.root,
            "taken": self.taken,
            "workers": [
                {
                    "id": each.worker.id,
                    "name": each.worker.name,
                    "zone": each.zone,
                    "status": each.machine.value,
                    "phase": each.view.phase,
                    **{name: getattr(each.view, name) for name in _COUNTS},
                    **{name: getattr(each.past, name) for name in _PAST},
                    "healthy": each.healthy,
                    "note": each.note,
                }
                for each in self.workers
            ],
            "totals": {name: self.snapshot.total(name) for name in (*_COUNTS, "tokens", "bytes", "tokens_per_second")},
            **{name: getattr(self, name) for name in ("percent", "healthy", "working", "needs_recovery")},
            "seconds_left": self.snapshot.seconds_left,
            "dollars": round(self.history.dollars, 4),
            "stopped": self.history.stopped,
            "machines": self.machines,
            "over": self.over,
            "monitor": None if self.holder is None else self.holder.owner,
            "actions": list(self.actions),
            "problems": list(self.problems),
            "quarantined": self.snapshot.quarantined,
            "cut": self.snapshot.cut,
        }


class FleetMonitor:
    """Watches a fleet, and replaces machines while it holds the lease."""

    def __init__(
        self,
        home: FleetHome,
        provider: CloudTpu,
        *,
        clock: Callable[[], float] | None = None,
        pool: Executor | None = None,
        policy: Mapping[str, Any] | None = None,
        watch_only: bool = False,
        may_create: bool = True,
        owner: str | None = None,
    ) -> None:
        """Open the fleet. ``policy`` has the fields of the fleet's policy that this monitor changes.

        If ``may_create`` is False no machine is created, so the deployment need not be known outside of the bucket.
        """
        self._home, self._provider, self._pool, self._policy = home, provider, pool, policy or {}
        self._clock = clock or (time.time if watch_only else bucket_clock(home.folder))
        self._watch_only, self._may_create = watch_only, may_create and not watch_only
        self._deployed: FleetSpec
        self._pin = ""
        self._unknown_deployment: UserError | None = None
        self.fleet = self._read_fleet()
        ttl = 4 * self.fleet.policy.interval + 30.0
        self.lease = Lease(home.folder, clock=self._clock, ttl=ttl, owner=owner)
        self._history = home.read_history()
        self._number = 0
        self._root = ""
        self._readers: tuple[SnapshotReader, ClaimReader]

    def step(self) -> FleetStatus:
        self.fleet = self._read_fleet()
        holder = self.lease.holder() if self._watch_only else self.lease.take()
        number = self.lease.number
        if number != self._number or not number:
            # This monitor is new, or another one acts: the stored history counts.
            self._history = self._home.read_history()
        self._number = number
        if self._root != self.fleet.root:
            folder, self._root = open_folder(self.fleet.root), self.fleet.root
            self._readers = SnapshotReader(folder, self._clock), ClaimReader(folder)
        snapshot, owners = self._readers[0].take(), self._readers[1].owners()
        health = worker_health(self.fleet, self._home.read_reports(), snapshot, owners)
        done = run_round(
            self.fleet,
            self._provider,
            self._history,
            health,
            clock=self._clock,
            held=self.lease.held,
            metadata=partial(machine_metadata, self._home.folder.url, self._pin),
            save=lambda history: self._home.write_history(history, number),
            may_create=self._may_create and self._unknown_deployment is None,
            pool=self._pool,
            home=self._home.folder.url,
        )
        before, self._history = self._history, done.history
        lines = self._home.log(done.done, number, self._clock()) if number else []
        if number and self.fleet.notify:
            news = list(events_between(self.fleet, copy_history(self.fleet, before), done.history))
            lines += call_webhooks(self.fleet, news, self._clock())
        return self._status(done, snapshot, owners, tuple(lines), holder)

    def _read_fleet(self) -> FleetSpec:
        """Return the specification of the fleet; new machines get the sha256 of its bytes.

        While the bucket contains a deployment that is not known outside the bucket, the previous one continues and no
        machine is created.
        """
        fleet, pin = self._home.read_pinned()
        self._unknown_deployment = None
        if pin != self._pin and self._may_create:
            self._unknown_deployment = check_pinned(self._provider, self._home.folder.url, fleet, pin)
        if self._unknown_deployment is None:
            self._deployed, self._pin = fleet, pin
        elif not self._pin:
            raise self._unknown_deployment
        ordered = self._home.with_orders(self._deployed)
        return replace(ordered, policy=replace(ordered.policy, **self._policy))

    def _status(
        self,
        done: RoundResult,
        snapshot: Snapshot,
        owners: Mapping[int, ClaimOwner],
        lines: tuple[str, ...],
        holder: Holder | None,
    ) -> FleetStatus:
        own, now = done.observed.own, self._clock()
        cases = list(worker_cases(self.fleet, done.observed, done.history, now))
        # The last rate of a deleted machine does not count towards the rate of the fleet.
        idle = {case.worker.name for case in cases if not any(node.state.stage is Stage.RUNNING for node in case.nodes)}
        streams = tuple(
            replace(each, tokens_per_second=0.0, seconds_left=None)
            if each.number in owners and owners[each.number].worker in idle and each.state is not State.DONE
            else each
            for each in snapshot.streams
        )
        snapshot = replace(snapshot, streams=streams)
        views = views_by_worker(snapshot, owners)
        problems = (self._unknown_deployment, *done.observed.unanswered.values())
        return FleetStatus(
            fleet=self.fleet,
            snapshot=snapshot,
            history=done.history,
            workers=tuple(_worker_status(case, views.get(case.worker.name)) for case in cases),
            actions=lines,
            problems=tuple(problem.line() for problem in problems if problem is not None),
            refusal=_refusal(done.observed),
            holder=holder,
            machines=sum(len(nodes) for nodes in own.values()),
            taken=now,
        )

    def close(self) -> None:
        """Release the lease, so that the next monitor can start at once."""
        self.lease.release()


def _worker_status(case: WorkerCase, view: StreamView | None) -> WorkerStatus:
    past, worker = case.past, case.worker
    view = view or StreamView(worker.id, worker.name, State.WAITING)
    node = min(case.nodes, key=lambda node: (node.state.stage is not Stage.RUNNING, node.created), default=None)
    if node is None:  # The state is not known if the zone did not answer.
        state = NodeState.UNKNOWN if case.silent_zones else NodeState.NOT_FOUND
        return WorkerStatus(worker, past.zone, state, view, past, past.finished, True, _note(case, None))
    heard = node.state.stage is Stage.RUNNING and case.heartbeat(node) is not None
    failing = bool(case.health.crash_loop or reason_to_replace(case, node)) or node.state.stage is Stage.ENDING
    healthy = past.finished or (heard and not failing)
    return WorkerStatus(worker, node.zone, node.state, view, past, healthy, failing, _note(case, node))


def _note(case: WorkerCase, node: Node | None) -> str:
    past = case.past
    if past.gave_up:
        return past.gave_up
    before = f"the machine before: {past.lost}" if past.lost else ""
    if node is None:
        if case.silent_zones:
            return f"{min(case.silent_zones)} does not answer"
        block = case.history.blocks.get(past.zone)
        return block.why if block is not None else past.note or before
    if node.state.stage is Stage.RUNNING and case.health.crash_loop and not past.finished:
        return case.health.crash_loop
    if node.state.stage is Stage.RUNNING and case.heartbeat(node) is None and not past.finished:
        since = duration(max(0.0, case.now - node.created))
        heard = f"booted {since} ago, no report yet (replaced after {duration(case.policy.heartbeat_limit())})"
        return "; ".join(part for part in (heard, before) if part)
    return past.note or before


def _refusal(observed: Observed) -> UserError | None:
    refused = [error for error in observed.unanswered.values() if isinstance(error, UserError)]
    return refused[0] if refused and len(refused) == len(observed.unanswered) and not observed.nodes else None


Kind = Literal["given up", "budget", "stopped", "finished", "silent", "no machine"]
Event = tuple[Kind, str]
_WEBHOOK_SECONDS = 10.0


def check_webhook(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise SpecError("--notify", expected="https://…", found=repr(url))
    return url


def events_between(fleet: FleetSpec, before: History, after: History) -> Iterator[Event]:
    """Return the events between two histories. Each event is reported once, also if the monitor changes."""
    for worker in fleet.workers:
        old, new = history_of(before, worker), history_of(after, worker)
        if new.gave_up and not old.gave_up:
            yield "given up", f"{worker.name} is given up: {new.gave_up}"
        if new.alarmed and not old.alarmed:
            minutes = fleet.policy.no_machine_alarm / 60
            yield (
                "no machine",
                f"{worker.name} has had no machine for {minutes:.0f} minutes: {new.note or 'no reason known'}",
            )
        if new.silences > old.silences:
            yield "silent", f"{worker.name} is silent and is replaced: {new.lost}"
    if after.stopped and not before.stopped:
        yield ("stopped" if fleet.policy.stop else "budget"), after.stopped
    if _all_finished(fleet, after) and not _all_finished(fleet, before):
        yield "finished", f"all {len(fleet.workers)} workers are done; ${after.dollars:.2f} spent"


def _all_finished(fleet: FleetSpec, history: History) -> bool:
    return history.deployment == fleet.deployment and all(history_of(history, each).finished for each in fleet.workers)


def call_webhooks(fleet: FleetSpec, events: Sequence[Event], now: float) -> list[str]:
    """Call every webhook; return a line for each call that failed."""
    failures = []
    for kind, text in events:
        moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        line = f"spile fleet {fleet.name}: {text}"[:2000]
        whole = {"event": kind, "fleet": fleet.name, "text": line, "output": fleet.root, "time": moment}
        for url in fleet.notify:
            slack = urlsplit(url).hostname == "hooks.slack.com"
            try:
                reply = requests.post(url, json={"text": line} if slack else whole, timeout=_WEBHOOK_SECONDS)
                reply.raise_for_status()
            except (OSError, ValueError) as error:
                failures.append(f"could not notify {urlsplit(url).hostname}: {error}")
    return failures
