"""The monitor: round after round, what the bucket and the cloud say of a fleet, and what is done about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from spile.errors import UserError
from spile.fleet.deployed import vouched
from spile.fleet.history import History, Pulse, WorkerHistory
from spile.fleet.home import FleetHome, WorkerReport
from spile.fleet.lease import Holder, Lease
from spile.fleet.notify import events_between, send
from spile.fleet.pins import PIN, slice_secret
from spile.fleet.provider import Life, Node, NodeState, Provider
from spile.fleet.reconcile import WorkerCase, begin, health_of, past_of
from spile.fleet.round import Round, tick
from spile.fleet.spec import FleetSpec, Worker
from spile.objects import open_folder
from spile.spec.amounts import duration
from spile.spec.phase import Phase
from spile.store.snapshot import Snapshot, SnapshotReader, StreamView

__all__ = ["FleetMonitor", "FleetStatus", "WorkerStatus", "machine_metadata", "pulses_of", "startup_script"]


def startup_script() -> str:
    """What every machine runs at boot."""
    return resources.files("spile.fleet").joinpath("startup.sh").read_text()


def machine_metadata(home: str, name: str, script: str, pin: str) -> dict[str, str]:
    """A machine's metadata: where its assignment is, the sha256 of it, what it does at boot, and its hosts' secret."""
    return {"spile-home": home, "spile-node": name, PIN: pin, "startup-script": script, **slice_secret()}


def pulses_of(fleet: FleetSpec, reports: Mapping[str, WorkerReport], snapshot: Snapshot) -> dict[int, Pulse]:
    """Each worker's pulse: the newer of its agent's word and its own heartbeat."""
    views = {view.number: view for view in snapshot.streams}
    found = {}
    for worker in fleet.workers:
        report, view = reports.get(worker.name), views.get(worker.id)
        if report is not None and report.deployment not in ("", fleet.deployment):
            report = None
        beats, steps = [], []
        if report is not None:
            beats.append((report.updated, report.phase))
            steps.append(report.updated)
        if view is not None and view.age is not None:
            beats.append((snapshot.taken - view.age, view.phase))
            steps.append(snapshot.taken - (view.age if view.idle is None else view.idle))
        beat, phase = max(beats, default=(None, Phase.UNKNOWN))
        verdict, said, error = (report.verdict, report.updated, report.error) if report else ("", 0.0, "")
        error = error or (view.last_error or "" if view else "")
        found[worker.id] = Pulse(beat, phase, verdict, said, error, max(steps, default=None))
    return found


@dataclass(frozen=True)
class WorkerStatus:
    """One line of the table."""

    worker: Worker
    zone: str
    machine: NodeState
    view: StreamView | None
    past: WorkerHistory
    healthy: bool
    """READY with a fresh heartbeat, or finished."""
    sick: bool
    """Its machine is to be replaced."""
    note: str

    @property
    def working(self) -> bool:
        """Healthy and not done."""
        return self.healthy and not self.past.finished

    @property
    def needs_recovery(self) -> bool:
        """Its machine is dead, gone or silent, and its work is not done."""
        return self.sick and not self.past.finished


@dataclass(frozen=True)
class FleetStatus:
    """A fleet at one moment."""

    fleet: FleetSpec
    snapshot: Snapshot
    history: History
    workers: tuple[WorkerStatus, ...]
    actions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    holder: Holder | None = None
    """Who monitors, when it is not us."""
    machines: int = 0
    """Of this fleet, in any state."""
    taken: float = 0.0
    refusal: UserError | None = None
    """Why the cloud lets us see nothing at all."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: all finished or given up, or the fleet stopped; and no machine is left."""
        pasts = [worker.past for worker in self.workers]
        ended = bool(self.history.stopped) or all(past.finished or past.gave_up for past in pasts)
        left = self.machines if self.fleet.policy.delete_finished or self.history.stopped else 0
        return ended and not left and all(past.pending is None for past in pasts)

    @property
    def failed(self) -> bool:
        """Whether it ended short of its goal. A run that is complete is a success, whatever it cost."""
        if all(worker.past.finished for worker in self.workers):
            return False
        return bool(self.history.stopped) or any(worker.past.gave_up for worker in self.workers)

    @property
    def percent(self) -> float | None:
        """Of all samples; None while a stream's number of samples is not known."""
        if len(self.snapshot.streams) < len(self.fleet.workers):
            return None
        return self.snapshot.percent

    @property
    def healthy(self) -> int:
        """Workers whose machine and heartbeat are fine, and those that are done."""
        return sum(worker.healthy for worker in self.workers)

    @property
    def working(self) -> int:
        """Healthy workers that are not done."""
        return sum(worker.working for worker in self.workers)

    @property
    def needs_recovery(self) -> int:
        """Workers whose machine is to be replaced."""
        return sum(worker.needs_recovery for worker in self.workers)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
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
                    "phase": each.view.phase if each.view else Phase.UNKNOWN,
                    "samples": each.view.samples if each.view else 0,
                    "shards": each.view.shards if each.view else 0,
                    "committed": each.view.committed if each.view else 0,
                    "finished": each.past.finished,
                    "gave_up": each.past.gave_up,
                    "healthy": each.healthy,
                    "preemptions": each.past.preemptions,
                    "crashes": each.past.crashes,
                    "stockouts": each.past.stockouts,
                    "note": each.note,
                }
                for each in self.workers
            ],
            "totals": {
                name: self.snapshot.total(name)
                for name in ("samples", "shards", "committed", "tokens", "bytes", "tokens_per_second")
            },
            "percent": self.percent,
            "seconds_left": self.snapshot.seconds_left,
            "healthy": self.healthy,
            "working": self.working,
            "needs_recovery": self.needs_recovery,
            "dollars": round(self.history.dollars, 4),
            "stopped": self.history.stopped,
            "machines": self.machines,
            "over": self.over,
            "monitor": None if self.holder is None else self.holder.owner,
            "actions": list(self.actions),
            "problems": list(self.problems),
        }


