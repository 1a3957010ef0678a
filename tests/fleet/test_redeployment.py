"""Several deployments to one bucket: nothing is replaced or removed without confirmation."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import Clouds, environment
from fleet.cloud_world import A, B, World
from fleet.prompt import Prompt
from fleet.ssh.loopback import wait_until
from programs import needs
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.home import FleetHome, WorkerReport
from spile.fleet.reconcile import copy_history
from spile.fleet.spec import FleetSpec, History
from spile.objects import open_folder

PREPARE = ("deploy", "--gcs-bucket", "b", "--zones", A, "--skip-launch")
TASK = ("--model", "embedded", "--dataset", "embedded")


def fleet_of(world: World, name: str = "default") -> FleetSpec:
    return FleetSpec.from_json(world.gcs.buckets.buckets["b"].objects[f"fleet/{name}/fleet.json"].data)


def tasks(path: Path, count: int, start: int = 0) -> Path:
    rows: list[dict[str, Any]] = [{"text": f"{number} and {number + 1}"} for number in range(start, start + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SCRIPT = ("./scripts/deploy_to_tpus.sh", *PREPARE[1:])


def test_a_deploy_without_a_model_or_a_dataset_is_refused(world: World, prompt: Prompt) -> None:
    """Nobody fills a bucket with the embedded model, or with data of the guides, without knowing."""
    assert prompt("data", "streams", "--dataset", "embedded", "--num-streams", 2)[0] == 0
    lines = {
        ("--dataset", "embedded"): "spile: no model for a fleet: expected --model NAME. Use --model embedded to try",
        ("--model", "embedded"): "spile: no dataset for a fleet: expected --dataset, --dataset-dir or --skip-dataset",
    }
    for words, line in lines.items():
        code, text = prompt(*PREPARE, *words)
        assert (code, line in text) == (2, True), text
    assert world.objects() == []


def test_the_guides_deploy_without_a_model_uses_their_model_and_says_so(
    world: World, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the embedded one; here the hub is out, so that it ends there, before anything is made."""
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, text = prompt(*SCRIPT, "--dataset", "embedded")
    first, second = text.splitlines()[:2]
    assert first == "deploy_to_tpus.sh of the guides is spile deploy with their defaults and variables: none set"
    assert second.startswith("no model was given: using Qwen/Qwen2.5-0.5B, as in the guides")
    assert (code, "the hub does not give a model of that name" in text) == (1, True)
    assert world.objects() == []


def test_only_the_guides_deploy_reads_their_variables(
    world: World, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prompt("data", "streams", "--dataset", "embedded", "--num-streams", 1, "--output-dir", "mine")[0] == 0
    variables = {
        "GCS_BUCKET": "b", "MODEL_PATH": "embedded", "DATASET_DIR": "mine", "BATCH_SIZE": "4", "SHARD_SIZE_GB": "0.5",
        "MAX_SEQ_LENGTH": "512", "MESH_SHAPE": "1,1", "OUTPUT_DIR": "./here",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, text = prompt("deploy", "--zones", A, "--skip-launch")
    assert (code, "no bucket: expected --gcs-bucket NAME" in text) == (2, True), text
    code, text = prompt(SCRIPT[0], "--zones", A, "--skip-launch")
    assert code == 0, text
    assert "--output-dir ./here is not used" in text
    run = fleet_of(world).run
    expected = {
        "model": "embedded", "batch_size": 4, "shard_size_gb": 0.5, "max_seq_length": 512, "mesh_shape": "1,1",
        "stream_names": "tpu",
    }  # fmt: skip
    assert {name: run[name] for name in expected} == expected
    assert (run["output"], run["local_copy"]) == ("gs://b/activations", None)


def test_the_guides_relaunch_keeps_the_model_of_the_deployment(world: World, prompt: Prompt) -> None:
    """Guide 001 relaunches with --skip_dataset and without a model."""
    assert prompt(*PREPARE, *TASK)[0] == 0
    code, text = prompt(*SCRIPT, "--skip_dataset", "--yes")
    assert code == 0, text
    assert fleet_of(world).run["model"] == "embedded"


def test_the_guides_deploy_without_a_dataset_uses_their_streams_and_says_so(world: World, prompt: Prompt) -> None:
    assert prompt("data", "streams", "--dataset", "embedded", "--num-streams", 2)[0] == 0
    code, text = prompt(*SCRIPT, "--model", "embedded", "--workers-per-zone", 2)
    assert code == 0, text
    assert "no dataset was given: using ./data/streams, as in the guides" in text
    assert json.loads(Path("data/streams/streams.json").read_text())["samples"] == 48


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--output", "./local"), "--output: expected gs://… or s3://…: a machine's disk is deleted with the machine"),
        (("--output", "/tmp/x"), "--output: expected gs://…"),
        (("--output", "file:///tmp/x"), "--output: expected gs://…"),
        (("--gcs-bucket", "./here"), "--gcs-bucket: expected a bucket"),
        (("--worker-id", "3"), "--worker-id: expected none: a fleet numbers its workers, found 3"),
        (("--layers", "99"), "--layers"),
        (("--model", "./empty"), "./empty is on this computer, where machines cannot read it"),
    ],
)
def test_what_a_fleet_cannot_do_is_refused_before_anything_is_made(
    world: World, prompt: Prompt, words: tuple[str, str], line: str
) -> None:
    Path("empty").mkdir()
    task = () if "--model" in words else ("--model", "embedded")
    bucket = () if "--gcs-bucket" in words else ("--gcs-bucket", "b")
    code, text = prompt("deploy", *bucket, "--zones", A, *task, "--dataset", "embedded", *words, "--create-tpus")
    assert (code, line in text) == (2, True), text
    assert world.objects() == []
    assert world.cloud.cloud.nodes("-") == []


