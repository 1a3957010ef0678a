"""The state of the fake Cloud TPU service: nodes, operations and queued resources, on a clock that tests control."""

from __future__ import annotations

import copy
import heapq
import itertools
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from spile.planning.machines import known_machines, parse_machine


class ApiError(Exception):
    """An error of the API: an HTTP status, a status name and a message."""

    WORDS: ClassVar[dict[int, str]] = {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        409: "ALREADY_EXISTS",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
    }

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> dict[str, Any]:
        word = self.WORDS.get(self.status, "UNKNOWN")
        return {"error": {"code": self.status, "message": self.message, "status": word}}


ZONES: tuple[str, ...] = (
    "us-central1-a",
    "us-central1-b",
    "us-central1-c",
    "us-central1-f",
    "us-central2-b",
    "us-east1-d",
    "us-east5-a",
    "us-west4-a",
    "europe-west4-a",
    "europe-west4-b",
    "asia-east1-c",
)
TYPES: tuple[str, ...] = tuple(machine.name for machine in known_machines())


@dataclass
class CloudTimes:
    """How long operations take, in seconds of the cloud's clock."""

    create: float = 1.0
    delete: float = 0.5
    queue: float = 0.5


@dataclass
class CloudOperation:
    """A long-running operation."""

    zone: str
    name: str
    verb: str
    target: str
    version: str
    created: float
    ended: float | None = None
    error: dict[str, Any] | None = None
    response: dict[str, Any] | None = None


@dataclass(order=True)
class _Event:
    due: float
    number: int
    act: Callable[[], None] = field(compare=False)


