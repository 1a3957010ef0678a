"""The fake Cloud TPU service: the REST API, the machines' metadata servers, and admin calls for tests and demos.

``Api`` needs no socket, so that a simulation can call it directly; ``FakeCloud`` serves it on a loopback port.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from tests.fakes.cloud import ApiError, Cloud, CloudTimes, queued_answer
from tests.fakes.cloud_protos import Refused, check_answer, check_request, known_fields
from tests.fakes.cloud_vms import Vms
from tests.fakes.cloud_zones import TYPES, ZONES
from tests.fakes.server import FakeReply, FaultyServer, Request

_RUNTIMES = ("tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "v2-alpha-tpuv6e")
_PATH = re.compile(r"^/(v2|v2alpha1)/projects/[^/]+(?:/locations(?:/([^/:]+)(?:/(\w+)(?:/([^/:]+))?)?)?)?(?::(\w+))?$")
_COMPUTE = re.compile(r"^/compute/v1/projects/([^/]+)(?:/zones/([^/]+))?$")


class Lost(ConnectionError):
    """The request was carried out, but its reply must not arrive."""


@dataclass
class ApiFault:
    """A fault for the next ``count`` requests of a method whose path contains ``path``."""

    method: str = ""
    path: str = ""
    count: int = 1
    status: int = 0
    """The HTTP status; 0 if the reply is lost after the request was carried out."""
    message: str = "injected"
    details: list[dict[str, Any]] | None = None
    """The details of the error, as Google sends them."""

    def applies_to(self, method: str, path: str) -> bool:
        """Return whether the fault applies. A machine's metadata server fails only if its path is named."""
        meant = self.path in path and (self.path.startswith("/vm/") or not path.startswith("/vm/"))
        return self.count > 0 and self.method in ("", method) and meant


