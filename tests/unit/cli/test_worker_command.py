"""``spile worker --spec``: one stream of a run spec, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.fakes.gcs import FakeGcs

import spile as api
from fleet.ssh.loopback import wait_until
from spile.data.split import make_streams
from spile.errors import RunMismatch
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.spec.run import DataSpec, GenerationSpec, PromptSpec, RunSpec
from spile.store.claims import ClaimBook
from spile.store.run import join_run, read_spec, refuse_other_spec, write_spec
from unit.cli.refusals import lines, spile
from world import run_identity


def worker(*words: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spile.cli.main", "worker", *map(str, words)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, input=text, check=False)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with FakeGcs() as fake:
        fake.add_bucket("bucket")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield "gs://bucket/run"


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    for number, text in enumerate(("1 2 3", "a b c d")):
        lines(tmp_path / "streams" / f"stream_00{number}.jsonl", {"text": text})
    return tmp_path / "streams"


def small(streams: Path, output: object) -> RunSpec:
    return RunSpec(data=DataSpec(dataset_dir=str(streams)), taps=("residual.0-1",), output=str(output))


@pytest.mark.parametrize("place", [pytest.param("disk", marks=pytest.mark.slow), "gcs"])
def test_a_worker_runs_the_stream_that_it_is_given(
    place: str, tmp_path: Path, streams: Path, request: pytest.FixtureRequest
) -> None:
    output = str(tmp_path / "out") if place == "disk" else request.getfixturevalue("bucket")
    url = write_spec(open_folder(output), small(streams, output))
    done = worker("--spec", url, "--stream", 1)
    assert done.returncode == 0, done.stderr
    assert spile("worker", "--spec", url, "--stream", 0) == 0
    dataset = open_dataset(output)
    assert len(dataset.samples) == 2
    assert {str(tap) for tap in dataset.taps} == {"residual.0", "residual.1"}
    assert read_spec(url) == small(streams, output)  # Workers leave the launcher's spec as it is.


@pytest.mark.slow
def test_a_spec_from_standard_input(tmp_path: Path, streams: Path) -> None:
    spec = small(streams, tmp_path / "out")
    done = worker("--spec", "-", "--stream", 1, text=spec.to_json().decode())
    assert done.returncode == 0, done.stderr
    assert read_spec(str(tmp_path / "out" / "spec.json")) == spec


@pytest.mark.slow
def test_a_spec_with_answers_runs_infer(tmp_path: Path, streams: Path) -> None:
    answers = GenerationSpec(max_new_tokens=3)
    spec = replace(small(streams, tmp_path / "out"), generation=answers)
    url = write_spec(open_folder(str(tmp_path)), spec)
    assert spile("worker", "--spec", url, "--stream", 0) == 0
    assert (tmp_path / "out" / "stream_0" / "predictions.jsonl").is_file()


def test_mistakes_have_their_exit_code(tmp_path: Path, streams: Path) -> None:
    missing = worker("--spec", tmp_path / "none.json", "--stream", 0)
    assert (missing.returncode, missing.stderr) == (
        2,
        f"spile: --spec {tmp_path}/none.json: expected a run spec, found no such file\n",
    )
    url = write_spec(open_folder(str(tmp_path)), small(streams, tmp_path / "out"))
    beyond = worker("--spec", url, "--stream", 7)
    assert beyond.returncode == 2
    assert "stream_007.jsonl" in beyond.stderr


def test_extract_writes_its_spec(tmp_path: Path, streams: Path) -> None:
    output = tmp_path / "out"
    words = ("--dataset-dir", streams, "--worker-id", 1, "--taps", "residual.1", "mlp.0", "--output", output)
    assert spile("extract", "--model", "embedded", *words) == 0
    spec = read_spec(str(output / "spec.json"))
    assert (spec.taps, spec.data.dataset_dir, spec.data.worker_id) == (("residual.1", "mlp.0"), str(streams), 0)
    assert spile("worker", "--spec", output / "spec.json", "--stream", 0) == 0


OTHERS: dict[str, tuple[dict[str, object], str]] = {
    "numbers": ({"store_dtype": "float32", "positions": "last"}, "positions last, store_dtype float32"),
    "taps": ({"taps": ("residual.0", "mlp.1")}, "taps residual.0, mlp.1"),
    "answers": ({"generation": GenerationSpec(max_new_tokens=3)}, "generation.max_new_tokens 3"),
    "data": ({"data": DataSpec(seed=7, max_seq_length=99, keep=("label",))}, "keep .*max_seq_length 99, seed 7"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_spec_that_workers_would_refuse_is_refused(other: str, tmp_path: Path, streams: Path) -> None:
    output = tmp_path / "out"
    spec = small(streams, output)
    root = open_folder(str(output))
    refuse_other_spec(root, spec)
    join_run(root, run_identity(prompt=PromptSpec(kind="text"), seed=0, max_seq_length=2048, store_dtype="bfloat16"))
    write_spec(root, spec)
    changes, found = OTHERS[other]
    with pytest.raises(RunMismatch, match=f"was created with .*, but this command asks for .*{found}"):
        refuse_other_spec(root, replace(spec, **changes))  # type: ignore[arg-type]
    refuse_other_spec(root, replace(spec, batch_size=3, taps=("residual",), layers=(0, 1), dtype="float32"))
    root.put("spec.json", b"{")
    refuse_other_spec(root, replace(spec, taps=("mlp.0",)))


def test_an_engine_refuses_another_run_before_it_starts_workers(
    tmp_path: Path, streams: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("extract", "--model", "embedded", "--dataset-dir", streams, "--output", tmp_path / "out", "--layers", "0")
    assert spile(*words, "--worker-id", 0) == 0
    before = (tmp_path / "out" / "spec.json").read_bytes()
    capsys.readouterr()
    assert spile(*words, "--engine", "local", "--num-workers", 1, "--store-dtype", "int8") == 2
    assert "created with store_dtype bfloat16, but this command asks for store_dtype int8" in capsys.readouterr().err
    assert (tmp_path / "out" / "spec.json").read_bytes() == before


def test_a_worker_that_waits_for_a_stream_ends_at_once(tmp_path: Path, streams: Path) -> None:
    """The first process of a container ignores SIGTERM unless it handles it; nothing is to be committed yet."""
    output = open_folder(str(tmp_path / "out"))
    url = write_spec(output, small(streams, tmp_path / "out"))
    book = ClaimBook(output, "another worker")
    assert book.take([0]) is not None
    assert book.take([1]) is not None
    command = [sys.executable, "-m", "spile.cli.main", "worker", "--spec", url, "--claim"]
    waiting = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: handles_sigterm(waiting.pid))
        waiting.terminate()
        assert waiting.wait(60) == 130
    finally:
        waiting.kill()
        waiting.communicate()


def handles_sigterm(pid: int) -> bool:
    text = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in text.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught & 1 << (signal.SIGTERM - 1))


# -- a stored spec in other folders ---------------------------------------------------------------------------------


def test_a_stored_spec_works_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, output and vectors were named by relative paths."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "stream_005.jsonl", *({"text": f"text {n}"} for n in range(5)))
    save_file({"v": np.ones(192, np.float32)}, "v.safetensors")
    words = ("--layers", "0", "--checkpoint-dir", "state", "--steer", "residual.1=v.safetensors#v:0.5")
    assert spile("extract", "--dataset", "stream_005.jsonl", "--output", "out", *words, "--max-samples", "2") == 0
    spec = tmp_path / "out" / "spec.json"
    stored = json.loads(spec.read_text())
    assert {stored[name] for name in ("dataset", "output", "checkpoint_dir")} == {
        str(tmp_path / name) for name in ("stream_005.jsonl", "out", "state")
    }
    assert (stored["worker_id"], stored["model"]) == (5, "embedded")
    assert stored["steer"] == [f"residual.1=add:{tmp_path}/v.safetensors#v:0.5"]
    spec.write_text(json.dumps(stored | {"max_samples": None}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert spile("worker", "--spec", spec) == 0
    assert not list(Path().iterdir())
    assert [path.name for path in spec.parent.glob("stream_*")] == ["stream_5"]
    report = verify(str(spec.parent))
    assert (report.ok, report.streams[0].samples) == (True, 5)
    assert spile("worker", "--spec", spec, "--claim") == 0
    assert [path.name for path in spec.parent.glob("stream_*")] == ["stream_5"]


def test_a_dataset_that_was_moved_is_read_proven_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "then").mkdir()
    monkeypatch.chdir(tmp_path / "then")
    lines(Path("texts.jsonl"), *({"text": f"text {n}"} for n in range(6)))
    make_streams("texts.jsonl", Path("streams"), 2, seed=None)
    for number in range(2):
        words = ("--dataset-dir", "streams", "--worker-id", number, "--output", "out", "--layers", "0")
        assert spile("extract", *words) == 0
    (tmp_path / "then" / "out").rename(tmp_path / "now")
    shutil.rmtree(tmp_path / "then")
    monkeypatch.chdir(tmp_path)
    dataset = api.open("now")
    assert len(dataset) == 6
    assert [sample.text for sample in dataset] == [f"text {n}" for n in range(6)]
    assert spile("verify", "now", "--recompute", "2") == 0
    assert spile("export", "now", "--to", "npy", "--output", "exported") == 0
