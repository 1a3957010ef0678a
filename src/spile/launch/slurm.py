"""The run as a Slurm array: a task per stream, requeued when it is preempted, never when its command is a mistake."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from spile.errors import SpecError
from spile.launch.kubernetes import ClusterJob

__all__ = ["SlurmJob", "to_script"]


@dataclass(frozen=True)
class SlurmJob:
    """The job, and what the cluster calls things."""

    job: ClusterJob
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpus: int = 0
    """On each host."""
    log_dir: str = "slurm-logs"
    setup: str | None = None
    """A line before the worker: ``module load …``, or a virtual environment."""
    options: tuple[str, ...] = field(default=())
    """More of sbatch's own, ``--constraint=a100``."""

    def __post_init__(self) -> None:
        if self.time is not None and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", self.time):
            raise SpecError("--time", expected="D-HH:MM:SS, as sbatch takes it", found=repr(self.time))
        if self.gpus < 0:
            raise SpecError("--gpus", expected="0 or more", found=str(self.gpus))
        words = (("--partition", self.partition), ("--account", self.account), ("--log-dir", self.log_dir))
        for flag, word in words:
            if word is not None and not re.fullmatch(r"\S+", word):
                raise SpecError(flag, expected="a word without blanks", found=repr(word))
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise SpecError("--sbatch", expected="an option such as --constraint=a100", found=repr(option))


def to_script(slurm: SlurmJob) -> str:
    """The script that sbatch takes; the same for the same flags."""
    job = slurm.job
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(slurm)), "", "set -u", *_setup(slurm)]
    lines += [
        f"# {len(job.streams)} streams; watch with: spile monitor {job.root}",
        "# Slurm asks the script, not the worker: it passes the request on, and the worker commits what it has.",
        'mistake() { echo "spile: stream $SLURM_ARRAY_TASK_ID was refused; not tried again" >&2; exit 2; }',
        "trap 'kill -TERM $(jobs -p) 2> /dev/null' TERM INT",
        f"{_worker(job)} &",
        "worker=$!",
        "while true; do",
        "  wait $worker",
        "  code=$?",
        "  kill -0 $worker 2> /dev/null || break  # else a signal ended the wait, not the worker",
        "done",
        "case $code in",
        "  0) exit 0 ;;",
        "  2) mistake ;;",
        "esac",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.tries * 10} ]; then',
        '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"  # goes on where the ledger ends',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _options(slurm: SlurmJob) -> list[str]:
    job = slurm.job
    found = [
        f"--job-name={job.name}",
        f"--array={_ranges(job.streams)}%{job.at_once}",
        f"--nodes={job.hosts}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        f"--output={slurm.log_dir}/%x-%a.log",
        f"--signal=B:TERM@{job.grace}",
    ]
    for name, value in (
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("time", slurm.time),
        ("gpus-per-node", slurm.gpus or None),
        ("cpus-per-task", job.cpus),
        ("mem", None if job.memory_gb is None else f"{job.memory_gb}G"),
    ):
        found += [] if value is None else [f"--{name}={value}"]
    return [*found, *slurm.options]


def _setup(slurm: SlurmJob) -> list[str]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in slurm.job.env.items()]
    return [*exports, *([slurm.setup] if slurm.setup else [])]


def _worker(job: ClusterJob) -> str:
    words = f'{shlex.join(job.words)} --worker-id "$SLURM_ARRAY_TASK_ID"'
    if job.hosts == 1:
        return f"{words} --num-processes 1"
    # One line for each host's own shell, where Slurm says which host it is.
    first = 'first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    place = f'--num-processes {job.hosts} --process-id "$SLURM_PROCID" --coordinator-address "$first"'
    return f"{first}\nexport first\nsrun --kill-on-bad-exit=1 bash -c {shlex.quote(f'{words} {place}')}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-31``, ``0,3-5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
