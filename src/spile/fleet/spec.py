"""What a fleet shall be: its workers, its machines, its patience. The content of ``fleet.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from spile.errors import Damaged, SpecError, untrusted
from spile.fleet.provider import Node, NodeRequest
from spile.plan.machines import Machine, parse_machine
from spile.spec.records import typed_fields

__all__ = [
    "FLEET_LABEL",
    "WORKER_LABEL",
    "FleetSpec",
    "Policy",
    "Worker",
    "default_runtime",
    "owns",
    "plan_workers",
    "worker_of",
]

FLEET_LABEL = "spile-fleet"
"""Only machines that carry it, with the fleet's name, are ever touched."""
WORKER_LABEL = "spile-worker"

# What Google's documentation says to boot each generation with, for JAX.
_RUNTIMES = {
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def default_runtime(machine: Machine) -> str:
    """The software version for a machine type."""
    return _RUNTIMES.get(machine.generation, "tpu-ubuntu2204-base")


@dataclass(frozen=True)
class Worker:
    """One stream's worker: its number over all zones, and its machine's name, which it keeps when it moves."""

    id: int
    name: str
    zone: str
    """Where it lives, unless that zone stays dry."""


@dataclass(frozen=True)
class Policy:
    """How patient the monitor is. All in seconds, but for counts."""

    interval: float = 60.0
    heartbeat: float = 30.0
    """How often a worker gives a sign of life."""
    stale_intervals: int = 5
    """A running worker's heartbeat may be so many intervals old (the monitor's or the worker's, the longer)."""
    compile_grace: float = 1200.0
    """The same while it boots, installs or compiles."""
    stall: float = 1800.0
    """A worker that gives signs of life may get no further for so long: a device or a compiler can hang beside them."""
    create_timeout: float = 1800.0
    """A machine that is not ready by then is deleted."""
    settle: float = 120.0
    """How long a request without an answer may take to show in a listing."""
    backoff_base: float = 30.0
    backoff_cap: float = 900.0
    early_death: float = 600.0
    """A machine that lived shorter is replaced with a growing delay."""
    stockouts_before_move: int = 3
    quota_retry: float = 1800.0
    max_crashes: int = 2
    """Machines a worker may crash on; on each it is relaunched a few times by its agent."""
    max_never_heard: int = 3
    """Machines in a row that may never give a sign of life."""
    delete_finished: bool = True
    budget: float | None = None
    """Dollars; the fleet is deleted when they are spent."""
    move: bool = True
    """Whether a worker may change its zone."""
    stop: str = ""
    """Why the fleet shall end now; ordered through the bucket, never part of ``fleet.json``."""

    def __post_init__(self) -> None:
        if not self.interval > 0:
            raise SpecError("--interval", expected="seconds, more than 0", found=f"{self.interval:g}")
        if self.budget is not None and not self.budget > 0:
            raise SpecError("--budget", expected="dollars, more than 0", found=f"{self.budget:g}")

    @property
    def patience(self) -> float:
        """How old a running worker's heartbeat may be."""
        return self.stale_intervals * max(self.interval, self.heartbeat)


_FORMER_NAMES = {"quick_death": "early_death", "max_mute": "max_never_heard"}


@cache
def _dollars_per_hour(accelerator_type: str, preemptible: bool) -> float:
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
    root: str = ""
    """Where the dataset is written."""
    streams: str | None = None
    """The folder of streams; worker 5 reads its ``stream_005.jsonl``."""
    arguments: tuple[str, ...] = ()
    """More words for ``spile extract``, the same on every worker."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every worker; whoever may read the bucket may read them."""
    wheel: str | None = None
    """The wheel's key beside ``fleet.json``."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of each file beside ``fleet.json`` that machines use."""
    version: str = ""
    deployment: str = ""
    """A new one for each deploy: what an earlier one finished, this one does anew."""
    max_samples: int | None = None
    policy: Policy = field(default_factory=Policy)
    former_zones: tuple[str, ...] = ()
    """Where earlier deployments of this fleet may have left machines."""
    split: str = ""
    """The split that the streams are of; a worker refuses any other."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """What was said on the command line, for ``--skip-dataset`` to take again."""
    notify: tuple[str, ...] = ()
    """Where the monitor tells what happens."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", self.name):
            raise SpecError(
                "--fleet", expected="a label: small letters, digits and dashes, a letter first", found=repr(self.name)
            )

    @property
    def labels(self) -> dict[str, str]:
        """What marks its machines."""
        return {FLEET_LABEL: self.name}

    def dollars_per_hour(self, node: Node) -> float:
        """What a node costs while it runs; 0 for a type that the table does not know."""
        return _dollars_per_hour(node.accelerator_type, node.preemptible)

    def to_json(self) -> bytes:
        """As ``fleet.json`` holds it."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, place: str = "fleet.json") -> FleetSpec:
        """From ``fleet.json``; what a newer version adds is left out."""
        with untrusted(
            Damaged, f"{place} cannot be read", fix="see who may write the bucket, remove it, and deploy again"
        ):
            raw: dict[str, Any] = json.loads(data)
            if raw.get("format") != 1:
                raise SpecError(place, expected="format 1", fix="use the version of spile that wrote it")
            known = typed_fields(cls, raw)
            known.update(
                workers=tuple(Worker(**typed_fields(Worker, worker)) for worker in raw["workers"]),
                machine=NodeRequest(**typed_fields(NodeRequest, raw["machine"])),
                policy=Policy(**typed_fields(Policy, raw["policy"], _FORMER_NAMES)),
                flags=dict(raw.get("flags", {})),
            )
            return cls(**known)


def plan_workers(zones: tuple[str, ...], workers_per_zone: int, *, prefix: str = "tpu") -> tuple[Worker, ...]:
    """``tpu-{zone}-{n}`` in each zone; the workers' own numbers run on over the zones."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", prefix):
        raise SpecError(
            "--name-prefix", expected="small letters, digits and dashes, a letter first", found=repr(prefix)
        )
    if not zones or len(set(zones)) != len(zones):
        raise SpecError(
            "--zones", expected="zones, each once, such as us-central1-a,us-central1-b", found=repr(",".join(zones))
        )
    if workers_per_zone < 1:
        raise SpecError("--workers-per-zone", expected="1 or more", found=str(workers_per_zone))
    return tuple(
        Worker(place * workers_per_zone + number, f"{prefix}-{zone}-{number}", zone)
        for place, zone in enumerate(zones)
        for number in range(workers_per_zone)
    )


def owns(fleet: str, node: Node) -> bool:
    """Whether the node carries the fleet's label."""
    return node.labels.get(FLEET_LABEL) == fleet


def worker_of(node: Node) -> int | None:
    """The worker whose machine this is."""
    text = node.labels.get(WORKER_LABEL, "")
    return int(text) if text.isdigit() else None
