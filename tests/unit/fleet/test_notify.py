"""What a webhook is sent."""

from __future__ import annotations

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spile.fleet.monitor import call_webhooks
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, plan_workers


def test_slack_is_sent_the_one_field_that_it_takes_and_others_the_whole_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a proxy on this machine, so that the request to Slack's own host is the real one."""
    output: list[tuple[str, dict[str, str]]] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json"
            output.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_address[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # which would know the proxies of before
        slack, other = "http://hooks.slack.com/services/T0/B0/x", "http://example.com/hook"
        fleet = FleetSpec(
            "f", "p", ("z",), plan_workers(("z",), 1), NodeRequest("v3-8", "r"),
            run={"output": "gs://b/activations"}, deployment="d", notify=(slack, other),
        )  # fmt: skip
        assert call_webhooks(fleet, [("given up", "tpu-z-0 is given up: no such model")], 0.0) == []
        server.shutdown()
    monkeypatch.setattr(urllib.request, "_opener", None)
    line = "spile fleet f: tpu-z-0 is given up: no such model"
    assert output[0] == (slack, {"text": line})
    assert output[1][0] == other
    assert output[1][1] == {
        "event": "given up", "fleet": "f", "text": line, "output": "gs://b/activations",
        "time": "1970-01-01T00:00:00+00:00",
    }  # fmt: skip
