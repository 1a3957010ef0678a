"""A worker that hangs is found by its heartbeat, replaced, and fenced when it continues."""

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
from tests.fakes import cloud_vms as vms

from fleet.cloud_world import A, World
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.home import FleetHome, WorkerReport
from spile.fleet.monitor import FleetMonitor, FleetStatus, views_by_worker, worker_health
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, plan_workers
from spile.spec.phase import Phase
from spile.store.claims import ClaimOwner
from spile.store.snapshot import Snapshot, State, StreamView

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
    """The process of ``spile worker`` on a machine."""
    (found,) = [
        process
        for process in vms.processes_marked(machine)
        if b"\0worker\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    return found


class Watched:
    """A fleet of one worker in a world, and its monitor, with a patience of its own."""

    def __init__(self, world: World, **policy: float) -> None:
        self.world = world
        words = f"""deploy --gcs-bucket b --model embedded --dataset embedded --skip-launch --zones {A}
                    --predictions-per-task 20 --shard-size-gb 0.00005 --max-seq-length 128 --batch-size 1"""
        code, text = world.spile(*words.split())
        assert code == 0, text
        self.home = FleetHome.open("gs://b/fleet/default")
        self.client = CloudTpu(read_settings(environment=world.cloud.environment()))
        self.monitor = FleetMonitor(self.home, self.client, policy={"interval": 1.0, **policy})

    def until(self, what: Callable[[FleetStatus], bool]) -> FleetStatus:
        deadline = time.monotonic() + 200
        while not what(status := self.monitor.step()):
            assert time.monotonic() < deadline, self.world.logs()
            time.sleep(0.1)
        return status

    def machine(self) -> str:
        (found,) = [raw["id"] for raw in self.world.cloud.cloud.nodes(A)]
        return str(found)

    def beat(self) -> dict[str, str]:
        found = self.world.gcs.buckets.buckets["b"].objects.get("activations/stream_0/progress.json")
        return json.loads(found.data) if found is not None else {}

    def commits_of(self, attempt: str) -> int:
        """Return how many commits have shards of this attempt."""
        objects = self.world.gcs.buckets.buckets["b"].objects
        return sum(attempt.encode() in found.data for key, found in objects.items() if "/commits/" in key)

    def deleted(self) -> str:
        """Return why the one unfinished machine was deleted."""
        logged = [json.loads(line) for line in self.home.folder.get("actions/000001.jsonl").splitlines()]
        (reason,) = [entry["reason"] for entry in logged if entry["verb"] == "delete"]
        return str(reason)

    def finish(self) -> None:
        """Check that the dataset is complete, each sample is stored once, and no machine is left."""
        self.until(lambda status: status.over)
        self.monitor.close()
        self.client.close()
        assert self.world.cloud.cloud.nodes("-") == []
        code, output = self.world.spile("verify", "gs://b/activations")
        assert code == 0, output


OFTEN = f"""
from spile.store.heartbeat import Heartbeat
Heartbeat.__init__.__kwdefaults__["every"] = {PATIENCE / 5}
"""


@pytest.mark.slow
def test_a_stopped_worker_is_replaced_and_fenced(
    world: World, monkeypatch: pytest.MonkeyPatch, reaper: None, spared: set[int]
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", world.gcs.url)
    (world.folder / "sitecustomize.py").write_text(OFTEN)
    world.cloud.vms.environment["PYTHONPATH"] = f"{world.folder}:{os.environ.get('PYTHONPATH', '')}"
    fleet = Watched(world)
    fleet.until(lambda _: fleet.beat().get("phase") == "running" and world.commits() >= 2)
    machine = fleet.machine()
    hung = worker_of(machine)
    spared.add(hung)
    os.kill(hung, signal.SIGSTOP)
    before, attempt = world.commits(), fleet.beat()["attempt"]

    status = fleet.until(lambda status: status.history.workers[0].silences == 1)
    assert fleet.deleted().startswith("its heartbeat is ")
    assert fleet.deleted().endswith(f"s old (limit {PATIENCE:.0f})")
    assert not status.history.workers[0].preemptions
    fleet.until(lambda _: world.commits() > before + 1 and fleet.beat()["attempt"] != attempt)
    assert fleet.machine() != machine

    committed = fleet.commits_of(attempt)
    os.kill(hung, signal.SIGCONT)
    _, ended = os.waitpid(hung, 0)
    spared.clear()
    assert os.waitstatus_to_exitcode(ended) == 0, "another worker owns the stream, and no other stream is left"
    assert fleet.commits_of(attempt) == committed > 0
    fleet.finish()


HANGS = """
import os, pathlib, sys, time
here = pathlib.Path({folder!r})
if "worker" in sys.orig_argv and not (here / "hung").exists():
    from spile.compute.device import DeviceProducer
    fetch, batches = DeviceProducer.fetch, []
    def hang(self, pending):
        batches.append(1)
        while len(batches) > 20:
            (here / "hung").touch()
            time.sleep(1)
        return fetch(self, pending)
    DeviceProducer.fetch = hang
"""


@pytest.mark.slow
def test_a_worker_whose_device_hangs_is_replaced_despite_its_heartbeats(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", world.gcs.url)
    (world.folder / "sitecustomize.py").write_text(HANGS.format(folder=str(world.folder)))
    world.cloud.vms.environment["PYTHONPATH"] = f"{world.folder}:{os.environ.get('PYTHONPATH', '')}"
    fleet = Watched(world, stall=PATIENCE)
    fleet.until(lambda _: (world.folder / "hung").exists())
    before, machine = -1, fleet.machine()
    while before != world.commits():  # what was computed before it hung is on its way
        before = world.commits()
        time.sleep(3)
    assert before > 0
    fleet.until(lambda status: status.history.workers[0].silences == 1)
    assert world.commits() <= before + 2, "it got no further"
    assert fleet.deleted().startswith("it sends heartbeats but has made no progress for ")
    fleet.until(lambda _: world.commits() > before + 2)
    assert fleet.machine() != machine
    fleet.finish()


def test_the_bucket_tells_how_long_a_worker_gets_no_further(tmp_path: Path) -> None:
    """Its own heartbeat and its agent's word: the newer one counts."""
    workers = plan_workers((A,), 1)
    fleet = FleetSpec("f", "p", (A,), workers, NodeRequest("v3-8", "r"), run={"output": str(tmp_path)}, deployment="d")
    view = StreamView(0, "tpu_0", State.WORKING, phase=Phase.RUNNING, age=10.0, idle=700.0)
    snapshot = Snapshot(str(tmp_path), 10_000.0, (view,))
    mine = {0: ClaimOwner(workers[0].name, active=True)}
    assert worker_health(fleet, {}, snapshot, mine)[0].progress == 9300.0
    rare = replace(snapshot, streams=(replace(view, interval=120.0),))
    assert worker_health(fleet, {}, rare, mine)[0].interval == 120.0
    assert worker_health(fleet, {}, replace(snapshot, streams=(replace(view, idle=None),)), mine)[0].progress == 9990.0
    output = {workers[0].name: WorkerReport(workers[0].name, "d", phase=Phase.STARTING, updated=9500.0)}
    assert worker_health(fleet, output, snapshot, mine)[0].progress == 9500.0
    assert worker_health(fleet, {}, replace(snapshot, streams=()), mine)[0].progress is None


def test_a_worker_has_the_samples_of_all_its_streams() -> None:
    """The column SAMPLES was 6/3 after two streams of three samples."""
    done = [StreamView(number, "s", State.DONE, samples=3, expected=3) for number in range(2)]
    mine = dict.fromkeys(range(3), ClaimOwner("w", active=False))
    view = views_by_worker(Snapshot("out", 0.0, tuple(done)), mine)["w"]
    assert (view.samples, view.expected) == (6, 6)
    unknown = StreamView(2, "s", State.WORKING, samples=1, expected=None)
    assert views_by_worker(Snapshot("out", 0.0, (*done, unknown)), mine)["w"].expected is None
