"""A fleet's life on a fake clock: the real reconciler, lease and client, the fake cloud, and everything going wrong.

``Simulation(seed).run()`` plays one history: hours of preemptions, stockouts, quota, lost replies, errors, slow
operations, hung and crashing workers, and monitors that pause, die and overlap; redeployments while it runs, another
fleet in the same bucket, budgets raised and lowered, stops, a hub that is out. Then all of it behaves, and the fleet
has to end well. Never are another dataset's rows under a stream, never is a stream wiped, never is there a success that
verify would refuse. The same seed plays the same history.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from spile.data.split import StreamEntry, StreamsManifest, stream_name
from spile.errors import RunMismatch
from spile.fleet.agent import worker_command
from spile.fleet.cloud_tpu import CloudSettings, CloudTpu
from spile.fleet.deploy import StreamsPlan, changes, check_stored, place_of
from spile.fleet.history import History, Pulse
from spile.fleet.home import FleetHome
from spile.fleet.lease import Lease
from spile.fleet.monitor import tick
from spile.fleet.provider import NodeRequest
from spile.fleet.reconcile import past_of
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, Policy, plan_workers
from spile.objects.folder import NotFound, ObjectInfo
from spile.spec.phase import Phase
from spile_fakes.cloud import ApiError, Cloud, CloudTimes
from spile_fakes.cloud_server import Api, ApiFault, Lost

ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a", "us-east1-d")
LIVE = ("CREATING", "READY")


class MemoryFolder:
    """As much of a folder as a fleet's home needs."""

    url = "gs://b/fleet/sim"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def create(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(key, data) is data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(key, 0, 0.0) for key in sorted(self.objects) if key.startswith(prefix)])


class Reply:
    """As much of a response as the client reads."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status_code, self.ok, self.content, self.text = status, status < 400, b"x", ""
        self._body = body

    def json(self) -> dict[str, Any]:
        return self._body


class DirectSession(requests.Session):
    """Calls the fake API without a socket."""

    def __init__(self, api: Api) -> None:
        super().__init__()
        self.api = api

    def request(self, method: str, url: str, **more: Any) -> Any:  # type: ignore[override]
        path = "/" + url.split("/", 3)[3]
        try:
            return Reply(200, self.api.handle(method, path, more.get("params") or {}, dict(more.get("json") or {})))
        except ApiError as error:
            return Reply(error.status, error.body())
        except Lost as error:
            raise requests.exceptions.ConnectionError("connection reset") from error


@dataclass
class Vm:
    """A machine that runs."""

    worker: int
    raw: dict[str, Any]
    booted: float
    deployment: str = ""
    hung: bool = False
    ended: bool = False


@dataclass
class Task:
    """What a worker has to do, and what its bucket says of it."""

    left: float
    crashes_left: int = 0
    deployment: str = ""
    """Whose word the verdict is."""
    rows_of: str = ""
    """The sha256 of the stream whose rows are stored; empty: none are."""
    beat: float | None = None
    phase: Phase = Phase.UNKNOWN
    verdict: str = ""
    said: float = 0.0


class Died(Exception):
    """A monitor's process ends between two requests."""


@dataclass
class Monitor:
    """One monitor process."""

    lease: Lease
    history: History
    next: float
    paused_until: float = 0.0
    holding: int = 0
    busy: bool = False


