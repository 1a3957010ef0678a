"""OpenMetrics of a monitor: the text, and the server that gives it."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request

import pytest

from spile.errors import SpecError
from spile.view.metrics import metrics_text, serve_metrics

STATUS = {
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
    "streams": [{"name": "tpu_0", "samples": 5, "committed": 1}],
}
LINE = re.compile(r'spile_[a-z_]+(\{[a-z]+="([^"\\\n]|\\.)*"\})? -?[0-9.e+-]+')


def test_the_text_is_openmetrics() -> None:
    lines = metrics_text(STATUS).splitlines()
    assert lines[-1] == "# EOF"
    assert 'spile_worker_preemptions{worker="a\\"b"} 2' in lines
    assert 'spile_stream_samples{stream="tpu_0"} 5' in lines
    assert "spile_tokens_per_second 1500.5" in lines
    assert not any("percent" in line for line in lines), "what is not known is left out"
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    values = [line for line in lines[:-1] if not line.startswith("#")]
    assert all(LINE.fullmatch(line) and re.split(r"[{ ]", line)[0] in typed for line in values), values


def test_the_server_gives_the_last_status() -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with serve_metrics(port) as update:
        update(STATUS)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            assert reply.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            assert reply.read().decode() == metrics_text(STATUS)
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other")
        refused.value.close()
        with pytest.raises(SpecError, match="--metrics-port: expected a free port"), serve_metrics(port):
            pass


@pytest.mark.parametrize(("words", "others"), [((), False), (("0.0.0.0",), True)])
def test_other_machines_read_metrics_only_if_that_is_asked_for(words: tuple[str, ...], others: bool) -> None:
    """Every address of 127.0.0.0/8 is this machine, but only one is the default."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with serve_metrics(port, *words), socket.socket() as caller:
        assert (caller.connect_ex(("127.0.0.2", port)) == 0) == others


def test_no_port_serves_nothing() -> None:
    with serve_metrics(None) as update:
        update(STATUS)
