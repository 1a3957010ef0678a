"""``spile k8s job`` and ``spile slurm job``: print a run as Kubernetes manifests or as a Slurm array."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import ExtractFlags
from spile.engines.kubernetes import KubernetesOptions, to_yaml
from spile.engines.registry import ClusterJob, ClusterOptions
from spile.engines.slurm import SlurmOptions, to_script
from spile.engines.supervisor import stream_tasks
from spile.errors import SpecError
from spile.objects import is_remote
from spile.spec.run import no_model

_CLUSTER = Parameter(name="*", group=Group("The job and the cluster", sort_key=0))


def _job(options: ClusterOptions, flags: ExtractFlags, *, shared: Sequence[str]) -> ClusterJob:
    """Return the job that the flags ask for. ``shared`` are the folders that every host can read."""
    if flags.worker_id is not None:
        raise SpecError("--worker-id", expected="none: the cluster numbers the workers", found=str(flags.worker_id))
    if flags.overwrite or flags.checkpointing is False:
        raise SpecError(
            "--no-checkpointing and --overwrite",
            expected="a command that runs now, once",
            found="a job that is printed, and whose workers are restarted",
            fix="leave them out, and give another --output to keep what is stored",
        )
    if flags.dataset_dir is None:
        raise SpecError("no streams", expected="--dataset-dir gs://…", fix="make them: spile data streams")
    if flags.model is None:
        raise no_model("a job")
    spec = flags.with_values(worker_id=0).spec()
    for name, place in (("--output", spec.output), ("--dataset-dir", flags.dataset_dir)):
        if not is_remote(place) and not any(PurePosixPath(place).is_relative_to(folder) for folder in shared):
            expected = "a bucket, or a folder that all hosts share"
            raise SpecError(f"{name} {place}", expected=expected, found="a folder of this machine")
    words = ("spile", "worker", "--spec", json.dumps(spec.to_dict()), "--claim")
    workers = options.num_workers or len(stream_tasks(flags.dataset_dir, lambda _: ()))
    return ClusterJob(words, workers, spec.output)


def k8s_job(
    *,
    kubernetes: Annotated[KubernetesOptions, _CLUSTER],
    flags: ExtractFlags = ExtractFlags(),
) -> int:
    """Print Kubernetes manifests for a run: spile k8s job … | kubectl apply -f -

    Takes every flag of spile extract. Each worker is one pod of an Indexed Job, or a slice of several hosts with a Job
    or JobSet of its own. Workers claim one stream after another, so their number may change during the run. Nothing is
    sent to the cluster; kubectl apply --dry-run=server checks the output.
    """
    print(to_yaml(kubernetes, _job(kubernetes, flags, shared=tuple(kubernetes.volumes))), end="")
    return 0


def slurm_job(
    *,
    slurm: Annotated[SlurmOptions, _CLUSTER] = SlurmOptions(),
    flags: ExtractFlags = ExtractFlags(),
) -> int:
    """Print a Slurm array job for a run: spile slurm job … > job.sh; mkdir slurm-logs; sbatch job.sh

    Takes every flag of spile extract. One task of the array is one worker. Workers claim one stream after another, so
    their number may change during the run. A task that is preempted or runs out of time commits what it has and is
    requeued.
    """
    print(to_script(slurm, _job(slurm, flags, shared=("/",))), end="")
    return 0
