"""The specification of a fleet, the content of ``fleet.json``, and its state: what is observed and what is stored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import orjson

from spile.errors import Damaged, SpecError, SpileError, untrusted
from spile.fleet.provider import Node, NodeRequest, Operation
from spile.planning.machines import Machine, parse_machine
from spile.spec.options import check_number
from spile.spec.phase import Phase
from spile.spec.records import read_record
from spile.store.heartbeat import INTERVAL, Liveness

FLEET_LABEL = "spile-fleet"
"""The label with the fleet's name. Only machines that carry it are ever changed or deleted."""
WORKER_LABEL = "spile-worker"

# The runtime versions for JAX from Google's documentation, by TPU generation.
_RUNTIMES = {
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def default_runtime(machine: Machine) -> str:
    return _RUNTIMES.get(machine.generation, "tpu-ubuntu2204-base")


@dataclass(frozen=True)
class Worker:
    """One worker: its number, and the name of its machine, which it keeps when it moves to another zone."""

    id: int
    name: str
    zone: str
    """The zone where its machine is created first."""


@dataclass(frozen=True)
class Policy:
    """The limits by which machines are judged. Times are in seconds."""

    interval: float = 60.0
    """Time between two rounds of the monitor."""
    compile_grace: float = 1200.0
    """The least limit for the age of a heartbeat while a worker boots, installs or compiles."""
    stall: float = 1800.0
    """A worker with heartbeats may make no progress for this long: a device or a compiler can hang."""
    create_timeout: float = 1800.0
    """A machine that is not ready after this time is deleted."""
    settle: float = 120.0
    """A request without an answer shows in a listing after at most this time."""
    backoff_base: float = 30.0
    backoff_cap: float = 900.0
    early_death: float = 600.0
    """A machine that lived shorter than this is replaced after a growing delay."""
    stockouts_before_move: int = 3
    quota_retry: float = 1800.0
    no_machine_alarm: float = 1800.0
    """A worker without a machine for this long is reported to the webhooks."""
    max_crashes: int = 2
    """The number of machines that a worker may crash on. On each one the agent restarts it a few times."""
    max_never_heard: int = 3
    """The number of machines in a row that may never report."""
    idle_limit: float = 1800.0
    """A machine whose worker was refused or gave up deletes itself after this time, even without a monitor."""
    delete_finished: bool = True
    budget: float | None = None
    """Dollars. The fleet is deleted when they are spent, by the monitor or by the machines themselves."""
    move: bool = True
    """Whether a worker may change its zone."""
    stop: str = ""
    """Why the fleet has to end now. It comes from an order in the bucket and is never part of ``fleet.json``."""

    def __post_init__(self) -> None:
        if not self.interval > 0:
            raise SpecError("--interval", expected="seconds, more than 0", found=f"{self.interval:g}")
        if self.budget is not None and not self.budget > 0:
            raise SpecError("--budget", expected="dollars, more than 0", found=f"{self.budget:g}")

    def heartbeat_limit(self, interval: float = INTERVAL, *, slow: bool = True) -> float:
        """Return the limit for the age of a heartbeat; ``slow`` while a worker boots, installs or compiles."""
        return max(Liveness(max(self.interval, interval)).silent, self.compile_grace if slow else 0.0)


@cache
def dollars_per_hour(accelerator_type: str, preemptible: bool) -> float:
    """Return the price of a machine while it runs; 0 if it is not known."""
    try:
        price = parse_machine(accelerator_type).price
    except SpecError:
        return 0.0
    return price.preemptible if preemptible else price.on_demand


@dataclass(frozen=True)
class FleetSpec:
    """One fleet."""

    name: str
    project: str
    zones: tuple[str, ...]
    workers: tuple[Worker, ...]
    machine: NodeRequest
    queued: bool = False
    best_effort: bool = False
    run: Mapping[str, Any] = field(default_factory=dict)
    """The run spec, as ``RunSpec.to_dict`` gives it: the same for every worker."""
    stream_count: int = 0
    """The number of streams that the workers claim."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The flags of the deployment that a later one reuses if it uses the same streams."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for every worker. Everyone who may read the bucket may read them."""
    wheel: str | None = None
    """The key of the wheel next to ``fleet.json``."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of each file next to ``fleet.json`` that machines use."""
    version: str = ""
    deployment: str = ""
    """A new name for each deploy. Verdicts of an earlier deployment do not count for this one."""
    policy: Policy = field(default_factory=Policy)
    former_zones: tuple[str, ...] = ()
    """Zones where earlier deployments of this fleet may have left machines."""
    name_prefix: str = "tpu"
    """The first part of the names of new machines."""
    notify: tuple[str, ...] = ()
    """Webhooks that the monitor calls."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", self.name):
            raise SpecError(
                "--fleet", expected="a label: small letters, digits and dashes, a letter first", found=repr(self.name)
            )

    @property
    def labels(self) -> dict[str, str]:
        return {FLEET_LABEL: self.name}

    @property
    def possible_zones(self) -> tuple[str, ...]:
        """Every zone where a machine of the fleet may exist."""
        return tuple(dict.fromkeys([*self.zones, *(worker.zone for worker in self.workers), *self.former_zones]))

    @property
    def root(self) -> str:
        return str(self.run.get("output") or "")

    @property
    def streams(self) -> str | None:
        return self.run.get("dataset_dir")

    @property
    def tier(self) -> str:
        """How the machines are paid for, as text."""
        tiers = {
            "best effort": self.best_effort,
            "spot": self.machine.spot,
            "preemptible": self.machine.preemptible,
            "reserved": self.machine.reserved,
        }
        return next((name for name, is_set in tiers.items() if is_set), "on demand")

    @property
    def price(self) -> float:
        """The dollars per hour of one machine; 0 if the price is not known."""
        cheap = self.machine.preemptible or self.machine.spot or self.best_effort
        return dollars_per_hour(self.machine.accelerator_type, cheap)

    def run_json(self) -> bytes:
        """Return the run spec as ``spile worker --spec`` reads it."""
        return json.dumps(dict(self.run)).encode()

    def to_json(self) -> bytes:
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, place: str = "fleet.json") -> FleetSpec:
        """Parse ``fleet.json``. Fields that only a newer version knows are ignored."""
        with untrusted(
            Damaged,
            f"{place} cannot be read",
            fix="check who can write to the bucket, remove the file, and deploy again",
        ):
            raw: dict[str, Any] = json.loads(data)
            if raw.get("format") != 1:
                raise SpecError(place, expected="format 1", fix="use the version of spile that wrote it")
            return read_record(cls, raw)


def plan_workers(zones: tuple[str, ...], workers_per_zone: int, *, prefix: str = "tpu") -> tuple[Worker, ...]:
    """Return workers named ``tpu-{zone}-{n}`` in each zone, numbered over all zones."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", prefix):
        raise SpecError(
            "--name-prefix", expected="small letters, digits and dashes, a letter first", found=repr(prefix)
        )
    if not zones or len(set(zones)) != len(zones):
        raise SpecError(
            "--zones", expected="zones, each once, such as us-central1-a,us-central1-b", found=repr(",".join(zones))
        )
    check_number("--workers-per-zone", workers_per_zone, 1)
    return tuple(
        Worker(place * workers_per_zone + number, f"{prefix}-{zone}-{number}", zone)
        for place, zone in enumerate(zones)
        for number in range(workers_per_zone)
    )


