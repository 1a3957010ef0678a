"""The old guides' command lines, as written there, run to their end: the right model, data, worker and machines.

Hubs, buckets and clouds are servers on this machine. What takes whole fleets, pods or 256 devices is ``slow``.
"""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.guide_world import BUCKETS, LAYERS, Ending, GuideWorld, guide_world, one_machine, stream_text
from docs.old_guides import LINES, QWEN, OldLine
from fleet.ssh.loopback import SSHD, WHY_NOT, Hosts, keygen
from pod.launching import clean_environment, started
from ports import coordinator_port
from spile.data.manifest import StreamsManifest
from spile.fleet.agent import worker_command
from spile.fleet.spec import FleetSpec
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.store.run import read_run

FINEWEB = BUCKETS[0]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[GuideWorld]:
    with guide_world(tmp_path, monkeypatch, capfd) as world:
        yield world


# -- what a line comes to -------------------------------------------------------------------------------------------


def extracts(at: GuideWorld, old: OldLine) -> None:
    worker = old.means["worker"]
    sha256 = at.put(old.means["location"], stream_text(worker))
    if old.means["location"].startswith("./data/streams"):
        for other in range(3):  # whose rows would be wrong
            at.put(f"./data/streams/stream_{10 + other:03d}.jsonl", stream_text(50 + other))
    code, text = at.type(old.line, old.environment)
    assert code == 0, text
    root = old.means.get("output", "./activations")
    at.proven(root, worker, sha256, old.means.get("layers"))
    assert [info.key for info in open_folder(root).list("tpu_") if not info.key.startswith(f"tpu_{worker}/")] == []
    if "--checkpoint_dir" in old.line:
        output = json.loads(Path(f"checkpoints/checkpoint_worker_{worker}.json").read_text())
        assert (output["worker_id"], output["total_samples_processed"]) == (worker, 3)


def shows_all_workers(at: GuideWorld, old: OldLine) -> None:
    code, text = at.type(old.line, old.environment)
    assert (code, f"no dataset at {old.means['root']}" in text) == (2, True), "nothing was started"
    for number in range(3):
        at.put(f"./data/streams/stream_{number:03d}.jsonl", stream_text(number))
    code, text = at.type("./launch_worker.sh 1 --layers 0", old.environment)
    assert code == 0, text
    code, text = at.type(old.line, old.environment)
    assert code == 0, text
    assert re.search(r"tpu_1 +done +3/3 ", text), text


def converts(at: GuideWorld, old: OldLine) -> None:
    code, text = at.type(old.line)
    assert code == 0, text
    tasks, answers = (
        json.loads((at.folder / "app" / "arc_data" / f"{name}.json").read_text())
        for name in ("arc_format_train", "test_outputs_train")
    )
    assert len(tasks) == 96
    assert list(answers) == list(tasks)


def splits(at: GuideWorld, old: OldLine) -> None:
    code, text = at.type(old.line)
    assert code == 0, text
    count = old.means["num_streams"]
    made = StreamsManifest.from_json(Path("data/streams/streams.json").read_bytes(), "streams.json")
    names = sorted(path.name for path in Path("data/streams").glob("*.jsonl"))
    assert names == [f"stream_{number:03d}.jsonl" for number in range(count)] == [entry.name for entry in made.streams]
    assert sum(len(Path("data/streams", name).read_bytes().splitlines()) for name in names) == 96


def uploads(at: GuideWorld, old: OldLine) -> None:
    for number in range(2):
        at.put(f"./dataset_streams/stream_{number:03d}.jsonl", stream_text(number))
    code, text = at.type(old.line)
    assert code == 0, text
    folder = open_folder(f"gs://{FINEWEB}/datasets")
    assert {info.key for info in folder.list()} >= {"stream_000.jsonl", "stream_001.jsonl"}
    assert folder.get("stream_001.jsonl") == stream_text(1)


