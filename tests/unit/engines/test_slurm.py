"""The text of the Slurm script. tests/fleet/test_slurm_cluster.py runs it on a real cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spile.cli.main import main
from spile.engines.registry import ClusterJob
from spile.engines.slurm import SlurmOptions, to_script
from spile.errors import SpecError


def script(**options: Any) -> str:
    words = ("spile", "worker", "--spec", "a spec", "--claim")
    return to_script(SlurmOptions(name="run", **options), ClusterJob(words, 4, "gs://b/out"))


def test_the_header_says_how_many_and_which() -> None:
    lines = script(partition="tpu", time="1-00:00:00", gpus=2, sbatch=["--constraint=a100"]).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert "--array=0-3" in options
    assert {"--partition=tpu", "--time=1-00:00:00", "--gpus-per-node=2", "--constraint=a100"} <= set(options)
    assert {"--requeue", "--signal=B:USR1@120", "--nodes=1"} <= set(options)
    assert lines[0] == "#!/bin/bash"


def test_each_host_gets_its_place_in_the_slice() -> None:
    (step,) = [line.strip() for line in script(hosts_per_worker=2).splitlines() if "srun" in line]
    words = shlex.split(step.removesuffix(" &"))
    assert words[:4] == ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0"]
    assert words[-1] == (
        "exec spile worker --spec 'a spec' --claim "
        '--worker-name "$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" '
        '--num-processes 2 --process-id "$SLURM_PROCID" --coordinator-address "$first"'
    )


@pytest.mark.parametrize("text", ["gs://b/out\nrm -rf /", "gs://b/\x1b[2J", "gs://b/\u2028", "gs://b/\u202etuo"])
def test_no_text_becomes_a_line_of_the_script(text: str) -> None:
    with pytest.raises(SpecError, match=r"--output contains the control character U\+"):
        ClusterJob(("spile", "extract", "--output", text), 1, "gs://b/out")
    with pytest.raises(SpecError, match=r"--output contains"):
        ClusterJob(("spile",), 1, text)
    with pytest.raises(SpecError, match=r"--env A contains"):
        SlurmOptions(env=[f"A={text}"])
    with pytest.raises(SpecError, match=r"--setup contains"):
        SlurmOptions(setup=text)
    with pytest.raises(SpecError, match=r"--sbatch contains"):
        SlurmOptions(sbatch=[f"--comment={text}"])


def test_what_a_shell_would_expand_is_quoted() -> None:
    words = ("spile", "extract", "--output", "/o/$(reboot)`id`")
    text = to_script(SlurmOptions(env=["A=$HOME;id"]), ClusterJob(words, 1, "/o/$(reboot)`id`"))
    assert "# 1 workers, which claim streams. Watch them with: spile monitor '/o/$(reboot)`id`'" in text
    assert "export A='$HOME;id'" in text
    inner = shlex.split(next(line for line in text.splitlines() if "srun" in line).removesuffix(" &"))[-1]
    assert shlex.split(inner)[4] == "/o/$(reboot)`id`"


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="--time: expected D-HH:MM:SS"):
        SlurmOptions(time="tomorrow")
    with pytest.raises(SpecError, match="--sbatch: expected an option"):
        SlurmOptions(sbatch=["constraint"])
    with pytest.raises(SpecError, match="--gpus: expected 0 or more, found -2"):
        SlurmOptions(gpus=-2)
    with pytest.raises(SpecError, match="--log-dir: expected a word without spaces, found 'my logs'"):
        SlurmOptions(log_dir="my logs")
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "job", "--model", "embedded", "--output", "out", "--dataset-dir", "/s", "--num-workers", "2"])
    assert ended.value.code == 2
    assert "--output out: expected a bucket, or a folder that all hosts share" in capsys.readouterr().err


def test_the_script_is_what_bash_reads(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(script(hosts_per_worker=2))
    assert subprocess.run(["/bin/bash", "-n", str(tmp_path / "job.sh")], check=False, env=os.environ).returncode == 0
