"""``spile deploy --launch ssh``: the startup script on machines that were made without it, over a real sshd."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.fakes.cloud_server import FakeCloud

from fleet.ssh.loopback import SSHD, WHY_NOT, Hosts, keygen
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.deploy import launch_over_ssh, list_existing, prepare_bare_machines, publish
from spile.fleet.home import FleetHome
from spile.fleet.manage import create
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, plan_workers
from spile.hosts.hosts import Access

ZONE = "us-central1-a"
pytestmark = [
    pytest.mark.skipif(SSHD is None, reason=WHY_NOT),
    pytest.mark.skipif(os.getuid() != 0, reason="only root may listen on port 22"),
]


def test_machines_without_the_script_get_it_over_ssh(tmp_path: Path, fake: FakeCloud, client: CloudTpu) -> None:
    home = FleetHome.open(str(tmp_path / "bucket" / "fleet" / "f"))
    fleet = FleetSpec(
        "f", "fake-project", (ZONE,), plan_workers((ZONE,), 2), NodeRequest("v3-8", "r"),
        run={"output": str(tmp_path / "out"), "no_such_field": 1}, deployment="d",
    )  # fmt: skip
    create(client, replace(fleet, workers=fleet.workers[:1]), lambda _: {})
    fleet = publish(home, fleet, lambda _: None)
    assert "create it with --create-tpus" in list_existing(client, fleet, 2)[1].detail
    assert prepare_bare_machines(client, fleet, home) == [fleet.workers[0].name]
    assert prepare_bare_machines(client, fleet, home) == [fleet.workers[0].name], "it was not launched yet"
    assert "startup-script" in client.node(ZONE, fleet.workers[0].name).metadata, "from its next boot on it has it"

    folder = tmp_path / "hosts"
    folder.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)
    keygen(folder / "key")
    hosts = Hosts(folder, folder / "key")
    address = client.node(ZONE, fleet.workers[0].name).endpoints[0].external
    machine = tmp_path / "machine"
    stubs = machine / "bin"
    stubs.mkdir(parents=True)
    shutil.copy(fake.vms.folder / "bin" / "systemctl", stubs / "systemctl")
    (machine / "env").write_text(f'export PATH="{stubs}:$PATH"\n')
    variables = {
        "HOME": machine, "BASH_ENV": machine / "env", "SPILE_HOME": machine / "opt", "SPILE_EXPECT": "any",
        "SPILE_UNIT_DIR": machine / "units", "SPILE_PYTHON": sys.executable, "GCE_METADATA_HOST": "127.0.0.1:1",
    }  # fmt: skip
    try:
        setting = "SetEnv " + " ".join(f"{key}={value}" for key, value in variables.items())
        hosts.start(0, address=str(address), port=22, config=setting)
        access = Access(user="root", key=hosts.key, options=hosts.options)
        done = launch_over_ssh(client, fleet, home.folder.url, access, 2)
        assert [(each.name, each.outcome, each.detail) for each in done] == [
            ("tpu-us-central1-a-1", "failed", "there is no such machine"),
            ("tpu-us-central1-a-0", "created", "launched"),
        ], done
        deadline = time.monotonic() + 120
        while home.read_reports()["tpu-us-central1-a-0"].verdict == "" and time.monotonic() < deadline:
            time.sleep(0.1)
        report = home.read_reports()["tpu-us-central1-a-0"]
        assert report.verdict == "refused", "the worker ran, on the machine, with the fleet's flags"
        assert "no_such_field" in report.error
        assert prepare_bare_machines(client, fleet, home) == [], "it takes the next deployment by itself"
    finally:
        hosts.close()
        _end_what_runs_below(tmp_path)


def _end_what_runs_below(folder: Path) -> None:
    """The agent of a machine waits for new orders as long as the machine exists."""
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(str(folder)) for word in process.info["cmdline"] or ()):
            process.kill()
