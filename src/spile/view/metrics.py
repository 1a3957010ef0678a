"""OpenMetrics: the figures of a run or a fleet for Prometheus, served by ``spile monitor --metrics-port``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from spile.errors import SpecError

if TYPE_CHECKING:
    from prometheus_client import Metric

_FIGURES = {
    "": {
        "samples": "Samples that are stored or computed.",
        "shards": "Shards that are written.",
        "committed": "Shards that are committed.",
        "tokens": "Tokens that are stored.",
        "bytes": "Bytes that are stored.",
        "tokens_per_second": "Tokens per second of all workers.",
        "healthy": "Workers or streams that are healthy or done.",
        "working": "Workers or streams that are being worked on.",
        "needs_recovery": "Workers or streams that need recovery.",
        "machines": "Machines of the fleet, in any state.",
        "dollars": "Dollars spent by the fleet.",
        "percent": "Percent of all samples that are done.",
        "seconds_left": "Estimated seconds until the run is complete.",
        "taken": "The time of these figures, in seconds since the epoch.",
    },
    "worker": {
        "samples": "Samples of the worker.",
        "healthy": "Whether the worker is healthy.",
        "finished": "Whether the worker is finished.",
        "preemptions": "Preemptions of the worker's machines.",
        "crashes": "Crashes of the worker.",
        "stockouts": "Requests for a machine that found no capacity.",
    },
    "stream": {
        "samples": "Samples of the stream.",
        "expected": "Samples of the stream when it is complete.",
        "committed": "Committed shards of the stream.",
        "age": "Seconds since the last heartbeat of the stream's worker.",
    },
}
"""The figures of a run, and those of each worker and stream."""
_COUNTERS = {"committed", "tokens", "bytes", "dollars", "preemptions", "crashes", "stockouts"}
"""The others can decrease: samples and shards that a worker has not committed are lost with it."""


class Metrics:
    """The metrics of the last status, in the form that a registry of prometheus_client collects."""

    status: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a status as ``spile monitor --json`` prints it; what is not known is left out."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self.status
        own = {"fleet": status.get("fleet", ""), "output": status.get("root", "")}
        for level, texts in _FIGURES.items():
            sources = status.get(f"{level}s", ()) if level else [{**status, **status.get("totals", {})}]
            labels, prefix = ([*own, level], f"spile_{level}_") if level else ([*own], "spile_")
            for name, text in texts.items():
                family = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                metric = family(prefix + name, text, labels=labels)
                for source in sources:
                    if source.get(name) is not None:  # One label fewer for the run itself, which has no name.
                        metric.add_metric([*own.values(), source.get("name", "")], float(source[name]))
                if metric.samples:
                    yield metric


LOOPBACK = "127.0.0.1"
"""Only programs of this machine can connect to it."""


@contextmanager
def serve_metrics(port: int | None, host: str = LOOPBACK) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Serve the last status at ``/metrics`` while a block runs; yield a function that sets it. None serves nothing."""
    metrics = Metrics()
    update = partial(setattr, metrics, "status")
    if port is None:
        yield update
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        found = f"{host}:{port}: {error.strerror}"
        raise SpecError("--metrics-port", expected="a free port of this machine", found=found) from error
    with server:
        try:
            yield update
        finally:
            server.shutdown()
            thread.join()