class FleetMonitor:
    """Watches a fleet and heals it, while it holds the lease; else it only watches."""

    def __init__(
        self,
        home: FleetHome,
        provider: Provider,
        *,
        clock: Callable[[], float] = time.time,
        pool: Executor | None = None,
        adjust: Callable[[FleetSpec], FleetSpec] = lambda fleet: fleet,
        watch_only: bool = False,
        makes: bool = True,
        owner: str | None = None,
    ) -> None:
        """``makes`` False: no machine is made, so that any ``fleet.json`` will do."""
        self._home, self._provider, self._clock, self._pool = home, provider, clock, pool
        self._adjust, self._watch_only, self._makes = adjust, watch_only, makes and not watch_only
        self._deployed, self._pin = home.read_pinned()
        self._foreign = vouched(provider, home.folder.url, self._deployed, self._pin) if self._makes else None
        if self._foreign is not None:
            raise self._foreign
        self.fleet = self._adjust(home.ordered(self._deployed))
        ttl = 4 * self.fleet.policy.interval + 30.0
        self.lease = Lease(home.folder, clock=clock, ttl=ttl, owner=owner)
        self._history = home.read_history()
        self._number = 0
        self._reader: SnapshotReader | None = None
        self._root = ""

    def step(self) -> FleetStatus:
        """One round."""
        self.fleet = self._read_fleet()
        holder = self.lease.holder() if self._watch_only else self.lease.take()
        number = self.lease.number
        if number != self._number or not number:
            # We have just become the monitor, or watch what another one does: what is stored counts.
            self._history = self._home.read_history()
        self._number = number
        if self._reader is None or self._root != self.fleet.root:  # a new deployment may write elsewhere
            self._reader, self._root = SnapshotReader(open_folder(self.fleet.root), self._clock), self.fleet.root
        snapshot = self._reader.take()
        pulses = pulses_of(self.fleet, self._home.read_reports(), snapshot)
        done = tick(
            self.fleet,
            self._provider,
            self._history,
            pulses,
            clock=self._clock,
            held=self.lease.held,
            metadata=self._metadata,
            save=lambda history: self._home.write_history(history, number),
            making=self._makes and self._foreign is None,
            pool=self._pool,
        )
        before, self._history = self._history, done.history
        lines = self._home.log(done.done, number, self._clock()) if number else []
        if number and self.fleet.notify:
            news = list(events_between(self.fleet, begin(self.fleet, before), done.history))
            lines += send(self.fleet, news, self._clock())
        return self._status(done, snapshot, tuple(lines), holder)

    def _read_fleet(self) -> FleetSpec:
        """What the fleet shall be; its machines are made with the sha256 of what was read.

        While the bucket holds another deployment that nobody is known to have made, the one before goes on, and no
        machine is made: it would find nothing there that it may run.
        """
        fleet, pin = self._home.read_pinned()
        if pin != self._pin or self._foreign is not None:
            url = self._home.folder.url
            self._foreign = vouched(self._provider, url, fleet, pin) if self._makes else None
            if self._foreign is None:
                self._deployed, self._pin = fleet, pin
        return self._adjust(self._home.ordered(self._deployed))

    def _metadata(self, worker: int) -> dict[str, str]:
        name = next(each.name for each in self.fleet.workers if each.id == worker)
        return machine_metadata(self._home.folder.url, name, startup_script(), self._pin)

    def _status(self, done: Round, snapshot: Snapshot, lines: tuple[str, ...], holder: Holder | None) -> FleetStatus:
        own, now = done.observed.own, self._clock()
        views = {view.number: view for view in snapshot.streams}
        workers: list[WorkerStatus] = []
        told: set[str] = set()
        for worker in self.fleet.workers:
            past = past_of(done.history, worker)
            node = _best(own.get(worker.id, []))
            fine, sick = past.finished, node is None or node.state.life is Life.LEAVING
            if node is not None and not sick:
                health = health_of(WorkerCase(self.fleet, worker, past, now, done.observed), node)
                heard = node.state.life is Life.ALIVE and done.observed.beat(worker.id, node) is not None
                fine, sick = fine or (health.fine and heard), not health.fine
            case = WorkerCase(self.fleet, worker, past, now, done.observed, done.history)
            zone = node.zone if node is not None else past.zone
            view = views.get(worker.id)
            if view is not None and (node is None or node.state.life is not Life.ALIVE):
                # What a machine that is gone said last is no rate of the fleet.
                view = views[worker.id] = replace(view, tokens_per_second=0.0, seconds_left=None)
            note = _note(case, node, told)
            workers.append(WorkerStatus(worker, zone, _state(case, node), view, past, fine, sick, note))
        return FleetStatus(
            fleet=self.fleet,
            snapshot=replace(snapshot, streams=tuple(views[each.number] for each in snapshot.streams)),
            history=done.history,
            workers=tuple(workers),
            actions=lines,
            problems=tuple(problem.line() for problem in (self._foreign, *done.problems) if problem is not None),
            refusal=_refusal(done),
            holder=holder,
            machines=sum(len(nodes) for nodes in own.values()),
            taken=now,
        )

    def close(self) -> None:
        """Let the next monitor start at once. Everything else goes on."""
        self.lease.release()


