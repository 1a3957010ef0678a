"""Only a script of the guides selects their variables and defaults; a bucket or a pod needs a named model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import spile as api
from spile.cli.aliases import GUIDE_MODEL, GUIDE_STREAMS, VARIABLES
from spile.errors import SpecError
from spile.spec.run import RunSpec
from unit.cli.refusals import spile

SET = {
    "TPU_WORKER_ID": "5",
    "BATCH_SIZE": "4",
    "OUTPUT_DIR": "./elsewhere",
    "MODEL_PATH": "other",
    "GCS_BUCKET": "theirs",
    "UPLOAD_TO_GCS": "true",
    "DATASET_DIR": "./their-streams",
    "CHECKPOINT_DIR": "./c",
    "SHARD_SIZE_GB": "3",
    "MAX_SEQ_LENGTH": "77",
    "MESH_SHAPE": "16,16",
}
"""What other programs export, and GKE on every TPU host."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The specs of the runs, which are not started."""
    found: list[RunSpec] = []

    def stop(spec: RunSpec, **_: object) -> None:
        found.append(spec)
        raise SpecError("stopped here")

    from spile.run.pod.identity import Identity

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spile.run.worker.run_stream", stop)
    monkeypatch.setattr("spile.engines.run.has_streams", lambda _: False)  # it reads the bucket
    monkeypatch.setattr("spile.cli.flags.PodFlags.identity", lambda *_: Identity(0, 1))
    return found


def on_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    from spile.run.pod.identity import Identity
    from spile.run.pod.pod import WorkerGroup

    monkeypatch.setattr("spile.cli.flags.PodFlags.join", lambda *_: contextlib.nullcontext(WorkerGroup()))
    monkeypatch.setattr("spile.cli.flags.PodFlags.identity", lambda *_: Identity(0, 16))