def test_the_number_of_workers_may_change_and_the_streams_stay(world: World, prompt: Prompt) -> None:
    """Four workers, then two, then three, with and without the dataset: all work on the same four streams."""
    assert prompt(*PREPARE, *TASK, "--workers-per-zone", 4)[0] == 0
    four = fleet_of(world)
    assert (four.stream_count, four.run["expect_split"] is None) == (4, False)
    for number, words in ((2, TASK), (3, ("--model", "embedded", "--skip-dataset"))):
        code, text = prompt(*PREPARE, *words, "--workers-per-zone", number, "--yes")
        assert code == 0, text
        now = fleet_of(world)
        assert (now.run, now.stream_count, len(now.workers)) == (four.run, 4, number)
    assert [worker.id for worker in now.workers] == [0, 1, 2], "a machine's label stays true"
    code, text = prompt(*PREPARE, "--model", "embedded", "--workers-per-zone", 5, "--skip-dataset", "--yes")
    assert (code, "has too few streams: expected 5, at least one per worker, found 4" in text) == (2, True), text


def test_a_dataset_is_split_into_more_streams_than_workers(world: World, prompt: Prompt) -> None:
    code, text = prompt(*PREPARE, *TASK, "--workers-per-zone", 2, "--num-streams", 6)
    assert code == 0, text
    assert "48 samples of embedded in 6 streams" in text
    assert (fleet_of(world).stream_count, len(fleet_of(world).workers)) == (6, 2)


def test_another_fleet_in_the_bucket_replaces_nothing(world: World, prompt: Prompt) -> None:
    assert prompt(*PREPARE, *TASK, "--fleet", "one")[0] == 0
    before = {key: world.gcs.buckets.buckets["b"].objects[key].data for key in world.objects("datasets/")}
    other = ("--model", "embedded", "--dataset", tasks(world.folder / "t.jsonl", 5), "--column", "text")
    code, text = prompt(*PREPARE, *other, "--fleet", "two")
    assert (code, "fleet one writes to gs://b/activations" in text) == (2, True), text
    code, text = prompt(*PREPARE, *other, "--fleet", "two", "--gcs-prefix", "second")
    assert code == 0, text
    assert fleet_of(world, "two").streams != fleet_of(world, "one").streams
    for key, data in before.items():
        assert world.gcs.buckets.buckets["b"].objects[key].data == data


def test_a_deploy_that_changes_a_fleet_asks_first(world: World, prompt: Prompt) -> None:
    assert prompt(*PREPARE, *TASK, "--layers", "0-2")[0] == 0
    first = fleet_of(world)
    code, text = prompt(*PREPARE, *TASK, "--layers", "0-3")
    assert (code, "is already deployed with other settings: layers: 0-2 → 0-3" in text) == (2, True), text
    assert fleet_of(world) == first
    assert prompt(*PREPARE, *TASK, "--layers", "0-3", "--yes")[0] == 0
    code, text = prompt(*PREPARE, *TASK, "--layers", "0-3")
    assert code == 0, f"the same again is no change: {text}"


