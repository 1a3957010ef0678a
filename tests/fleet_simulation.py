"""A simulated fleet on a fake clock: the real reconciler, lease and client on the fake cloud, with many faults.

``Simulation(seed).run()`` plays one history: hours of preemptions, stockouts, quota, lost replies, errors, slow
operations, hung and crashing workers, samples that kill the worker that computes them, and monitors that pause, die and
overlap, or are missing for hours; redeployments with more and fewer workers while it runs, another fleet in the same
bucket, budgets raised and lowered, stops, a hub that is out. Then all of it behaves, and the fleet has to end well.
Never are another dataset's rows under a stream, never is a stream wiped, never is a sample lost, doubled or, if it is
healthy, quarantined, never is there a success that verify would refuse, and never is a machine billed for long after
its work ended. The same seed plays the same history.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from spile.data.manifest import StreamEntry, StreamsManifest
from spile.data.split import StreamsPlan, place_of
from spile.errors import RunMismatch
from spile.fleet.cloud_tpu import CloudSettings, CloudTpu
from spile.fleet.deploy import changes, check_stored
from spile.fleet.home import FleetHome, Lease
from spile.fleet.monitor import run_round
from spile.fleet.provider import NodeRequest
from spile.fleet.reconcile import history_of
from spile.fleet.spec import (
    FLEET_LABEL,
    WORKER_LABEL,
    FleetSpec,
    History,
    Policy,
    WorkerHealth,
    keep_numbers,
    plan_workers,
)
from spile.objects.folder import NotFound, ObjectInfo
from spile.spec.phase import Phase
from spile.spec.ranges import Ranges
from spile.spec.run import stream_file
from spile.store.claims import Claim, ClaimBook
from spile.store.quarantine import Supervision, Trials, resume_trials
from tests.fakes.cloud import ApiError, Cloud, CloudTimes
from tests.fakes.cloud_server import Api, ApiFault, Lost

ZONES = ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a")
LIVE = ("CREATING", "READY")


class MemoryFolder:
    """As much of a folder as a fleet's home needs."""

    url = "gs://b/fleet/sim"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.versions: dict[str, int] = {}

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.versions[key] = self.versions.get(key, 0) + 1

    def create(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(key, data) is data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = [key for key in sorted(self.objects) if key.startswith(prefix)]
        return iter([ObjectInfo(key, 0, 0.0, str(self.versions.get(key, 0))) for key in keys])


IDLE_LIMIT = 1800.0
"""Seconds after which a machine whose worker has ended deletes itself."""


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
    """A machine that runs, with the worker on it."""

    worker: int
    name: str
    raw: dict[str, Any]
    booted: float
    book: ClaimBook
    deployment: str = ""
    hung: bool = False
    ended: float = 0.0
    """When its worker ended for good; 0 while it works."""
    claim: Claim | None = None
    commits_seen: int = 0
    """The length of the ledger that the worker knows: its next commit has this number."""
    renewed: float = 0.0
    supervision: Supervision = field(default_factory=Supervision.begin)
    """Its agent's count of how its workers ended."""
    trials: Trials | None = None
    """What its worker knows of the suspects of the stream."""
    healthy: bool = False
    """Whether its worker has computed something."""


@dataclass
class Stream:
    """A stream and its ledger."""

    samples: int
    poison: frozenset[int] = frozenset()
    """The samples that kill the worker that computes them."""
    ledger: list[list[int]] = field(default_factory=list)
    """The samples of each commit."""
    quarantined: list[int] = field(default_factory=list)
    record: Trials | None = None
    """Its ``suspects.json``."""
    rows_of: str = ""
    """The sha256 of the stream whose rows are stored; empty if none are."""

    @property
    def done(self) -> int:
        return sum(map(len, self.ledger))

    @property
    def covered(self) -> Ranges:
        return Ranges.of(sample for commit in self.ledger for sample in commit)

    @property
    def complete(self) -> bool:
        return self.done >= self.samples


@dataclass
class Said:
    """The report of a worker in the bucket."""

    crashes_left: int = 0
    deployment: str = ""
    """The deployment that the verdict belongs to."""
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
            NodeRequest("v5litepod-8", "r", preemptible=True),
            run={"output": "gs://b/activations"},
            deployment="d",
            policy=Policy(move=rng.random() < 0.8, idle_limit=IDLE_LIMIT),
            queued=rng.random() < 0.2,
        )
        self.bucket: dict[str, StreamsManifest] = {}
        """The folders of streams, by their URL."""
        self.stream_count = len(self.fleet.workers) * rng.randint(1, 4)
        self.fleet = self._with_streams("ours")
        self.cloud = Cloud(lambda: self.now, times=CloudTimes(60, 30, 20), on_start=self._boot, on_stop=self._halt)
        self.api = Api(self.cloud, check_answers=False)
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
        self.root = MemoryFolder()
        self.streams = {number: self._stream() for number in range(self.fleet.stream_count)}
        self.said: dict[int, Said] = {worker.id: Said() for worker in self.fleet.workers}
        self.poisoned = rng.choice(self.fleet.workers).id if rng.random() < 0.15 else None
        for worker in self.fleet.workers:
            if rng.random() < 0.2:
                self.said[worker.id].crashes_left = 1
        if self.poisoned is not None:
            self.said[self.poisoned].crashes_left = 10**6
        self.monitors = [self._monitor()]
        self.reports: list[int] = []
        self.calm_at = self.now + (self.chaos if self.chaos is not None else rng.uniform(1200, 7200))
        self.calm = False
        self.unmonitored_until = 0.0
        self.ticks = 0
        self._foreigners()

    # -- the world --------------------------------------------------------------------------------------------------

    def _stream(self) -> Stream:
        """A stream; one in 25 has a sample or two that kill their worker."""
        samples = self.rng.randint(5, 60)
        poison = self.rng.sample(range(samples), self.rng.randint(1, 2)) if self.rng.random() < 0.04 else ()
        return Stream(samples, frozenset(poison))

    def _foreigners(self) -> None:
        """Machines of somebody else: one with a name that a worker would like, one of another fleet."""
        body = {"acceleratorType": "v5litepod-8"}
        zone = self.rng.choice(self.fleet.zones)
        self.cloud.create(zone, "theirs", {**body, "labels": {FLEET_LABEL: "other", WORKER_LABEL: "0"}})
        if self.fleet.policy.move and len(self.fleet.zones) > 1 and self.rng.random() < 0.3:
            self.cloud.create(zone, self.rng.choice(self.fleet.workers).name, {**body})
        self.foreign: dict[str, dict[str, Any]] = {}
        self.now += 61.0
        self.cloud.advance()
        self.foreign = {raw["id"]: raw for raw in self.cloud.nodes("-")}

    def _with_streams(self, dataset: str, fleet: FleetSpec | None = None) -> FleetSpec:
        """The fleet with its streams in the bucket, under the name that a deploy gives them."""
        fleet = fleet or self.fleet
        names = [stream_file(number) for number in range(self.stream_count)]
        entries = tuple(StreamEntry(name, 1, 1, f"{dataset} {len(names)} {name}") for name in names)
        manifest = StreamsManifest({"dataset": dataset}, 0, len(names), entries, {})
        url = place_of("gs://b/datasets", manifest.digest())
        self._hold(self.bucket.setdefault(url, manifest) == manifest, "streams were replaced by others")
        run = {**fleet.run, "dataset_dir": url, "expect_split": manifest.digest()}
        return replace(fleet, run=run, stream_count=len(names))

    def _redeploy(self, dataset: str) -> None:
        """As ``spile deploy --yes`` does it: refused where another dataset's rows are stored."""
        after = self._with_streams(dataset, self._resized())
        plan = StreamsPlan(after.streams or "", self.bucket[after.streams or ""])
        same = after.streams == self.fleet.streams and after.workers == self.fleet.workers
        self._hold(same == (not changes(self.fleet, after)), "a change that nobody was asked about")
        try:
            for number, stream in self.streams.items():
                if stream.rows_of:
                    check_stored(number, stream.rows_of, "activations", plan, mine=True)
        except RunMismatch:
            self._say(f"a deploy of {dataset} is refused")
            return
        self.deployments += 1
        before, self.fleet = len(self.fleet.workers), replace(after, deployment=f"d{self.deployments}")
        if before != len(self.fleet.workers):
            self._say(f"scaled: {before} to {len(self.fleet.workers)} workers")
        for worker in self.fleet.workers:
            self.said.setdefault(worker.id, Said())
        self.home.write_fleet(self.fleet)
        self._say(f"redeployed: {self.fleet.deployment} of {dataset}")

    def _resized(self) -> FleetSpec:
        """The fleet with another number of workers, sometimes: more than before, or fewer."""
        fleet = self.fleet
        if self.workers_per_zone is not None or self.rng.random() < 0.4:
            return fleet
        most = max(1, self.stream_count // len(fleet.zones))
        planned = plan_workers(fleet.zones, self.rng.randint(1, min(most, 5)))
        return replace(fleet, workers=keep_numbers(planned, fleet.workers))

    def _may_write(self, stream: int) -> bool:
        """Whether the stream is the one that the worker was given. Then its rows are of that stream."""
        run = self.fleet.run
        manifest = self.bucket[run["dataset_dir"]]
        if manifest.digest() != run["expect_split"]:
            return False
        mine, stored = manifest.streams[stream].sha256, self.streams[stream]
        self._hold(stored.rows_of in ("", mine), f"rows of {mine} under the stream of {stored.rows_of}")
        stored.rows_of = mine
        return True

    def _worker_of(self, raw: dict[str, Any]) -> int | None:
        labels = raw.get("labels", {})
        return int(labels[WORKER_LABEL]) if labels.get(FLEET_LABEL) == "sim" else None

    def _boot(self, raw: dict[str, Any]) -> None:
        worker = self._worker_of(raw)
        if worker is not None:
            name = raw["name"].split("/")[5]
            book = self._new_book(name)
            booted = self.now + self.rng.uniform(60, 240)
            self.vms[raw["id"]] = Vm(worker, name, raw, booted, book, self.fleet.deployment)
            running = [vm for vm in self.vms.values() if vm.worker == worker]
            self._hold(len(running) == 1, f"two live machines for worker {worker}")

    def _new_book(self, name: str) -> ClaimBook:
        """Return what a new process of a worker knows about the claims: nothing."""
        chance = random.Random(self.rng.random())
        return ClaimBook(self.root, name, clock=lambda: self.now, rng=chance)  # type: ignore[arg-type]

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
            if vm.hung or self.now < vm.booted:
                continue
            if vm.deployment != self.fleet.deployment:
                self._take_deployment(vm)
            elif vm.ended:
                if self.now - vm.ended > IDLE_LIMIT:
                    self._delete_itself(vm)
            elif self.now < self.hub_out_until:
                said = self.said[vm.worker]
                said.beat, said.phase = self.now, Phase.LOADING  # tried again, not given up
            else:
                self._work(vm, seconds)

    def _take_deployment(self, vm: Vm) -> None:
        """Its agent looks once a minute; the worker commits what it has and releases its claim."""
        if self.rng.random() > 0.25:
            return
        vm.deployment, vm.ended, vm.booted = self.fleet.deployment, 0.0, self.now + 15.0
        if vm.claim is not None:
            vm.claim.release()
        # Another agent and another worker process run from now on.
        vm.claim, vm.trials, vm.supervision, vm.book = None, None, Supervision.begin(), self._new_book(vm.name)
        if vm.name not in {worker.name for worker in self.fleet.workers}:
            vm.ended = self.now  # it has no work in this deployment

    def _work(self, vm: Vm, seconds: float) -> None:
        said = self.said[vm.worker]
        said.deployment, said.verdict = vm.deployment, ""
        said.beat, said.phase = self.now, Phase.RUNNING
        if vm.claim is None:
            order = [number for number, stream in self.streams.items() if not stream.complete]
            order.sort(key=lambda number: self.streams[number].done - self.streams[number].samples)
            vm.claim = vm.book.take(order)
            if vm.claim is None:
                if vm.book.all_busy(order):
                    self._end(vm, "finished")
                return
            vm.commits_seen, vm.renewed = len(self.streams[vm.claim.stream].ledger), self.now
            vm.trials = None
            if not self._may_write(vm.claim.stream):
                self._end(vm, "refused")
                return
        if self.now - vm.renewed >= vm.book.expiry / 4:
            vm.claim.renew()  # it works on if the claim is lost: the ledger fences it
            vm.renewed = self.now
        if said.crashes_left and self.rng.random() < 0.2:
            said.crashes_left -= 1
            self._end(vm, "crashed")
            return
        self._take_step(vm, self.streams[vm.claim.stream], max(1, int(seconds / 5)))

    def _take_step(self, vm: Vm, stream: Stream, count: int) -> None:
        """Compute some samples, as :class:`spile.run.worker.StreamWork` does it."""
        if vm.trials is None:
            heard = Supervision.from_environment(vm.supervision.environment())
            vm.trials = resume_trials(stream.record, heard, "id", stream.covered)
            stream.record = vm.trials if stream.record is not None or heard.kills else None
        trials = vm.trials.without(stream.covered)
        step = trials.choose(Ranges([(0, stream.samples)]) - stream.covered, section=4 * count)
        if step.kind == "done":
            self._commit(vm, [])
            return
        if step.kind == "quarantine":
            if self._commit(vm, list(step.samples)):
                stream.quarantined += step.samples
                self._say(f"quarantined {list(step.samples)} of stream {list(self.streams.values()).index(stream)}")
            return
        samples = list(step.samples)
        if step.kind == "trial":
            trials = stream.record = trials.with_trial(step.samples, controlled=vm.healthy or stream.done > 0)
        else:
            samples = samples[:count]
        vm.trials = trials
        if stream.poison.intersection(samples):
            self._kill(vm)
        elif self._commit(vm, samples):
            vm.healthy = True
            if step.kind == "trial":
                vm.trials = stream.record = trials.after_success()

    def _kill(self, vm: Vm) -> None:
        """A sample ends the worker. Its agent starts it again under the same name, so it has its claim back at once."""
        self._say(f"a sample kills the worker of {vm.name}")
        vm.supervision = vm.supervision.after(137)
        vm.claim, vm.trials, vm.healthy, vm.booted = None, None, False, self.now + 15.0
        vm.book = self._new_book(vm.name)

    def _commit(self, vm: Vm, samples: list[int]) -> bool:
        """Create the next commit of the stream if it is absent; else this worker is fenced and takes another stream."""
        assert vm.claim is not None
        stream = self.streams[vm.claim.stream]
        fenced = len(stream.ledger) > vm.commits_seen
        if fenced:
            self._say(f"{vm.name} is fenced from stream {vm.claim.stream}")
        elif samples:
            stream.ledger.append(samples)
            vm.commits_seen += 1
        if fenced or stream.complete:
            vm.claim.release()
            vm.claim, vm.trials = None, None
        return not fenced

    def _end(self, vm: Vm, verdict: str) -> None:
        said = self.said[vm.worker]
        vm.ended, said.verdict, said.said, said.deployment = self.now, verdict, self.now, vm.deployment
        if vm.claim is not None and verdict == "refused":
            vm.claim.release()
        vm.claim, vm.trials = None, None  # a crash releases nothing
        vm.supervision = vm.supervision.after(1)
        if verdict == "finished" and self.rng.random() < 0.7:
            self._delete_itself(vm)

    def _delete_itself(self, vm: Vm) -> None:
        words = vm.raw["name"].split("/")
        if any(raw["id"] == vm.raw["id"] and raw["state"] in LIVE for raw in self.cloud.nodes(words[3])):
            self.cloud.delete(words[3], words[5])

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
            (cloud.without_capacity.discard if zone in cloud.without_capacity else cloud.without_capacity.add)(zone)
            self._say(f"dry: {sorted(cloud.without_capacity)}")
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
            cloud.times = CloudTimes(rng.choice([10, 60, 600, 2500]), rng.choice([5, 30, 400]), 20)
        elif roll < 0.52 and self.vms:
            vm = rng.choice(list(self.vms.values()))
            if self.now > vm.booted + 60 and rng.random() < 0.5:
                vm.hung = True
            elif self.now > vm.booted + 60:  # Its claim expires, and it works on with what it knew.
                vm.booted = self.now + rng.uniform(150, 290)
                self._say(f"the worker of {vm.name} is suspended for a while")
        elif roll < 0.56:
            self.monitors.append(self._monitor())
            self._say(f"another monitor: {len(self.monitors)}")
        elif roll < 0.62 and self.monitors:
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
        elif roll < 0.95 and not any(monitor.busy for monitor in self.monitors):
            self.monitors.clear()
            self.unmonitored_until = self.now + rng.uniform(600, 7200)
            self._say("no monitor runs for a while")

    def _calm(self) -> None:
        self.cloud.without_capacity.clear()
        self.cloud.quota.clear()
        self.api.faults.clear()
        self.cloud.times = CloudTimes(60, 30, 20)
        for monitor in self.monitors:
            monitor.paused_until = 0.0
        self.hub_out_until = self.unmonitored_until = 0.0
        if self.home.read_stop(self.fleet):
            self._redeploy("ours" if self._ours() else "theirs")
        self.home.order_budget(self.fleet, 1e6)
        self._say("calm")

    def _ours(self) -> bool:
        """Which dataset the stored rows are of, if any are."""
        stored = [stream.rows_of for stream in self.streams.values() if stream.rows_of]
        return not stored or stored[0].startswith("ours ")

    def _say(self, text: str) -> None:
        self.log.append(f"{self.now - 1_000_000:7.0f} {text}")

    # -- the monitors -----------------------------------------------------------------------------------------------

    def _monitor(self) -> Monitor:
        number = self.rng.getrandbits(32)
        lease = Lease(self.folder, clock=lambda: self.now, ttl=240.0, owner=f"m{number}")  # type: ignore[arg-type]
        return Monitor(lease, History(), self.now + self.rng.uniform(0, 60))

    def _watch(self, monitor: Monitor) -> None:
        self.ticks += 1
        monitor.lease.take()
        if monitor.lease.number and monitor.lease.number != monitor.holding:
            saved = sorted(key for key in self.folder.objects if key.startswith("history/"))
            monitor.history = History.from_json(self.folder.get(saved[-1])) if saved else History()
        monitor.holding = monitor.lease.number
        fleet = self.home.with_orders(self.home.read_fleet())
        health = {
            number: WorkerHealth(
                task.beat, task.phase, task.verdict if mine else "", task.said if mine else 0.0, "boom"
            )  # type: ignore[arg-type]
            for number, task in self.said.items()
            for mine in [task.deployment == fleet.deployment]
        }
        monitor.busy = True
        try:
            done = run_round(
                fleet, self.client, monitor.history, health,
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
        if all(history_of(history, worker).finished for worker in fleet.workers):
            manifest = self.bucket[fleet.streams or ""]
            whole = [(stream.complete, stream.rows_of) for stream in self.streams.values()]
            right = [(True, entry.sha256) for entry in manifest.streams]
            self._hold(whole == right, f"a success that verify would refuse: {whole}")

    def _metadata(self, name: str) -> dict[str, str]:
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
        workers = [worker.id for worker in self.fleet.workers]
        ended = all(
            (self.said[n].verdict == "finished" and self.said[n].deployment == self.fleet.deployment)
            or (n == self.poisoned and n in self.reports)
            for n in workers
        )
        own = [raw for raw in self.cloud.nodes("-") if self._worker_of(raw) is not None]
        complete = all(stream.complete for stream in self.streams.values())
        # A worker that crashes on every machine may have been the last one that held a stream.
        return ended and not own and (complete or self.poisoned in workers)

    def run(self) -> Simulation:
        """Play it to its end, or fail with the seed and the last of its log."""
        limit = self.calm_at + 4 * 3600
        while not (self.calm and self.over()):
            self._hold(self.now < limit, f"it did not converge: {self.state()}" if self.now >= limit else "")
            self._step()
        for number, stream in self.streams.items():
            stored = sorted(sample for commit in stream.ledger for sample in commit)
            self._hold(len(set(stored)) == len(stored), f"stream {number} doubled a sample: {stored}")
            self._hold(not stream.complete or stored == list(range(stream.samples)), f"stream {number} lost a sample")
            self._hold(set(stream.quarantined) <= stream.poison, f"stream {number} quarantined {stream.quarantined}")
            if stream.complete:
                self._hold(set(stream.quarantined) == stream.poison, f"stream {number} stored {stream.poison}")
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
        if not self.monitors and self.now >= self.unmonitored_until:
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
        for vm in self.vms.values():
            late = self.now - vm.ended > IDLE_LIMIT + 600 if vm.ended and not vm.hung else False
            self._hold(not late, f"{vm.name} is billed {IDLE_LIMIT + 600:.0f} s after its work ended")
        listed = {raw["id"] for raw in self.cloud.nodes("-")}
        self._hold(set(self.foreign) <= listed, "a foreign machine is gone")

    def state(self) -> str:
        """Return the state for a failure message."""
        nodes = [(raw["name"].split("/")[3], raw["name"].split("/")[5], raw["state"]) for raw in self.cloud.nodes("-")]
        holder = [monitor for monitor in self.monitors if monitor.lease.number]
        history = holder[-1].history.workers if holder else {}
        return f"nodes {nodes}\nstreams {self.streams}\nsaid {self.said}\nhistory {history}"
