"""The fake cloud on a port: the API, the machines' metadata servers, and admin calls for tests and for play."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from spile_fakes.cloud import ApiError, Cloud, CloudTimes
from spile_fakes.cloud_api import Api, ApiFault, Lost
from spile_fakes.cloud_vms import Vms

__all__ = ["FakeCloud", "ShiftedClock", "main"]


class ShiftedClock:
    """The wall clock, which an admin call may move forward."""

    def __init__(self) -> None:
        self.shift = 0.0

    def __call__(self) -> float:
        """Now."""
        return time.time() + self.shift


class FakeCloud:
    """A server on a loopback port. Use it as a context manager: machines end with it."""

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
            # Machines become ready though nobody asks.
            threading.Thread(target=self._tick, daemon=True),
        ]

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}/"

    def environment(self) -> dict[str, str]:
        """What points spile, gcloud and the Google libraries here."""
        return {
            "SPILE_TPU_ENDPOINT": self.url,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": self.url,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}compute/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_PROJECT": "fake-project",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        }

    def start(self) -> FakeCloud:
        """Begin to answer."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Stop answering; end every machine."""
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
        """What a test or a person may do to the cloud."""
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
        """What a machine's metadata server says: ``ZONE/NAME/HOST/computeMetadata/v1/…``."""
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
        """A client that hangs up, as a killed machine does, is no error; anything else is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeCloud

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Quiet."""

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
                    said = self.fake.metadata(path[4:])
                self._reply(200, said.encode(), "application/text")
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
        """Not a web page in a browser on this machine: that names its Origin, or its own Host."""
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
    received: list[int] = []  # not an Event: its lock could deadlock when a second signal interrupts the handler
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