@dataclass
class Api:
    """The API over one cloud."""

    cloud: Cloud
    check_answers: bool = True
    """Whether Google's classes judge the answers too. Simulations of large fleets skip it, because it takes most of
    their time."""
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
        """Apply the faults of this request around it."""
        fault = next((fault for fault in self.faults if fault.applies_to(method, path)), None)
        if fault is not None:
            fault.count -= 1
            if fault.status:
                raise ApiError(fault.status, fault.message, fault.details)
        yield
        if fault is not None:
            raise Lost

    def _route(self, method: str, path: str, params: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        if compute := _COMPUTE.match(path):
            return _compute(compute.group(1), compute.group(2))
        missing = ApiError(404, f"The requested URL {path} was not found on this server.")
        found = _PATH.match(path)
        if found is None:
            raise missing
        version, zone, kind, name, verb = found.groups("")
        try:
            check_request(version, method, kind if not verb else "", bool(name), params, body)
        except Refused as error:
            raise ApiError(400, str(error)) from error
        answer = self._answer(method, (version, zone, kind, name, verb), params, body)
        if answer is None:
            raise missing
        if self.check_answers and not verb:
            check_answer(version, method, kind, bool(name) if kind else bool(zone), answer)
        return answer

    def _answer(
        self, method: str, place: tuple[str, ...], params: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the answer to a request of the Cloud TPU API; None if there is no such address."""
        cloud, (version, zone, kind, name, verb) = self.cloud, place
        if zone not in ("", "-"):
            cloud.check_place(zone)
        match method, kind, name:
            case _, "", _ if not zone:
                return {"locations": [_location(each) for each in ZONES]}
            case _, "", _:
                return {"email": "service-1@cloud-tpu.fake-project"} if verb else _location(zone)
            case "GET", "nodes", "":
                return _page("nodes", cloud.nodes(zone), params)
            case "POST", "nodes", "":
                return cloud.create(zone, params.get("nodeId", ""), body)
            case _, "nodes", _ if verb == "getGuestAttributes":
                return {"guestAttributes": []}
            case "GET", "nodes", _:
                return cloud.node(zone, name)
            case "DELETE", "nodes", _:
                return cloud.delete(zone, name)
            case "PATCH", "nodes", _:
                return cloud.change(zone, name, body, params.get("updateMask", ""))
            case "GET", "queuedResources", "":
                queued = [queued_answer(raw, version) for raw in cloud.queued(zone)]
                return _page("queuedResources", queued, params)
            case "POST", "queuedResources", "":
                return cloud.enqueue(zone, params.get("queuedResourceId", ""), known_fields(version, body), version)
            case "GET", "queuedResources", _:
                return queued_answer(cloud.queued_one(zone, name), version)
            case "DELETE", "queuedResources", _:
                return cloud.dequeue(zone, name, force=params.get("force", "").lower() == "true")
            case "GET", "operations", _:
                return cloud.operation(zone, name)
            case "GET", "acceleratorTypes" | "runtimeVersions", _:
                return _fixed(zone, kind, name)
        return None


def _fixed(zone: str, kind: str, name: str) -> dict[str, Any]:
    """Return the machine types or software versions of a zone, or one of them."""
    key, values = ("type", TYPES[zone]) if kind == "acceleratorTypes" else ("version", _RUNTIMES)
    shown = [{"name": f"{_location(zone)['name']}/{kind}/{value}", key: value} for value in values]
    if not name:
        return {kind: shown}
    if name not in values:
        raise ApiError(404, f"Resource '{kind}/{name}' was not found")
    return shown[values.index(name)]


def _page(key: str, items: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
    start = int(params.get("pageToken") or 0)
    size = int(params.get("pageSize") or 0) or 500
    more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
    return {key: items[start : start + size], **more} if items else {}


def _location(zone: str) -> dict[str, Any]:
    return {"name": f"projects/fake-project/locations/{zone}", "locationId": zone}


def _compute(project: str, zone: str | None) -> dict[str, Any]:
    """Return the parts of the Compute API that ``gcloud … ssh`` uses."""
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


class ShiftedClock:
    """The wall clock plus an offset that an admin call can increase."""

    def __init__(self) -> None:
        self.shift = 0.0

    def __call__(self) -> float:
        return time.time() + self.shift


class FakeCloud(FaultyServer):
    """A server on a loopback port. Use it as a context manager; its machines end with it."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        times: CloudTimes | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(port)
        self.port = int(self.server_address[1])
        self.clock = ShiftedClock()
        self.vms = Vms(folder, f"127.0.0.1:{self.port}", environment)
        self.cloud = Cloud(self.clock, times=times, on_start=self.vms.start, on_stop=self.vms.stop)
        self.api = Api(self.cloud)
        # Machines become ready even if no request arrives.
        self._advancing = threading.Thread(target=self._advance_clock, daemon=True)

    @property
    def url(self) -> str:
        return f"{super().url}/"

    def environment(self) -> dict[str, str]:
        """Return the variables that point spile, gcloud and the Google libraries to this server."""
        return {
            "SPILE_TPU_ENDPOINT": self.url,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": self.url,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}compute/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_PROJECT": "fake-project",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        }

    def __enter__(self) -> Self:
        self._advancing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._advancing.join()
        self.vms.close()

    def _advance_clock(self) -> None:
        while not self.stopping.wait(0.05):
            self.cloud.advance()

    def answer(self, request: Request) -> FakeReply:
        path, host = unquote(request.path), request.headers.get("host", "").partition(":")[0]
        # A request of a web page, which could start processes here, has an Origin or another Host.
        if host not in ("127.0.0.1", "localhost", "metadata.google.internal") or "origin" in request.headers:
            return _json({"error": {"code": 403, "message": "not this cloud"}}, 403)
        try:
            if path.startswith("/vm/"):
                with self.api.faulty(request.method, path):
                    return FakeReply(200, self.metadata(path[4:]).encode(), {"Metadata-Flavor": "Google"})
            body = json.loads(request.body) if request.body else {}
            if path.startswith("/admin/"):
                return _json(self.admin(path.removeprefix("/admin/"), body))
            with self.cloud.lock:  # The answer is the state itself, which must not change while it is written.
                return _json(self.api.handle(request.method, path, request.query, body))
        except ApiError as error:
            return _json(error.body(), error.status)

    # -- admin ------------------------------------------------------------------------------------------------------

    def admin(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Carry out an admin call of a test or a user."""
        if verb == "preempt":
            notice = float(body.get("notice", 0))
            self.cloud.preempt(body["zone"], body["name"], notice=notice, state=body.get("state", "PREEMPTED"))
        elif verb == "stock":
            zones = self.cloud.without_capacity
            (zones.discard if body["available"] else zones.add)(body["zone"])
        elif verb == "quota":
            if body.get("limit") is None:
                self.cloud.quota.pop(body["zone"], None)
            else:
                self.cloud.quota[body["zone"]] = int(body["limit"])
        elif verb == "fault":
            self.api.faults.append(ApiFault(**body))
        elif verb == "pace":
            self.cloud.times = CloudTimes(**body)
        elif verb == "clock":
            self.clock.shift += float(body["advance"])
            self.cloud.advance()
        elif verb == "vms":
            return {"running": self.vms.running()}
        else:
            known = "preempt, stock, quota, fault, pace, clock, vms"
            raise ApiError(404, f"no admin call {verb!r}: expected one of {known}")
        return {}

    def metadata(self, path: str) -> str:
        """Return the answer of a machine's metadata server: ``ZONE/NAME/HOST/computeMetadata/v1/…``."""
        zone, name, host, _, _, *rest = path.split("/")
        raw = self.cloud.node(zone, name)
        if rest[:2] == ["instance", "attributes"]:
            values = {
                **raw.get("metadata", {}),
                "accelerator-type": raw["acceleratorType"],
                "agent-worker-number": host,
                "instance-id": name,
                "worker-network-endpoints": ",".join(
                    f"unknown:unknown:{end['ipAddress']}" for end in raw["networkEndpoints"]
                ),
            }
            if len(rest) < 3 or not rest[2]:
                return "\n".join(sorted(values))
            if rest[2] in values:
                return str(values[rest[2]])
        fixed = {
            "project/project-id": raw["name"].split("/")[1],
            "instance/zone": f"projects/1/zones/{zone}",
            "instance/service-accounts/default/token": json.dumps(
                {"access_token": "fake", "expires_in": 3600, "token_type": "Bearer"}
            ),
        }
        key = "/".join(rest)
        if key not in fixed:
            raise ApiError(404, f"no metadata {key}")
        return str(fixed[key])


def _json(value: dict[str, Any], status: int = 200) -> FakeReply:
    return FakeReply(status, json.dumps(value).encode(), {"Content-Type": "application/json; charset=UTF-8"})


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, after printing the variables that point spile and gcloud at this server."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.cloud_server", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; 0 picks a free one")
    parser.add_argument("--folder", type=Path, help="where the machines' folders are (default: a temporary folder)")
    parser.add_argument("--create-seconds", type=float, default=2.0, help="how long a machine takes to become READY")
    parser.add_argument("--delete-seconds", type=float, default=1.0, help="how long a machine takes to disappear")
    options = parser.parse_args(arguments)
    received: list[int] = []  # An Event's lock could deadlock when a second signal interrupts the handler.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    with tempfile.TemporaryDirectory(prefix="spile-cloud-", ignore_cleanup_errors=True) as temporary:
        times = CloudTimes(options.create_seconds, options.delete_seconds)
        with FakeCloud(options.folder or Path(temporary), port=options.port, times=times) as cloud:
            for name, value in cloud.environment().items():
                print(f"export {name}={value}", flush=True)
            while not received:
                time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