def keep_numbers(workers: tuple[Worker, ...], before: tuple[Worker, ...]) -> tuple[Worker, ...]:
    """Return the workers with the numbers that their names had in an earlier deployment.

    Machines are labelled with the number of their worker, so a fleet that grows or shrinks must not renumber them. New
    names get numbers that were never used.
    """
    known = {worker.name: worker.id for worker in before}
    unused = iter(range(max(known.values(), default=-1) + 1, 1 << 30))
    return tuple(replace(each, id=known[each.name] if each.name in known else next(unused)) for each in workers)


def owns(fleet: str, node: Node, home: str = "") -> bool:
    """Return whether a machine belongs to a fleet of this name; with ``home``, not to one of another bucket."""
    return node.labels.get(FLEET_LABEL) == fleet and home in ("", node.metadata.get("spile-home", home))


def worker_of(node: Node) -> int | None:
    """Return the number of the worker whose machine this is, from its label."""
    text = node.labels.get(WORKER_LABEL, "")
    return int(text) if text.isdigit() else None


Verdict = Literal["", "finished", "crashed", "refused", "stopped"]


@dataclass(frozen=True)
class WorkerHealth:
    """A worker as the bucket shows it: its heartbeat and its agent's report."""

    heartbeat: float | None = None
    """The time of the last heartbeat or report."""
    phase: Phase = Phase.UNKNOWN
    verdict: Verdict = ""
    """How the worker ended in this deployment, by its agent's report."""
    reported: float = 0.0
    """The time of that report."""
    error: str = ""
    """The last lines of its log."""
    interval: float = INTERVAL
    """The time between two heartbeats."""
    progress: float | None = None
    """The time at which the worker last made progress."""
    crash_loop: str = ""
    """A description of the crash loop of a worker that its agent keeps restarting; empty if there is none."""


