"""``spile k8s job`` and ``spile slurm job``: print a run as Kubernetes manifests or as a Slurm array."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import ExtractFlags
from spile.errors import SpecError
from spile.launch.engines import ClusterJob
from spile.launch.kubernetes import KubernetesJob, KubernetesOptions, to_yaml
from spile.launch.slurm import SlurmJob, SlurmOptions, to_script
from spile.launch.supervisor import stream_tasks
from spile.objects import is_remote
from spile.spec.options import pairs

_CLUSTER = Parameter(name="*", group=Group("The cluster", sort_key=0))


@Parameter(name="*", group=Group("The job", sort_key=0))
@dataclass(frozen=True)
class ClusterFlags:
    """The flags that all clusters share."""

    name: str = "spile"
    """The job's name."""
    num_workers: int | None = None
    """The number of workers, which claim one stream after another. [default: one for each stream]"""
    cpus: int | None = None
    """Processors of each host."""
    memory_gb: int | None = None
    """Memory of each host, in GB."""
    env: list[str] | None = None
    """NAME=value for every worker. Do not use it for secrets."""
    grace: int = 120
    """Seconds that a worker has to commit before it is killed."""
    retries: int = 6
    """Retries after errors of a worker. Disruptions do not count."""

    def job(self, flags: ExtractFlags, *, hosts: int, shared: Sequence[str] = ()) -> ClusterJob:
        """Return the job that these flags ask for. ``shared`` are the folders that every host can read."""
        if flags.worker_id is not None:
            raise SpecError("--worker-id", expected="none: the cluster numbers the workers", found=str(flags.worker_id))
        if flags.dataset_dir is None:
            raise SpecError("no streams", expected="--dataset-dir gs://…", fix="make them: spile data streams")
        if flags.model is None:
            raise SpecError(
                "no model", expected="--model NAME", found="none", fix="use --model embedded to try spile out"
            )
        spec = flags.replaced(worker_id=0).spec()
        for name, place in (("--output", spec.output), ("--dataset-dir", flags.dataset_dir)):
            if not is_remote(place) and not any(PurePosixPath(place).is_relative_to(folder) for folder in shared):
                expected = "a bucket, or a folder that all hosts share"
                raise SpecError(f"{name} {place}", expected=expected, found="a folder of this machine")
        text = json.dumps(spec.to_dict())
        return ClusterJob(
            name=self.name,
            words=("spile", "worker", "--spec", text, "--claim"),
            workers=len(stream_tasks(flags.dataset_dir, lambda _: ()))
            if self.num_workers is None
            else self.num_workers,
            root=spec.output,
            hosts=hosts,
            env=pairs("--env", self.env),
            grace=self.grace,
            retries=self.retries,
            cpus=self.cpus,
            memory_gb=self.memory_gb,
        )


def k8s_job(
    *,
    kubernetes: Annotated[KubernetesOptions, _CLUSTER],
    cluster: ClusterFlags = ClusterFlags(),
    flags: ExtractFlags = ExtractFlags(),
) -> int:
    """Print Kubernetes manifests for a run: spile k8s job … | kubectl apply -f -

    Takes every flag of spile extract. Each worker is one pod of an Indexed Job, or a slice of several hosts with a Job
    or JobSet of its own. Workers claim one stream after another, so their number may change during the run. Nothing is
    sent to the cluster; kubectl apply --dry-run=server checks the output.
    """
    job = cluster.job(flags, hosts=kubernetes.hosts, shared=tuple(kubernetes.volumes))
    print(to_yaml(KubernetesJob(**vars(kubernetes), job=job)), end="")
    return 0


def slurm_job(
    *,
    slurm: Annotated[SlurmOptions, _CLUSTER] = SlurmOptions(),
    cluster: ClusterFlags = ClusterFlags(),
    flags: ExtractFlags = ExtractFlags(),
) -> int:
    """Print a Slurm array job for a run: spile slurm job … > job.sh; mkdir slurm-logs; sbatch job.sh

    Takes every flag of spile extract. One task of the array is one worker. Workers claim one stream after another, so
    their number may change during the run. A task that is preempted or runs out of time commits what it has and is
    requeued.
    """
    job = cluster.job(flags, hosts=slurm.hosts_per_worker, shared=("/",))
    print(to_script(SlurmJob(**vars(slurm), job=job)), end="")
    return 0