def test_a_second_deploy_with_the_same_streams_remembers_the_first_ones_flags(world: World, prompt: Prompt) -> None:
    words = (
        "--layers",
        "1",
        "3",
        "--max-seq-length",
        512,
        "--workers-per-zone",
        2,
        "--tpu-type",
        "v5p-8",
        "--budget",
        9,
    )
    assert prompt(*PREPARE, *TASK, *words)[0] == 0
    first = fleet_of(world)
    code, text = prompt("deploy", "--gcs-bucket", "b", "--skip-launch", "--skip-dataset")
    assert code == 0, text
    words = "--model embedded --max-seq-length 512 --layers 1 3 --workers-per-zone 2"
    assert f"flags of the last deployment: {words}" in text
    second = fleet_of(world)
    assert (second.run, second.workers) == (first.run, first.workers)
    assert (second.machine.accelerator_type, second.policy.budget) == ("v5p-8", 9)
    assert second.deployment != first.deployment


def test_a_second_deploy_reuses_the_stored_run_spec_and_machines(world: World, prompt: Prompt) -> None:
    """A flag that is given replaces its stored value; all others keep theirs."""
    machines = ("--spot", "--runtime-version", "my-image", "--service-account", "m@p", "--network", "n")
    task = ("--layers", "1", "--gcs-prefix", "mine", "--max-samples", 7, "--taps", "mlp")
    code, text = prompt(*PREPARE, *TASK, *task, *machines, "--workers-per-zone", 2, "--num-streams", 4)
    assert code == 0, text
    first = fleet_of(world)
    again = ("deploy", "--gcs-bucket", "b", "--skip-launch", "--skip-dataset", "--yes")
    code, text = prompt(*again, "--layers", "2", "--tpu-type", "v5p-8")
    assert code == 0, text
    assert "--gcs-prefix mine" in text
    second = fleet_of(world)
    assert second.run == {**first.run, "layers": "2"}
    assert second.machine == replace(first.machine, accelerator_type="v5p-8", metadata=second.machine.metadata)
    assert (second.workers, second.zones, second.tier) == (first.workers, first.zones, "spot")
    code, text = prompt(*again, "--reserved", "--zones", f"{A},{B}", "--gcs-prefix", "other")
    assert code == 0, text
    third = fleet_of(world)
    assert (third.tier, len(third.workers), third.zones) == ("reserved", 4, (A, B))
    assert third.run == {**second.run, "output": "gs://b/other"}


def test_a_second_deploy_keeps_variables_webhooks_and_names(world: World, prompt: Prompt) -> None:
    """Variables are kept like flags: without a token every worker would fail. Their values are not shown."""
    words = ("--env", "HF_TOKEN=secret-token", "--notify", "http://127.0.0.1:9/hook", "--keep-finished")
    code, text = prompt(*PREPARE, *TASK, *words, "--name-prefix", "mine")
    assert code == 0, text
    assert "prepared; launch with: spile deploy --gcs-bucket gs://b --skip-dataset --create-tpus" in text
    first = fleet_of(world)
    code, text = prompt("deploy", "--gcs-bucket", "b", "--skip-launch", "--skip-dataset")
    assert code == 0, text
    assert "--keep-finished --env HF_TOKEN=… --notify …" in text
    assert "secret-token" not in text
    assert "prepared; existing machines of the fleet use it from now on; launch with: spile deploy" in text
    second = fleet_of(world)
    assert (second.environment, second.notify, second.workers) == (first.environment, first.notify, first.workers)
    assert not second.policy.delete_finished
    code, text = prompt(*PREPARE, *TASK, "--name-prefix", "mine")
    assert (code, "with other settings: variables: HF_TOKEN. Replace it?" in text) == (2, True), text


def test_flags_that_only_the_bucket_contains_need_confirmation(world: World, prompt: Prompt) -> None:
    """Otherwise anyone who can write to the bucket could choose what the next deployment runs."""
    assert prompt(*PREPARE, *TASK, "--layers", "1")[0] == 0
    home = open_folder("gs://b/fleet/default")
    stored = home.get("fleet.json")
    forged = stored.replace(b'"embedded"', b'"evil/model"')
    assert forged != stored
    home.put("fleet.json", forged)
    again = ("deploy", "--gcs-bucket", "b", "--skip-launch", "--skip-dataset")
    code, text = prompt(*again)
    assert code == 2, text
    assert "fleet.json was deployed neither from this computer nor to a machine of the fleet. Use its flags" in text
    assert "evil" not in text
    home.put("fleet.json", stored)
    code, text = prompt(*again)
    assert code == 0, text


