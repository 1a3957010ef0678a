"""The state of the fake Cloud TPU service: nodes, operations and queued resources, on a clock that tests control."""

from __future__ import annotations

import copy
import heapq
import itertools
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from spile.planning.machines import parse_machine
from tests.fakes.cloud_protos import as_v2
from tests.fakes.cloud_zones import TYPES, ZONES


class ApiError(Exception):
    """An error of the API: an HTTP status, a status name, a message and details."""

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

    def __init__(self, status: int, message: str, details: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.details = status, message, details

    def body(self) -> dict[str, Any]:
        word = self.WORDS.get(self.status, "UNKNOWN")
        details = {"details": self.details} if self.details else {}
        return {"error": {"code": self.status, "message": self.message, "status": word, **details}}


@dataclass
class CloudTimes:
    """How long operations take, in seconds of the cloud's clock."""

    create: float = 1.0
    delete: float = 0.5
    queue: float = 0.5


_GOOGLE = "type.googleapis.com/google"
_PROJECT = "projects/fake-project"


class Cloud:
    """The TPUs of one project. ``on_start`` and ``on_stop`` start and end the processes of machines."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        times: CloudTimes | None = None,
        on_start: Callable[[dict[str, Any]], None] = lambda _: None,
        on_stop: Callable[[dict[str, Any], float], None] = lambda *_: None,
    ) -> None:
        self.clock = clock
        self.times = times or CloudTimes()
        self.lock = threading.RLock()
        self.without_capacity: set[str] = set()
        self.quota: dict[str, int] = {}
        self._on_start, self._on_stop = on_start, on_stop
        # Ids are unique across clouds, as in the real one: the processes of a VM are found and killed by its id.
        self._first_id = 7_000_000_000_000_000_000 + secrets.randbelow(10**11) * 10**6
        self._nodes: dict[tuple[str, str], dict[str, Any]] = {}
        self._queued: dict[tuple[str, str], dict[str, Any]] = {}
        self._operations: dict[tuple[str, str], dict[str, Any]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)

    # -- time and operations ----------------------------------------------------------------------------------------

    def _now(self) -> str:
        """Return the current time in the API's format."""
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"

    def advance(self) -> None:
        """Run all events that are due."""
        with self.lock:
            while self._events and self._events[0][0] <= self.clock():
                heapq.heappop(self._events)[2]()

    def _later(self, seconds: float, finish: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock() + seconds, next(self._numbers), finish))

    def _begin(self, zone: str, verb: str, target: str) -> dict[str, Any]:
        """Return a new pending operation; it has no ``done`` until it ends."""
        name = f"operation-{next(self._numbers):08d}"
        operation = self._operations[zone, name] = {
            "name": f"{_PROJECT}/locations/{zone}/operations/{name}",
            "metadata": {
                "@type": f"{_GOOGLE}.cloud.common.OperationMetadata",
                "createTime": self._now(),
                "target": target,
                "verb": verb,
                "cancelRequested": False,
                "apiVersion": "v2",
            },
        }
        return operation

    def _end(self, operation: dict[str, Any], kind: str = "protobuf.Empty", **response: Any) -> dict[str, Any]:
        operation["metadata"]["endTime"] = self._now()
        operation |= {"done": True, "response": {"@type": f"{_GOOGLE}.{kind}", **copy.deepcopy(response)}}
        return operation

    def _fail(self, operation: dict[str, Any], code: int, message: str) -> None:
        operation["metadata"]["endTime"] = self._now()
        operation |= {"done": True, "error": {"code": code, "message": message}}

    def operation(self, zone: str, name: str) -> dict[str, Any]:
        return _found(self._operations, zone, name, "operations")

    # -- nodes ------------------------------------------------------------------------------------------------------

    def nodes(self, zone: str) -> list[dict[str, Any]]:
        """Return the nodes of a zone; ``-`` means every zone."""
        return [raw for (place, _), raw in sorted(self._nodes.items()) if zone in ("-", place)]

    def node(self, zone: str, name: str) -> dict[str, Any]:
        return _found(self._nodes, zone, name, "nodes")

    def check_place(self, zone: str, kind: str | None = None) -> None:
        """Refuse an unknown zone or machine type as the real API does."""
        if zone not in ZONES:
            raise ApiError(403, f"Permission denied on 'locations/{zone}' (or it may not exist).")
        if kind is not None and kind not in TYPES[zone]:
            raise ApiError(400, f'Accelerator type "{kind}" not found in zone {zone}.')

    def _check_quota(self, zone: str) -> None:
        limit = self.quota.get(zone)
        if limit is not None and len(self.nodes(zone)) >= limit:
            name = "TPUPreemptiblePerProjectPerZoneForTPUAPI"
            violation = {
                "subject": "project:1",
                "description": f"Quota '{name}' exhausted. Limit {limit} in zone {zone}",
            }
            details = [{"@type": f"{_GOOGLE}.rpc.QuotaFailure", "violations": [violation]}]
            raise ApiError(429, f"Quota limit '{name}' has been exceeded. Limit: {limit} in zone {zone}.", details)

    def _new_node(self, zone: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        raw = copy.deepcopy(body)
        raw.setdefault("networkConfig", {}).setdefault("network", f"{_PROJECT}/global/networks/default")
        raw.update(
            name=f"{_PROJECT}/locations/{zone}/nodes/{name}",
            id=str(self._first_id + number),
            state="CREATING",
            createTime=self._now(),
            apiVersion="V2",
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
        self._nodes[zone, name] = raw
        return raw

    def _boot(self, raw: dict[str, Any]) -> None:
        raw.update(state="READY", health="HEALTHY")
        self._on_start(raw)

    def create(self, zone: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Request a node. A stockout appears only when the operation fails, and leaves nothing behind."""
        kind = body.setdefault("acceleratorType", "v2-8")
        self.check_place(zone, kind)
        if not name:
            raise ApiError(400, "Node ID must be specified.")
        if (zone, name) in self._nodes:
            raise ApiError(409, f"Resource '{_PROJECT}/locations/{zone}/nodes/{name}' already exists")
        self._check_quota(zone)
        raw = self._new_node(zone, name, body)
        operation = self._begin(zone, "create", raw["name"])

        def finish() -> None:
            if self._nodes.get((zone, name)) is not raw or raw["state"] != "CREATING":
                self._fail(operation, 10, "The node was deleted while it was created.")
            elif zone in self.without_capacity:
                del self._nodes[zone, name]
                text = (
                    f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes'
                )
                self._fail(operation, 8, f"{text} are offered (see https://cloud.google.com/tpu/docs/regions)")
            else:
                self._boot(raw)
                self._end(operation, _NODE, **raw)

        self._later(self.times.create, finish)
        return operation

    def delete(self, zone: str, name: str) -> dict[str, Any]:
        """Request the deletion of a node; its processes end at once."""
        raw = self.node(zone, name)
        operation = self._begin(zone, "delete", raw["name"])
        self._stop(raw)

        def finish() -> None:
            if self._nodes.get((zone, name)) is raw:
                del self._nodes[zone, name]
                self._suspend(zone, raw)
            self._end(operation)

        self._later(self.times.delete, finish)
        return operation

    def _stop(self, raw: dict[str, Any]) -> None:
        if raw["state"] != "DELETING":
            raw["state"] = "DELETING"
            self._on_stop(raw, 0.0)

    def change(self, zone: str, name: str, body: dict[str, Any], mask: str) -> dict[str, Any]:
        """Replace the fields that the mask names."""
        raw = self.node(zone, name)
        for key in mask.split(","):
            if key not in ("labels", "metadata", "tags", "description"):
                raise ApiError(400, f"Invalid update mask: {key}")
            raw[key] = copy.deepcopy(body.get(key, {}))
        return self._end(self._begin(zone, "update", raw["name"]), _NODE, **raw)

    def preempt(self, zone: str, name: str, *, notice: float = 0.0, state: str = "PREEMPTED") -> None:
        """Preempt a machine. It stays listed and holds quota until it is deleted."""
        with self.lock:
            raw = self.node(zone, name)
            if raw["state"] not in ("READY", "CREATING"):
                raise ApiError(400, f"{name} is {raw['state']}, not READY")
            raw["state"] = state
            self._on_stop(raw, notice)
            self._suspend(zone, raw)

    # -- queued resources -------------------------------------------------------------------------------------------

    def queued(self, zone: str) -> list[dict[str, Any]]:
        """Return the queued resources of a zone; ``-`` means every zone."""
        return [raw for (place, _), raw in sorted(self._queued.items()) if zone in ("-", place)]

    def queued_one(self, zone: str, name: str) -> dict[str, Any]:
        return _found(self._queued, zone, name, "queuedResources")

    def enqueue(self, zone: str, name: str, body: dict[str, Any], version: str = "v2") -> dict[str, Any]:
        """Request a queued resource: ACCEPTED, then its nodes when there is capacity, then ACTIVE."""
        if (zone, name) in self._queued:
            raise ApiError(409, f"Resource '{_PROJECT}/locations/{zone}/queuedResources/{name}' already exists")
        specs = body.get("tpu", {}).get("nodeSpec", [])
        if not specs:
            raise ApiError(400, "At least one node spec must be given.")
        for spec in specs:
            self.check_place(zone, spec.get("node", {}).get("acceleratorType"))
        reservation = body.get("reservationName", f"{_PROJECT}/locations/{zone}/reservations/any")
        if not _RESERVATION.fullmatch(reservation):
            raise ApiError(400, f"Invalid reservation name: {reservation}")
        raw = {**_alpha(copy.deepcopy(body)), "name": f"{_PROJECT}/locations/{zone}/queuedResources/{name}"}
        raw.update(createTime=self._now(), state={"state": "ACCEPTED"})
        self._queued[zone, name] = raw
        self._later(self.times.queue, lambda: self._provision(zone, name, raw))
        answer = queued_answer(raw, version)
        return self._end(self._begin(zone, "create", raw["name"]), f"cloud.tpu.{version}.QueuedResource", **answer)

    def _provision(self, zone: str, name: str, raw: dict[str, Any]) -> None:
        if self._queued.get((zone, name)) is not raw or raw["state"]["state"] == "DELETING":
            return
        if zone in self.without_capacity:
            raw["state"] = {"state": "WAITING_FOR_RESOURCES"}
            self._later(self.times.queue, lambda: self._provision(zone, name, raw))
            return
        names = _node_names(name, raw)
        taken = [node for _, node in names if (zone, node) in self._nodes]
        if taken:
            error = {"code": 6, "message": f"Node {taken[0]} already exists"}
            raw["state"] = {"state": "FAILED", "failedData": {"error": error}}
            return
        raw["state"] = {"state": "PROVISIONING"}
        scheduling = {"spot": True} if {"spot", "bestEffort"} & set(raw) else {}
        more = {"queuedResource": raw["name"], "schedulingConfig": scheduling}
        nodes = [self._new_node(zone, node, {**spec.get("node", {}), **more}) for spec, node in names]
        self._later(self.times.create, lambda: self._activate(zone, name, raw, nodes))

    def _activate(self, zone: str, name: str, raw: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        if self._queued.get((zone, name)) is not raw or raw["state"]["state"] != "PROVISIONING":
            return
        for node in nodes:
            if node["state"] == "CREATING":
                self._boot(node)
        raw["state"] = {"state": "ACTIVE"}

    def _suspend(self, zone: str, node: dict[str, Any]) -> None:
        """Suspend the queued resource of a lost node for good."""
        owner = str(node.get("queuedResource", "")).rpartition("/")[2]
        raw = self._queued.get((zone, owner))
        if raw is not None and raw["state"]["state"] != "DELETING":
            raw["state"] = {"state": "SUSPENDED"}

    def dequeue(self, zone: str, name: str, *, force: bool) -> dict[str, Any]:
        """Delete a queued resource; without ``force`` only if its nodes are gone."""
        raw = self.queued_one(zone, name)
        owned = [node for node in self.nodes(zone) if node.get("queuedResource") == raw["name"]]
        if owned and not force:
            raise ApiError(400, f"Queued resource {name} still has nodes: delete them first, or use force.")
        raw["state"] = {"state": "DELETING"}
        for node in owned:
            self._stop(node)
        operation = self._begin(zone, "delete", raw["name"])

        def finish() -> None:
            for node in owned:
                self._nodes.pop((zone, node["name"].rpartition("/")[2]), None)
            self._queued.pop((zone, name), None)
            self._end(operation)

        self._later(self.times.delete, finish)
        return operation


_NODE = "cloud.tpu.v2.Node"
_RESERVATION = re.compile(r"projects/[^/]+/locations/[^/]+/reservations/[^/]+")


def _alpha(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a queued resource in v2alpha1, which has every field; v2 has another name for several nodes."""
    for spec in raw["tpu"]["nodeSpec"]:
        if "multisliceParams" in spec:
            spec["multiNodeParams"] = spec.pop("multisliceParams")
    return raw


def queued_answer(raw: dict[str, Any], version: str) -> dict[str, Any]:
    """Return a queued resource as this version of the API shows it: v2 has neither best effort nor reserved."""
    if version != "v2":
        return copy.deepcopy(raw)
    specs = [
        {("multisliceParams" if key == "multiNodeParams" else key): value for key, value in spec.items()}
        for spec in raw["tpu"]["nodeSpec"]
    ]
    return as_v2({**raw, "tpu": {"nodeSpec": specs}})


def _found(items: dict[tuple[str, str], dict[str, Any]], zone: str, name: str, kind: str) -> dict[str, Any]:
    try:
        return items[zone, name]
    except KeyError:
        raise ApiError(404, f"Resource '{kind}/{name}' was not found in {zone}") from None


def _node_names(name: str, raw: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the specification and the name of each node of a queued resource."""
    found: list[tuple[dict[str, Any], str]] = []
    for spec in raw["tpu"]["nodeSpec"]:
        many = spec.get("multiNodeParams")
        if many:
            prefix = many.get("nodeIdPrefix") or name
            found.extend((spec, f"{prefix}-{number}") for number in range(int(many["nodeCount"])))
        else:
            found.append((spec, spec.get("nodeId") or name))
    return found
