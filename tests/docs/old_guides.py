"""Every command line of the five old guides that ran something of theirs, as written there, and what it means here.

Shell variables have a value, ``...`` for what a guide left out is dropped, and ``bash <(curl …/SCRIPT)`` is SCRIPT;
nothing else was changed. What the shell itself does (``ls``, ``export``, ``jq``) means nothing after ``spile``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["BARC", "INSTEAD", "LINES", "QWEN", "OldLine"]

QWEN = "Qwen/Qwen2.5-0.5B"
BARC = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"


@dataclass(frozen=True)
class OldLine:
    """One command line and its expected meaning."""

    guide: str
    line: str
    command: str
    """Ours, whose function is called."""
    means: dict[str, Any]
    """The expected arguments: the spec for extract, the flags by their dotted names for other commands."""
    environment: dict[str, str] = field(default_factory=dict)


def _extract(guide: str, line: str, environment: dict[str, str] | None = None, **means: Any) -> OldLine:
    return OldLine(guide, line, "extract", {"model": QWEN, **means}, environment or {})


def _deploy(line: str, zones: str, workers: int, **steps: Any) -> OldLine:
    flags = {f"steps.{name}": value for name, value in steps.items() if name != "max_samples"}
    if "max_samples" in steps:
        flags["flags.max_samples_per_stream"] = steps["max_samples"]
    return OldLine(
        "001", line, "deploy",
        {"flags.gcs_bucket": "fineweb-data-us-central1", "place.zones": zones, "machines.workers_per_zone": workers,
         **flags},
    )  # fmt: skip


def _tpu(verb: str, rest: str, **means: Any) -> OldLine:
    flags = {name.replace("__", "."): value for name, value in means.items()}
    return OldLine("001", f"./scripts/manage_tpus.sh {verb} {rest}".strip(), f"tpu {verb}", flags)


_BUCKET = "gs://your-bucket-name/activations"
_A, _AB = "us-central1-a", "us-central1-a,us-central1-b"
_FOUR = "us-central1-a,us-central1-b,us-central1-c,us-central1-f"
_DEPLOY = "./scripts/deploy_to_tpus.sh --gcs_bucket fineweb-data-us-central1 --zones"
_WORKER = {"GCS_BUCKET": "your-bucket-name", "UPLOAD_TO_GCS": "true"}
_STREAM = "gs://fineweb-data-us-central1/datasets/stream_000.jsonl"
_FINEWEB = "gs://fineweb-data-us-central1/activations"

LINES: tuple[OldLine, ...] = (
    # 000 · Docker on multi-host pods
    OldLine(
        "000",
        f"python transform_hf_to_arc.py --dataset {BARC} --output_dir /app/arc_data --max_samples 50000",
        "data convert",
        {"dataset": BARC, "output_dir": "/app/arc_data", "rows.max_samples": 50000},
    ),
    OldLine(
        "000",
        "python distributed_inference_with_activations.py --model_path /app/model/qwen2.5-0.5b "
        "--tasks_file /app/arc_data/arc_format_train.json --output_dir /app/outputs --activations_dir /app/activations "
        "--batch_size 8 --mesh_shape 16,16 --gcs_bucket gs://your-bucket-name/activations --upload_to_cloud True",
        "infer",
        {
            "model": "/app/model/qwen2.5-0.5b",
            "location": "/app/arc_data/arc_format_train.json",
            "output": _BUCKET,
            "batch_size": 8,
            "mesh_shape": (16, 16),
        },
    ),
    OldLine("000", "./run-docker.sh build", "docker build", {}),
    # 001 · TPU deployment system
    _deploy(f"{_DEPLOY} {_A} --workers_per_zone 2 --max_samples 100 --create_tpus --monitor", _A, 2,
            create_tpus=True, monitor=True, max_samples=100),
    _deploy(f"{_DEPLOY} {_AB} --workers_per_zone 4 --create_tpus --monitor", _AB, 4, create_tpus=True, monitor=True),
    _deploy(f"{_DEPLOY} {_AB} --workers_per_zone 4 --create_tpus", _AB, 4, create_tpus=True, monitor=False),
    _deploy(f"{_DEPLOY} {_A} --workers_per_zone 2 --max_samples 100 --create_tpus", _A, 2, create_tpus=True,
            max_samples=100),
    _deploy(f"{_DEPLOY} {_A} --workers_per_zone 4 --skip_dataset", _A, 4, skip_dataset=True, create_tpus=False),
    _deploy(f"{_DEPLOY} {_AB} --workers_per_zone 4 --skip_dataset", _AB, 4, skip_dataset=True),
    _deploy(f"{_DEPLOY} {_AB} --workers_per_zone 4 --create_tpus --monitor --monitor_interval 60", _AB, 4,
            interval=60.0, monitor=True),
    _deploy(f"{_DEPLOY} {_FOUR} --workers_per_zone 4 --create_tpus", _FOUR, 4, create_tpus=True),
    _extract(
        "001",
        "bash run_extraction_worker.sh --gcs_bucket fineweb-data-us-central1 "
        f"--dataset_stream {_STREAM} --model Qwen/Qwen2.5-0.5B",
        location=_STREAM, worker=0, output=_FINEWEB,
    ),
    _extract(
        "001",
        f"./scripts/run_extraction_worker.sh --gcs_bucket fineweb-data-us-central1 --dataset_stream {_STREAM}",
        location=_STREAM, worker=0, output=_FINEWEB,
    ),
    _tpu("create", f"--zones {_AB} --workers_per_zone 4 --tpu_type v3-8", place__zones=_AB,
         machines__workers_per_zone=4, machines__tpu_type="v3-8"),
    _tpu("create", f"--zones {_A} --workers_per_zone 1", place__zones=_A, machines__workers_per_zone=1),
    _tpu("create", "--zones us-central1-b --workers_per_zone 4", place__zones="us-central1-b"),
    _tpu("delete", f"--zones {_A} --workers_per_zone 4", place__zones=_A, workers_per_zone=4),
    _tpu("delete", f"--zones {_A} --workers_per_zone 1", place__zones=_A, workers_per_zone=1),
    _tpu("status", f"--zones {_AB}", place__zones=_AB),
    _tpu("status", f"--zones {_A}", place__zones=_A),
    _tpu("recreate-preempted", f"--zones {_AB} --workers_per_zone 4", place__zones=_AB, workers_per_zone=4),
    _tpu("list", ""),
    OldLine(
        "001",
        "./scripts/upload_dataset_streams_to_gcs.sh --bucket fineweb-data-us-central1 --prefix datasets "
        "--local_dir ./dataset_streams",
        "data upload",
        {"bucket": "fineweb-data-us-central1", "prefix": "datasets"},
    ),
    # 002 · Parallel independent workers
    OldLine("002", "python create_dataset_streams.py --num_streams 32 --output_dir ./data/streams --max_samples 200000",
            "data streams", {"num_streams": 32, "output_dir": "./data/streams", "rows.max_samples": 200000}),
    OldLine("002", "python create_dataset_streams.py --num_streams 64 --output_dir ./data/streams --max_samples 200000",
            "data streams", {"num_streams": 64, "output_dir": "./data/streams", "rows.max_samples": 200000}),
    _extract("002", "./launch_worker.sh", {"TPU_WORKER_ID": "5", **_WORKER},
             location="./data/streams/stream_005.jsonl", worker=5, output=_BUCKET),
    _extract("002", "./launch_worker.sh 5", _WORKER, location="./data/streams/stream_005.jsonl", worker=5,
             output=_BUCKET),
    _extract("002", "./launch_worker.sh", {"TPU_WORKER_ID": "5"}, location="./data/streams/stream_005.jsonl", worker=5,
             output="./activations"),
    _extract("002", "./launch_worker.sh", {"TPU_WORKER_ID": "0"}, location="./data/streams/stream_000.jsonl", worker=0,
             output="./activations"),
    _extract("002", "./launch_worker.sh", {"TPU_WORKER_ID": "1"}, location="./data/streams/stream_001.jsonl", worker=1,
             output="./activations"),
    _extract(
        "002",
        "python extract_activations.py --worker_id 5 --dataset_path data/streams/stream_005.jsonl "
        "--model_path Qwen/Qwen2.5-0.5B --output_dir ./activations --checkpoint_dir ./checkpoints "
        "--enable_checkpointing --upload_to_gcs --gcs_bucket your-bucket --batch_size 4 --shard_size_gb 1.0 "
        "--max_seq_length 2048 --verbose",
        location="data/streams/stream_005.jsonl", worker=5, output="gs://your-bucket/activations",
    ),
    _extract("002", "python extract_activations.py --no_checkpointing --dataset_path data/streams/stream_005.jsonl",
             location="data/streams/stream_005.jsonl", worker=5, output="./activations"),
    _extract(
        "002",
        "python extract_activations.py --dataset_path data/streams/stream_000.jsonl "
        "--layers_to_extract 0 1 2 3 4 5 6 7 8 9 10 11",
        {"TPU_WORKER_ID": "0"}, location="data/streams/stream_000.jsonl", worker=0, layers=tuple(range(12)),
    ),
    _extract(
        "002",
        "python extract_activations.py --dataset_path data/streams/stream_001.jsonl "
        "--layers_to_extract 12 13 14 15 16 17 18 19 20 21 22 23",
        {"TPU_WORKER_ID": "1"}, location="data/streams/stream_001.jsonl", worker=1, layers=tuple(range(12, 24)),
    ),
    OldLine("002", "./check_all_workers.sh", "monitor", {"root": "./activations", "once": True}),
    OldLine("002", "./check_all_workers.sh", "monitor", {"root": "gs://your-bucket-name/activations", "once": True},
            {"GCS_BUCKET": "your-bucket-name", "UPLOAD_TO_GCS": "true"}),
    # 003 · multihost_runner.py
    OldLine("003", 'python3 multihost_runner.py --TPU_PREFIX=my-tpu --COMMAND="bash setup.sh"', "run",
            {"where.tpu_prefix": "my-tpu", "flags.command": "bash setup.sh"}),
    OldLine(
        "003",
        'python3 multihost_runner.py --TPU_PREFIX=my-tpu --COMMAND="python3 MaxText/train.py MaxText/configs/base.yml '
        'run_name=mine" --INTERNAL_IP=true',
        "run",
        {"where.tpu_prefix": "my-tpu", "where.internal_ip": True,
         "flags.command": "python3 MaxText/train.py MaxText/configs/base.yml run_name=mine"},
    ),
    # 004 · TPU pod verification
    OldLine("004", "./test_multihost_v5e64.sh", "pod check", {"flags.topology": "v5litepod-64"}),
    _extract(
        "004",
        "python3 multihost_extract.py --topology v5litepod-64 --dataset_path gs://bucket/data.jsonl "
        "--gcs_bucket my-bucket --batch_size 64 --enable_barrier_sync --verbose",
        location="gs://bucket/data.jsonl", worker=0, output="gs://my-bucket/activations",
    ),
    _extract(
        "004",
        "python3 multihost_extract.py --is_barrier_server --topology v5litepod-64 "
        "--dataset_path gs://bucket/data.jsonl --gcs_bucket my-bucket --barrier_controller_host 10.0.0.1",
        location="gs://bucket/data.jsonl", worker=0, output="gs://my-bucket/activations",
    ),
)  # fmt: skip

_SSH = "gcloud compute tpus tpu-vm ssh"
_ARC = "arc-inference-multihost"
_TPU0 = "tpu-us-central1-a-0 --zone=us-central1-a"
_CURL = f"--gcs_bucket fineweb-data-us-central1 --dataset_stream {_STREAM}"

INSTEAD: dict[str, str] = {
    # 000
    f"gcloud compute tpus tpu-vm create {_ARC} --zone=us-central2-b --accelerator-type=v5litepod-256 "
    "--version=tpu-ubuntu2204-base --network=default": "spile tpu create",
    f"{_SSH} {_ARC} --zone=us-central2-b --worker=all --command='sudo apt-get update'": "spile run",
    f"{_SSH} {_ARC} --zone=us-central2-b --worker=all --command=exit": "spile run",
    f"{_SSH} {_ARC} --zone=us-central2-b --worker=all --command='docker images | grep arc-inference'": "spile run",
    f"gcloud compute tpus tpu-vm scp --recurse --zone=us-central2-b --worker=0 /path/to/local/torch_xla/qwen "
    f"{_ARC}:~/torch_xla/": "spile run",
    f"gcloud compute tpus tpu-vm scp --recurse --zone=us-central2-b --worker=0 {_ARC}:/tmp/activations "
    "./collected_activations/worker_0/": "spile collect",
    "sudo apt-get install -y docker.io": "spile run --tpu-prefix",
    "pip install huggingface_hub": "spile install",
    "docker images": "spile docker build",
    "docker ps": "spile monitor",
    "docker logs -f 3f1c": "spile logs",
    "docker run --rm -v /tmp/arc_data:/app/arc_data arc-inference python transform_hf_to_arc.py "
    f"--dataset {BARC} --output_dir /app/arc_data --max_samples 50000": "--mount",
    "docker run --privileged --network=host -v /tmp/arc_data:/app/arc_data -v /tmp/model:/app/model "
    "-e JAX_PLATFORMS=tpu -e MESH_SHAPE=16,16 arc-inference python distributed_inference_with_activations.py "
    "--model_path /app/model/qwen2.5-0.5b": "spile docker pod",
    "docker run --privileged arc-inference python -c 'import jax; print(jax.devices())'": "spile docker pod",
    "docker stop 3f1c 9a2b": "spile docker stop --all",
    "./run_distributed_docker.sh": "spile docker pod",
    "./multihost_docker_run.sh": "spile docker pod",
    "gsutil cp /tmp/arc_data/arc_format_train.json gs://your-bucket-name/data/": "gs://",
    "gsutil -m cp -r ./qwen2.5-0.5b gs://your-bucket-name/models/": "gs://",
    "gsutil ls gs://your-bucket-name/activations/": "spile monitor",
    "huggingface-cli download Qwen/Qwen2.5-0.5B --local-dir ./qwen2.5-0.5b": "--model",
    f"gcloud compute tpus tpu-vm delete {_ARC} --zone=us-central2-b": "spile tpu delete",
    # 001
    f"bash /dev/fd/63 {_CURL} --model Qwen/Qwen2.5-0.5B": "spile extract",
    f"{_SSH} {_TPU0} --command='tail -f ~/activation-extract/extraction.log'": "spile logs",
    f"{_SSH} {_TPU0} --command='cat ~/activation-extract/checkpoints/checkpoint_worker_0.json'": "spile run",
    f"{_SSH} {_TPU0}": "spile run",
    "gsutil du -sh gs://fineweb-data-us-central1/activations/": "spile monitor",
    "./setup_tpu_worker.sh": "spile install --tpu-prefix",
    "./setup_tpu_worker.sh --force": "spile install --tpu-prefix",
    "./scripts/setup_tpu_worker.sh --force": "again with --force",
    "gcloud compute tpus describe-quota --zone=us-central1-a": "spile deploy --create-tpus --dry-run",
    # 002
    "./launch_all_workers.sh": "spile deploy",
    "gcloud auth list": "without spile",
    "gcloud auth application-default login": "without spile",
    "gsutil mb -l us-central1 gs://your-bucket/": "gs://",
    # 003
    "gcloud config set project my-project": "without spile",
    "ssh-keygen -f ~/.ssh/google_compute_engine": "spile tpu create",
    "gcloud alpha compute tpus queued-resources create qr --accelerator-type=v4-8 "
    "--runtime-version=tpu-ubuntu2204-base --node-count=2 --node-prefix=my-tpu --reserved": "spile tpu create --queued",
    "gcloud alpha compute tpus queued-resources list --filter=qr": "spile tpu status",
    "gcloud alpha compute tpus queued-resources delete qr --force --async": "spile tpu delete",
    # 004
    f"{_SSH} my-tpu --zone=us-central1-a --worker=all --command='cd ~/activation-extract-multihost'": "spile run",
}
"""Lines of other programs, and the replacement that the error names."""