def test_overwriting_happens_once_at_deploy_after_a_question(world: World, prompt: Prompt) -> None:
    small = ("--layers", "0", "--max-seq-length", "64", "--max-samples", "2")
    streams = world.folder / "s"
    assert prompt("data", "streams", "--dataset", "embedded", "--num-streams", 1, "--output-dir", streams)[0] == 0
    data = ("--model", "embedded", "--dataset-dir", streams)
    code, text = prompt("extract", *data, "--worker-id", 0, "--output", "gs://b/activations", *small)
    assert code == 0, text
    stored = world.objects("activations/stream_0/")
    again = (*PREPARE, *data, *small, "--no-checkpointing")
    code, text = prompt(*again)
    assert (code, "--no-checkpointing: expected streams without commits" in text) == (2, True), text
    code, text = prompt(*again, "--overwrite")
    assert (code, "Permanently remove the data of 1 stream in gs://b/activations?" in text) == (2, True), text
    assert world.objects("activations/stream_0/") == stored
    code, text = prompt(*again, "--overwrite", "--yes")
    assert code == 0, text
    assert world.objects("activations/stream_0/") == []
    assert not fleet_of(world).run.keys() & {"checkpointing", "overwrite"}, "no worker removes a stream"


def test_a_dry_run_says_what_would_be_made_and_makes_nothing(world: World, prompt: Prompt) -> None:
    words = ("deploy", "--gcs-bucket", "b", "--zones", A, *TASK, "--workers-per-zone", 2, "--dry-run")
    for reason, more in {
        "(--skip-launch)": ("--skip-launch", "--create-tpus"),
        "(neither --create-tpus nor --monitor is given)": (),
    }.items():
        code, text = prompt(*words, *more)
        assert (code, f"would be created: no machine {reason}" in text) == (0, True), text
    code, text = prompt(*words, "--create-tpus", "--monitor")
    assert code == 0, text
    assert "would be created: 2 machines v5litepod-8 (tpu-us-central1-a-0 …) in us-central1-a, $" in text
    assert "to boot, install, load and compile" in text
    assert "no --budget: 2 machines cost at most $230.40 a day (list prices)\n" in text
    assert "no --budget" not in prompt(*words, "--create-tpus", "--budget", 9)[1]
    assert "\nnothing was created\n" in text
    assert world.objects() == []
    assert world.cloud.cloud.nodes("-") == []


def test_max_samples_limits_what_is_prepared_and_uploaded(world: World, prompt: Prompt, tmp_path: Path) -> None:
    """Streams of the whole dataset were uploaded, of which workers read the first samples."""
    data = ("--model", "embedded", "--dataset", tasks(tmp_path / "many.jsonl", 500), "--prompt", "text")
    code, text = prompt(*PREPARE, *data, "--workers-per-zone", 2, "--max-samples", 5, "--fleet", "first")
    assert (code, "5 samples of " in text, "in 2 streams, as --max-samples 5 needs" in text) == (0, True, True), text
    each = ("--gcs-prefix", "each", "--max-samples-per-stream")
    code, text = prompt(*PREPARE, *data, "--workers-per-zone", 2, *each, 3)
    assert (code, "6 samples of " in text) == (0, True), text
    assert "in 2 streams, as --max-samples-per-stream 3 needs no more" in text
    streams = open_folder(fleet_of(world).streams or "")
    assert [len(streams.get(f"stream_{number:03d}.jsonl").splitlines()) for number in range(2)] == [3, 3]
    again = ("deploy", "--gcs-bucket", "b", "--skip-launch", "--skip-dataset", "--yes")
    code, text = prompt(*again, *each, 4)
    assert (code, "has fewer samples than --max-samples-per-stream 4 needs" in text) == (2, True), text
    assert prompt(*again, *each, 2)[0] == 0


def test_a_fleet_is_listed_looked_at_and_stopped(world: World, prompt: Prompt) -> None:
    assert prompt(*PREPARE, *TASK, "--fleet", "one")[0] == 0
    assert prompt(*PREPARE, *TASK, "--fleet", "two", "--gcs-prefix", "second")[0] == 0
    code, text = prompt("fleet", "list", "b")
    assert code == 0, text
    for name, root in (("one", "gs://b/activations"), ("two", "gs://b/second")):
        assert any(name in line and root in line and "0 of 1" in line for line in text.splitlines()), text
    code, text = prompt("fleet", "status", "gs://b", "--fleet", "one")
    assert (code, "tpu-us-central1-a-0" in text) == (0, True), text
    code, text = prompt("fleet", "stop", "gs://b/fleet/one")
    assert (code, "an answer at a terminal, or --yes" in text) == (2, True), text
    code, text = prompt("fleet", "stop", "gs://b/fleet/one", "--yes", "--interval", "0.1")
    assert (code, "fleet one was asked to stop" in text, "stopped by" in text) == (0, True, True), text
    code, text = prompt("fleet", "list", "b", "--json")
    assert [row["state"].split(" at ")[0] for row in json.loads(text)][1] == "deployed"
    assert json.loads(text)[0]["state"].startswith("stopped by")
    assert prompt("fleet", "stop", "gs://b")[0] == 2
    assert prompt(*PREPARE, *TASK, "--fleet", "three")[0] == 0, "the root of a fleet that is stopped is free"


