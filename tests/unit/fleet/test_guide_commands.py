"""Every command line of the old deployment guide, as its reader would paste it after ``spile``."""

from __future__ import annotations

import shlex

import pytest

from spile.cli.aliases import translate
from spile.cli.program import build_app

LINES = [
    "deploy --gcs_bucket fineweb-data-us-central1 --zones us-central1-a --workers_per_zone 2 --max_samples 100"
    " --create_tpus --monitor",
    "deploy --gcs_bucket fineweb-data-us-central1 --zones us-central1-a,us-central1-b --workers_per_zone 4"
    " --create_tpus --monitor --monitor_interval 60",
    "deploy --gcs_bucket fineweb-data-us-central1 --zones us-central1-a --workers_per_zone 4 --skip_dataset",
    "deploy --gcs_bucket b --zones us-central1-a --skip_launch",
    "tpu create --zones us-central1-a,us-central1-b --workers_per_zone 4 --tpu_type v3-8",
    "tpu delete --zones us-central1-a --workers_per_zone 4",
    "tpu status --zones us-central1-a,us-central1-b",
    "tpu recreate-preempted --zones us-central1-a,us-central1-b --workers_per_zone 4",
    "tpu list",
    "data upload --bucket fineweb-data-us-central1 --prefix datasets --local_dir ./dataset_streams",
]


@pytest.mark.parametrize("line", LINES)
def test_it_is_understood(line: str) -> None:
    _, bound, _ = build_app().parse_args(translate(shlex.split(line), {}), exit_on_error=False, print_error=False)
    given = {**bound.arguments}
    if "--workers_per_zone" in line and "machines" in given:
        assert given["machines"].workers_per_zone in (2, 4)
    if "--monitor_interval" in line:
        assert given["steps"].interval == 60.0
    if "--gcs_bucket" in line:
        assert given["flags"].gcs_bucket in ("fineweb-data-us-central1", "b")


def test_every_flag_of_extract_reaches_the_workers() -> None:
    from spile.cli.deploy import worker_spec

    line = "deploy --gcs-bucket b --model M --layers_to_extract 0 1 2 --batch_size 8 --max_seq_length 512 --pack"
    _, bound, _ = build_app().parse_args(translate(shlex.split(line), {}), exit_on_error=False, print_error=False)
    spec = worker_spec(bound.arguments["flags"], "gs://b/activations", "gs://b/datasets/x", "split")
    assert (spec.model, spec.data.prompt.pack, spec.layers, spec.batch_size) == ("M", True, (0, 1, 2), 8)
    assert (spec.output, spec.data.location) == ("gs://b/activations", "gs://b/datasets/x/stream_000.jsonl")
