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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from spile_fakes.cloud import TYPES, ZONES, ApiError, Cloud, CloudTimes
from spile_fakes.cloud_vms import Vms

_RUNTIMES = ("tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "v2-alpha-tpuv6e")
_PATH = re.compile(
    r"^/(v2|v2alpha1)/projects/([^/]+)(?:/locations(?:/([^/:]+)(?:/(\w+)(?:/([^/:]+))?)?)?)?(?::(\w+))?$"
)
_PERMISSIONS = re.compile(r"^/v1/projects/[^:]+:testIamPermissions$")
_QUOTAS = re.compile(r"^/v1/projects/[^/]+/locations/global/services/tpu\.googleapis\.com/quotaInfos$")
_COMPUTE = re.compile(r"^/compute/v1/projects/([^/]+)(?:/zones/([^/]+))?$")


class Lost(Exception):
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

    def hits(self, method: str, path: str) -> bool:
        """Return whether the fault applies. A machine's metadata server fails only if its path is named."""
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
        """Apply the faults of this request around it."""
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
        if _QUOTAS.match(path):
            return _page("quotaInfos", self.cloud.quota_infos, params)
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
        return self.cloud.show_operation(call.project, self.cloud.operation(call.zone, call.name or ""))

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
        """Return the current time."""
        return time.time() + self.shift


class FakeCloud:
    """A server on a loopback port. Use it as a context manager; its machines end with it."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        pace: CloudTimes | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.clock = ShiftedClock()
        self.vms = Vms(folder, environment)
        self.cloud = Cloud(self.clock, pace=pace, on_start=self.vms.start, on_stop=self.vms.stop)
        self.api = Api(self.cloud)
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _HttpServer(("127.0.0.1", port), handler)
        self.port = int(self._server.server_address[1])
        self.vms.address = f"127.0.0.1:{self.port}"
        self._ticking = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True),
            # Machines become ready even if no request arrives.
            threading.Thread(target=self._tick, daemon=True),
        ]

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}/"

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

    def start(self) -> FakeCloud:
        """Start to serve."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Stop serving and end every machine."""
        self._ticking.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        self.vms.close()

    def __enter__(self) -> FakeCloud:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick(self) -> None:
        while not self._ticking.wait(0.05):
            self.cloud.advance()

    # -- admin ------------------------------------------------------------------------------------------------------

    def admin(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Carry out an admin call of a test or a user."""
        if verb == "preempt":
            notice = float(body.get("notice", 0))
            self.cloud.preempt(body["zone"], body["name"], notice=notice, state=body.get("state", "PREEMPTED"))
        elif verb == "stock":
            (self.cloud.dry.discard if body["available"] else self.cloud.dry.add)(body["zone"])
        elif verb == "quota":
            if body.get("limit") is None:
                self.cloud.quota.pop(body["zone"], None)
            else:
                self.cloud.quota[body["zone"]] = int(body["limit"])
        elif verb == "fault":
            self.api.faults.append(ApiFault(**body))
        elif verb == "pace":
            self.cloud.pace = CloudTimes(**body)
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


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect, as a killed machine does; show every other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeCloud

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""

    def _answer(self) -> None:
        if not self._is_from_here():
            self._reply(403, b'{"error": {"code": 403, "message": "not this cloud"}}')
            return
        split = urlsplit(self.path)
        path = unquote(split.path)
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length) if length else b""
        try:
            if path.startswith("/vm/"):
                with self.fake.api.faulty(self.command, path):
                    value = self.fake.metadata(path[4:])
                self._reply(200, value.encode(), "application/text")
                return
            body = json.loads(data) if data else {}
            if path.startswith("/admin/"):
                answer = self.fake.admin(path.removeprefix("/admin/"), body)
            else:
                answer = self.fake.api.handle(self.command, path, dict(parse_qsl(split.query)), body)
            self._reply(200, json.dumps(answer).encode())
        except ApiError as error:
            self._reply(error.status, json.dumps(error.body()).encode())
        except Lost:
            self.close_connection = True

    def _is_from_here(self) -> bool:
        """Return whether the request does not come from a web page, which would have an Origin or another Host."""
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host", "")
        return host in ("127.0.0.1", "localhost", "metadata.google.internal") and self.headers.get("Origin") is None

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _answer  # noqa: N815

    def _reply(self, status: int, body: bytes, kind: str = "application/json; charset=UTF-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write(body)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, after printing the variables that point spile and gcloud at this server."""
    parser = argparse.ArgumentParser(prog="python -m spile_fakes.cloud_server", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; 0 picks a free one")
    parser.add_argument("--folder", type=Path, help="where the machines' folders are (default: a temporary folder)")
    parser.add_argument("--create-seconds", type=float, default=2.0, help="how long a machine takes to become READY")
    parser.add_argument("--delete-seconds", type=float, default=1.0, help="how long a machine takes to disappear")
    options = parser.parse_args(arguments)
    received: list[int] = []  # An Event's lock could deadlock when a second signal interrupts the handler.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    with tempfile.TemporaryDirectory(prefix="spile-cloud-", ignore_cleanup_errors=True) as temporary:
        pace = CloudTimes(options.create_seconds, options.delete_seconds)
        with FakeCloud(options.folder or Path(temporary), port=options.port, pace=pace) as cloud:
            for name, value in cloud.environment().items():
                print(f"export {name}={value}", flush=True)
            while not received:
                time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
