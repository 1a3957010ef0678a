"""OpenMetrics: the figures of a run or a fleet for Prometheus, served by ``spile monitor --metrics-port``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spile.errors import SpecError

_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_TOTALS = {
    "samples": "Samples that are stored or computed.",
    "shards": "Shards that are written.",
    "committed": "Shards that are committed.",
    "tokens": "Tokens that are stored.",
    "bytes": "Bytes that are stored.",
    "tokens_per_second": "Tokens per second of all workers.",
}
_COUNTS = {
    "healthy": "Workers or streams that are healthy or done.",
    "working": "Workers or streams that are being worked on.",
    "needs_recovery": "Workers or streams that need recovery.",
    "machines": "Machines of the fleet, in any state.",
    "dollars": "Dollars spent by the fleet.",
    "percent": "Percent of all samples that are done.",
    "seconds_left": "Estimated seconds until the run is complete.",
}
_WORKER = {
    "samples": "Samples of the worker.",
    "healthy": "Whether the worker is healthy.",
    "finished": "Whether the worker is finished.",
    "preemptions": "Preemptions of the worker's machines.",
    "crashes": "Crashes of the worker.",
    "stockouts": "Requests for a machine that found no capacity.",
}
_STREAM = {"samples": "Samples of the stream.", "committed": "Committed shards of the stream."}


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return the OpenMetrics text for a status as ``spile monitor --json`` prints it."""
    workers = [(_label("worker", each["name"]), each) for each in status.get("workers", ())]
    streams = [(_label("stream", each["name"]), each) for each in status.get("streams", ())]
    groups: list[tuple[str, dict[str, str], list[tuple[str, Mapping[str, Any]]]]] = [
        ("spile_", _TOTALS, [("", status.get("totals", {}))]),
        ("spile_", _COUNTS, [("", status)]),
        ("spile_worker_", _WORKER, workers),
        ("spile_stream_", _STREAM, streams),
    ]
    lines: list[str] = []
    for prefix, texts, sources in groups:
        for name, text in texts.items():
            known = [(labels, source[name]) for labels, source in sources if source.get(name) is not None]
            if known:
                lines += [f"# TYPE {prefix}{name} gauge", f"# HELP {prefix}{name} {text}"]
                lines += [f"{prefix}{name}{labels} {float(value):g}" for labels, value in known]
    return "\n".join([*lines, "# EOF\n"])


def _label(name: str, value: object) -> str:
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{{{name}="{text}"}}'


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        body = self.server.text.encode() if self.path.partition("?")[0] == "/metrics" else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    text = "# EOF\n"


LOOPBACK = "127.0.0.1"
"""Only programs of this machine can connect to it."""


@contextmanager
def serve_metrics(port: int | None, host: str = LOOPBACK) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Serve the last status at ``/metrics`` while a block runs; yield a function that sets it. None serves nothing."""
    if port is None:
        yield lambda _status: None
        return
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        found = f"{host}:{port}: {error.strerror}"
        raise SpecError("--metrics-port", expected="a free port of this machine", found=found) from error

    def update(status: Mapping[str, Any]) -> None:
        server.text = metrics_text(status)

    with server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield update
        finally:
            server.shutdown()
