"""A worker that is alive and does nothing: found by its heartbeat, replaced, and fenced when it comes to itself."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.world import A, World
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.fake_cloud import vms
from spile.fleet.home import FleetHome, Report
from spile.fleet.monitor import FleetMonitor, FleetStatus, pulses_of
from spile.fleet.provider import NodeRequest
from spile.fleet.settings import read_settings
from spile.fleet.spec import FleetSpec, plan_workers
from spile.status.snapshot import Snapshot, State, StreamView

_SUBREAPER = 36
PATIENCE = 12.0


@pytest.fixture
def reaper() -> Iterator[None]:
    """Orphans become ours, so that how one ended can be asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        pytest.skip("no subreapers here")
    yield
    libc.prctl(_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def spared(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Processes that outlive their machine: it is gone for the API, and cut off, but not quite dead."""
    found: set[int] = set()
    every = vms.processes_marked
    monkeypatch.setattr(vms, "processes_marked", lambda mark: [each for each in every(mark) if each not in found])
    yield found
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def worker_of(machine: str) -> int:
    """The process of ``spile extract`` on a machine."""
    (found,) = [
        process
        for process in vms.processes_marked(machine)
        if b"\0extract\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    return found


def impatient(fleet: FleetSpec) -> FleetSpec:
    return replace(fleet, policy=replace(fleet.policy, interval=1.0, heartbeat=1.0, stale_intervals=int(PATIENCE)))


@pytest.mark.slow
def test_a_stopped_worker_is_replaced_and_fenced(
    world: World, monkeypatch: pytest.MonkeyPatch, reaper: None, spared: set[int]
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", world.gcs.url)
    words = (
        "--zones",
        A,
        "--predictions-per-task",
        "2",
        "--shard-size-gb",
        "0.00005",
        "--max-seq-length",
        "128",
        "--batch-size",
        "1",
    )
    code, text = world.spile("deploy", "--gcs-bucket", "b", "--skip-launch", *words)
    assert code == 0, text
    home = FleetHome.open("gs://b/fleet/default")
    client = CloudTpu(read_settings(world.cloud.environment()))
    monitor = FleetMonitor(home, client, adjust=impatient)

    def until(what: Callable[[FleetStatus], bool]) -> FleetStatus:
        deadline = time.monotonic() + 200
        while not what(status := monitor.step()):
            assert time.monotonic() < deadline, world.logs()
            time.sleep(0.1)
        return status

    until(lambda _: beat(world).get("phase") == "running" and world.commits() >= 2)
    (machine,) = [raw["id"] for raw in world.cloud.cloud.nodes(A)]
    hung = worker_of(machine)
    spared.add(hung)
    os.kill(hung, signal.SIGSTOP)
    before = world.commits()
    attempt = beat(world)["attempt"]

    status = until(lambda status: status.history.workers[0].silences == 1)
    logged = [json.loads(line) for line in home.folder.get("actions/000001.jsonl").splitlines()]
    (reason,) = [entry["reason"] for entry in logged if entry["verb"] == "delete"]
    assert reason.startswith("its heartbeat is ")
    assert reason.endswith(f"s old (limit {PATIENCE:.0f})")
    assert not status.history.workers[0].preemptions
    until(lambda _: world.commits() > before + 1 and beat(world)["attempt"] != attempt)
    (replacement,) = [raw["id"] for raw in world.cloud.cloud.nodes(A)]
    assert replacement != machine

    os.kill(hung, signal.SIGCONT)
    _, ended = os.waitpid(hung, 0)
    spared.clear()
    assert os.waitstatus_to_exitcode(ended) == 3, "another worker owns the stream"
    until(lambda status: status.over)
    monitor.close()
    client.close()
    assert world.cloud.cloud.nodes("-") == []
    code, said = world.spile("verify", "gs://b/activations")
    assert code == 0, said


def beat(world: World) -> dict[str, str]:
    found = world.gcs.buckets.buckets["b"].objects.get("activations/tpu_0/progress.json")
    return json.loads(found.data) if found is not None else {}


def test_the_bucket_tells_how_long_a_worker_gets_no_further(tmp_path: Path) -> None:
    """Its own heartbeat and its agent's word: the newer one counts."""
    workers = plan_workers((A,), 1)
    fleet = FleetSpec("f", "p", (A,), workers, NodeRequest("v3-8", "r"), root=str(tmp_path), deployment="d")
    view = StreamView(0, "tpu_0", State.WORKING, phase="running", age=10.0, idle=700.0)
    snapshot = Snapshot(str(tmp_path), 10_000.0, (view,))
    assert pulses_of(fleet, {}, snapshot)[0].progress == 9300.0
    assert pulses_of(fleet, {}, replace(snapshot, streams=(replace(view, idle=None),)))[0].progress == 9990.0
    said = {workers[0].name: Report(workers[0].name, "d", phase="starting", updated=9500.0)}
    assert pulses_of(fleet, said, snapshot)[0].progress == 9500.0
    assert pulses_of(fleet, {}, replace(snapshot, streams=()))[0].progress is None