def test_hostile_records_and_cloud_errors_do_not_command_the_terminal(world: World, prompt: Prompt) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    assert prompt(*PREPARE, *TASK)[0] == 0
    fleet, home = fleet_of(world), FleetHome.open("gs://b/fleet/default")
    name = fleet.workers[0].name
    report = WorkerReport(name, fleet.deployment, verdict="crashed", updated=time.time(), error=evil, version=evil)
    home.folder.put(f"workers/{name}.json", report.to_json())
    order = {"deployment": fleet.deployment, "who": evil, "time": evil}
    home.folder.put("orders/stop.json", json.dumps(order).encode())
    said = [prompt("fleet", *words)[1] for words in (("list", "b"), ("status", "gs://b"))]
    world.cloud.admin("fault", {"path": "nodes", "count": 9, "status": 403, "message": f"no {evil}"})
    said.append(prompt("tpu", "list")[1])
    assert all(r"\x1b]0;owned" in text for text in (said[0], said[-1])), said
    assert not any("\x1b" in text or "\x07" in text for text in said)


def test_deleting_machines_under_a_monitor_is_refused_with_the_command_that_ends_the_fleet(
    world: World, prompt: Prompt
) -> None:
    from spile.fleet.home import Lease
    from spile.objects import open_folder

    world.cloud.vms.start = lambda *_: None  # type: ignore[method-assign]  # no process is needed
    assert prompt(*PREPARE, *TASK)[0] == 0
    lease = Lease(open_folder("gs://b/fleet/default"), clock=time.time, ttl=60.0, owner="ann")
    lease.take()
    metadata = {"spile-home": "gs://b/fleet/default"}
    node = {"acceleratorType": "v3-8", "labels": {"spile-fleet": "default", "spile-worker": "0"}, "metadata": metadata}
    world.cloud.cloud.create(A, "tpu-us-central1-a-0", node)
    code, text = prompt("tpu", "delete", "--zones", A, "--yes")
    assert (code, "ann monitors fleet default and would create them again" in text) == (2, True), text
    assert "spile fleet stop gs://b/fleet/default" in text
    lease.release()
    assert prompt("tpu", "delete", "--zones", A, "--yes")[0] == 0


def test_data_is_written_to_the_bucket_that_was_named(world: World, prompt: Prompt) -> None:
    """Not into a local folder named ``gs:``."""
    streams = ("data", "streams", "--dataset", "embedded", "--output-dir", "gs://b/split", "--num-streams")
    code, text = prompt(*streams, 2)
    assert (code, "wrote 2 of 2 streams to gs://b/split" in text) == (0, True), text
    assert world.objects("split/") == ["split/stream_000.jsonl", "split/stream_001.jsonl", "split/streams.json"]
    code, text = prompt(*streams, 3)
    assert (code, "gs://b/split holds streams of another split" in text) == (2, True), text
    tasks = ("data", "convert", "--dataset", "embedded")
    code, text = prompt(*tasks, "--output", "gs://b/data/tasks.jsonl")
    assert (code, "wrote gs://b/data/tasks.jsonl" in text) == (0, True), text
    code, text = prompt(*tasks, "--output-dir", "gs://b/pair")
    assert (code, world.objects("pair/")) == (0, ["pair/arc_format_train.json", "pair/test_outputs_train.json"]), text
    assert not Path("gs:").exists()
    code, text = prompt("collect", "--into", "gs://b/x", "--hosts", "nobody")
    assert (code, "--into: expected a path on this machine" in text) == (2, True), text


def test_a_deploy_to_a_bucket_that_cannot_be_written_is_refused_at_once(
    world: World, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Clouds()) as clouds:
        for name, value in environment(clouds, "s3").items():
            monkeypatch.setenv(name, value)
        clouds.s3.faults.add("status", method="PUT", status=403, count=9)
        code, text = prompt(*PREPARE, *TASK, "--output", "s3://bucket/x")
        assert (code, "cannot write s3://bucket" in text) == (2, True), text
    assert world.objects() == []


