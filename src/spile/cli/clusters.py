"""``spile k8s job`` and ``spile slurm job``: print a run as Kubernetes manifests or as a Slurm array."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import ExtractFlags, flag, pairs, variables
from spile.errors import SpecError
from spile.launch.engines import ClusterJob
from spile.launch.kubernetes import KubernetesJob, SecretKey, to_yaml
from spile.launch.slurm import SlurmJob, to_script
from spile.launch.supervisor import stream_tasks
from spile.objects import is_remote
from spile.planning.machines import parse_machine

_JOB = Group("The job", sort_key=0)
_CLUSTER = Group("The cluster", sort_key=0)


@Parameter(name="*")
@dataclass(frozen=True)
class ClusterFlags:
    """The flags that all clusters share."""

    name: Annotated[str, flag(_JOB, "The job's name.")] = "spile"
    num_workers: Annotated[
        int | None,
        flag(_JOB, "The number of workers, which claim one stream after another. [default: one for each stream]"),
    ] = None
    cpus: Annotated[int | None, flag(_JOB, "Processors of each host.")] = None
    memory_gb: Annotated[int | None, flag(_JOB, "Memory of each host, in GB.")] = None
    env: Annotated[
        list[str] | None, flag(_JOB, "NAME=value for every worker. Do not use it for secrets.", negative="")
    ] = None
    grace: Annotated[int, flag(_JOB, "Seconds that a worker has to commit before it is killed.")] = 120
    retries: Annotated[int, flag(_JOB, "Retries after errors of a worker. Disruptions do not count.")] = 6

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
            workers=_count_streams(flags.dataset_dir) if self.num_workers is None else self.num_workers,
            root=spec.output,
            hosts=hosts,
            env=variables(self.env),
            grace=self.grace,
            retries=self.retries,
            cpus=self.cpus,
            memory_gb=self.memory_gb,
        )


def _count_streams(dataset_dir: str) -> int:
    return len(stream_tasks(dataset_dir, lambda _: ()))


_SAME = (
    *("image", "namespace", "service_account", "gpus", "gpu_type", "spot", "queue", "disk_gb", "cache_claim"),
    *("keep_hours", "privileged", "jobset"),
)
"""The flags whose values are fields of the job."""


@Parameter(name="*")
@dataclass(frozen=True)
class KubernetesFlags:
    """Names and options of the Kubernetes cluster."""

    image: Annotated[
        str, flag(_CLUSTER, "The image that the cluster pulls. spile docker build builds it; push it to your registry.")
    ]
    topology: Annotated[
        str | None, flag(_CLUSTER, "The TPUs on GKE: v5e-8, v5litepod-64, … Several hosts act as one worker.")
    ] = None
    gpus: Annotated[int, flag(_CLUSTER, "GPUs of each pod (nvidia.com/gpu).")] = 0
    gpu_type: Annotated[str | None, flag(_CLUSTER, "The type of the GPUs on GKE: nvidia-l4, nvidia-h100-80gb, …")] = (
        None
    )
    hosts_per_worker: Annotated[int, flag(_CLUSTER, "Without --topology: pods that act as one worker.")] = 1
    spot: Annotated[bool, flag(_CLUSTER, "Use spot machines of GKE.", negative="")] = False
    jobset: Annotated[bool, flag(_CLUSTER, "For many hosts: JobSets instead of a Service and Jobs.", negative="")] = (
        False
    )
    namespace: Annotated[str | None, flag(_CLUSTER, "The namespace. [default: kubectl's]")] = None
    service_account: Annotated[
        str | None, flag(_CLUSTER, "The service account of the pods. It must be able to write to the bucket.")
    ] = None
    secret: Annotated[
        list[str] | None, flag(_CLUSTER, "A variable from a secret, HF_TOKEN=huggingface/token.", negative="")
    ] = None
    volume: Annotated[list[str] | None, flag(_CLUSTER, "A volume claim to mount, /data=my-claim.", negative="")] = None
    node_selector: Annotated[
        list[str] | None, flag(_CLUSTER, "A label that nodes must have, key=value.", negative="")
    ] = None
    queue: Annotated[str | None, flag(_CLUSTER, "A LocalQueue of Kueue.")] = None
    disk_gb: Annotated[int, flag(_CLUSTER, "Ephemeral storage that each pod requests, in GB.")] = 50
    cache_claim: Annotated[
        str | None, flag(_CLUSTER, "A volume claim that keeps models between pods. [default: a folder of each pod]")
    ] = None
    pull_secret: Annotated[list[str] | None, flag(_CLUSTER, "A secret for pulling the image.", negative="")] = None
    toleration: Annotated[
        list[str] | None, flag(_CLUSTER, "A taint that pods tolerate: key=value:NoSchedule.", negative="")
    ] = None
    keep_hours: Annotated[int, flag(_CLUSTER, "Hours after which a finished job is deleted.")] = 168
    privileged: Annotated[
        bool, flag(_CLUSTER, "Run TPU pods with all privileges, for GKE before 1.28.", negative="")
    ] = False

    def described(self, flags: ExtractFlags, cluster: ClusterFlags) -> KubernetesJob:
        """Return the job for Kubernetes."""
        machine = None if self.topology is None else parse_machine(self.topology)
        volumes = pairs("--volume", self.volume, "/path=claim")
        hosts = machine.hosts if machine is not None else self.hosts_per_worker
        return KubernetesJob(
            job=cluster.job(flags, hosts=hosts, shared=tuple(volumes)),
            machine=machine,
            secrets=tuple(SecretKey.parse(text) for text in self.secret or ()),
            volumes=volumes,
            node_selector=pairs("--node-selector", self.node_selector, "key=value"),
            pull_secrets=tuple(self.pull_secret or ()),
            tolerations=tuple(self.toleration or ()),
            **{name: getattr(self, name) for name in _SAME},
        )


def k8s_job(
    *, kubernetes: KubernetesFlags, cluster: ClusterFlags | None = None, flags: ExtractFlags | None = None
) -> int:
    """Print Kubernetes manifests for a run: spile k8s job … | kubectl apply -f -

    Takes every flag of spile extract. Each worker is one pod of an Indexed Job, or a slice of several hosts with a Job
    or JobSet of its own. Workers claim one stream after another, so their number may change during the run. Nothing is
    sent to the cluster; kubectl apply --dry-run=server checks the output.
    """
    print(to_yaml(kubernetes.described(flags or ExtractFlags(), cluster or ClusterFlags())), end="")
    return 0


@Parameter(name="*")
@dataclass(frozen=True)
class SlurmFlags:
    """Names and options of the Slurm cluster."""

    partition: Annotated[str | None, flag(_CLUSTER, "The partition to run in.")] = None
    account: Annotated[str | None, flag(_CLUSTER, "The account to charge.")] = None
    time: Annotated[
        str | None, flag(_CLUSTER, "The time limit of one attempt, D-HH:MM:SS. A task that reaches it is requeued.")
    ] = None
    gpus: Annotated[int, flag(_CLUSTER, "GPUs of each host.")] = 0
    hosts_per_worker: Annotated[int, flag(_CLUSTER, "Hosts that act as one worker.")] = 1
    log_dir: Annotated[str, flag(_CLUSTER, "The folder for the logs.")] = "slurm-logs"
    setup: Annotated[
        str | None, flag(_CLUSTER, "A shell line that runs before the worker, such as module load or activate.")
    ] = None
    sbatch: Annotated[
        list[str] | None, flag(_CLUSTER, "An additional option of sbatch: --sbatch=--constraint=a100.", negative="")
    ] = None


def slurm_job(
    *,
    slurm: SlurmFlags = SlurmFlags(),  # noqa: B008
    cluster: ClusterFlags = ClusterFlags(),  # noqa: B008
    flags: ExtractFlags = ExtractFlags(),  # noqa: B008
) -> int:
    """Print a Slurm array job for a run: spile slurm job … > job.sh; mkdir slurm-logs; sbatch job.sh

    Takes every flag of spile extract. One task of the array is one worker. Workers claim one stream after another, so
    their number may change during the run. A task that is preempted or runs out of time commits what it has and is
    requeued.
    """
    described = SlurmJob(
        job=cluster.job(flags, hosts=slurm.hosts_per_worker, shared=("/",)),
        **{name: getattr(slurm, name) for name in ("partition", "account", "time", "gpus", "log_dir", "setup")},
        options=tuple(slurm.sbatch or ()),
    )
    print(to_script(described), end="")
    return 0