@dataclass
class Simulation:
    """One seeded history."""

    seed: int
    workers_per_zone: int | None = None
    chaos: float | None = None
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.now = 1_000_000.0
        zones = ZONES[: rng.randint(1, 4)]
        per_zone = self.workers_per_zone or rng.randint(1, 3)
        self.fleet = FleetSpec(
            "sim",
            "p",
            zones,
            plan_workers(zones, per_zone),
            NodeRequest("v3-8", "r", preemptible=True),
            root="gs://b/activations",
            deployment="d",
            policy=Policy(move=rng.random() < 0.8),
            queued=rng.random() < 0.2,
        )
        self.bucket: dict[str, StreamsManifest] = {}
        """The folders of streams, by their URL."""
        self.fleet = self._with_streams("ours")
        self.cloud = Cloud(lambda: self.now, pace=CloudTimes(60, 30, 20), on_start=self._boot, on_stop=self._halt)
        self.api = Api(self.cloud)
        self.client = CloudTpu(
            CloudSettings("p", endpoint="http://sim/", anonymous=True),
            session=DirectSession(self.api), sleep=lambda _: None, tries=2,
        )  # fmt: skip
        self.folder = MemoryFolder()
        self.home = FleetHome(self.folder)  # type: ignore[arg-type]
        self.home.write_fleet(self.fleet)
        self.hub_out_until = 0.0
        self.deployments = 1
        self.vms: dict[str, Vm] = {}
        self.tasks = {worker.id: Task(rng.uniform(300, 2400)) for worker in self.fleet.workers}
        self.poisoned = rng.choice(self.fleet.workers).id if rng.random() < 0.15 else None
        for worker in self.fleet.workers:
            if rng.random() < 0.2:
                self.tasks[worker.id].crashes_left = 1
        if self.poisoned is not None:
            self.tasks[self.poisoned].crashes_left = 10**6
        self.monitors = [self._monitor()]
        self.reports: list[int] = []
        self.calm_at = self.now + (self.chaos if self.chaos is not None else rng.uniform(1200, 7200))
        self.calm = False
        self.ticks = 0
        self._foreigners()

    # -- the world --------------------------------------------------------------------------------------------------

    def _foreigners(self) -> None:
        """Machines of somebody else: one with a name that a worker would like, one of another fleet."""
        body = {"acceleratorType": "v3-8"}
        zone = self.rng.choice(self.fleet.zones)
        self.cloud.create("p", zone, "theirs", {**body, "labels": {FLEET_LABEL: "other", WORKER_LABEL: "0"}}, "v2")
        if self.fleet.policy.move and len(self.fleet.zones) > 1 and self.rng.random() < 0.3:
            self.cloud.create("p", zone, self.rng.choice(self.fleet.workers).name, {**body}, "v2")
        self.foreign: dict[str, dict[str, Any]] = {}
        self.now += 61.0
        self.cloud.advance()
        self.foreign = {raw["id"]: raw for raw in self.cloud.nodes("-")}

    def _with_streams(self, dataset: str, fleet: FleetSpec | None = None) -> FleetSpec:
        """The fleet with its streams in the bucket, under the name that a deploy gives them."""
        fleet = fleet or self.fleet
        names = [stream_name(worker.id) for worker in fleet.workers]
        entries = tuple(StreamEntry(name, 1, 1, f"{dataset} {len(names)} {name}") for name in names)
        manifest = StreamsManifest({"dataset": dataset}, 0, len(names), entries, {})
        url = place_of("gs://b/datasets", manifest.digest())
        self._hold(self.bucket.setdefault(url, manifest) == manifest, "streams were replaced by others")
        return replace(fleet, streams=url, split=manifest.digest())

    def _redeploy(self, dataset: str) -> None:
        """As ``spile deploy --yes`` does it: refused where another dataset's rows are stored."""
        after = self._with_streams(dataset)
        plan = StreamsPlan(after.streams or "", self.bucket[after.streams or ""])
        same = after.streams == self.fleet.streams
        self._hold(same == (not changes(self.fleet, after)), "a change that nobody was asked about")
        try:
            for number, task in self.tasks.items():
                if task.rows_of:
                    check_stored(number, task.rows_of, "activations", plan, mine=True)
        except RunMismatch:
            self._say(f"a deploy of {dataset} is refused")
            return
        self.deployments += 1
        self.fleet = replace(after, deployment=f"d{self.deployments}")
        self.home.write_fleet(self.fleet)
        self._say(f"redeployed: {self.fleet.deployment} of {dataset}")

    def _store(self, vm: Vm, task: Task) -> bool:
        """Whether the worker may write: its stream is the one that it was given. Then it does."""
        words = worker_command(self.fleet, self.fleet.workers[vm.worker])
        self._hold(not {"--overwrite", "--no-checkpointing"} & set(words), "a life of a worker wipes its stream")
        manifest = self.bucket[words[words.index("--dataset-dir") + 1]]
        if manifest.digest() != words[words.index("--expect-split") + 1]:
            return False
        mine = manifest.streams[vm.worker].sha256
        self._hold(task.rows_of in ("", mine), f"rows of {mine} under the stream of {task.rows_of}")
        task.rows_of = mine
        return True

    def _worker_of(self, raw: dict[str, Any]) -> int | None:
        labels = raw.get("labels", {})
        return int(labels[WORKER_LABEL]) if labels.get(FLEET_LABEL) == "sim" else None

    def _boot(self, raw: dict[str, Any]) -> None:
        worker = self._worker_of(raw)
        if worker is not None:
            self.vms[raw["id"]] = Vm(worker, raw, self.now + self.rng.uniform(60, 240), self.fleet.deployment)
            running = [vm for vm in self.vms.values() if vm.worker == worker]
            self._hold(len(running) == 1, f"two live machines for worker {worker}")

    def _halt(self, raw: dict[str, Any], notice: float) -> None:
        self._hold(raw["id"] not in self.foreign, f"a foreign machine was touched: {raw['name']}")
        self.vms.pop(raw["id"], None)

    def _hold(self, fine: bool, what: str) -> None:
        if not fine:
            tail = "\n".join(self.log[-60:])
            raise AssertionError(
                f"seed {self.seed}, at {self.now:.0f}: {what}\nreplay: Simulation({self.seed}).run()\n{tail}"
            )

    def _live(self, seconds: float) -> None:
        """Let the workers work."""
        for vm in list(self.vms.values()):
            task = self.tasks[vm.worker]
            if (
                vm.deployment != self.fleet.deployment
                and not vm.hung
                and self.now >= vm.booted
                and self.rng.random() < 0.25
            ):
                vm.deployment, vm.ended = self.fleet.deployment, False  # its agent looks once a minute
                vm.booted = self.now + 15.0
            if vm.hung or vm.ended or self.now < vm.booted:
                continue
            if vm.deployment != self.fleet.deployment:
                continue  # of the deployment before: it commits what it has, and no verdict of it counts
            if self.now < self.hub_out_until:
                task.beat, task.phase = self.now, Phase.LOADING  # tried again, not given up
                continue
            if not self._store(vm, task):
                vm.ended, task.verdict, task.said, task.deployment = True, "refused", self.now, vm.deployment
                continue
            task.deployment, task.verdict = vm.deployment, ""
            task.beat, task.phase = self.now, Phase.RUNNING
            task.left -= seconds
            if task.crashes_left and self.rng.random() < 0.2:
                task.crashes_left -= 1
                vm.ended, task.verdict, task.said = True, "crashed", self.now
            elif task.left <= 0:
                vm.ended, task.verdict, task.said = True, "finished", self.now
                if self.rng.random() < 0.7:
                    self.cloud.delete(vm.raw["name"].split("/")[3], vm.raw["name"].split("/")[5], "v2")

    def _mischief(self) -> None:
        rng, cloud = self.rng, self.cloud
        zone = rng.choice(self.fleet.zones)
        roll = rng.random()
        own = [raw for raw in cloud.nodes("-") if self._worker_of(raw) is not None and raw["state"] in LIVE]
        if roll < 0.15 and own:
            raw = rng.choice(own)
            place = raw["name"].split("/")
            self._say(f"preempt {place[5]} in {place[3]}")
            cloud.preempt(place[3], place[5], state=rng.choice(["PREEMPTED", "PREEMPTED", "TERMINATED", "STOPPED"]))
        elif roll < 0.25:
            (cloud.dry.discard if zone in cloud.dry else cloud.dry.add)(zone)
            self._say(f"dry: {sorted(cloud.dry)}")
        elif roll < 0.32:
            if zone in cloud.quota:
                del cloud.quota[zone]
            else:
                cloud.quota[zone] = rng.randint(0, 3)
            self._say(f"quota: {cloud.quota}")
        elif roll < 0.42:
            method = rng.choice(["POST", "DELETE", "GET", ""])
            status = rng.choice([0, 0, 500, 503, 429, 403])
            self.api.faults.append(ApiFault(method, zone, rng.randint(1, 6), status, "Requests per minute exceeded"))
            self._say(f"fault {method} {status} {zone}")
        elif roll < 0.46:
            cloud.pace = CloudTimes(rng.choice([10, 60, 600, 2500]), rng.choice([5, 30, 400]), 20)
        elif roll < 0.50 and self.vms:
            vm = rng.choice(list(self.vms.values()))
            vm.hung = self.now > vm.booted + 60
        elif roll < 0.56:
            self.monitors.append(self._monitor())
            self._say(f"another monitor: {len(self.monitors)}")
        elif roll < 0.62:
            monitor = rng.choice(self.monitors)
            monitor.paused_until = self.now + rng.uniform(60, 1200)
        elif roll < 0.66 and len(self.monitors) > 1:
            monitor = rng.choice(self.monitors)
            if not monitor.busy:
                self.monitors.remove(monitor)
        else:
            self._orders(roll)

    def _orders(self, roll: float) -> None:
        """What owners of fleets do."""
        rng = self.rng
        if roll < 0.70:
            self._redeploy("ours")
        elif roll < 0.74:
            self._redeploy("theirs")
        elif roll < 0.78:
            self._with_streams("of another fleet", replace(self.fleet, name="other"))
            self._say("another fleet is deployed to the bucket")
        elif roll < 0.84:
            dollars = rng.choice([0.5, 2.0, 10.0, 50.0])
            self.home.order_budget(self.fleet, dollars)
            self._say(f"budget: ${dollars}")
        elif roll < 0.86:
            self.home.order_stop(self.fleet)
            self._say("stop")
        elif roll < 0.92:
            self.hub_out_until = self.now + rng.uniform(60, 1200)
            self._say("the hub is out")

    def _calm(self) -> None:
        self.cloud.dry.clear()
        self.cloud.quota.clear()
        self.api.faults.clear()
        self.cloud.pace = CloudTimes(60, 30, 20)
        for monitor in self.monitors:
            monitor.paused_until = 0.0
        self.hub_out_until = 0.0
        if self.home.read_stop(self.fleet):
            self._redeploy("ours" if self._ours() else "theirs")
        self.home.order_budget(self.fleet, 1e6)
        self._say("calm")

    def _ours(self) -> bool:
        """Which dataset the stored rows are of, if any are."""
        stored = [task.rows_of for task in self.tasks.values() if task.rows_of]
        return not stored or stored[0].startswith("ours ")

    def _say(self, text: str) -> None:
        self.log.append(f"{self.now - 1_000_000:7.0f} {text}")

    # -- the monitors -----------------------------------------------------------------------------------------------

    def _monitor(self) -> Monitor:
        number = self.rng.getrandbits(32)
        lease = Lease(self.folder, clock=lambda: self.now, ttl=240.0, owner=f"m{number}", token=str(number))  # type: ignore[arg-type]
        return Monitor(lease, History(), self.now + self.rng.uniform(0, 60))

    def _watch(self, monitor: Monitor) -> None:
        self.ticks += 1
        monitor.lease.take()
        if monitor.lease.number and monitor.lease.number != monitor.holding:
            saved = sorted(key for key in self.folder.objects if key.startswith("history/"))
            monitor.history = History.from_json(self.folder.get(saved[-1])) if saved else History()
        monitor.holding = monitor.lease.number
        fleet = self.home.read_ordered()
        pulses = {
            number: Pulse(task.beat, task.phase, task.verdict if mine else "", task.said if mine else 0.0, "boom")  # type: ignore[arg-type]
            for number, task in self.tasks.items()
            for mine in [task.deployment == fleet.deployment]
        }
        monitor.busy = True
        try:
            done = tick(
                fleet, self.client, monitor.history, pulses,
                clock=lambda: self.now, held=monitor.lease.held, metadata=self._metadata,
                save=lambda history: self._save(monitor, history),
            )  # fmt: skip
        except Died:
            self._say(f"m{monitor.lease.number} died between two requests")
            self.monitors.remove(monitor)
            return
        finally:
            monitor.busy = False
        monitor.history = done.history
        for action, outcome in done.done:
            result = outcome.error.line() if outcome.error else "asked"
            self._say(f"m{monitor.holding} {action.verb} {action.name} in {action.zone}: {action.reason} -> {result}")
            if action.verb == "report":
                self.reports.append(action.worker)
            self._hold(not (fleet.policy.stop and action.verb == "create"), "a machine was made for a stopped fleet")
        self._no_false_success(fleet, done.history)

    def _no_false_success(self, fleet: FleetSpec, history: History) -> None:
        """A fleet that counts as complete has every row of its split, and of no other."""
        if fleet.deployment != self.fleet.deployment or history.deployment != fleet.deployment:
            return
        if all(past_of(history, worker).finished for worker in fleet.workers):
            manifest = self.bucket[fleet.streams or ""]
            whole = [(task.left <= 0, task.rows_of) for task in self.tasks.values()]
            right = [(True, entry.sha256) for entry in manifest.streams]
            self._hold(whole == right, f"a success that verify would refuse: {whole}")

    def _metadata(self, worker: int) -> dict[str, str]:
        if self.now < self.calm_at and self.rng.random() < 0.02:
            raise Died
        return {}

    def _save(self, monitor: Monitor, history: History) -> None:
        """Store it; then, sometimes, the process stands still for a while and the world goes on without it."""
        self.folder.put(f"history/{monitor.holding:06d}.json", history.to_json())
        if self.now < self.calm_at and self.rng.random() < 0.05:
            self._say(f"m{monitor.holding} stalls")
            until = self.now + self.rng.choice([30, 120, 300, 900])
            while self.now < until:
                self._step()

    # -- the play ---------------------------------------------------------------------------------------------------

    def over(self) -> bool:
        """Whether all is done and nothing is left."""
        done = all(
            (t.verdict == "finished" and t.deployment == self.fleet.deployment) or n == self.poisoned
            for n, t in self.tasks.items()
        )
        own = [raw for raw in self.cloud.nodes("-") if self._worker_of(raw) is not None]
        spared = self.poisoned is None or self.tasks[self.poisoned].verdict == "finished"
        return done and not own and (spared or self.poisoned in self.reports)

    def run(self) -> Simulation:
        """Play it to its end, or fail with the seed and the last of its log."""
        limit = self.calm_at + 4 * 3600
        while not (self.calm and self.over()):
            self._hold(self.now < limit, f"it did not converge: {self.state()}" if self.now >= limit else "")
            self._step()
        return self

    def _step(self) -> None:
        self.now += 15.0
        self.cloud.advance()
        self._live(15.0)
        if self.now < self.calm_at:
            if self.rng.random() < 0.12:
                self._mischief()
        elif not self.calm:
            self.calm = True
            self._calm()
        for monitor in list(self.monitors):
            if self.now >= max(monitor.next, monitor.paused_until) and not monitor.busy and monitor in self.monitors:
                monitor.next = self.now + 60.0
                self._watch(monitor)
        if not self.monitors:
            self.monitors.append(self._monitor())
        self._invariants()

    def _invariants(self) -> None:
        live: dict[int, int] = {}
        for raw in self.cloud.nodes("-"):
            worker = self._worker_of(raw)
            if worker is not None and raw["state"] in LIVE:
                live[worker] = live.get(worker, 0) + 1
        self._hold(all(count == 1 for count in live.values()), f"two live machines for one worker: {live}")
        # A round costs a listing a zone, and a worker at most a question, a look and a request, each tried twice.
        most = self.ticks * 2 * (len(self.fleet.zones) + 3 * len(self.fleet.workers)) + 10
        self._hold(len(self.api.calls) <= most, f"a busy loop against the API: {len(self.api.calls)} calls")
        listed = {raw["id"] for raw in self.cloud.nodes("-")}
        self._hold(set(self.foreign) <= listed, "a foreign machine is gone")

    def state(self) -> str:
        """Where it stands, for a failure."""
        nodes = [(raw["name"].split("/")[3], raw["name"].split("/")[5], raw["state"]) for raw in self.cloud.nodes("-")]
        holder = [monitor for monitor in self.monitors if monitor.lease.number]
        history = holder[-1].history.workers if holder else {}
        return f"nodes {nodes}\ntasks {self.tasks}\nhistory {history}"