def builds_an_image(at: GuideWorld, old: OldLine) -> None:
    runtime = at.folder / "bin" / "docker"
    runtime.parent.mkdir()
    runtime.write_text(f'#!/bin/sh\necho "$@" > {at.folder}/asked\n')
    runtime.chmod(0o755)
    at.monkeypatch.setenv("PATH", f"{runtime.parent}:{os.environ['PATH']}")
    Path("Dockerfile").write_text("FROM x\n")
    code, text = at.type(old.line)
    assert code == 0, text
    assert re.fullmatch(r"build --target cpu --tag spile:\S+ \.\n", (at.folder / "asked").read_text())


# -- machines -------------------------------------------------------------------------------------------------------


def wanted(old: OldLine) -> list[tuple[str, str]]:
    """The machines that the line means, by the guides' names."""
    zones = re.search(r"--zones (\S+)", old.line)
    count = re.search(r"--workers_per_zone (\d+)", old.line)
    assert zones
    numbers = range(int(count[1]) if count else 1)
    return [(zone, f"tpu-{zone}-{number}") for zone in zones[1].split(",") for number in numbers]


def machines(at: GuideWorld) -> list[tuple[str, str]]:
    places = [raw["name"].split("/") for raw in at.world.cloud.cloud.nodes("-")]
    return sorted((place[3], place[5]) for place in places)


def makes(at: GuideWorld, zones: str, count: int) -> None:
    code, text = at.type(f"./scripts/manage_tpus.sh create --zones {zones} --workers_per_zone {count}")
    assert code == 0, text


def creates(at: GuideWorld, old: OldLine) -> None:
    code, text = at.type(old.line)
    assert code == 0, text
    assert machines(at) == wanted(old)
    assert {raw["acceleratorType"] for raw in at.world.cloud.cloud.nodes("-")} == {"v3-8"}


def deletes(at: GuideWorld, old: OldLine) -> None:
    makes(at, "us-central1-a,us-central1-b", 4)
    before = machines(at)
    at.answer("y\n")
    code, text = at.type(old.line)
    assert code == 0, text
    assert machines(at) == sorted({*before} - {*wanted(old)}), "those, and no other"


def shows(at: GuideWorld, old: OldLine) -> None:
    makes(at, "us-central1-a,us-central1-b", 1)
    code, text = at.type(old.line)
    assert code == 0, text
    shown = machines(at) if "--zones" not in old.line else wanted(old)
    for _, name in shown:
        assert re.search(rf"{name}\b.*READY", text), text


def recreates(at: GuideWorld, old: OldLine) -> None:
    makes(at, "us-central1-a,us-central1-b", 4)
    at.world.cloud.admin("preempt", {"zone": "us-central1-b", "name": "tpu-us-central1-b-2"})
    kept = {raw["name"]: raw["id"] for raw in at.world.cloud.cloud.nodes("-") if raw["state"] == "READY"}
    at.answer("y\n")
    code, text = at.type(old.line)
    assert code == 0, text
    now = {raw["name"]: raw["id"] for raw in at.world.cloud.cloud.nodes("-") if raw["state"] == "READY"}
    assert machines(at) == wanted(old)
    assert len(now) == 8
    assert kept.items() <= now.items(), "only the preempted one was made again"


# -- fleets ---------------------------------------------------------------------------------------------------------


def deploys(at: GuideWorld, old: OldLine) -> None:
    """The machines run nothing: the test runs the command of the first and of the last worker, word for word.

    The first worker claims every stream; the last one finds nothing left and succeeds.
    """
    at.no_machines()
    if "--skip_dataset" in old.line:
        first = old.line.replace("--skip_dataset", "--create_tpus")
        code, text = at.type(first)
        assert code == 0, text
    code, text = at.type(old.line)
    assert code == 0, text
    fleet = FleetSpec.from_json(at.fleet(FINEWEB))
    assert [(worker.zone, worker.name) for worker in fleet.workers] == wanted(old) == machines(at)
    assert fleet.root == f"gs://{FINEWEB}/activations"
    streams = open_folder(fleet.streams or "")
    for worker in (fleet.workers[0], fleet.workers[-1]):
        words = worker_command(worker)
        at.monkeypatch.setattr("sys.stdin", io.StringIO(fleet.run_json().decode()))
        code, text = at.prompt(*words[words.index("worker") :])
        assert code == 0, text
    assert fleet.stream_count > 0
    for stream in range(fleet.stream_count):
        data = streams.get(f"stream_{stream:03d}.jsonl")
        at.proven(fleet.root, stream, hashlib.sha256(data).hexdigest())
    if "--max_samples" in old.line:
        assert fleet.run["max_samples_per_stream"] == old.means["flags.max_samples_per_stream"]


