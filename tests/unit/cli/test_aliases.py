"""Every flag and variable of the five guides, as written there, keeps its meaning."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from spile.cli.aliases import DROPPED, FLAGS, SWITCHES, VARIABLES, translate, with_guide_defaults
from spile.cli.flags import ExtractFlags
from spile.cli.program import COMMANDS, build_app

# guide, the command that has the flag now, the flag and its value as the guide writes them, and what we make of it.
# A path such as flags.model leads through the command's arguments.
GUIDES: list[tuple[str, str, str, dict[str, Any]]] = [
    # 000: a pod with Docker
    ("000", "data convert", "--dataset barc0/x", {"dataset": "barc0/x"}),
    ("000", "data convert", "--output_dir /app/arc_data", {"output_dir": "/app/arc_data"}),
    ("000", "data convert", "--max_samples 50000", {"rows.max_samples": 50000}),
    ("000", "extract", "--model_path /app/model/qwen2.5-0.5b", {"flags.model": "/app/model/qwen2.5-0.5b"}),
    ("000", "extract", "--tasks_file /app/arc_data/t.jsonl", {"flags.dataset": "/app/arc_data/t.jsonl"}),
    ("000", "extract", "--output_dir /app/outputs", {"flags.output_dir": "/app/outputs"}),
    ("000", "extract", "--activations_dir /app/activations", {"flags.output_dir": "/app/activations"}),
    ("000", "extract", "--batch_size 8", {"flags.batch_size": 8}),
    ("000", "extract", "--mesh_shape 16,16", {"flags.mesh_shape": "16,16"}),
    ("000", "extract", "--gcs_bucket gs://b/activations", {"flags.gcs_bucket": "gs://b/activations"}),
    ("000", "extract", "--upload_to_cloud True", {"flags.upload_to_gcs": True}),
    ("000", "extract", "--upload_to_cloud False", {"flags.upload_to_gcs": False}),
    ("000", "extract", "--layers_to_extract 15 16 17", {"flags.layers": ["15", "16", "17"]}),
    (
        "000",
        "infer",
        "--tasks_file /app/arc_data/arc_format_train.json",
        {"flags.dataset": "/app/arc_data/arc_format_train.json"},
    ),
    ("000", "infer", "--output_dir /app/outputs", {"flags.output_dir": "/app/outputs"}),
    ("000", "infer", "--activations_dir /app/activations", {"flags.activations_dir": "/app/activations"}),
    ("000", "infer", "--batch_size 8 --mesh_shape 16,16", {"flags.batch_size": 8, "flags.mesh_shape": "16,16"}),
    ("000", "infer", "--max_output_tokens 900", {"flags.max_new_tokens": 900}),
    ("000", "infer", "--predictions_per_task 8 --n_tasks 3", {"flags.predictions_per_task": 8, "flags.n_tasks": 3}),
    ("000", "infer", "--gcs_bucket gs://b/activations --upload_to_cloud True", {"flags.upload_to_gcs": True}),
    ("000", "tpu create", "--accelerator-type=v5litepod-256", {"machines.tpu_type": "v5litepod-256"}),
    ("000", "tpu create", "--network=default", {"machines.network": "default"}),
    # 001: a fleet
    ("001", "deploy", "--gcs_bucket b", {"flags.gcs_bucket": "b"}),
    ("001", "deploy", "--zones us-central1-a,us-central1-b", {"place.zones": "us-central1-a,us-central1-b"}),
    ("001", "deploy", "--workers_per_zone 4", {"machines.workers_per_zone": 4}),
    ("001", "deploy", "--max_samples 100", {"flags.max_samples": 100}),
    ("001", "deploy", "--create_tpus", {"steps.create_tpus": True}),
    ("001", "deploy", "--skip_dataset", {"steps.skip_dataset": True}),
    ("001", "deploy", "--skip_launch", {"steps.skip_launch": True}),
    ("001", "deploy", "--monitor", {"steps.monitor": True}),
    ("001", "deploy", "--monitor_interval 60", {"steps.interval": 60.0}),
    ("001", "deploy", "--tpu_type v3-8", {"machines.tpu_type": "v3-8"}),
    ("001", "deploy", "--force", {"steps.force": True}),
    ("001", "monitor", "--monitor_interval 60", {"interval": 60.0}),
    ("001", "extract", "--dataset_stream gs://b/stream_000.jsonl", {"flags.dataset": "gs://b/stream_000.jsonl"}),
    ("001", "extract", "--model Qwen/Qwen2.5-0.5B", {"flags.model": "Qwen/Qwen2.5-0.5B"}),
    ("001", "tpu create", "--zones us-central1-a", {"place.zones": "us-central1-a"}),
    ("001", "tpu create", "--workers_per_zone 4", {"machines.workers_per_zone": 4}),
    ("001", "tpu create", "--tpu_type v3-8", {"machines.tpu_type": "v3-8"}),
    ("001", "tpu delete", "--workers_per_zone 4", {"workers_per_zone": 4}),
    ("001", "tpu status", "--zones us-central1-a", {"place.zones": "us-central1-a"}),
    ("001", "tpu recreate-preempted", "--workers_per_zone 4", {"workers_per_zone": 4}),
    ("001", "data upload", "--bucket b --prefix datasets", {"bucket": "b", "prefix": "datasets"}),
    ("001", "data upload", "--bucket b --local_dir ./dataset_streams", {"local_dir": "dataset_streams"}),
    # 002: parallel workers
    ("002", "data streams", "--num_streams 32", {"num_streams": 32}),
    ("002", "data streams", "--num_streams 32 --output_dir ./data/streams", {"output_dir": "./data/streams"}),
    ("002", "data streams", "--num_streams 32 --max_samples 200000", {"rows.max_samples": 200000}),
    ("002", "extract", "--worker_id 5", {"flags.worker_id": 5}),
    (
        "002",
        "extract",
        "--dataset_path data/streams/stream_005.jsonl",
        {"flags.dataset": "data/streams/stream_005.jsonl"},
    ),
    ("002", "extract", "--model_path Qwen/Qwen2.5-0.5B", {"flags.model": "Qwen/Qwen2.5-0.5B"}),
    ("002", "extract", "--output_dir ./activations", {"flags.output_dir": "./activations"}),
    ("002", "extract", "--checkpoint_dir ./checkpoints", {"flags.checkpoint_dir": "./checkpoints"}),
    ("002", "extract", "--enable_checkpointing", {"flags.checkpointing": True}),
    ("002", "extract", "--enable_checkpointing False", {"flags.checkpointing": False}),
    ("002", "extract", "--no_checkpointing", {"flags.checkpointing": False}),
    ("002", "extract", "--upload_to_gcs", {"flags.upload_to_gcs": True}),
    ("002", "extract", "--gcs_bucket your-bucket", {"flags.gcs_bucket": "your-bucket"}),
    ("002", "extract", "--gcs_prefix p", {"flags.gcs_prefix": "p"}),
    ("002", "extract", "--batch_size 4", {"flags.batch_size": 4}),
    ("002", "extract", "--shard_size_gb 1.0", {"flags.shard_size_gb": 1.0}),
    ("002", "extract", "--max_seq_length 2048", {"flags.max_seq_length": "2048"}),
    ("002", "extract", "--verbose", {"verbose": True}),
    ("002", "extract", "--delete_local_after_upload", {"flags.delete_local_after_upload": True}),
    ("002", "extract", "--layers_to_extract 0 1 2 3", {"flags.layers": ["0", "1", "2", "3"]}),
    ("002", "extract", "--activation_type residual", {"flags.taps": ["residual"]}),
    ("002", "data convert", "--dataset_name barc0/x", {"dataset": "barc0/x"}),
    ("002", "data convert", "--column_name examples", {"rows.column": "examples"}),
    ("002", "data convert", "--output_filename data/custom_stream_0.jsonl", {"output": "data/custom_stream_0.jsonl"}),
    ("002", "data convert", "--start_index 0 --end_index 5000", {"rows.start_index": 0, "rows.end_index": 5000}),
    # 003: the runner
    ("003", "run", "--TPU_PREFIX=my-TPU_1", {"where.tpu_prefix": "my-TPU_1"}),
    ("003", "run", "--TPU_PREFIX p", {"where.tpu_prefix": "p"}),
    ("003", "run", '--COMMAND="bash setup.sh --All_of_it"', {"flags.command": "bash setup.sh --All_of_it"}),
    ("003", "run", "--INTERNAL_IP=true", {"where.internal_ip": True}),
    ("003", "run", "--INTERNAL_IP true", {"where.internal_ip": True}),
    ("003", "tpu create", "--accelerator-type=v4-8", {"machines.tpu_type": "v4-8"}),
    ("003", "tpu create", "--runtime-version=tpu-ubuntu2204-base", {"machines.runtime_version": "tpu-ubuntu2204-base"}),
    ("003", "tpu create", "--node-count=2", {"node_count": 2}),
    ("003", "tpu create", "--node-prefix=p", {"node_prefix": "p"}),
    ("003", "tpu create", "--reserved", {"machines.reserved": True}),
    ("003", "tpu create", "--best-effort", {"machines.best_effort": True}),
    ("003", "tpu delete", "--async", {"wait": False}),
    # 004: a pod's barriers
    ("004", "extract", "--topology v5litepod-64", {"pod.topology": "v5litepod-64"}),
    ("004", "extract", "--dataset_path gs://bucket/data.jsonl", {"flags.dataset": "gs://bucket/data.jsonl"}),
    ("004", "extract", "--gcs_bucket my-bucket", {"flags.gcs_bucket": "my-bucket"}),
    ("004", "extract", "--batch_size 64", {"flags.batch_size": 64}),
    ("004", "extract", "--enable_barrier_sync", {}),
    ("004", "extract", "--enable_barrier_sync True", {}),
    ("004", "extract", "--is_barrier_server", {}),
    ("004", "extract", "--barrier_controller_host 10.0.0.1", {"pod.coordinator_address": "10.0.0.1"}),
    ("004", "extract", "--host_id 3", {"pod.process_id": 3}),
    ("004", "pod check", "--barrier_controller_host=10.0.0.1 --host_id=3", {"flags.process_id": 3}),
]

WHOLE = {  # the guides' longest commands, pasted whole
    "000": "extract --model_path /app/model/qwen2.5-0.5b --tasks_file /app/arc_data/tasks.jsonl"
    " --output_dir /app/outputs --activations_dir /app/activations --batch_size 8 --mesh_shape 16,16"
    " --gcs_bucket gs://your-bucket-name/activations --upload_to_cloud True",
    "002": "extract --worker_id 5 --dataset_path data/streams/stream_005.jsonl --model_path Qwen/Qwen2.5-0.5B"
    " --output_dir ./activations --checkpoint_dir ./checkpoints --enable_checkpointing --upload_to_gcs"
    " --gcs_bucket your-bucket --batch_size 4 --shard_size_gb 1.0 --max_seq_length 2048 --verbose",
    "004": "extract --model m --topology v5litepod-64 --dataset_path gs://bucket/data.jsonl --gcs_bucket my-bucket"
    " --batch_size 64 --enable_barrier_sync --verbose",
}

VALUES = {  # guide 002's table of variables and guide 000's -e flags
    "MODEL_PATH": ("Qwen/Qwen2.5-0.5B", "model", "Qwen/Qwen2.5-0.5B"),
    "DATASET_DIR": ("./data/streams", "dataset_dir", "./data/streams"),
    "OUTPUT_DIR": ("./activations/worker_5", "output_dir", "./activations/worker_5"),
    "CHECKPOINT_DIR": ("./checkpoints", "checkpoint_dir", "./checkpoints"),
    "BATCH_SIZE": ("4", "batch_size", 4),
    "SHARD_SIZE_GB": ("1.0", "shard_size_gb", 1.0),
    "MAX_SEQ_LENGTH": ("2048", "max_seq_length", "2048"),
    "MESH_SHAPE": ("16,16", "mesh_shape", "16,16"),
    "UPLOAD_TO_GCS": ("true", "upload_to_gcs", True),
    "GCS_BUCKET": ("your-bucket-name", "gcs_bucket", "your-bucket-name"),
}


def parsed(words: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    spelled = translate(words, environment or {})
    _, bound, _ = build_app().parse_args(spelled, exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def at(arguments: dict[str, Any], path: str) -> Any:
    first, *rest = path.split(".")
    value = arguments[first]
    for name in rest:
        value = getattr(value, name)
    return value


def flags(line: str, environment: dict[str, str] | None = None) -> ExtractFlags:
    found = parsed(shlex.split(line), environment).get("flags") or ExtractFlags()
    assert isinstance(found, ExtractFlags)
    return found


@pytest.mark.parametrize(("guide", "command", "words", "expected"), GUIDES, ids=lambda value: str(value)[:60])
def test_a_guides_flag_means_what_it_meant(guide: str, command: str, words: str, expected: dict[str, Any]) -> None:
    needed = " --num_streams 1" if command == "data streams" and "num_streams" not in words else ""
    arguments = parsed(shlex.split(f"{command} {words}{needed}"))
    for path, value in expected.items():
        found = at(arguments, path)
        assert (str(found) if hasattr(found, "parts") else found) == value, (guide, path)


@pytest.mark.parametrize("guide", WHOLE)
def test_a_guides_whole_command_is_understood(guide: str) -> None:
    assert flags(WHOLE[guide]).spec().model


def test_what_the_whole_commands_write() -> None:
    pod = flags(WHOLE["000"]).spec()
    assert (pod.output, pod.local_copy) == ("gs://your-bucket-name/activations", "/app/activations")
    worker = flags(WHOLE["002"]).spec()
    assert (worker.output, worker.local_copy) == ("gs://your-bucket/activations", "./activations")
    assert worker.data.worker_id == 5
    assert flags(WHOLE["004"]).spec().output == "gs://my-bucket/activations"


def test_every_row_of_the_tables_is_tried_above() -> None:
    spelled = {word.partition("=")[0] for _, _, words, _ in GUIDES for word in words.split() if word.startswith("--")}
    dashed = {word.replace("_", "-").lower() for word in spelled}
    assert set(FLAGS) | DROPPED <= dashed
    assert set(VALUES) == set(VARIABLES)


def test_no_old_name_hides_a_flag_of_ours() -> None:
    ours: set[str] = set()
    for command in COMMANDS:
        collection = build_app()[command.name.split(" ")[0]]
        for name in command.name.split(" ")[1:]:
            collection = collection[name]
        ours |= {name for argument in collection.assemble_argument_collection() for name in argument.names}
    assert {"--model", "--tpu-prefix", "--no-checkpointing"} <= ours
    assert (set(FLAGS) | DROPPED) & ours == {"--activations-dir"}  # infer has it, and keeps it
    assert set(FLAGS.values()) <= ours
    assert ours >= SWITCHES - DROPPED


@pytest.mark.parametrize("name", VALUES)
def test_a_guides_variable_counts_for_its_scripts_only(name: str) -> None:
    text, field, value = VALUES[name]
    environment = {name: text} | ({"UPLOAD_TO_GCS": "true"} if name == "GCS_BUCKET" else {})
    assert getattr(flags("./launch_worker.sh", environment), field) == value
    assert getattr(flags("extract", environment), field) is None


@pytest.mark.parametrize("bucket", ["your-bucket-name", "gs://your-bucket-name", "gs://your-bucket-name/"])
def test_the_bucket_with_or_without_its_scheme(bucket: str) -> None:
    environment = {"GCS_BUCKET": bucket, "UPLOAD_TO_GCS": "true", "TPU_WORKER_ID": "5"}
    assert flags("launch_worker.sh --model m", environment).spec().output == "gs://your-bucket-name/activations"


def test_a_bucket_variable_alone_uploads_nothing() -> None:
    worker, bucket = "launch_worker.sh --model m", {"GCS_BUCKET": "b"}
    assert flags(worker, bucket).spec().output == "./activations"
    assert flags(worker, {**bucket, "UPLOAD_TO_GCS": "false"}).spec().output == "./activations"
    assert flags(f"{worker} --upload_to_gcs", bucket).spec().output == "gs://b/activations"
    assert flags("deploy_to_tpus.sh", bucket).gcs_bucket == "b"
    assert flags("deploy", bucket).gcs_bucket is None


def test_a_bucket_variable_that_is_not_used_is_said_aloud() -> None:
    """``launch_worker.sh`` with only GCS_BUCKET stored on the VM's disk without a word."""
    said: list[str] = []
    flags = ExtractFlags(model="embedded", dataset="x.jsonl", guide_script="launch_worker.sh")
    with_guide_defaults(flags, {"GCS_BUCKET": "mine"}, said.append)
    (line,) = said
    assert line.startswith("GCS_BUCKET=mine is not used, because UPLOAD_TO_GCS is not true: the activations stay on")
    said.clear()
    with_guide_defaults(flags.with_values(output="gs://other/x"), {"GCS_BUCKET": "mine"}, said.append)
    with_guide_defaults(flags.with_values(gcs_bucket="mine"), {"GCS_BUCKET": "mine"}, said.append)
    assert said == []