def test_without_a_type_the_machines_are_of_the_first_that_every_zone_offers(world: World, prompt: Prompt) -> None:
    code, text = prompt(*PREPARE, *TASK)
    assert code == 0, text
    first = "machine type: v5litepod-8, the first of v5litepod-8, v6e-8, v4-8, v3-8 that is in us-central1-a"
    assert f"{first}; $9.60 an hour on demand, $4.80 preemptible (list prices, US, " in text
    assert fleet_of(world).machine.accelerator_type == "v5litepod-8"
    prepare = ("deploy", "--gcs-bucket", "b", "--skip-launch", *TASK, "--zones")
    code, text = prompt(*prepare, f"{A},{B}", "--fleet", "both", "--gcs-prefix", "both")
    assert (code, "machine type: v3-8, the first of" in text) == (0, True), text
    code, text = prompt(*prepare, A, "--fleet", "both", "--gcs-prefix", "both", "--yes")
    assert (code, "machine type: v3-8, as before; $8.00 an hour" in text) == (0, True), text
    assert fleet_of(world, "both").machine.accelerator_type == "v3-8", "it is kept"
    code, text = prompt(*prepare, f"{A},us-east1-d", "--fleet", "none")
    line = (
        "no machine type is in every zone: us-central1-a, us-east1-d: expected one of v5litepod-8, v6e-8, v4-8, v3-8, "
        "found us-central1-a: v5litepod-8, v3-8; us-east1-d: v6e-8. Name one with --tpu-type"
    )
    assert (code, line in text) == (2, True), text


def test_the_guides_type_works_in_zones_that_have_it(world: World, prompt: Prompt) -> None:
    words = ("tpu", "create", "--workers_per_zone", 1, "--tpu_type", "v3-8", "--async")
    code, text = prompt(*words, "--zones", A)
    assert (code, "machine type" in text) == (0, False), text
    code, text = prompt(*words, "--zones", "us-central1-c")
    assert (code, "zone us-central1-c has no v3-8: expected one of v2-8. Choose one with --tpu-type" in text) == (
        2,
        True,
    ), text


