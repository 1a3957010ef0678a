"""A fleet that grows and shrinks in the middle of a run: real machines' processes on the fake cloud, real workers."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fakes.cloud import ApiError

from fleet.cloud_world import A, B, World
from fleet.ssh.loopback import wait_until

C = "us-east1-d"
RUN = (
    "deploy", "--model", "embedded", "--dataset", "embedded", "--gcs-bucket", "b", "--interval", "1", "--shard-size-gb",
    "0.0005", "--create-tpus", "--yes",
)  # fmt: skip
DEPLOY = (*RUN, "--num-streams", "24")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_proves_its_dataset() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.demo"], capture_output=True, text=True, check=False, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ proven: 48 samples in 8 streams, each exactly once" in done.stdout
    assert "Done: no machine is left" in done.stdout


POISON = "double-small"
POISON_FOLDER = Path(__file__).parent.parent / "poison"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_then_eight_then_three_workers_over_24_streams_with_preemptions(world: World) -> None:
    """Three zones; any machine may be taken at any time, and one sample kills its worker: all others are proven."""
    known = os.environ.get("PYTHONPATH", "")
    world.cloud.vms.environment |= {
        "SPILE_CLAIM_SECONDS": "10",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(POISON_FOLDER), known])),
        "POISON": f"{POISON}:kill",
    }
    rng = random.Random(27)
    log = world.folder / "monitor.txt"
    assert world.spile(*DEPLOY, "--zones", f"{A},{B}", "--workers-per-zone", "1")[0] == 0
    with log.open("w") as out:
        monitor = world.start("monitor", "gs://b/fleet/default", "--interval", "1", log=out)
        try:
            _take_machines(world, monitor, rng, commits=4, most=1)
            code, text = world.spile(*DEPLOY, "--zones", f"{A},{B}", "--workers-per-zone", "4")
            assert code == 0, text
            _take_machines(world, monitor, rng, commits=world.commits() + 14, most=4)
            code, text = world.spile(*DEPLOY, "--zones", f"{A},{B},{C}", "--workers-per-zone", "1")
            assert code == 0, text
            assert monitor.wait(600) == 0, log.read_text()[-3000:] + world.logs()
        finally:
            monitor.kill()
            monitor.wait()
    # A monitor that ends before the last deployment leaves its machines to themselves.
    assert wait_until(lambda: world.cloud.cloud.nodes("-") == [], 300), "no machine is left"
    code, text = world.spile("verify", "gs://b/activations")
    assert code == 0, text
    aside = rf"proven except 1 quarantined sample: {POISON} \(worker killed by signal 9 (three|four|five) times\): "
    assert re.search(aside + "47 samples in 24 streams, each exactly once", text), text
    assert f"quarantined in stream_{_poisoned_stream(world)}: {POISON} (" in log.read_text(), "the monitor names it"
    assert f"quarantined: {POISON} (worker killed by signal 9" in world.spile("fleet", "list", "b")[1]
    assert len(world.objects("fleet/default/workers/")) >= 6, "the fleet had grown"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_slices_of_two_hosts_share_streams_and_one_is_preempted(world: World) -> None:
    """Each slice claims streams as one worker. The other slice or a successor finishes the streams of the lost one."""
    world.cloud.vms.environment["SPILE_CLAIM_SECONDS"] = "10"
    words = (*RUN, "--num-streams", "6", "--zones", f"{A},us-east5-a", "--tpu-type", "v5p-16")
    code, text = world.spile(*words)
    assert code == 0, text
    log = world.folder / "monitor.txt"
    with log.open("w") as out:
        monitor = world.start("monitor", "gs://b/fleet/default", "--interval", "1", log=out)
        try:
            _take_machines(world, monitor, random.Random(4), commits=6, most=1)
            assert monitor.wait(600) == 0, log.read_text()[-3000:] + world.logs()
        finally:
            monitor.kill()
            monitor.wait()
    assert world.cloud.cloud.nodes("-") == [], "no machine is left"
    code, text = world.spile("verify", "gs://b/activations")
    assert code == 0, text
    homes = sorted(path.name for path in (world.folder / "cloud").glob("us-*/*/*"))
    assert homes == ["host0"] * 3 + ["host1"] * 3, "two slices and one successor"
    shards = [key for key in world.objects("activations/stream_") if key.endswith(".safetensors")]
    assert {(key.split("/")[1], key.rpartition("-")[2]) for key in shards} == {
        (f"stream_{stream}", f"h{host:02d}.safetensors") for stream in range(6) for host in range(2)
    }, "both hosts of a slice stored rows of each stream"
    objects = world.gcs.buckets.buckets["b"].objects
    claims = [key for key in world.objects("activations/claims/") if key.endswith(".json")]
    assert len({json.loads(objects[key].data)["worker"] for key in claims}) == 2, "the successor has the same name"


def _poisoned_stream(world: World) -> int:
    """Return the stream that has the poisoned sample."""
    objects = world.gcs.buckets.buckets["b"].objects
    (key,) = (key for key in world.objects("datasets/") if f'"{POISON}"'.encode() in objects[key].data)
    return int(key[-len("000.jsonl") : -len(".jsonl")])


def _take_machines(
    world: World, monitor: subprocess.Popen[str], rng: random.Random, *, commits: int, most: int
) -> None:
    """Wait for the commits, and preempt at most so many machines meanwhile, one after each new commit."""
    taken, seen = 0, world.commits()
    deadline = time.monotonic() + 400
    while world.commits() < commits and monitor.poll() is None:
        assert time.monotonic() < deadline, world.logs()
        time.sleep(0.2)
        ready = world.ready()
        if taken < most and ready and world.commits() > seen:
            zone, name = rng.choice(ready)
            try:
                world.cloud.admin("preempt", {"zone": zone, "name": name, "notice": rng.choice([0, 2])})
                taken, seen = taken + 1, world.commits()
            except ApiError:  # It has just finished and deleted itself.
                continue