def test_a_flag_wins_over_its_variable() -> None:
    assert flags("launch_worker.sh --batch-size 2", {"BATCH_SIZE": "4"}).batch_size == 2
    assert flags("launch_worker.sh --batch_size=2", {"BATCH_SIZE": "4"}).batch_size == 2
    assert flags("launch_worker.sh --model_path m", {"MODEL_PATH": "n"}).model == "m"
    home = {"GCS_BUCKET": "b", "UPLOAD_TO_GCS": "1", "OUTPUT_DIR": "./x"}
    assert flags("launch_worker.sh --model m --output ./y", home).spec().output == "./y"
    assert flags("launch_worker.sh --dataset t.jsonl", {"DATASET_DIR": "d"}).spec().data.location == "t.jsonl"
    assert flags("launch_worker.sh --model m --upload-to-gcs=False", home).spec().output == "./x"


def test_our_own_variable_wins_over_the_guides() -> None:
    words = translate(["launch_worker.sh"], {"MODEL_PATH": "old", "SPILE_MODEL": "new"})
    assert words == ["extract", "--guide-script=launch_worker.sh"]


def test_a_variable_that_is_empty_or_of_another_command_does_not_count() -> None:
    words = translate(["launch_worker.sh"], {"MODEL_PATH": "", "BATCH_SIZE": " "})
    assert words == ["extract", "--guide-script=launch_worker.sh"]
    assert translate(["verify", "x"], {"MODEL_PATH": "m", "OUTPUT_DIR": "o"}) == ["verify", "x"]


def test_what_follows_two_dashes_is_another_programs() -> None:
    words = ["run", "--TPU_PREFIX=p", "--", "python3", "train.py", "--Batch_size", "True", "--model_path=x"]
    assert translate(words, {}) == ["run", "--tpu-prefix=p", *words[2:]]
    spelled = translate(["launch_worker.sh", "--model_path", "m", "--", "--x_y"], {"BATCH_SIZE": "4"})
    script = "--guide-script=launch_worker.sh"
    assert spelled == ["extract", "--model", "m", "--batch-size=4", script, "--", "--x_y"]


def test_values_are_left_as_they_are() -> None:
    words = ["extract", "--dataset_path", "Data_dir/My_Tasks.jsonl", "--model_path=Org/My_Model", "True"]
    assert translate(words, {}) == [
        "extract", "--dataset", "Data_dir/My_Tasks.jsonl", "--model=Org/My_Model", "True"
    ]  # fmt: skip


def test_the_folder_for_answers_yields_to_the_activations() -> None:
    for spelled in ("--output_dir=/o --activations_dir=/a", "--output_dir /o --activations_dir /a"):
        assert flags(f"extract {spelled} --batch_size 1").output_dir == "/a"