def test_a_dry_run_without_credentials_says_what_it_did_not_check(
    world: World, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    def none(**_: object) -> None:
        raise DefaultCredentialsError("none")

    monkeypatch.setattr(google.auth, "default", none)
    for name in world.cloud.environment():
        monkeypatch.delenv(name)
    words = ("deploy", "--gcs-bucket", "b", "--zones", A, *TASK, "--project", "p", "--create-tpus")
    code, text = prompt(*words, "--dry-run")
    assert code == 0, text
    assert "zones and machines are not checked: no Google credentials. Run: gcloud auth" in text
    assert f"machine type: v5litepod-8, not checked in {A}; $9.60" in text
    assert "would be created: 1 machine v5litepod-8" in text
    code, text = prompt(*words)
    assert (code, "no Google credentials. Run: gcloud auth application-default login" in text) == (2, True), text
    assert world.objects() == []


@needs("ssh")
@pytest.mark.parametrize("create", [("--create-tpus",), ()])
def test_machines_that_were_created_by_hand_are_launched_over_ssh_or_are_an_error(
    world: World, prompt: Prompt, create: tuple[str, ...]
) -> None:
    """Such machines have no startup script and were READY for ever. There is no ssh server here."""
    code, text = prompt("tpu", "create", "--zones", A, "--workers-per-zone", 1)
    assert code == 0, text
    code, text = prompt("deploy", *TASK, "--gcs-bucket", "b", "--zones", A, *create)
    assert code == 1, text
    assert "tpu-us-central1-a-0: created without spile's startup script; the worker is started over ssh" in text
    assert "tpu-us-central1-a-0 in us-central1-a: failed" in text


@pytest.mark.parametrize(
    "how",
    [
        ("--create-tpus",),
        (),
        ("--launch", "ssh"),
        ("--adopt", "tpu-us-central1-a-0"),
        ("--monitor",),
        ("--create-tpus", "--dry-run"),
    ],
)
def test_a_machine_that_works_for_another_bucket_is_refused_by_name(
    world: World, prompt: Prompt, how: tuple[str, ...]
) -> None:
    """Two fleets have the default name, and so have their machines."""
    world.gcs.add_bucket("theirs")
    assert prompt("tpu", "create", "--zones", A, "--workers-per-zone", 1)[0] == 0
    client = CloudTpu(read_settings(None))
    (node,) = client.nodes(A)
    theirs = {**node.metadata, "spile-home": "gs://theirs/fleet/default"}
    client.set_metadata(A, node.name, theirs)
    code, text = prompt("deploy", *TASK, "--gcs-bucket", "b", "--zones", A, *how)
    assert code == 2, text
    assert "tpu-us-central1-a-0 in us-central1-a works for the fleet gs://theirs/fleet/default: expected" in text
    assert "startup script" not in text
    assert world.objects() == []
    (left,) = client.nodes(A)
    assert left.metadata == theirs
    assert prompt("tpu", "delete", "--zones", A, "--yes")[0] == 0, "commands without a bucket have its machines"
    assert client.nodes(A) == []


def test_a_fleet_that_stops_leaves_the_machines_of_another_bucket(world: World, prompt: Prompt) -> None:
    assert prompt(*PREPARE, *TASK)[0] == 0
    assert prompt("tpu", "create", "--zones", A, "--workers-per-zone", 1)[0] == 0
    client = CloudTpu(read_settings(None))
    (node,) = client.nodes(A)
    client.set_metadata(A, node.name, {**node.metadata, "spile-home": "gs://theirs/fleet/default"})
    assert prompt("fleet", "stop", "gs://b/fleet/default", "--yes", "--interval", 0.1)[0] == 0
    assert len(client.nodes(A)) == 1
    client.set_metadata(A, node.name, {**node.metadata, "spile-home": "gs://b/fleet/default"})
    assert prompt("fleet", "stop", "gs://b/fleet/default", "--yes", "--interval", 0.1)[0] == 0
    assert client.nodes(A) == []


COMPLETE = "gs://b/activations is complete: nothing is deployed, and no machine is needed"


def completed(world: World, prompt: Prompt, tmp_path: Path) -> tuple[object, ...]:
    """Deploy, and do the workers' work without machines. Return the command that relaunches."""
    world.cloud.vms.start = lambda *_: None  # type: ignore[method-assign]  # no process is needed
    data = ("--dataset", tasks(tmp_path / "rows.jsonl", 4), "--max-seq-length", 64, "--layers", 0)
    words = ("deploy", "--gcs-bucket", "b", "--zones", A, "--workers-per-zone", 2)
    code, text = prompt(*words, "--model", "embedded", *data, "--create-tpus")
    assert code == 0, text
    (tmp_path / "spec.json").write_bytes(fleet_of(world).run_json())
    return (*words, "--skip-dataset")


@pytest.mark.parametrize("how", [(), ("--create-tpus",), ("--monitor",), ("--launch", "ssh"), ("--skip-launch",)])
def test_a_complete_dataset_needs_no_machine(
    world: World, prompt: Prompt, tmp_path: Path, how: tuple[str, ...]
) -> None:
    """A relaunch failed for each machine that had deleted itself; a dry run promised machines and dollars."""
    words = completed(world, prompt, tmp_path)
    assert prompt("worker", "--spec", tmp_path / "spec.json", "--claim")[0] == 0
    assert prompt("tpu", "delete", "--zones", A, "--yes")[0] == 0
    before = fleet_of(world)
    for more in (("--dry-run",), ()):
        code, text = prompt(*words, *how, *more)
        assert (code, COMPLETE in text) == (0, True), text
        assert "$" not in text
        assert world.cloud.cloud.nodes("-") == []
        assert fleet_of(world) == before
    code, text = prompt(*words, "--no-checkpointing", "--overwrite", "--create-tpus", "--dry-run")
    assert (code, "would be created: 2 machines v5litepod-8" in text) == (0, True), text


def test_a_relaunch_needs_no_machine_for_a_worker_without_streams(world: World, prompt: Prompt, tmp_path: Path) -> None:
    words = completed(world, prompt, tmp_path)
    assert prompt("worker", "--spec", tmp_path / "spec.json", "--stream", 0)[0] == 0
    client = CloudTpu(read_settings(None))
    client.delete_node(A, "tpu-us-central1-a-0")
    assert wait_until(lambda: len(client.nodes(A)) == 1)
    code, text = prompt(*words, "--create-tpus", "--dry-run")
    assert (code, "would be created: 1 machine v5litepod-8 (tpu-us-central1-a-0 …)" in text) == (0, True), text
    assert "which claim 2 streams (1 unfinished) one after another" in text
    for _ in range(2):
        code, text = prompt(*words)
        assert code == 0, text
        assert "tpu-us-central1-a-0 in us-central1-a: finished: no stream is left for it" in text
        assert "tpu-us-central1-a-1 in us-central1-a: exists" in text
    code, text = prompt(*words, "--no-checkpointing", "--overwrite", "--yes")
    assert (code, "tpu-us-central1-a-0 in us-central1-a: failed: there is no such machine" in text) == (1, True), text


def test_gclouds_own_words_for_a_machine(world: World, prompt: Prompt) -> None:
    """``--version V`` printed spile's version and ended with 0; a queued resource without a tier was preemptible."""
    code, text = prompt("tpu", "create", "--zones", A, "--name", "my-tpu", "--version", "v2-alpha-tpuv5")
    assert (code, "v5litepod-8, preemptible" in text) == (0, True), text
    (raw,) = world.cloud.cloud.nodes(A)
    assert (raw["name"].rpartition("/")[2], raw["runtimeVersion"]) == ("my-tpu", "v2-alpha-tpuv5")
    code, text = prompt(
        "tpu", "create", "--zones", B, "--queued", "--node-prefix", "q", "--version=tpu-ubuntu2204-base"
    )
    assert (code, "v6e-8, on demand" in text) == (0, True), text
    (raw,) = world.cloud.cloud.nodes(B)
    assert not raw["schedulingConfig"].get("preemptible")


def test_a_trial_and_then_production_in_the_same_bucket(world: World, prompt: Prompt) -> None:
    """The trial's streams are another split, so production is stored in a separate, named folder."""
    assert prompt(*PREPARE, *TASK, "--workers-per-zone", 1)[0] == 0
    data = ("--dataset-dir", fleet_of(world).streams, "--worker-id", 0, "--max-samples", 1)
    code, text = prompt("extract", "--model", "embedded", *data, "--output", "gs://b/activations")
    assert code == 0, text
    code, text = prompt(*PREPARE, *TASK, "--workers-per-zone", 3, "--yes")
    assert code == 0, text
    root = fleet_of(world).root
    assert root.startswith("gs://b/activations-")
    assert f"this run is stored in {root}" in text
    code, text = prompt(*PREPARE, *TASK, "--workers-per-zone", 3, "--yes", "--gcs-prefix", "activations")
    assert (code, "holds rows of another dataset or of another split" in text) == (2, True), text


def test_the_list_of_fleets_shows_crash_loops_and_workers_that_gave_up(world: World, prompt: Prompt) -> None:
    assert prompt(*PREPARE, *TASK, "--workers-per-zone", 2)[0] == 0
    fleet = fleet_of(world)
    home = FleetHome.open("gs://b/fleet/default")
    first, second = (worker.name for worker in fleet.workers)
    home.write_report(WorkerReport(first, "an earlier deployment", verdict="crashed"))
    assert json.loads(prompt("fleet", "list", "b", "--json")[1])[0]["problems"] == [
        f"{first} has not reported", f"{second} has not reported"
    ]  # fmt: skip
    home.write_report(WorkerReport(first, fleet.deployment, exit_code=1, launches=3, error="spile: out of memory"))
    home.write_report(WorkerReport(second, fleet.deployment, verdict="refused", exit_code=2))
    code, text = prompt("fleet", "list", "b", "--json")
    assert code == 0, text
    wanted = [f"{first}: restarted 2×, exit code 1: out of memory", f"{second} refused"]
    assert json.loads(text)[0]["problems"] == wanted
    spent = replace(copy_history(fleet, History()), stopped="the budget of $2.00 is spent ($2.01)")
    home.write_history(spent, 1)
    code, text = prompt("fleet", "list", "b", "--json")
    assert (json.loads(text)[0]["state"], json.loads(text)[0]["problems"]) == (spent.stopped, [])


def test_a_fleet_has_one_limit_of_length_from_its_machines_and_says_what_it_does(prompt: Prompt) -> None:
    words = ("deploy", "--gcs-bucket", "b", "--zones", A, *TASK, "--tpu-type", "v5litepod-1")
    said = "no prompt is longer; the longest of"
    code, text = prompt(*words, "--dry-run")
    assert code == 0, text
    assert f"32,768 tokens: {said}" in text
    code, text = prompt(*words, "--skip-launch")
    assert code == 0, text
    assert f"32,768 tokens: {said}" in text
    run = FleetHome.open("gs://b/fleet/default").read_fleet().run
    assert (run["max_seq_length"], run["long"]) == (32_768, "skip"), "no worker decides"
    code, text = prompt(*words, "--dry-run", "--max-seq-length", "100")
    assert "100 tokens: 100 % of prompts are longer and lose their end." in text
    assert "max_seq_length: 32768 → 100" in text
