"""OpenMetrics of a monitor: the text, and the server that gives it."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ports import free_port
from spile.errors import SpecError
from spile.objects import open_folder
from spile.store.snapshot import SnapshotReader
from spile.view.metrics import serve_metrics
from world import produce

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
STATUS: dict[str, Any] = {
    "fleet": "night",
    "root": "gs://bucket/out",
    "totals": {"samples": 12, "tokens_per_second": 1500.5},
    "healthy": 1,
    "dollars": 0.25,
    "percent": None,
    "workers": [
        {
            "name": 'a"b',
            "samples": 7,
            "healthy": True,
            "finished": False,
            "preemptions": 2,
            "crashes": 0,
            "stockouts": 0,
        }
    ],
}


def read(status: dict[str, Any]) -> dict[str, Metric]:
    """Serve a status and parse the reply as Prometheus does."""
    with serve_metrics(port := free_port()) as update:
        update(status)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request) as reply:
            assert reply.headers["Content-Type"].startswith(OPENMETRICS)
            return {each.name: each for each in text_string_to_metric_families(reply.read().decode())}


def test_prometheus_reads_the_figures_of_a_fleet() -> None:
    found = read(STATUS)
    own = {"fleet": "night", "output": "gs://bucket/out"}
    assert found["spile_tokens_per_second"].samples == [Sample("spile_tokens_per_second", own, 1500.5)]
    labels = {**own, "worker": 'a"b'}
    assert found["spile_worker_preemptions"].samples == [Sample("spile_worker_preemptions_total", labels, 2)]
    assert found["spile_worker_healthy"].samples == [Sample("spile_worker_healthy", labels, 1)]
    assert "spile_percent" not in found, "what is not known is left out"


def test_prometheus_reads_the_figures_of_a_dataset(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    produce(folder, 20)
    status = SnapshotReader(folder).take().to_json()
    found = read(status)
    own = {"fleet": "", "output": status["root"]}
    (stream,) = status["streams"]
    labels = {**own, "stream": stream["name"]}
    assert found["spile_tokens"].samples == [Sample("spile_tokens_total", own, status["totals"]["tokens"])]
    assert found["spile_stream_expected"].samples == [Sample("spile_stream_expected", labels, stream["expected"])]
    assert found["spile_taken"].samples[0].value == status["taken"]


@pytest.mark.parametrize("count", [10**15 + 1, 2**53 - 1, 1234567])
def test_counters_are_exact(count: int) -> None:
    found = read({**STATUS, "totals": {"tokens": count, "samples": count}})
    assert found["spile_tokens"].type == "counter"
    assert found["spile_samples"].type == "gauge", "samples that are not committed can be lost"
    assert [found[name].samples[0].value for name in ("spile_tokens", "spile_samples")] == [count, count]


def test_a_port_that_is_taken_is_refused() -> None:
    with serve_metrics(port := free_port()), pytest.raises(SpecError) as refused, serve_metrics(port):
        pass
    assert "--metrics-port" in str(refused.value)


@pytest.mark.parametrize(("words", "others"), [((), False), (("0.0.0.0",), True)])
def test_other_machines_read_metrics_only_if_that_is_asked_for(words: tuple[str, ...], others: bool) -> None:
    """Every address of 127.0.0.0/8 is this machine, but only one is the default."""
    with serve_metrics(port := free_port("0.0.0.0"), *words), socket.socket() as caller:
        assert (caller.connect_ex(("127.0.0.2", port)) == 0) == others


def test_no_port_serves_nothing() -> None:
    with serve_metrics(None) as update:
        update(STATUS)
