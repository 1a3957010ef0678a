"""A monitor creates machines only for a deployment that is confirmed outside of the bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.cloud_server import FakeCloud

from fleet.cloud_world import A
from fleet.prompt import Prompt
from spile.errors import Damaged, SpecError, UserError
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.home import (
    FLEET,
    PIN,
    FleetHome,
    NotDeployed,
    accept_deployment,
    pin_machines,
    recorded_deployment,
    sha256,
)
from spile.fleet.monitor import FleetMonitor, FleetStatus
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, Policy, plan_workers

NAME = f"tpu-{A}-0"


@pytest.fixture
def home(tmp_path: Path) -> FleetHome:
    """As a deploy on this computer leaves it."""
    home = FleetHome.open(str(tmp_path / "fleet" / "f"))
    home.write_fleet(
        FleetSpec(
            "f",
            "fake-project",
            (A,),
            plan_workers((A,), 1),
            NodeRequest("v3-8", "r", preemptible=True),
            run={"output": str(tmp_path / "activations")},
            deployment="d",
            policy=Policy(interval=0.1),
        )
    )
    return home


def forged(home: FleetHome) -> bytes:
    """A forged deployment by someone who can only write to the bucket: another wheel under the same name."""
    data = replace(home.read_fleet(), wheel="evil-1-py3-none-any.whl").to_json()
    home.folder.put(FLEET, data)
    return data


@pytest.fixture
def elsewhere(home: FleetHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another computer, which has deployed nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other-computer"))


def until(monitor: FleetMonitor, true: Callable[[FleetStatus], bool]) -> FleetStatus:
    for _ in range(3000):
        status = monitor.step()
        if true(status):
            return status
        time.sleep(0.02)
    raise AssertionError(status)


def ready(status: FleetStatus) -> bool:
    return all(each.machine == "READY" for each in status.workers)


def test_a_deployment_that_the_bucket_alone_knows_is_refused_at_the_start(home: FleetHome, client: CloudTpu) -> None:
    found, wanted = sha256(forged(home)), recorded_deployment(home.folder.url)
    with pytest.raises(NotDeployed) as refused:
        FleetMonitor(home, client)
    line = refused.value.line()
    assert f"expected sha256:{wanted}, found sha256:{found}" in line
    assert f"spile monitor {home.folder.url} --deployment sha256:{found}" in line
    assert client.nodes("-") == []
    assert FleetMonitor(home, client, watch_only=True).step().problems == (), "who only looks may look at anything"


def test_a_deployment_that_changes_under_a_monitor_makes_no_machine(
    home: FleetHome, fake: FakeCloud, client: CloudTpu
) -> None:
    deployed = home.folder.get(FLEET)
    monitor = FleetMonitor(home, client)
    until(monitor, ready)
    forged(home)
    fake.admin("preempt", {"zone": A, "name": NAME})
    status = until(monitor, lambda _: client.nodes("-") == [])
    for _ in range(3):
        status = monitor.step()
        assert "fleet.json was deployed neither from this computer nor to a machine" in status.problems[0]
    assert client.nodes("-") == [], "what is dead goes, and nothing comes"
    assert monitor.fleet.wheel is None, "the one before goes on"
    home.folder.put(FLEET, deployed)
    assert until(monitor, ready).problems == ()
    assert client.node(A, NAME).metadata[PIN] == sha256(deployed)
    assert len(client.node(A, NAME).metadata["spile-secret"]) == 64


def test_a_deployment_of_another_user_is_accepted_if_the_machines_metadata_names_it(
    home: FleetHome, client: CloudTpu
) -> None:
    before = home.folder.get(FLEET)
    monitor = FleetMonitor(home, client)
    until(monitor, ready)
    new = replace(home.read_fleet(), deployment="e")
    home.folder.put(FLEET, new.to_json())
    assert "nor to a machine" in monitor.step().problems[0], "not yet told"
    assert pin_machines(client, new, home.folder.url) == []
    assert monitor.step().problems == ()
    assert monitor.fleet.deployment == "e"
    home.folder.put(FLEET, before)
    assert "nor to a machine" in monitor.step().problems[0], "an older one, put back, counts no more"


@pytest.mark.usefixtures("elsewhere")
def test_another_computer_needs_the_deployment_hash(home: FleetHome, client: CloudTpu) -> None:
    found = sha256(home.folder.get(FLEET))
    with pytest.raises(NotDeployed, match="expected one that is known outside of the bucket"):
        FleetMonitor(home, client)
    with pytest.raises(NotDeployed, match="is not that deployment"):
        accept_deployment(home.folder.url, found, "sha256:" + "0" * 64)
    accept_deployment(home.folder.url, found, f"sha256:{found}")
    until(FleetMonitor(home, client), ready)
    forged(home)
    with pytest.raises(NotDeployed):
        FleetMonitor(home, client)


@pytest.mark.parametrize("text", ["", "sha256:12", "d", "sha256:" + "g" * 64])
def test_an_invalid_sha256_is_reported(text: str) -> None:
    with pytest.raises(SpecError, match="--deployment: expected sha256: and 64 digits"):
        accept_deployment("gs://b/fleet/f", "0" * 64, text)


def test_a_folder_speaks_for_the_fleet_of_its_own_name(home: FleetHome) -> None:
    """Otherwise stopping this fleet would delete the machines of another one."""
    home.folder.put(FLEET, replace(home.read_fleet(), name="other").to_json())
    with pytest.raises(
        UserError, match=r"belongs to another fleet: expected f, found other\. Check who can write to the bucket"
    ):
        home.read_fleet()
    home.folder.put(FLEET, b"[" * 100_000)
    for look in (home.read_fleet, home.find_fleet):
        with pytest.raises(
            Damaged, match=r"fleet.json cannot be read: .*\. Check who can write to the bucket, remove the file"
        ):
            look()


def test_at_the_prompt(prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deploy on one computer, monitor on another with the printed line; then the bucket is modified."""
    words = f"deploy --gcs-bucket b --model embedded --dataset embedded --skip-launch --zones {A} --max-seq-length 128"
    code, text = prompt(*words.split())
    assert code == 0, text
    (flag,) = [line.partition("computer: ")[2] for line in text.splitlines() if "on another computer" in line]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "there"))
    url = "gs://b/fleet/default"
    code, text = prompt("monitor", url, "--once")
    assert (code, text.count("\n")) == (2, 1), text
    assert flag in text
    code, text = prompt("monitor", url, "--once", *flag.split())
    assert (code, "create " in text) == (0, True), text
    code, text = prompt("monitor", url, "--once")
    assert code == 0, text
    home = FleetHome.open(url)
    home.folder.put(FLEET, replace(home.read_fleet(), wheel="evil.whl").to_json())
    code, text = prompt("monitor", url, "--once")
    assert (code, text.count("\n")) == (2, 1), text
    code, text = prompt("fleet", "stop", url, "--yes", "--interval", "0.1")
    assert code == 0, text
    code, text = prompt("tpu", "list", "--json")
    assert '"name"' not in text, "ending needs nobody's word"