def deploys_and_watches(at: GuideWorld, old: OldLine) -> None:
    """Real machines' processes, to the last sample."""
    code, text = at.type(old.line)
    assert code == 0, text + at.world.logs()
    assert "the work is finished" in text, text[-4000:]
    assert machines(at) == [], "no machine is left"
    fleet = FleetSpec.from_json(at.fleet(FINEWEB))
    assert len(fleet.workers) == len(wanted(old))
    report = verify(open_folder(fleet.root))
    assert report.ok, [problem.line() for problem in report.all_problems]
    run = read_run(open_folder(fleet.root))
    assert run is not None
    assert run.model == QWEN


# -- hosts ----------------------------------------------------------------------------------------------------------


def runs_on_every_host(at: GuideWorld, old: OldLine) -> None:
    if SSHD is None or os.getuid() != 0:
        pytest.skip(WHY_NOT if SSHD is None else "only root may listen on port 22")
    for number in range(2):
        at.world.cloud.cloud.create("us-central2-b", f"my-tpu-{number}", {"acceleratorType": "v4-8"})
    until = time.monotonic() + 120
    while any(raw["state"] != "READY" for raw in at.world.cloud.cloud.nodes("-")) and time.monotonic() < until:
        time.sleep(0.05)
    keys = Path(os.environ["HOME"]) / ".ssh" / "google_compute_engine"
    for path in (keys, keys.with_suffix(".pub")):
        path.unlink()
    keygen(keys)
    Path("/run/sshd").mkdir(exist_ok=True)
    (at.folder / "hosts").mkdir()
    hosts = Hosts(at.folder / "hosts", keys)
    project = at.folder / "maxtext"
    (project / "MaxText").mkdir(parents=True)
    (project / "setup.sh").write_text('echo "ran: bash setup.sh"\n')
    (project / "MaxText" / "train.py").write_text("import sys\nprint('ran: python3', *sys.argv)\n")
    at.monkeypatch.chdir(project)
    try:
        for number, raw in enumerate(at.world.cloud.cloud.nodes("-")):
            end = raw["networkEndpoints"][0]
            where = end["ipAddress"] if "INTERNAL_IP" in old.line else end["accessConfig"]["externalIp"]
            hosts.start(number, address=where, port=22)
        code, text = at.type(old.line)
    finally:
        hosts.close()
    assert code == 0, text
    (results,) = project.glob("spile-run-*")
    logs = sorted(path.read_text() for path in results.glob("*.log"))
    assert logs == [f"ran: {old.means['flags.command']}\n"] * 2, getpass.getuser()


def pod_of(at: GuideWorld, old: OldLine, hosts: int) -> list[str]:
    """The line on every host of a slice, as ``ssh --worker=all`` starts it; what each printed."""
    line = old.line.replace("10.0.0.1", "127.0.0.1")  # "replace with actual Worker 0 IP"
    words = [sys.executable, "-m", "spile.cli.main", *shlex.split(line)]
    names = ",".join(["127.0.0.1"] * hosts)
    there = {name: at.world.environment[name] for name in ("STORAGE_EMULATOR_HOST", "HF_ENDPOINT", "HF_HOME", "HOME")}
    environments = [
        clean_environment(1, {"CLOUD_TPU_TASK_ID": str(number), "TPU_WORKER_HOSTNAMES": names, **there})
        for number in range(hosts)
    ]
    with coordinator_port(), started([words] * hosts, environments) as group:
        ended = group.wait(1500)
    assert [end.code for end in ended] == [0] * hosts, "\n".join(end.err for end in ended)
    return [end.out for end in ended]


