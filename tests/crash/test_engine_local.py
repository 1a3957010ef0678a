"""``--engine local`` for real: workers that are killed, one Ctrl+C, one exit code, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fleet.ssh.loopback import below, wait_until
from holding import HeldCommits
from spile.cli.main import main
from spile.data.split import make_streams
from spile.objects import open_folder
from spile.proof.verification import verify

COUNT = 12
SMALL = ["--layers", "0", "--max-seq-length", "64"]
POISON_FOLDER = Path(__file__).parent.parent / "poison"


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    make_streams("embedded", tmp_path / "streams", COUNT // 6)
    return tmp_path / "streams"


def start(folder: Path, *words: str, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spile.cli.main", "extract", "--model", "embedded", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def workers(run: subprocess.Popen[str]) -> list[int]:
    """Return the processes that run ``spile worker`` for a stream."""
    found = []
    for pid in below(run.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--stream" in line and b"spile.cli.main" in line and b"child.py" not in b" ".join(line):
            found.append(pid)
    return found


def stream_of(pid: int) -> str:
    """Return the number of the stream that a worker's command names."""
    line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return line[line.index("--stream") + 1]


def finish(run: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    try:
        out, _ = run.communicate(timeout=seconds)
    finally:
        run.kill()  # its workers end with it
    return run.returncode, out


def test_a_killed_worker_is_restarted_and_nothing_is_stored_twice(
    streams: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiny shards, so that the killed one has commits, which its successor does not repeat."""
    words = ["--dataset-dir", str(streams), "--output", "out", "--num-workers", "2", "--shard-size-gb", "1e-6", *SMALL]
    monkeypatch.setenv("SPILE_ENGINE", "local")  # Set by a variable, which the workers must not inherit.
    held = HeldCommits(tmp_path / "held", after=1)
    run = start(tmp_path, *words, "--log-dir", "logs", environment={**os.environ, **held.environment})
    assert wait_until(lambda: len(workers(run)) == 2)
    assert wait_until(lambda: list((tmp_path / "out").glob("stream_*/commits/0001.json")))
    (begun,) = {path.parts[-3] for path in list((tmp_path / "out").glob("stream_*/commits/0001.json"))[:1]}
    number = begun.removeprefix("stream_")
    (victim,) = [pid for pid in workers(run) if stream_of(pid) == number]
    os.kill(victim, signal.SIGKILL)
    held.release()
    code, out = finish(run)
    assert code == 0, out
    assert f"stream {number}: its worker ended with exit code 137" in out
    assert "streams      2 of 2 done, 1 attempt more than streams" in out
    assert out.rstrip().endswith("next         spile verify out")
    report = verify(open_folder(str(tmp_path / "out")))
    assert report.ok, [problem.line() for problem in report.all_problems]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["stream_000.log", "stream_001.log"]
    assert list((tmp_path / "out").glob(".spile-*")) == []


CAUSES = {
    "kill": "worker killed by signal 9 three times",
    "segv": "worker killed by signal 11 three times",
    "hang": "worker hung three times",
    "memory": "out of memory (three|four) times",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", CAUSES)
def test_a_sample_that_ends_its_workers_is_quarantined_and_the_rest_completes(
    streams: Path, tmp_path: Path, how: str
) -> None:
    words = ["--dataset-dir", str(streams), "--output", "out", "--num-workers", "2", "--shard-size-gb", "0.001"]
    path = os.pathsep.join(filter(None, [str(POISON_FOLDER), os.environ.get("PYTHONPATH", "")]))
    run = start(tmp_path, *words, environment={**os.environ, "PYTHONPATH": path, "POISON": f"double-small:{how}"})
    code, out = finish(run, 540)
    assert code == 0, out
    assert re.search(rf"quarantined  in stream_\d: double-small \({CAUSES[how]}\)", out), out
    report = verify(open_folder(str(tmp_path / "out")))
    assert report.ok, [problem.line() for problem in report.all_problems]
    assert [skip.task_id for skip in report.quarantined] == ["double-small"]
    assert sum(stream.samples for stream in report.streams) == 47


@pytest.mark.slow
def test_one_interrupt_commits_and_stops_all(streams: Path, tmp_path: Path) -> None:
    words = ["--dataset-dir", str(streams), "--output", "out", "--engine", "local", "--num-workers", "2"]
    run = start(tmp_path, *words, "--shard-size-gb", "1e-6", "--predictions-per-task", "64", *SMALL)
    assert wait_until(lambda: len(list((tmp_path / "out").glob("stream_*/commits/0001.json"))) == 2)
    mine = below(run.pid)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the foreground group, which the workers are not in
    code, out = finish(run)
    assert code == 130, out
    assert "SIGINT: all workers commit and stop (again: end at once)" in out
    assert out.rstrip().endswith("the same command again resumes")
    assert not [pid for pid in mine if Path(f"/proc/{pid}/cmdline").exists() and os.getpgid(pid) != os.getpgrp()]
    assert {problem.kind for problem in verify(open_folder(str(tmp_path / "out"))).all_problems} == {"missing"}


def test_a_killed_runner_leaves_no_worker(streams: Path, tmp_path: Path) -> None:
    run = start(tmp_path, "--dataset-dir", str(streams), "--output", "out", "--num-workers", "2")
    assert wait_until(lambda: len(workers(run)) == 2)
    mine = below(run.pid)
    run.kill()
    run.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in mine))
    run.communicate()


BAD = {
    (
        "--engine",
        "local",
        "--dataset",
        "embedded",
        "--worker-id",
        "1",
    ): "--worker-id with an engine: expected all streams. Leave out --worker-id or --engine.",
    ("--num-workers", "0"): "--num-workers: expected from 1 to 10,000, found 0",
    ("--num-workers", "1", "--ray-address", "a:1"): "--ray-address: expected --engine ray, found --engine local",
    ("--num-workers", "1", "--resources", "GPU"): "--resources: expected NAME=number such as GPU=1, found 'GPU'",
    ("--num-workers", "1", "--dataset-dir", "."): "no stream in {here}: expected stream_000.jsonl, stream_001.jsonl, … "
    "Make them with spile data streams --output-dir DIR, or name one file with --dataset.",
    ("--num-workers", "1", "--num-streams", "49"): "--num-streams: expected at most 48, one per sample, found 49",
    ("--engine", "loco"): "--engine: expected local or ray, found loco. See spile extract --help.",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--model", "embedded", "--output", "out", *words])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"spile: {BAD[words].format(here=tmp_path)}\n")
    assert not (tmp_path / "out" / "run.json").exists()


def test_the_command_that_starts_the_workers_has_no_jax_itself(tmp_path: Path) -> None:
    """A Ctrl+C during the start is not lost in a callback of JAX."""
    words = ["extract", "--num-workers", "1", "--num-streams", "49", "--model", "embedded", "--output", "out"]
    program = f"import sys\nfrom spile.cli.main import main\ntry: main({words})\nfinally: print('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (2, "False"), ran.stderr


@pytest.mark.slow
def test_a_command_that_every_worker_refuses_ends_soon_with_its_line(streams: Path, tmp_path: Path) -> None:
    words = ["--dataset-dir", str(streams), "--output", "out", "--num-workers", "2", "--layers", "77"]
    code, out = finish(start(tmp_path, *words))
    assert code == 2, out
    assert "given up     stream 0: exit code 2: " in out
    assert "77" in out
