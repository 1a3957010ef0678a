"""The Slurm script's body, run by bash under the variables that Slurm sets, with stand-ins for its own commands."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from fleet.ssh.loopback import wait_until
from spile.cli.main import main
from spile.errors import SpecError
from spile.launch.kubernetes import ClusterJob
from spile.launch.slurm import SlurmJob, to_script

WORKER = """#!/bin/bash
trap 'echo committed >> "$HOME/worker"; exit 130' TERM
echo "$*" >> "$HOME/worker"
if [ -f "$HOME/long" ]; then echo up; while :; do sleep 0.1; done; fi
exit ${CODE:-0}
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node-a\\nnode-b\\n'; else echo "$*" >> "$HOME/scontrol"; fi
"""
SRUN = """#!/bin/bash
shift
for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@" & done; wait
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, text in (("spile", WORKER), ("scontrol", SCONTROL), ("srun", SRUN)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def job(hosts: int = 1, streams: tuple[int, ...] = (0, 1, 2, 7), **more: object) -> SlurmJob:
    words = ("spile", "extract", "--model", "a model", "--output", "gs://b/out")
    return SlurmJob(ClusterJob("run", words, streams, "gs://b/out", hosts=hosts, workers=2), **more)  # type: ignore[arg-type]


def start(home: Path, slurm: SlurmJob, task: int = 2, **more: str) -> subprocess.Popen[str]:
    (home / "job.sh").write_text(to_script(slurm))
    variables = {
        "HOME": str(home),
        "PATH": f"{home}/bin:/usr/bin:/bin",
        "SLURM_ARRAY_JOB_ID": "900",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_JOB_ID": "907",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NTASKS": "1",
    }
    return subprocess.Popen(
        ["/bin/bash", str(home / "job.sh")],
        env={**variables, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_the_header_says_how_many_and_which(home: Path) -> None:
    lines = to_script(job(partition="tpu", time="1-00:00:00", gpus=2, options=("--constraint=a100",))).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert "--array=0-2,7%2" in options
    assert {"--partition=tpu", "--time=1-00:00:00", "--gpus-per-node=2", "--constraint=a100"} <= set(options)
    assert {"--requeue", "--signal=B:TERM@120", "--nodes=1"} <= set(options)
    assert lines[0] == "#!/bin/bash"


def test_a_task_works_on_its_stream(home: Path) -> None:
    run = start(home, job(setup='echo "hello" > "$HOME/setup"'))
    _, err = run.communicate(timeout=120)
    assert (run.returncode, err) == (0, "")
    assert read(home / "worker") == ["extract --model a model --output gs://b/out --worker-id 2 --num-processes 1"]
    assert read(home / "setup") == ["hello"]
    assert read(home / "scontrol") == []


@pytest.mark.parametrize(("code", "again"), [("1", True), ("3", True), ("2", False)])
def test_what_is_worth_another_try_is_requeued(home: Path, code: str, again: bool) -> None:
    run = start(home, job(), CODE=code)
    _, err = run.communicate(timeout=120)
    assert run.returncode == int(code)
    assert read(home / "scontrol") == (["requeue 900_2"] if again else [])
    assert ("was refused; not tried again" in err) is not again
    (home / "scontrol").unlink(missing_ok=True)
    last = start(home, job(), CODE=code, SLURM_RESTART_COUNT="60")
    last.communicate(timeout=120)
    assert read(home / "scontrol") == [], "not for ever"


def test_a_preempted_task_commits_and_is_requeued(home: Path) -> None:
    (home / "long").touch()
    run = start(home, job())
    assert wait_until(lambda: read(home / "worker"))
    run.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B: does
    run.communicate(timeout=120)
    assert run.returncode == 130
    assert read(home / "worker")[1:] == ["committed"]
    assert read(home / "scontrol") == ["requeue 900_2"]


def test_many_hosts_are_one_worker(home: Path) -> None:
    run = start(home, job(hosts=2))
    _, err = run.communicate(timeout=120)
    assert (run.returncode, err) == (0, "")
    tail = "--worker-id 2 --num-processes 2 --process-id {} --coordinator-address node-a"
    whole = [f"extract --model a model --output gs://b/out {tail.format(host)}" for host in (0, 1)]
    assert sorted(read(home / "worker")) == whole


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="--time: expected D-HH:MM:SS"):
        job(time="tomorrow")
    with pytest.raises(SpecError, match="--sbatch: expected an option"):
        job(options=("constraint",))
    with pytest.raises(SpecError, match="--gpus: expected 0 or more, found -2"):
        job(gpus=-2)
    with pytest.raises(SpecError, match="--log-dir: expected a word without blanks, found 'my logs'"):
        job(log_dir="my logs")
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "job", "--model", "embedded", "--output", "out", "--dataset-dir", "/s", "--num-streams", "2"])
    assert ended.value.code == 2
    assert "--output out: expected a bucket, or a folder that all hosts share" in capsys.readouterr().err


def test_the_script_is_what_bash_reads(home: Path) -> None:
    (home / "job.sh").write_text(to_script(job(hosts=2)))
    assert subprocess.run(["/bin/bash", "-n", str(home / "job.sh")], check=False, env=os.environ).returncode == 0