def _state(case: WorkerCase, node: Node | None) -> NodeState:
    """Its machine's state; one in a zone that did not answer is not known to be gone."""
    if node is not None:
        return node.state
    return NodeState.UNKNOWN if case.observed.unanswered.intersection(case.past.used) else NodeState.NOT_FOUND


def _note(case: WorkerCase, node: Node | None, told: set[str]) -> str:
    """What is known of a worker beside its numbers. ``told``: the zones whose quota an earlier row has told."""
    past = case.past
    if past.gave_up:
        return past.gave_up
    before = f"the machine before: {past.lost}" if past.lost else ""
    if node is None:
        silent = sorted(case.observed.unanswered.intersection(past.used))
        if silent:
            return f"{silent[0]} does not answer"
        block = case.history.blocks.get(past.zone)
        if block is None:
            return past.note or before
        first = past.zone not in told
        told.add(past.zone)
        return block.why if first else f"no quota in {past.zone}, as above"
    if node.state.life is Life.ALIVE and case.beat(node) is None and not past.finished:
        limit = max(case.policy.patience, case.policy.compile_grace)
        since = duration(max(0.0, case.now - node.created))
        heard = f"booted {since} ago, not heard of yet (replaced after {duration(limit)})"
        return "; ".join(part for part in (heard, before) if part)
    return past.note or before


def _refusal(done: Round) -> UserError | None:
    refused = [problem for problem in done.problems if isinstance(problem, UserError)]
    return refused[0] if refused and len(refused) == len(done.observed.unanswered) and not done.observed.nodes else None


def _best(nodes: list[Node]) -> Node | None:
    return min(nodes, key=lambda node: (node.state.life is not Life.ALIVE, node.created), default=None)