@dataclass(frozen=True)
class Observed:
    """One observation of the cloud and the bucket."""

    fleet: str
    nodes: tuple[Node, ...] = ()
    """All nodes of the zones that answered, of this fleet and of others."""
    unanswered: Mapping[str, SpileError] = field(default_factory=dict)
    """The zones that did not answer, with the error."""
    operations: Mapping[str, Operation] = field(default_factory=dict)
    """The operations that the history waits for, by name."""
    health: Mapping[int, WorkerHealth] = field(default_factory=dict)
    home: str = ""
    """The fleet's folder. Machines of a fleet of the same name in another bucket are foreign."""

    @cached_property
    def own(self) -> dict[int, list[Node]]:
        """The fleet's own machines, by worker."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            worker = worker_of(node)
            if owns(self.fleet, node, self.home) and worker is not None:
                found.setdefault(worker, []).append(node)
        return found

    @cached_property
    def foreign(self) -> frozenset[tuple[str, str]]:
        """The (zone, name) pairs of machines that do not belong to the fleet."""
        return frozenset((node.zone, node.name) for node in self.nodes if not owns(self.fleet, node, self.home))

    def health_of(self, worker: int) -> WorkerHealth:
        return self.health.get(worker, WorkerHealth())


@dataclass(frozen=True)
class Pending:
    """A request whose result is not known yet."""

    verb: Literal["create", "delete"]
    zone: str
    since: float
    operation: str | None = None
    """None if the answer was lost, so that only a listing can tell."""
    uid: str = ""
    """The uid of the machine that is being deleted."""


@dataclass
class WorkerHistory:
    """The history of one worker."""

    zone: str
    """The zone of its next machine."""
    other_zones: tuple[str, ...] = ()
    """Other zones where one of its machines may exist."""
    pending: Pending | None = None
    failures: int = 0
    """Consecutive failed requests in this zone."""
    early_deaths: int = 0
    """Consecutive machines that lived only a short time."""
    retry_at: float = 0.0
    alive: str = ""
    """The uid of the machine that was last seen alive. If it disappears, that counts as a preemption."""
    since: float = 0.0
    """When that machine was created."""
    starting_since: float = 0.0
    """The time since when its machine has been starting; 0 if it is not starting."""
    no_machine_since: float = 0.0
    """The time since when it has had no machine; 0 if it has one or needs none."""
    alarmed: bool = False
    """Whether that is longer than ``Policy.no_machine_alarm``."""
    last_dead: str = ""
    """The uid of the machine whose end was counted last."""
    preemptions: int = 0
    stockouts: int = 0
    silences: int = 0
    never_heard: int = 0
    """Consecutive machines that never reported."""
    crashes: int = 0
    creates: int = 0
    finished: bool = False
    gave_up: str = ""
    reported: bool = False
    note: str = ""
    """The reason why it waits, as text."""
    lost: str = ""
    """Why its last machine was replaced. It is kept when the next one exists."""

    @property
    def zones(self) -> set[str]:
        """Every zone where one of its machines may exist."""
        return {self.zone, *self.other_zones, *([self.pending.zone] if self.pending else [])}


@dataclass(frozen=True)
class ZoneBlock:
    """Why no machine is requested in a zone, and until when."""

    until: float
    why: str


@dataclass(frozen=True)
class Bill:
    """The cost of one machine so far."""

    worker: int
    zone: str
    started: float
    seen: float
    dollars_per_hour: float

    @property
    def dollars(self) -> float:
        """The cost until the machine was last seen alive."""
        return max(0.0, self.seen - self.started) / 3600.0 * self.dollars_per_hour


@dataclass
class History:
    """The history of a fleet, as monitors store it."""

    workers: dict[int, WorkerHistory] = field(default_factory=dict)
    blocks: dict[str, ZoneBlock] = field(default_factory=dict)
    bills: dict[str, Bill] = field(default_factory=dict)
    settled: float = 0.0
    """The cost of machines that no longer exist."""
    stopped: str = ""
    """Why the whole fleet is being deleted."""
    deployment: str = ""

    @property
    def dollars(self) -> float:
        return self.settled + sum(bill.dollars for bill in self.bills.values())

    def to_json(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS)

    @classmethod
    def from_json(cls, data: bytes) -> History:
        """Parse a stored history. Fields that only a newer version knows are ignored."""
        with untrusted(Damaged, "the fleet's history cannot be read", fix="remove the last of its history/*.json"):
            return read_record(cls, orjson.loads(data))
