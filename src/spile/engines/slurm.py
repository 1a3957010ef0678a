"""The run as a Slurm array: one task per stream.

What Slurm does with a job's processes, as seen on slurmctld 22.05, decides the shape of the script:

    event                        who gets a signal                          what the script does
    scancel                      SIGTERM to the steps and the script        waits for the worker, exits
    preemption without grace     the same; Slurm requeues the job           waits for the worker, exits
    preemption with GraceTime    SIGTERM to the steps only                  waits for the worker, requeues the job
    time limit                   SIGUSR1 to the script (--signal=B:USR1)    sends SIGTERM to the steps, requeues the job
    a lost node                  none; Slurm requeues the job               –

So every worker runs in a step (``srun``), also on one host: the batch script's own children get a signal only when the
grace time of a preemption is over. SIGTERM is never passed on, because the worker takes a second one as a request to
end at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from spile.engines.registry import ClusterJob, ClusterOptions, check_texts, refuse_control_characters
from spile.store.quarantine import RESUMABLE, VARIABLE

_REQUEUED = " | ".join(str(int(code)) for code in RESUMABLE)
_PAUSE = 10
"""Seconds before a worker that failed is started again; a multiple of it for each further error."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """The flags of ``spile slurm job``."""

    partition: str | None = None
    """The partition to run in."""
    account: str | None = None
    """The account to charge."""
    time: str | None = None
    """The time limit of one attempt, D-HH:MM:SS. A task that reaches it is requeued."""
    log_dir: str = "slurm-logs"
    """The folder for the logs."""
    setup: str | None = None
    """A shell line that runs before the worker, such as module load or activate."""
    sbatch: list[str] | None = None
    """An additional option of sbatch: --sbatch=--constraint=a100."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_texts("--time", r"(\d+-)?\d+(:\d+){0,2}", "D-HH:MM:SS, as sbatch takes it", self.time)
        words = (("--partition", self.partition), ("--account", self.account), ("--log-dir", self.log_dir))
        for flag, word in words:
            check_texts(flag, r"\S+", "a word without spaces", word)
        options = self.sbatch or ()
        check_texts("--sbatch", r"(?s)-.*", "an option such as --constraint=a100", *options)
        for flag, text in (*words, ("--setup", self.setup), *(("--sbatch", option) for option in options)):
            refuse_control_characters(flag, text or "")


def to_script(slurm: SlurmOptions, job: ClusterJob) -> str:
    """Return the script for sbatch. The same flags give the same text."""
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(slurm, job.workers)),
            "",
            f"# {job.workers} workers, which claim streams. Watch them with: spile monitor {shlex.quote(job.root)}",
            "set -u",
            *(f"export {name}={shlex.quote(value)}" for name, value in slurm.variables.items()),
            *([slurm.setup] if slurm.setup else []),
            'first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            "export first",
            "# SLURM_JOB_ID of the array's last task is the number of the whole array.",
            'task="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
            "",
            "# When Slurm cancels or preempts the job, it sends SIGTERM to the worker itself, which commits and ends.",
            "trap : TERM",
            "# Before the time limit it sends SIGUSR1 to this script only.",
            "trap 'scancel --signal=TERM \"$task\"' USR1",
            "",
            "# Each worker gets the exit code of the one before it, so that it can find a sample that kills workers.",
            "kills=0 others=0 how=",
            f"for attempt in $(seq 0 {slurm.retries}); do",
            f'  export {VARIABLE}="$task.${{SLURM_RESTART_COUNT:-0}}:$kills:$others:$how"',
            f"  {_worker(slurm, job.words)} &",
            "  while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends one wait, not the worker",
            "  wait $!",
            "  code=$?",
            "  case $code in",
            "    0) exit 0 ;;",
            '    2) echo "spile: worker $SLURM_ARRAY_TASK_ID was refused; it is not tried again" >&2; exit 2 ;;',
            "  esac",
            '  if [ "$(squeue --noheader --jobs="$task" --format=%T)" != RUNNING ]; then',
            "    exit $code  # cancelled, or Slurm requeues the job itself",
            "  fi",
            "  case $code in",
            f'    {_REQUEUED}) scontrol requeue "$task"; exit $code ;;  # continues where the ledger ends',
            "  esac",
            "  if [ $code -gt 128 ]; then",
            '    kills=$((kills + 1)) how="signal $((code - 128))"',
            "  else",
            "    others=$((others + 1)) how=",
            "  fi",
            f'  echo "spile: attempt $((attempt + 1)) of {slurm.retries + 1} ended with exit code $code" >&2',
            f"  [ $attempt -lt {slurm.retries} ] && sleep $(({_PAUSE} * (attempt + 1)))",
            "done",
            "exit $code",
            "",
        ]
    )


def _options(slurm: SlurmOptions, workers: int) -> list[str]:
    found = [
        f"--job-name={slurm.name}",
        f"--array=0-{workers - 1}",
        f"--nodes={slurm.hosts_per_worker}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        f"--output={slurm.log_dir}/%x-%a.log",
        f"--signal=B:USR1@{slurm.grace}",
    ]
    for name, value in (
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("time", slurm.time),
        ("gpus-per-node", slurm.gpus or None),
        ("cpus-per-task", slurm.cpus),
        ("mem", None if slurm.memory_gb is None else f"{slurm.memory_gb}G"),
    ):
        found += [] if value is None else [f"--{name}={value}"]
    return [*found, *(slurm.sbatch or ())]


def _worker(slurm: SlurmOptions, words: Sequence[str]) -> str:
    """Return the step that runs the worker, one task on each host."""
    hosts = slurm.hosts_per_worker
    place = "--num-processes 1"
    if hosts > 1:
        place = f'--num-processes {hosts} --process-id "$SLURM_PROCID" --coordinator-address "$first"'
    # The name stays the same when the task is requeued, so that the worker takes its own stream back at once.
    name = '--worker-name "$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    command = f"exec {shlex.join(words)} {name} {place}"
    # One host's end must not kill the others before they have committed: they notice it and end by themselves.
    step = ["srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--kill-on-bad-exit=0", f"--wait={slurm.grace}"]
    if slurm.cpus is not None:  # Since 22.05 a step does not inherit it.
        step.append(f"--cpus-per-task={slurm.cpus}")
    return f"{shlex.join(step)} bash -c {shlex.quote(command)}"
