"""Without a model or a dataset, the embedded ones are used for a trial, but never in a production run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spile.cli.aliases import GUIDE_MODEL, GUIDE_STREAMS, VARIABLES, with_guide_defaults
from spile.cli.flags import ExtractFlags
from spile.errors import SpecError
from spile.spec.run import ExtractSpec


def taken(given: dict[str, Any], environment: dict[str, str], *, pod: bool = False) -> tuple[ExtractSpec, list[str]]:
    output: list[str] = []
    spec = with_guide_defaults(ExtractFlags(**given), environment, output.append, pod=pod).spec()
    # Another line, tested elsewhere, says what else GCS_BUCKET needs.
    return spec, [line for line in output if not line.startswith("GCS_BUCKET=")]


def test_a_try_out_here_takes_the_embedded_model_and_tasks() -> None:
    for given in ({}, {"output": "out"}, {"dataset": "texts.jsonl", "output_dir": "out"}, {"output": "gs://b/x"}):
        spec, output = taken(given, {})
        assert spec.model == "embedded"
        assert output == []


EARNEST: list[tuple[dict[str, Any], dict[str, str], bool]] = [
    ({"gcs_bucket": "b"}, {}, False),
    ({"worker_id": 0}, {}, False),
    ({}, {"TPU_WORKER_ID": "5"}, False),
    ({}, {}, True),
    *(({}, {name: "1"}, False) for name in VARIABLES),
]


@pytest.mark.parametrize(("given", "environment", "pod"), EARNEST, ids=str)
def test_a_production_run_without_a_model_uses_the_guides_model_and_says_so(
    given: dict[str, Any], environment: dict[str, str], pod: bool
) -> None:
    spec, output = taken({"dataset": "tasks.jsonl", **given}, environment, pod=pod)
    assert spec.model == GUIDE_MODEL == "Qwen/Qwen2.5-0.5B"
    assert len(output) == 1
    assert GUIDE_MODEL in output[0]
    spec, output = taken({"dataset": "tasks.jsonl", "model": "embedded", **given}, environment, pod=pod)
    assert (spec.model, output) == ("embedded", []), "asked for by its name it is had"


@pytest.mark.parametrize(("given", "environment", "pod"), EARNEST, ids=str)
def test_a_production_run_without_a_dataset_is_a_one_line_error(
    given: dict[str, Any], environment: dict[str, str], pod: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"^no dataset, with .*--dataset-dir DIR.*no ./data/streams here"):
        taken({"model": "m", **given}, environment, pod=pod)


def test_a_production_run_uses_the_guides_streams_if_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "streams").mkdir(parents=True)
    spec, output = taken({"model": "m"}, {"TPU_WORKER_ID": "5"})
    assert spec.data.location == f"{GUIDE_STREAMS}/stream_005.jsonl"
    assert output == ["no dataset was given: using ./data/streams, as in the guides"]
    with pytest.raises(SpecError, match=r"^no stream was chosen: expected --worker-id N or TPU_WORKER_ID"):
        taken({"model": "m", "gcs_bucket": "b"}, {})


@pytest.mark.parametrize(
    ("given", "variable", "worker"),
    [
        ({"dataset_dir": "d"}, "5", 5),
        ({"dataset_dir": "d"}, " 0 ", 0),
        ({"dataset_dir": "d"}, "", 0),
        ({"dataset_dir": "d", "worker_id": 3}, "5", 3),
        ({"dataset": "embedded"}, "5", 5),
        ({"dataset": "tasks.jsonl", "output": "gs://b/activations"}, "7", 7),
        ({"dataset": "stream_002.jsonl"}, "", 2),
    ],
    ids=str,
)
def test_the_variable_is_the_workers_number_wherever_one_process_runs(
    given: dict[str, Any], variable: str, worker: int
) -> None:
    assert taken({"model": "m", **given}, {"TPU_WORKER_ID": variable})[0].data.worker_id == worker


def test_a_stream_number_that_differs_from_the_variable_is_reported() -> None:
    spec, output = taken({"model": "m", "dataset": "d/stream_002.jsonl"}, {"TPU_WORKER_ID": "5"})
    assert spec.data.worker_id == 2
    assert output == ["TPU_WORKER_ID=5 is ignored: d/stream_002.jsonl is stream 2 (--worker-id overrides it)"]


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(SpecError, match=r"^TPU_WORKER_ID: expected the stream's number, found 'x'$"):
        taken({"dataset_dir": "d"}, {"TPU_WORKER_ID": "x"})
