"""The REST face: method and path in, status and JSON out. No sockets here, so that a simulation can call it too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spile_fakes.cloud import TYPES, ZONES, ApiError, Cloud

__all__ = ["Api", "ApiFault", "Lost"]

_RUNTIMES = ("tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "v2-alpha-tpuv6e")
_PATH = re.compile(
    r"^/(v2|v2alpha1)/projects/([^/]+)(?:/locations(?:/([^/:]+)(?:/(\w+)(?:/([^/:]+))?)?)?)?(?::(\w+))?$"
)
_PERMISSIONS = re.compile(r"^/v1/projects/[^:]+:testIamPermissions$")
_COMPUTE = re.compile(r"^/compute/v1/projects/([^/]+)(?:/zones/([^/]+))?$")


class Lost(Exception):
    """The request was carried out and nobody shall hear of it."""


@dataclass
class ApiFault:
    """What goes wrong with the next ``count`` requests of a method whose path contains ``path``."""

    method: str = ""
    path: str = ""
    count: int = 1
    status: int = 0
    """0: the reply is lost after the request was carried out."""
    message: str = "injected"

    def hits(self, method: str, path: str) -> bool:
        """Whether this request is the one. A machine's metadata server fails only where its path is named."""
        meant = self.path in path and (self.path.startswith("/vm/") or not path.startswith("/vm/"))
        return self.count > 0 and self.method in ("", method) and meant


@dataclass
class Api:
    """The API over one cloud."""

    cloud: Cloud
    faults: list[ApiFault] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def handle(self, method: str, path: str, params: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        """Answer one request, or raise ApiError or Lost."""
        with self.cloud.lock:
            self.cloud.advance()
            self.calls.append((method, path))
            with self.faulty(method, path):
                return self._route(method, path, params, body)

    @contextmanager
    def faulty(self, method: str, path: str) -> Iterator[None]:
        """Whatever is to go wrong with this request goes wrong."""
        fault = next((fault for fault in self.faults if fault.hits(method, path)), None)
        if fault is not None:
            fault.count -= 1
            if fault.status:
                raise ApiError(fault.status, fault.message)
        yield
        if fault is not None:
            raise Lost

    def _route(self, method: str, path: str, params: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        compute = _COMPUTE.match(path)
        if compute:
            return _compute(compute.group(1), compute.group(2))
        if _PERMISSIONS.match(path):
            return {"permissions": [each for each in body["permissions"] if each not in self.cloud.refused]}
        match = _PATH.match(path)
        if match is None:
            raise ApiError(404, f"The requested URL {path} was not found on this server.")
        version, project, zone, kind, name, verb = match.groups()
        if zone is None:
            return {"locations": [_location(project, each) for each in ZONES]}
        if zone != "-":
            self.cloud.check_place(zone)
        if kind is None:
            return {"email": f"service-1@cloud-tpu.{project}"} if verb else _location(project, zone)
        handlers: dict[str, Callable[..., dict[str, Any]]] = {
            "nodes": self._nodes,
            "queuedResources": self._queued,
            "operations": self._operations,
            "acceleratorTypes": self._fixed("acceleratorTypes", "type", TYPES),
            "runtimeVersions": self._fixed("runtimeVersions", "version", _RUNTIMES),
        }
        if kind not in handlers:
            raise ApiError(404, f"The requested URL {path} was not found on this server.")
        return handlers[kind](_ApiCall(method, version, project, zone, name, verb, params, body))

    def _nodes(self, call: _ApiCall) -> dict[str, Any]:
        cloud, zone = self.cloud, call.zone
        if call.name is None:
            if call.method == "POST":
                made = cloud.create(call.project, zone, call.params.get("nodeId", ""), call.body, call.version)
                return cloud.show_operation(call.project, made)
            return _page("nodes", cloud.nodes(zone), call.params)
        if call.verb == "getGuestAttributes":
            return {"guestAttributes": []}
        if call.verb in ("start", "stop"):
            return cloud.show_operation(call.project, cloud.power(zone, call.name, call.verb, call.version))
        if call.method == "DELETE":
            return cloud.show_operation(call.project, cloud.delete(zone, call.name, call.version))
        if call.method == "PATCH":
            mask = call.params.get("updateMask", "")
            return cloud.show_operation(call.project, cloud.change(zone, call.name, call.body, mask, call.version))
        return cloud.node(zone, call.name)

    def _queued(self, call: _ApiCall) -> dict[str, Any]:
        cloud, zone = self.cloud, call.zone
        if call.name is None:
            if call.method == "POST":
                name = call.params.get("queuedResourceId", "")
                if "bestEffort" in call.body and call.version == "v2":
                    raise ApiError(400, 'Invalid JSON payload received. Unknown name "bestEffort".')
                made = cloud.queue.enqueue(call.project, zone, name, call.body, call.version)
                return cloud.show_operation(call.project, made)
            return _page("queuedResources", cloud.queue.queued(zone), call.params)
        if call.method == "DELETE":
            force = call.params.get("force", "").lower() == "true"
            return cloud.show_operation(call.project, cloud.queue.dequeue(zone, call.name, force, call.version))
        return cloud.queue.queued_one(zone, call.name)

    def _operations(self, call: _ApiCall) -> dict[str, Any]:
        if call.name is None:
            shown = [self.cloud.show_operation(call.project, each) for each in self.cloud.operations(call.zone)]
            return {"operations": shown}
        if call.method in ("DELETE", "POST"):
            return {}
        return self.cloud.show_operation(call.project, self.cloud.operation(call.zone, call.name))

    def _fixed(self, kind: str, field_name: str, values: tuple[str, ...]) -> Callable[[_ApiCall], dict[str, Any]]:
        def answer(call: _ApiCall) -> dict[str, Any]:
            base = f"projects/{call.project}/locations/{call.zone}/{kind}"
            if call.name is None:
                return {kind: [{"name": f"{base}/{value}", field_name: value} for value in values]}
            if call.name not in values:
                raise ApiError(404, f"Resource '{kind}/{call.name}' was not found")
            return {"name": f"{base}/{call.name}", field_name: call.name}

        return answer


@dataclass(frozen=True)
class _ApiCall:
    method: str
    version: str
    project: str
    zone: str
    name: str | None
    verb: str | None
    params: Mapping[str, str]
    body: dict[str, Any]


def _page(key: str, items: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
    start = int(params.get("pageToken") or 0)
    size = int(params.get("pageSize") or 0) or 500
    more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
    return {key: items[start : start + size], **more} if items else {}


def _location(project: str, zone: str) -> dict[str, Any]:
    return {"name": f"projects/{project}/locations/{zone}", "locationId": zone}


def _compute(project: str, zone: str | None) -> dict[str, Any]:
    """The bits of Compute that ``gcloud … ssh`` asks for."""
    if zone is not None:
        return {"kind": "compute#zone", "name": zone, "status": "UP"}
    return {
        "kind": "compute#project",
        "id": "1",
        "name": project,
        "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": "AAAA", "items": []},
        "defaultServiceAccount": f"1-compute@{project}",
        "xpnProjectStatus": "UNSPECIFIED_XPN_PROJECT_STATUS",
    }
