"""``spile slurm job``: the run as a Slurm array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import ExtractFlags, flag
from spile.cli.shell.cluster_flags import ClusterFlags

__all__ = ["SlurmFlags", "job"]

_CLUSTER = Group("The cluster", sort_key=0)


@Parameter(name="*")
@dataclass(frozen=True)
class SlurmFlags:
    """Names and options of the Slurm cluster."""

    partition: Annotated[str | None, flag(_CLUSTER, "The partition to run in.")] = None
    account: Annotated[str | None, flag(_CLUSTER, "The account to charge.")] = None
    time: Annotated[str | None, flag(_CLUSTER, "The limit of one attempt, D-HH:MM:SS; a longer one is requeued.")] = (
        None
    )
    gpus: Annotated[int, flag(_CLUSTER, "GPUs of each host.")] = 0
    hosts_per_worker: Annotated[int, flag(_CLUSTER, "Hosts that act as one worker.")] = 1
    log_dir: Annotated[str, flag(_CLUSTER, "Where the logs go.")] = "slurm-logs"
    setup: Annotated[str | None, flag(_CLUSTER, "A line before the worker: a module, a virtual environment.")] = None
    sbatch: Annotated[
        list[str] | None, flag(_CLUSTER, "More of sbatch's options, --sbatch=--constraint=a100.", negative="")
    ] = None


def job(
    *,
    slurm: SlurmFlags = SlurmFlags(),  # noqa: B008  (frozen)
    cluster: ClusterFlags = ClusterFlags(),  # noqa: B008
    flags: ExtractFlags = ExtractFlags(),  # noqa: B008
) -> int:
    """Print the run as a Slurm array: spile slurm job … > job.sh; mkdir slurm-logs; sbatch job.sh

    Takes every flag of spile extract. One task of the array is one stream. A task that is preempted or runs out of time
    commits what it has and is requeued.
    """
    from spile.launch.slurm import SlurmJob, to_script

    described = SlurmJob(
        job=cluster.job(flags, hosts=slurm.hosts_per_worker, shared=("/",)),
        partition=slurm.partition,
        account=slurm.account,
        time=slurm.time,
        gpus=slurm.gpus,
        log_dir=slurm.log_dir,
        setup=slurm.setup,
        options=tuple(slurm.sbatch or ()),
    )
    print(to_script(described), end="")
    return 0