def checks_the_pod(at: GuideWorld, old: OldLine) -> None:
    for text in pod_of(at, old, 16):
        assert "all checks passed" in text


def extracts_as_a_pod(at: GuideWorld, old: OldLine) -> None:
    sha256 = at.put(old.means["location"], stream_text(0, 20))
    pod_of(at, old, 16)
    at.proven(old.means["output"], 0, sha256)


def infers_on_256_devices(at: GuideWorld, old: OldLine) -> None:
    """Of eight of the tasks, and four tokens of each answer: those of a model of chance have no end."""
    converts(at, next(line for line in LINES if line.command == "data convert"))
    tasks = at.folder / "app" / "arc_data" / "arc_format_train.json"
    tasks.write_text(json.dumps(dict(list(json.loads(tasks.read_text()).items())[:8])))
    (at.folder / "app" / "model").mkdir(parents=True)
    (at.folder / "app" / "model" / "qwen2.5-0.5b").symlink_to(at.model)
    words = [sys.executable, "-m", "spile.cli.main", *shlex.split(at.here(old.line)), "--max-new-tokens", "4"]
    there = {name: at.world.environment[name] for name in ("STORAGE_EMULATOR_HOST", "HOME")}
    with started([words], [clean_environment(256, there)]) as group:
        (end,) = group.wait(1500)
    assert end.code == 0, end.err
    root = open_folder(old.means["output"])
    report, run = verify(root), read_run(root)
    assert report.ok, [problem.line() for problem in report.all_problems]
    assert run is not None
    assert (run.model, run.n_layers) == (at.here(old.means["model"]), LAYERS)
    answers = (at.folder / "app" / "outputs" / "predictions.jsonl").read_text().splitlines()
    assert len(answers) == 8


ENDINGS: dict[str, Ending] = {
    "data convert": converts,
    "data streams": splits,
    "data upload": uploads,
    "docker build": builds_an_image,
    "extract": extracts,
    "monitor": shows_all_workers,
    "infer": infers_on_256_devices,
    "pod check": checks_the_pod,
    "run": runs_on_every_host,
    "tpu create": creates,
    "tpu delete": deletes,
    "tpu list": shows,
    "tpu recreate-preempted": recreates,
    "tpu status": shows,
}
_SLOW = (infers_on_256_devices, checks_the_pod, extracts_as_a_pod, deploys_and_watches)


def ending(old: OldLine) -> Ending:
    """Return the check for the result of a line."""
    if "--topology" in old.line:
        return extracts_as_a_pod
    if old.command != "deploy":
        return ENDINGS[old.command]
    return deploys_and_watches if "--monitor" in shlex.split(old.line) else deploys


def _cases(slow: bool) -> list[object]:
    """Of each script and verb one line runs by default; the others, and all that takes long, in ``slow``."""
    met: set[tuple[object, ...]] = set()
    cases = []
    for old in LINES:
        kind, script = ending(old), next(word for word in old.line.split() if word.endswith((".sh", ".py")))
        meaning = (kind, Path(script).name, "--skip_dataset" in old.line, "--COMMAND" in old.line)
        again = meaning in met or kind in _SLOW
        met.add(meaning)
        if again == slow:
            cases.append(pytest.param(old, id=f"{old.guide} {old.line[:70]}"))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("old", _cases(slow=False))
def test_a_line_of_an_old_guide_comes_to_its_end(old: OldLine, at: GuideWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    one_machine(monkeypatch)
    ending(old)(at, old)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("old", _cases(slow=True))
def test_every_line_of_the_old_guides_comes_to_its_end(
    old: OldLine, at: GuideWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_machine(monkeypatch)
    ending(old)(at, old)