def export(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_every_variable_is_tried() -> None:
    assert set(SET) == {"TPU_WORKER_ID", *VARIABLES}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("command", ["extract", "infer"])
def test_a_variable_of_another_program_changes_nothing(
    name: str, command: str, asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (command, "--dataset", "my.csv")
    spile(*words)
    export(monkeypatch, {name: SET[name]})
    spile(*words)
    assert asked[0] == asked[1]
    assert (asked[0].model, asked[0].data.worker_id, asked[0].stream_names) == ("embedded", 0, "stream")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--worker_id 1", "--worker-id 1"),
        ("--dataset_path my.csv", "--dataset my.csv"),
        ("--model_path embedded --gcs_bucket b", "--model embedded --gcs-bucket b"),
        ("--output_dir out --batch_size 4", "--output out --batch-size 4"),
    ],
)
def test_an_old_spelling_is_renamed_and_selects_nothing(
    old: str, new: str, asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spile("extract", *new.split())
    export(monkeypatch, SET)
    spile("extract", *old.split())
    assert asked[0] == asked[1]
    assert (asked[0].model, asked[0].stream_names) == ("embedded", "stream")


def test_plan_ignores_the_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    planned: list[RunSpec] = []

    def stop(spec: RunSpec, *_: object, **__: object) -> None:
        planned.append(spec)
        raise SpecError("stopped here")

    monkeypatch.setattr("spile.planning.forecast.plan", stop)
    spile("plan")
    export(monkeypatch, SET)
    spile("plan")
    assert planned[0] == planned[1]
    assert capsys.readouterr().out == ""


NO_MODEL = "expected --model NAME. Use --model embedded to try spile out."


@pytest.mark.parametrize("words", [("--output", "gs://b/x"), ("--output", "s3://b/x"), ("--gcs-bucket", "b")])
@pytest.mark.parametrize("more", [(), ("--num-workers", "2"), ("--engine", "ray")], ids=str)
def test_a_bucket_needs_a_named_model(
    words: tuple[str, ...], more: tuple[str, ...], asked: list[RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    place = words[1] if "://" in words[1] else "gs://b/activations"
    assert spile("extract", *words, *more) == 2
    assert capsys.readouterr().err == f"spile: no model for {place}: {NO_MODEL}\n"
    assert asked == []
    if not more:
        spile("extract", *words, "--model", "embedded")
        assert [(spec.model, spec.output) for spec in asked] == [("embedded", place)], "its name is accepted"


def test_a_pod_needs_a_named_model(
    asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_pod(monkeypatch)
    for command in ("extract", "infer"):
        assert spile(command) == 2
        assert capsys.readouterr().err == f"spile: no model for a pod: {NO_MODEL}\n"
    assert spile("extract", "--engine", "ray", "--hosts-per-worker", "2") == 2
    assert capsys.readouterr().err == f"spile: no model for a pod: {NO_MODEL}\n"
    spile("extract", "--model", "embedded")
    assert [spec.model for spec in asked] == ["embedded"]


def test_a_fleet_and_a_job_need_a_named_model(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("slurm", "job"), ("k8s", "job", "--image", "x")):
        assert spile(*words, "--dataset-dir", "/s", "--output", "/o") == 2
        assert capsys.readouterr().err == f"spile: no model for a job: {NO_MODEL}\n"


def test_python_needs_a_named_model_for_a_bucket(asked: list[RunSpec]) -> None:
    with pytest.raises(SpecError, match=r"^spile.extract\(\): no model for gs://b/x: expected model NAME"):
        api.extract(output="gs://b/x")
    for given in ({"output": "gs://b/x", "model": "embedded"}, {}):
        with pytest.raises(SpecError, match="stopped here"):
            api.extract(**given)  # type: ignore[arg-type]
    assert [spec.model for spec in asked] == ["embedded"] * 2


# -- scripts of the guides ------------------------------------------------------------------------------------------


SCRIPTS = ["./launch_worker.sh 5", "python extract_activations.py --worker_id 5", "./run_extraction_worker.sh"]


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_script_without_variables_has_the_guides_model_and_data(
    line: str, asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data/streams").mkdir(parents=True)
    if not line.endswith("5"):
        monkeypatch.setenv("TPU_WORKER_ID", "5")
    spile(*line.split())
    (spec,) = asked
    assert (spec.model, spec.data.location) == (GUIDE_MODEL, f"{GUIDE_STREAMS}/stream_005.jsonl")
    assert (spec.output, spec.stream_names, spec.data.worker_id) == ("./activations", "tpu", 5)
    assert spec.data.max_seq_length == RunSpec().data.max_seq_length, "a script does not set the length"
    first, *rest = capsys.readouterr().out.splitlines()
    script = line.split()[0].removeprefix("./") if "python" not in line else "extract_activations.py"
    assert first == f"{script} of the guides is spile extract with their defaults and variables: none set"
    assert rest == [
        f"no model was given: using {GUIDE_MODEL}, as in the guides (--model embedded: the embedded one)",
        "no dataset was given: using ./data/streams, as in the guides",
    ]


def test_a_script_reads_the_guides_variables_and_names_them_first(
    asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export(monkeypatch, SET)
    spile("./launch_worker.sh", "--batch_size", "2")
    (spec,) = asked
    assert (spec.model, spec.output, spec.local_copy) == ("other", "gs://theirs/activations", "./elsewhere")
    assert (spec.data.location, spec.batch_size) == ("./their-streams/stream_005.jsonl", 2)
    assert (spec.data.max_seq_length, spec.mesh_shape, spec.shard_size_gb) == (77, (16, 16), 3)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("launch_worker.sh of the guides is spile extract with their defaults and variables: MODEL_")
    assert "GCS_BUCKET=theirs" in first
    assert "BATCH_SIZE" not in first, "a flag takes precedence"


def test_a_script_without_a_model_fills_a_bucket_with_the_guides_model(asked: list[RunSpec]) -> None:
    spile("./run_extraction_worker.sh", "--gcs_bucket", "b", "--dataset_stream", "gs://b/datasets/stream_000.jsonl")
    assert [(spec.model, spec.output) for spec in asked] == [(GUIDE_MODEL, "gs://b/activations")]


def test_a_script_without_data_is_a_one_line_error(
    asked: list[RunSpec], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spile("./launch_worker.sh", "5") == 2
    error = capsys.readouterr().err
    assert error.startswith("spile: no dataset for launch_worker.sh: expected --dataset FILE or --dataset-dir DIR")
    Path("data/streams").mkdir(parents=True)
    assert spile("./launch_worker.sh") == 2
    assert capsys.readouterr().err == (
        "spile: no stream was chosen: expected --worker-id N or TPU_WORKER_ID, found only ./data/streams\n"
    )
    monkeypatch.setenv("TPU_WORKER_ID", "x")
    assert spile("./launch_worker.sh") == 2
    assert capsys.readouterr().err == "spile: TPU_WORKER_ID: expected the stream's number, found 'x'\n"
    assert asked == []


@pytest.mark.parametrize(
    ("words", "variable", "worker"),
    [
        (("--dataset-dir", "d"), "5", 5),
        (("--dataset-dir", "d"), " 0 ", 0),
        (("--dataset-dir", "d", "--worker-id", "3"), "5", 3),
        (("--dataset", "embedded"), "5", 5),
        (("--dataset", "embedded"), "", 0),
        (("--dataset", "d/stream_002.jsonl"), "", 2),
        (("--dataset", "d/stream_002.jsonl"), "5", 2),
    ],
    ids=str,
)
def test_the_variable_is_the_stream_of_a_script(
    words: tuple[str, ...],
    variable: str,
    worker: int,
    asked: list[RunSpec],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", variable)
    spile("extract_activations.py", "--model", "m", *words)
    assert [spec.data.worker_id for spec in asked] == [worker]
    ignored = "TPU_WORKER_ID=5 is ignored: d/stream_002.jsonl is stream 2 (--worker-id overrides it)"
    assert (ignored in capsys.readouterr().out) == (worker == 2 and variable == "5")


def test_on_a_pod_the_variable_is_the_number_of_the_host(asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_pod(monkeypatch)
    monkeypatch.setenv("TPU_WORKER_ID", "5")
    spile("python3", "multihost_extract.py", "--dataset_path", "gs://bucket/data.jsonl", "--gcs_bucket", "my-bucket")
    assert [(spec.model, spec.data.worker_id) for spec in asked] == [(GUIDE_MODEL, 0)]


def test_our_own_variables_and_files_take_precedence_over_a_scripts_defaults(
    asked: list[RunSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPILE_MODEL", "new")
    monkeypatch.setenv("MODEL_PATH", "old")
    spile("./launch_worker.sh", "5", "--dataset", "x.jsonl")
    monkeypatch.delenv("SPILE_MODEL")
    monkeypatch.delenv("MODEL_PATH")
    (tmp_path / "run.toml").write_text('model = "of the file"\ndataset = "x.jsonl"\n')
    spile("./launch_worker.sh", "5", "--config", tmp_path / "run.toml")
    assert [spec.model for spec in asked] == ["new", "of the file"]
