"""The flags of ``spile extract`` → the run they ask for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from spile.cli.flags import ExtractFlags
from spile.errors import SpecError
from spile.spec.run import RunSpec


def test_no_flag_at_all_is_the_default_run() -> None:
    assert ExtractFlags().spec() == RunSpec()


@pytest.mark.parametrize(
    ("given", "home", "copy"),
    [
        ({}, "./activations", None),
        ({"output": "./a"}, "./a", None),
        ({"output_dir": "./a"}, "./a", None),
        ({"output": "gs://b/x"}, "gs://b/x", None),
        ({"output": "s3://b/x", "output_dir": "./a"}, "s3://b/x", "./a"),
        ({"gcs_bucket": "b", "upload_to_gcs": True}, "gs://b/activations", None),
        ({"gcs_bucket": "gs://b/", "upload_to_gcs": True}, "gs://b/activations", None),
        ({"gcs_bucket": "b"}, "gs://b/activations", None),
        ({"gcs_bucket": "b", "gcs_prefix": "/p/q/"}, "gs://b/p/q", None),
        ({"gcs_bucket": "b", "gcs_prefix": ""}, "gs://b", None),
        ({"gcs_bucket": "gs://b/activations"}, "gs://b/activations", None),
        ({"gcs_bucket": "gs://b/x", "gcs_prefix": "p"}, "gs://b/x/p", None),
        ({"gcs_bucket": "b", "output_dir": "./a"}, "gs://b/activations", "./a"),
        ({"gcs_bucket": "b", "upload_to_gcs": False}, "./activations", None),
        ({"gcs_bucket": "b", "upload_to_gcs": False, "output_dir": "./a"}, "./a", None),
        ({"gcs_bucket": "b", "upload_to_gcs": False, "output": "./a"}, "./a", None),
    ],
    ids=str,
)
def test_where_it_goes(given: dict[str, Any], home: str, copy: str | None) -> None:
    spec = ExtractFlags(model="m", **given).spec()
    assert (spec.output, spec.local_copy) == (home, copy)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"upload_to_gcs": True}, "--upload-to-gcs: expected --gcs-bucket as well, found no bucket"),
        (
            {"output": "./a", "gcs_bucket": "b"},
            "--output and --gcs-bucket both given: expected one of them, found ./a, gs://b/activations",
        ),
        (
            {"output": "./a", "output_dir": "./b"},
            "--output-dir with --output: expected a bucket, of which it is the local copy, found ./a",
        ),
        (
            {"dataset": "t.jsonl", "dataset_dir": "d"},
            "two datasets: expected --dataset or --dataset-dir, found both",
        ),
        ({"worker_id": -1}, "--worker-id: expected from 0 to 99,999, found -1"),
        ({"layers": ["x"]}, "--layers"),
        ({"overwrite": True}, "--overwrite: expected --no-checkpointing as well, found --overwrite alone"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        ExtractFlags(**given).spec()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "worker"),
    [
        ("data/streams/stream_005.jsonl", 5),
        ("stream_012.jsonl", 12),
        ("gs://b/datasets/stream_1234.jsonl", 1234),
        ("custom_stream_005.jsonl", 0),
        ("stream_5.jsonl", 0),
        ("stream_005.jsonl/tasks.jsonl", 0),
        ("stream_005.json", 0),
        ("embedded", 0),
    ],
)
def test_a_streams_own_name_says_its_number(dataset: str, worker: int) -> None:
    spec = ExtractFlags(dataset=dataset).spec()
    assert (spec.data.worker_id, spec.data.location) == (worker, dataset)
    assert ExtractFlags(dataset=dataset, worker_id=7).spec().data.worker_id == 7


def test_a_folder_of_streams_and_a_number_name_the_file() -> None:
    data = ExtractFlags(dataset_dir="data/streams/", worker_id=5).spec().data
    assert (data.location, data.worker_id) == ("data/streams/stream_005.jsonl", 5)


def test_the_rest_arrives() -> None:
    spec = ExtractFlags(
        model="m",
        revision="r",
        layers=["0-2,", "5"],
        taps=["residual", "mlp"],
        max_samples=9,
        prompt="chat",
        max_seq_length=77,
        long="skip",
        seed=3,
        store_dtype="float32",
        dtype="bfloat16",
        batch_size=4,
        batch_tokens=512,
        mesh_shape="2,4",
        shard_size_gb=0.5,
        commit_every=60.0,
        checkpoint_dir="c",
    ).spec()
    assert (spec.model, spec.revision, spec.layers, spec.taps) == ("m", "r", (0, 1, 2, 5), ("residual", "mlp"))
    assert (spec.data.max_samples, spec.data.prompt.kind, spec.data.max_seq_length) == (9, "chat", 77)
    assert (spec.data.long, spec.data.seed, spec.store_dtype, spec.dtype) == ("skip", 3, "float32", "bfloat16")
    assert (spec.batch_size, spec.batch_tokens, spec.mesh_shape, spec.shard_size_gb) == (4, 512, (2, 4), 0.5)
    assert (spec.commit_every, spec.checkpoint_dir) == (60.0, "c")


@pytest.mark.parametrize(
    ("host", "words", "worker"),
    [
        ("", ["--dataset-dir", "d"], 5),
        ("", ["--dataset-dir", "d", "--worker-id", "3"], 3),
        ("", ["--dataset", "d/stream_002.jsonl"], 2),
        ("worker 5 of 16", ["--dataset-dir", "d"], 0),
        ("worker 5 of 16", ["--dataset-dir", "d", "--worker-id", "3"], 3),
    ],
)
def test_the_variable_is_a_streams_alone_and_a_hosts_on_a_pod(
    host: str, words: list[str], worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import spile.run.worker
    from spile.cli.main import main
    from spile.run.pod.identity import Identity
    from spile.run.pod.pod import WorkerGroup

    class Pod(WorkerGroup):
        name = host

    asked: list[RunSpec] = []

    def extract(spec: RunSpec, **_: object) -> None:
        asked.append(spec)
        raise SpecError("stopped here")

    monkeypatch.setenv("TPU_WORKER_ID", "5")
    monkeypatch.setattr(spile.run.worker, "run_stream", extract)
    monkeypatch.setattr("spile.cli.flags.PodFlags.join", lambda *_: contextlib.nullcontext(Pod()))
    monkeypatch.setattr("spile.cli.flags.PodFlags.identity", lambda *_: Identity(0, 16 if host else 1))
    with pytest.raises(SystemExit):
        main(["extract_activations.py", "--model", "embedded", *words])
    assert [spec.data.worker_id for spec in asked] == [worker]
