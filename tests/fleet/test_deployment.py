"""Whole deployments on one machine: the fake cloud and the fake GCS, real machines' processes, the real worker."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.cloud import ApiError

from fleet.cloud_world import A, B, World
from fleet.prompt import Prompt

TASK = ("--model", "embedded", "--dataset", "embedded")
DEPLOY = ("deploy", *TASK, "--gcs-bucket", "b", "--fleet", "t", "--interval", "0.5", "--create-tpus", "--monitor")


def fleet_of(world: World, name: str = "default") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(world.gcs.buckets.buckets["b"].objects[f"fleet/{name}/fleet.json"].data)
    return found


def claimed_by(world: World, stream: int) -> str | None:
    """Return the worker that claimed a stream first."""
    found = world.gcs.buckets.buckets["b"].objects.get(f"activations/claims/{stream:04d}/000001.json")
    return None if found is None else json.loads(found.data)["worker"]


def finish(world: World, process: subprocess.Popen[str], log: Path, seconds: float) -> str:
    try:
        code = process.wait(seconds)
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert code == 0, text[-3000:] + world.logs()
    assert "the work is finished" in text, text[-4000:]
    assert world.cloud.cloud.nodes("-") == [], "no machine is left"
    assert world.cloud.vms.running() == {}, "nor any process"
    return text


@pytest.mark.timeout(600)
def test_a_fleet_survives_a_preemption_and_ends_with_nothing_left(world: World) -> None:
    """Two zones with one worker each: a machine is killed without notice, and one zone has no capacity for a while."""
    log = world.folder / "monitor.txt"
    world.cloud.admin("stock", {"zone": B, "available": False})
    world.gcs.faults.add("hang", method="PUT", target="/commits/0002", count=-1, seconds=300)  # not before the end
    with log.open("w") as out:
        words = (*DEPLOY, "--zones", f"{A},{B}", "--max-samples-per-stream", "16", "--shard-size-gb", "0.0003")
        process = world.start(*words, log=out)
        stream = None
        deadline = time.monotonic() + 280
        while stream is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            # Either stream: the other worker moves to this zone after a while and may claim the first one.
            held = [number for number in (0, 1) if claimed_by(world, number) == "tpu-us-central1-a-0"]
            stream = next((n for n in held if world.objects(f"activations/stream_{n}/commits/")), None)
        assert stream is not None, log.read_text() + world.logs()
        assert (A, "tpu-us-central1-a-0") in world.ready(), log.read_text() + world.logs()
        world.cloud.admin("preempt", {"zone": A, "name": "tpu-us-central1-a-0"})
        world.gcs.faults.clear()
        world.cloud.admin("stock", {"zone": B, "available": True})
        text = finish(world, process, log, 280)
    assert "delete tpu-us-central1-a-0 in us-central1-a: it is PREEMPTED" in text
    assert "no capacity to create tpu-us-central1-b-0" in text
    code, output = world.spile("verify", "gs://b/activations", "--max-samples", "16")
    assert code == 0, output
    history = json.loads(world.gcs.buckets.buckets["b"].objects[world.objects("fleet/t/history/")[-1]].data)
    assert history["workers"]["0"]["preemptions"] == 1
    assert history["workers"]["1"]["stockouts"] >= 1
    actions = [
        json.loads(line)
        for line in world.gcs.buckets.buckets["b"].objects["fleet/t/actions/000001.jsonl"].data.splitlines()
    ]
    assert all(action["reason"] for action in actions)
    attempts = {key.split("-")[1] for key in world.objects(f"activations/stream_{stream}/shard_")}
    assert len(attempts) == 2, f"the second machine went on where the first was killed: {text}{world.logs()}"


@pytest.mark.slow
def test_random_preemptions_again_and_again(world: World) -> None:
    """Two zones of two workers over all embedded tasks; random machines are taken, with and without notice."""
    rng, log = random.Random(7), world.folder / "monitor.txt"
    with log.open("w") as out:
        words = (*DEPLOY, "--zones", f"{A},{B}", "--workers-per-zone", "2", "--shard-size-gb", "0.001")
        process = world.start(*words, log=out)
        taken, since = 0, 0
        while process.poll() is None and taken < 8:
            time.sleep(0.2)
            ready = world.ready()
            if not ready or world.commits() <= since:
                continue
            since = world.commits()
            zone, name = rng.choice(ready)
            try:
                world.cloud.admin("preempt", {"zone": zone, "name": name, "notice": rng.choice([0, 0, 3])})
                taken += 1
            except ApiError:  # it ended first
                continue
            if taken == 3:
                world.cloud.admin("stock", {"zone": A, "available": False})
            if taken == 5:
                world.cloud.admin("stock", {"zone": A, "available": True})
        world.cloud.admin("stock", {"zone": A, "available": True})
        finish(world, process, log, 280)
    assert taken >= 5
    code, output = world.spile("verify", "gs://b/activations")
    assert code == 0, output
    named = sum(key.count("shard_") for key in world.objects("activations/"))
    committed = world.commits()
    assert named - committed <= taken, "nothing was done twice but the shards in flight"


def test_a_refused_task_is_reported_and_its_machine_deleted(world: World) -> None:
    code, text = world.spile(*DEPLOY, "--zones", A, "--mesh-shape", "3,5", "--max-samples", "1")
    assert code == 1, text
    assert "report tpu-us-central1-a-0" in text
    assert "--mesh-shape" in text
    assert world.cloud.cloud.nodes("-") == []


@pytest.mark.slow
def test_deploy_without_monitor_then_one_look(world: World) -> None:
    """Without a monitor, machines finish and delete themselves."""
    words = ("deploy", *TASK, "--gcs-bucket", "gs://b", "--zones", A, "--max-samples", "1", "--create-tpus")
    code, text = world.spile(*words)
    assert code == 0, text
    assert "tpu-us-central1-a-0 in us-central1-a: created" in text
    deadline = time.monotonic() + 120
    while world.cloud.cloud.nodes("-") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert world.cloud.cloud.nodes("-") == [], world.logs()
    code, text = world.spile("monitor", "gs://b/activations", "--fleet", "default", "--once", "--json")
    status = json.loads(text)
    assert (code, status["over"], status["workers"][0]["finished"]) == (0, True, True)
    assert status["totals"]["samples"] == 1


def test_prepare_only_and_bad_input(world: World, prompt: Prompt) -> None:
    two = ("--gcs-bucket", "b", "--zones", A, "--workers-per-zone", "2", "--skip-launch")
    code, text = prompt("deploy", *TASK, *two)
    assert code == 0, text
    folder = fleet_of(world)["run"]["dataset_dir"].removeprefix("gs://b/")
    assert re.fullmatch(r"datasets/[0-9a-f]{16}", folder), "under a name of their content"
    assert world.objects("datasets/") == [
        f"{folder}/{name}" for name in ("stream_000.jsonl", "stream_001.jsonl", "streams.json")
    ]
    assert world.cloud.cloud.nodes("-") == []
    cases = {
        ("--zones", A): "no bucket: expected --gcs-bucket NAME",
        ("--zones", "us-central1-x", "--gcs-bucket", "b"): "zone us-central1-x has no TPUs",
        ("--zones", A, "--gcs-bucket", "nowhere"): "nowhere",
        ("--zones", A, "--gcs-bucket", "b", "--shard-size-gb", "-1"): "--shard-size-gb: expected",
        (
            "--zones",
            f"{A},{B}",
            "--workers-per-zone",
            "2",
            "--gcs-bucket",
            "b",
            "--skip-dataset",
            "--tpu-type",
            "v3-8",
        ): "has too few streams: expected 4, at least one per worker, found 2",
    }
    for words, line in cases.items():
        code, text = prompt("deploy", "--model", "embedded", *words)
        assert code in (1, 2), text
        assert line in text
        assert [each for each in text.splitlines() if not each.startswith(("flags of the last", "machine type: "))][
            1:
        ] == [], text
    code, text = prompt("deploy", "--gcs-bucket", "b", "--zones", A, "--skip-dataset")
    assert code == 1, text
    assert "there is no such machine of this fleet; create it with --create-tpus" in text
    assert world.cloud.cloud.nodes("-") == []


def test_a_folder_of_streams_goes_to_the_bucket_as_it_is(world: World, prompt: Prompt) -> None:
    folder = world.folder / "streams"
    assert prompt("data", "streams", "--dataset", "embedded", "--num-streams", "1", "--output-dir", str(folder))[0] == 0
    words = (
        "--model", "embedded", "--gcs-bucket", "b", "--zones", A, "--skip-launch", "--dataset-dir", str(folder),
        "--env", "HF_TOKEN=x",
    )  # fmt: skip
    code, text = prompt("deploy", *words)
    assert code == 0, text
    fleet = fleet_of(world)
    where = fleet["run"]["dataset_dir"].removeprefix("gs://b/")
    assert world.objects("datasets/") == [f"{where}/stream_000.jsonl", f"{where}/streams.json"]
    assert fleet["environment"] == {"HF_TOKEN": "x"}
    code, text = prompt("deploy", *words, "--env", "no value")
    assert (code, "--env: expected NAME=value" in text) == (2, True)


def test_ctrl_c_leaves_everything_running_and_the_next_monitor_starts_at_once(world: World) -> None:
    world.spile("deploy", *TASK, "--gcs-bucket", "b", "--zones", A, "--skip-launch", "--max-samples", "1")
    world.gcs.faults.add("hang", method="PUT", target="stream_0/commits/", count=-1, seconds=300)  # it stays at work
    with (world.folder / "first.txt").open("w") as out:
        first = world.start("monitor", "gs://b/fleet/default", "--interval", "0.3", log=out)
        while not world.ready():
            time.sleep(0.05)
        code, text = world.spile("monitor", "gs://b/fleet/default", "--once")
        assert code == 0, text
        assert "monitors this fleet; this one only watches" in text
        first.send_signal(signal.SIGINT)
        assert first.wait(120) == 0
    assert "the fleet continues" in (world.folder / "first.txt").read_text()
    assert world.ready(), "the machine runs on"
    code, text = world.spile("monitor", "gs://b/fleet/default", "--once", "--json")
    assert json.loads(text)["monitor"] is None, "the lease was given back"


@pytest.mark.slow
def test_a_second_deployment_is_taken_by_running_machines(world: World) -> None:
    """Running workers commit, take the new flags and continue; no machine is created again."""
    words = ("deploy", "--gcs-bucket", "b", "--zones", A, "--shard-size-gb", "0.0005")
    code, text = world.spile(*words, *TASK, "--create-tpus", "--max-samples", "40")
    assert code == 0, text
    machine = world.cloud.cloud.nodes(A)[0]["id"]
    deadline = time.monotonic() + 120
    while not world.commits() and time.monotonic() < deadline:
        time.sleep(0.02)
    code, text = world.spile(*words, "--skip-dataset", "--batch-size", "2", "--yes")
    assert code == 0, text
    assert "it takes this deployment by itself" in text
    new = json.loads(world.gcs.buckets.buckets["b"].objects["fleet/default/fleet.json"].data)["deployment"]
    while world.cloud.cloud.nodes(A) and time.monotonic() < deadline + 120:
        assert world.cloud.cloud.nodes(A)[0]["id"] == machine
        time.sleep(0.1)
    report = json.loads(world.gcs.buckets.buckets["b"].objects["fleet/default/workers/tpu-us-central1-a-0.json"].data)
    assert (report["deployment"], report["verdict"]) == (new, "finished"), world.logs()
    code, output = world.spile("verify", "gs://b/activations", "--max-samples", "40")
    assert code == 0, output


@pytest.mark.slow
def test_a_slice_of_two_hosts_is_a_worker_like_any_other(world: World) -> None:
    """Both hosts run the same command, act as one worker, and are one machine that deletes itself."""
    log = world.folder / "monitor.txt"
    with log.open("w") as out:
        process = world.start(*DEPLOY, "--zones", A, "--tpu-type", "v5p-16", "--max-samples", "40", log=out)
        finish(world, process, log, 200)
    homes = sorted(path.name for path in (world.folder / "cloud" / A).glob("*/*"))
    assert homes == ["host0", "host1"]
    assert any("-h01." in key for key in world.objects("activations/stream_0/")), "both hosts stored rows"
    code, output = world.spile("verify", "gs://b/activations", "--max-samples", "40")
    assert code == 0, output