def stamp(moment: float) -> str:
    """Return a time in the API's format."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


def region(zone: str) -> str:
    """Return ``us-central1`` for ``us-central1-a``."""
    return zone.rpartition("-")[0]


class Cloud:
    """The TPUs of one project. ``on_start`` and ``on_stop`` start and end the processes of machines."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        pace: CloudTimes | None = None,
        on_start: Callable[[dict[str, Any]], None] = lambda _: None,
        on_stop: Callable[[dict[str, Any], float], None] = lambda *_: None,
    ) -> None:
        self.clock = clock
        self.pace = pace or CloudTimes()
        self.lock = threading.RLock()
        self.dry: set[str] = set()
        self.quota: dict[str, int] = {}
        self.quota_infos: list[dict[str, Any]] = []
        """What the Cloud Quotas API answers. It is not enforced: ``quota`` is."""
        self.refused: set[str] = set()
        """Permissions that the caller does not have."""
        self._on_start, self._on_stop = on_start, on_stop
        # Ids are unique across clouds, as in the real one: the processes of a VM are found and killed by its id.
        self._first_id = 7_000_000_000_000_000_000 + secrets.randbelow(10**11) * 10**6
        self.machines: dict[tuple[str, str], dict[str, Any]] = {}
        self._operations: dict[str, CloudOperation] = {}
        self._events: list[_Event] = []
        self._numbers = itertools.count(1)
        self.queue = Queue(self)

    # -- time -------------------------------------------------------------------------------------------------------

    def now(self) -> str:
        """Return the current time in the API's format."""
        return stamp(self.clock())

    def advance(self) -> None:
        """Run all events that are due."""
        with self.lock:
            while self._events and self._events[0].due <= self.clock():
                heapq.heappop(self._events).act()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule an event after ``seconds``."""
        heapq.heappush(self._events, _Event(self.clock() + seconds, next(self._numbers), act))

    # -- operations -------------------------------------------------------------------------------------------------

    def begin(self, zone: str, verb: str, target: str, version: str) -> CloudOperation:
        """Return a new pending operation."""
        name = f"operation-{next(self._numbers):08d}"
        operation = CloudOperation(zone, name, verb, target, version, self.clock())
        self._operations[name] = operation
        return operation

    def end(self, operation: CloudOperation, *, error: dict[str, Any] | None = None, response: Any = None) -> None:
        """Mark an operation as done or failed."""
        operation.ended = self.clock()
        operation.error = error
        operation.response = copy.deepcopy(response)

    def show_operation(self, project: str, operation: CloudOperation) -> dict[str, Any]:
        """Return the operation as JSON; ``done`` is absent while it is pending."""
        shown: dict[str, Any] = {
            "name": f"projects/{project}/locations/{operation.zone}/operations/{operation.name}",
            "metadata": {
                "@type": "type.googleapis.com/google.cloud.common.OperationMetadata",
                "createTime": stamp(operation.created),
                "target": operation.target,
                "verb": operation.verb,
                "cancelRequested": False,
                "apiVersion": operation.version,
            },
        }
        if operation.ended is not None:
            shown["done"] = True
            shown["metadata"]["endTime"] = stamp(operation.ended)
            if operation.error:
                shown["error"] = operation.error
            else:
                shown["response"] = operation.response
        return shown

    def operation(self, zone: str, name: str) -> CloudOperation:
        """Return one operation, or raise a 404."""
        found = self._operations.get(name)
        if found is None or found.zone != zone:
            raise ApiError(404, f"Resource 'operations/{name}' was not found")
        return found

    # -- nodes ------------------------------------------------------------------------------------------------------

    def nodes(self, zone: str) -> list[dict[str, Any]]:
        """Return the nodes of a zone; ``-`` means every zone."""
        return [raw for (place, _), raw in sorted(self.machines.items()) if zone in ("-", place)]

    def node(self, zone: str, name: str) -> dict[str, Any]:
        """Return one node, or raise a 404."""
        try:
            return self.machines[zone, name]
        except KeyError:
            raise ApiError(404, f"Resource 'nodes/{name}' was not found in {zone}") from None

    def check_place(self, zone: str, kind: str | None = None) -> None:
        """Refuse an unknown zone or machine type as the real API does."""
        if zone not in ZONES:
            raise ApiError(403, f"Permission denied on 'locations/{zone}' (or it may not exist).")
        if kind is not None and kind not in TYPES:
            raise ApiError(400, f'Accelerator type "{kind}" not found in zone {zone}.')

    def _check_quota(self, zone: str, more: int = 1) -> None:
        limit = self.quota.get(zone, self.quota.get(region(zone)))
        held = sum(1 for place, _ in self.machines if region(place) == region(zone))
        if zone in self.quota:
            held = sum(1 for place, _ in self.machines if place == zone)
        if limit is not None and held + more > limit:
            name = "TPUPreemptiblePerProjectPerZoneForTPUAPI"
            raise ApiError(429, f"Quota limit '{name}' has been exceeded. Limit: {limit} in region {region(zone)}.")

    def _stockout(self, zone: str, kind: str) -> dict[str, Any]:
        text = f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes'
        return {"code": 8, "message": f"{text} are available (accelerator type {kind})."}

    def new_node(self, project: str, zone: str, name: str, body: dict[str, Any], version: str) -> dict[str, Any]:
        """Return a node that is being created."""
        number = next(self._numbers)
        raw = copy.deepcopy(body)
        raw.setdefault("networkConfig", {}).setdefault("network", f"projects/{project}/global/networks/default")
        raw.update(
            name=f"projects/{project}/locations/{zone}/nodes/{name}",
            id=str(self._first_id + number),
            state="CREATING",
            createTime=self.now(),
            apiVersion=version.upper(),
            # Loopback addresses let hosts that are local processes reach each other, and let an sshd listen there.
            networkEndpoints=[
                {
                    "ipAddress": f"127.78.{number % 250}.{host + 2}",
                    "port": 8470,
                    "accessConfig": {"externalIp": f"127.77.{number % 250}.{host + 2}"},
                }
                for host in range(parse_machine(raw["acceleratorType"]).hosts)
            ],
        )
        self.machines[zone, name] = raw
        return raw

    def became_ready(self, raw: dict[str, Any]) -> None:
        """Boot the machine."""
        raw.update(state="READY", health="HEALTHY")
        self._on_start(raw)

    def create(self, project: str, zone: str, name: str, body: dict[str, Any], version: str) -> CloudOperation:
        """Request a node. A stockout appears only when the operation fails, and leaves nothing behind."""
        kind = body.get("acceleratorType") or "v2-8"
        body["acceleratorType"] = kind
        self.check_place(zone, kind)
        if not name:
            raise ApiError(400, "Node ID must be specified.")
        if (zone, name) in self.machines:
            raise ApiError(409, f"Resource 'projects/{project}/locations/{zone}/nodes/{name}' already exists")
        self._check_quota(zone)
        raw = self.new_node(project, zone, name, body, version)
        operation = self.begin(zone, "create", raw["name"], version)

        def act() -> None:
            if self.machines.get((zone, name)) is not raw or raw["state"] != "CREATING":
                self.end(operation, error={"code": 10, "message": "The node was deleted while it was created."})
            elif zone in self.dry:
                del self.machines[zone, name]
                self.end(operation, error=self._stockout(zone, kind))
            else:
                self.became_ready(raw)
                node_type = f"type.googleapis.com/google.cloud.tpu.{version}.Node"
                self.end(operation, response={"@type": node_type, **raw})

        self.later(self.pace.create, act)
        return operation

    def delete(self, zone: str, name: str, version: str) -> CloudOperation:
        """Request the deletion of a node; its processes end at once."""
        raw = self.node(zone, name)
        operation = self.begin(zone, "delete", raw["name"], version)
        self.remove(raw)

        def act() -> None:
            if self.machines.get((zone, name)) is raw:
                del self.machines[zone, name]
                self.queue.after_loss(zone, raw)
            self.end(operation, response={"@type": "type.googleapis.com/google.protobuf.Empty"})

        self.later(self.pace.delete, act)
        return operation

    def remove(self, raw: dict[str, Any]) -> None:
        """Remove the machine; its processes end at once."""
        if raw["state"] != "DELETING":
            raw["state"] = "DELETING"
            self._on_stop(raw, 0.0)

    def change(self, zone: str, name: str, body: dict[str, Any], mask: str, version: str) -> CloudOperation:
        """Replace the fields that the mask names."""
        raw = self.node(zone, name)
        for key in mask.split(","):
            if key not in ("labels", "metadata", "tags", "description"):
                raise ApiError(400, f"Invalid update mask: {key}")
            raw[key] = copy.deepcopy(body.get(key, {}))
        operation = self.begin(zone, "update", raw["name"], version)
        self.end(operation, response={"@type": f"type.googleapis.com/google.cloud.tpu.{version}.Node", **raw})
        return operation

    def preempt(self, zone: str, name: str, *, notice: float = 0.0, state: str = "PREEMPTED") -> None:
        """Preempt a machine. It stays listed and holds quota until it is deleted."""
        with self.lock:
            raw = self.node(zone, name)
            if raw["state"] not in ("READY", "CREATING"):
                raise ApiError(400, f"{name} is {raw['state']}, not READY")
            raw["state"] = state
            self._on_stop(raw, notice)
            self.queue.after_loss(zone, raw)


class Queue:
    """The queued resources of one cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._queued: dict[tuple[str, str], dict[str, Any]] = {}

    def queued(self, zone: str) -> list[dict[str, Any]]:
        """Return the queued resources of a zone; ``-`` means every zone."""
        return [raw for (place, _), raw in sorted(self._queued.items()) if zone in ("-", place)]

    def queued_one(self, zone: str, name: str) -> dict[str, Any]:
        """Return one queued resource, or raise a 404."""
        try:
            return self._queued[zone, name]
        except KeyError:
            raise ApiError(404, f"Resource 'queuedResources/{name}' was not found in {zone}") from None

    def enqueue(self, project: str, zone: str, name: str, body: dict[str, Any], version: str) -> CloudOperation:
        """Request a queued resource: ACCEPTED, then its nodes when there is capacity, then ACTIVE."""
        self._cloud.check_place(zone)
        if (zone, name) in self._queued:
            raise ApiError(409, f"Resource 'projects/{project}/locations/{zone}/queuedResources/{name}' already exists")
        specs = body.get("tpu", {}).get("nodeSpec", [])
        if not specs:
            raise ApiError(400, "At least one node spec must be given.")
        for spec in specs:
            self._cloud.check_place(zone, spec.get("node", {}).get("acceleratorType"))
        raw = {**copy.deepcopy(body), "name": f"projects/{project}/locations/{zone}/queuedResources/{name}"}
        raw.update(createTime=self._cloud.now(), state={"state": "ACCEPTED", "stateInitiator": "SERVICE"})
        self._queued[zone, name] = raw
        operation = self._cloud.begin(zone, "create", raw["name"], version)
        shown = {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.QueuedResource", **raw}
        self._cloud.end(operation, response=shown)
        self._cloud.later(self._cloud.pace.queue, lambda: self._provision(project, zone, name, raw, version))
        return operation

    def _provision(self, project: str, zone: str, name: str, raw: dict[str, Any], version: str) -> None:
        if self._queued.get((zone, name)) is not raw or raw["state"]["state"] == "DELETING":
            return
        if zone in self._cloud.dry:
            raw["state"] = {"state": "WAITING_FOR_RESOURCES", "stateInitiator": "SERVICE"}
            self._cloud.later(self._cloud.pace.queue, lambda: self._provision(project, zone, name, raw, version))
            return
        taken = [node for _, node in self._node_names(name, raw) if (zone, node) in self._cloud.machines]
        if taken:
            error = {"code": 6, "message": f"Node {taken[0]} already exists"}
            raw["state"] = {"state": "FAILED", "stateInitiator": "SERVICE", "failedData": {"error": error}}
            return
        raw["state"] = {"state": "PROVISIONING", "stateInitiator": "SERVICE"}
        made = []
        for spec, node_name in self._node_names(name, raw):
            body = copy.deepcopy(spec.get("node", {}))
            body["queuedResource"] = raw["name"]
            body["schedulingConfig"] = {"spot": True} if {"spot", "bestEffort"} & set(raw) else {}
            made.append(self._cloud.new_node(project, zone, node_name, body, version))
        self._cloud.later(self._cloud.pace.create, lambda: self._activate(zone, name, raw, made))

    def _node_names(self, name: str, raw: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        found: list[tuple[dict[str, Any], str]] = []
        for spec in raw["tpu"]["nodeSpec"]:
            many = spec.get("multisliceParams") or spec.get("multiNodeParams")
            if many:
                prefix = many.get("nodeIdPrefix") or name
                found.extend((spec, f"{prefix}-{number}") for number in range(int(many["nodeCount"])))
            else:
                found.append((spec, spec.get("nodeId") or name))
        return found

    def _activate(self, zone: str, name: str, raw: dict[str, Any], made: list[dict[str, Any]]) -> None:
        if self._queued.get((zone, name)) is not raw or raw["state"]["state"] != "PROVISIONING":
            return
        for node in made:
            if node["state"] == "CREATING":
                self._cloud.became_ready(node)
        raw["state"] = {"state": "ACTIVE", "stateInitiator": "SERVICE"}

    def after_loss(self, zone: str, node: dict[str, Any]) -> None:
        """Suspend a queued resource for good after it has lost a node."""
        owner = str(node.get("queuedResource", "")).rpartition("/")[2]
        raw = self._queued.get((zone, owner))
        if raw is not None and raw["state"]["state"] != "DELETING":
            raw["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}

    def dequeue(self, zone: str, name: str, force: bool, version: str) -> CloudOperation:
        """Delete a queued resource; without ``force`` only if its nodes are gone."""
        raw = self.queued_one(zone, name)
        owned = [
            node
            for (place, _), node in self._cloud.machines.items()
            if place == zone and node.get("queuedResource") == raw["name"]
        ]
        if owned and not force:
            raise ApiError(400, f"Queued resource {name} still has nodes: delete them first, or use force.")
        raw["state"] = {"state": "DELETING", "stateInitiator": "USER"}
        for node in owned:
            self._cloud.remove(node)
        operation = self._cloud.begin(zone, "delete", raw["name"], version)
        shown = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        if version == "v2alpha1":
            shown = {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.QueuedResource", **raw}

        def act() -> None:
            for node in owned:
                self._cloud.machines.pop((zone, node["name"].rpartition("/")[2]), None)
            self._queued.pop((zone, name), None)
            self._cloud.end(operation, response=shown)

        self._cloud.later(self._cloud.pace.delete, act)
        return operation
