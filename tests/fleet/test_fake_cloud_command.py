"""``python -m tests.fakes.cloud_server`` as a person uses it: two terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.fakes.cloud_vms import processes_marked

SPILE = [sys.executable, "-m", "spile.cli.main"]
FAKE = [sys.executable, "-m", "tests.fakes.cloud_server"]


def test_it_serves_until_ctrl_c_and_takes_its_machines_along(tmp_path: Path) -> None:
    words = [*FAKE, "--folder", str(tmp_path / "cloud"), "--create-seconds", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline().removeprefix("export ").strip() for _ in range(6)]
        variables = dict(line.split("=", 1) for line in lines)
        environment = {**os.environ, **variables, "CLOUDSDK_CONFIG": str(tmp_path)}
        url = variables["SPILE_TPU_ENDPOINT"]
        body = {"acceleratorType": "v3-8", "metadata": {"startup-script": "sleep 1000"}}
        place = f"{url}v2/projects/fake-project/locations/us-central1-a/nodes?nodeId=t"
        urllib.request.urlopen(urllib.request.Request(place, json.dumps(body).encode(), method="POST")).close()
        listed: list[dict[str, str]] = []
        while not listed or listed[0]["state"] != "READY":
            done = subprocess.run([*SPILE, "tpu", "list", "--json"], env=environment, capture_output=True, check=True)
            listed = json.loads(done.stdout)
        with urllib.request.urlopen(f"{url}admin/vms", data=b"{}") as reply:
            running = json.load(reply)["running"]
        assert len(running) == 1
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
    assert not processes_marked(next(iter(running)))


def test_many_signals_at_once_end_it_all_the_same(tmp_path: Path) -> None:
    words = [*FAKE, "--folder", str(tmp_path / "cloud")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        for _ in range(20):
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(120) == 0
        finally:
            server.kill()
