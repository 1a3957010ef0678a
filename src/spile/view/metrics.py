"""OpenMetrics: the figures of a run or a fleet for Prometheus, served by ``spile monitor --metrics-port``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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
    "healthy": "Workers or streams that are well or done.",
    "working": "Workers or streams that are being worked on.",
    "needs_recovery": "Workers or streams that need recovery.",
    "machines": "Machines of the fleet, in any state.",
    "dollars": "Dollars spent by the fleet.",
    "percent": "Percent of all samples that are done.",
    "seconds_left": "Estimated seconds until the run is complete.",
}
_WORKER = {
    "samples": "Samples of the worker.",
    "healthy": "Whether the worker is well.",
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


class MetricsServer:
    """Serves the last status at ``/metrics``. A port of 0 picks a free one; None serves nothing."""

    def __init__(self, port: int | None) -> None:
        self._text = "# EOF\n"
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        if port is None:
            return
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer /metrics."""
                body = owner._text.encode() if self.path.partition("?")[0] == "/metrics" else b""
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Print nothing."""

        try:
            self._server = ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            raise SpecError("--metrics-port", expected="a free port", found=f"{port}: {error.strerror}") from error
        self.port = int(self._server.server_address[1])

    def update(self, status: Mapping[str, Any]) -> None:
        """Serve this status from now on."""
        self._text = metrics_text(status)

    def __enter__(self) -> MetricsServer:
        if self._server is not None:
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
