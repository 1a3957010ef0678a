"""``--overwrite`` is an act of one command: it clears once, and no worker that is started again clears again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spile.objects import open_folder
from spile.proof.verification import verify
from spile.spec.run import RunSpec
from spile.store.cleanup import stream_version
from spile.store.ledger import read_commits
from spile.store.writer import read_stream
from unit.cli.refusals import SMALL, lines, spile

KILLS = (1, 3, 4)
_KILLED = """
import os, pathlib, signal, sys
if "worker" in sys.orig_argv:
    from spile.store.writer import StreamWriter
    real = StreamWriter.commit
    def commit(self, *args, **options):
        made = real(self, *args, **options)
        mark = pathlib.Path({folder!r}, f"killed-{{made.number}}")
        if made.number in {kills!r} and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return made
    StreamWriter.commit = commit
"""
CLEAR = ("--no-checkpointing", "--overwrite")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a finished dataset with a commit for each of its six samples."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "texts.jsonl", *({"text": f"{number} " * 64} for number in range(6)))
    words = ["extract", "--dataset", "texts.jsonl", "--output", "out", "--shard-size-gb", "1e-6", "--batch-size", "1"]
    return [*words, "--batch-tokens", "64", "--num-workers", "1", *SMALL]


def stream_id(root: str, number: int = 0) -> str:
    record = read_stream(open_folder(f"{root}/stream_{number}"))
    assert record is not None
    return record.id


@pytest.fixture
def killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a worker right after each of these commits, once."""
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(_KILLED.format(folder=str(tmp_path), kills=KILLS))
    paths = [str(tmp_path / "patch"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def assert_cleared_once(command: list[str], engine: str, *words: str) -> None:
    """Start over on an engine whose workers are killed, and check that each goes on behind the one before."""
    before = stream_id("out")
    line = [sys.executable, "-m", "spile.cli.main", *command, "--engine", engine, *words, *CLEAR]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"1 of 1 done, {len(KILLS)} attempts more than streams", done.stdout), done.stdout
    assert stream_id("out") != before, "the stored data was cleared"
    attempts = [commit.attempt for commit in read_commits(open_folder("out/stream_0"), stream_id("out"))]
    assert [attempts.index(attempt) for attempt in dict.fromkeys(attempts)] == [0, *KILLS]
    assert verify(open_folder("out")).ok


def test_a_worker_that_is_killed_again_and_again_goes_on(dataset: list[str], request: pytest.FixtureRequest) -> None:
    assert spile(*dataset) == 0
    request.getfixturevalue("killed_again_and_again")
    assert_cleared_once(dataset, "local")


@pytest.mark.slow
def test_a_worker_on_ray_goes_on(dataset: list[str], request: pytest.FixtureRequest) -> None:
    ray = pytest.importorskip("ray")
    assert spile(*dataset) == 0
    request.getfixturevalue("killed_again_and_again")
    found = ray.init(num_cpus=1, include_dashboard=False, configure_logging=False)
    try:
        assert_cleared_once(dataset, "ray", "--ray-address", found.address_info["gcs_address"])
    finally:
        ray.shutdown()


def test_a_stored_spec_clears_nothing(dataset: list[str], tmp_path: Path) -> None:
    assert spile(*dataset) == 0
    assert spile(*dataset, *CLEAR) == 0
    stored = json.loads((tmp_path / "out" / "spec.json").read_text())
    assert not stored.keys() & {"overwrite", "checkpointing", "delete_local_after_upload"}
    ours = [
        path
        for path in (tmp_path / "out" / "stream_0").rglob("*")
        if re.search(r"shard|commits/|stream\.json", str(path))
    ]
    before = {path: path.read_bytes() for path in ours if path.is_file()}
    assert spile("worker", "--spec", "out/spec.json", "--stream", 0) == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_worker_clears_only_the_stream_that_its_launcher_saw(dataset: list[str]) -> None:
    assert spile(*dataset) == 0
    words = ("worker", "--spec", "out/spec.json", "--stream", 0, "--clear", stream_version(open_folder("out"), 0))
    first = stream_id("out")
    assert spile(*words) == 0
    second = stream_id("out")
    assert second != first
    assert spile(*words) == 0
    assert stream_id("out") == second, "the same command again resumes"
    assert verify(open_folder("out")).ok


def test_an_engine_clears_nothing_before_a_model_is_loaded(dataset: list[str]) -> None:
    assert spile(*dataset) == 0
    before = stream_id("out")
    assert spile(*dataset, *CLEAR, "--mesh-shape", "7,9") != 0
    assert stream_id("out") == before
    assert verify(open_folder("out")).ok


def test_an_engine_refuses_to_start_over_where_commits_are(
    dataset: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert spile(*dataset) == 0
    capfd.readouterr()
    assert spile(*dataset, "--no-checkpointing") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("spile: --no-checkpointing: expected streams without commits, found commits of 1 stream in ")


def test_a_spec_that_asks_for_it_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = {**RunSpec(output=str(tmp_path / "out")).to_dict(), "overwrite": True}
    assert spile("worker", "--spec", json.dumps(spec), "--stream", 0) == 2
    assert "--spec has an unknown field 'overwrite'" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["variable", "file"])
def test_only_a_typed_flag_clears(
    where: str, dataset: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*dataset, "--no-checkpointing"]
    if where == "variable":
        monkeypatch.setenv("SPILE_OVERWRITE", "true")
    else:
        Path("run.toml").write_text("overwrite = true\n")
        words += ["--config", "run.toml"]
    assert spile(*words) == 2
    found = {"variable": "SPILE_OVERWRITE", "file": "run.toml"}[where]
    assert f"--overwrite: expected on the command line, found {found}" in capfd.readouterr().err


PRINTED = {
    "k8s": ("k8s", "job", "--image", "spile:1", "--volume", "/data=claim"),
    "slurm": ("slurm", "job"),
    "docker": ("docker", "run", "--print", "--", "extract"),
    "docker pod": ("docker", "pod", "--print", "--", "extract"),
}


@pytest.mark.parametrize("kind", PRINTED)
def test_a_printed_job_refuses_it(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = ("--model", "embedded", "--dataset-dir", "/data/streams", "--output", "/data/out", "--num-workers", "2")
    assert spile(*PRINTED[kind], *run, *CLEAR) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert "--overwrite: expected a command that runs now, once, found" in line
