"""``spile k8s job`` and ``spile slurm job``: print a run as Kubernetes manifests or as a Slurm array."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from cyclopts import Group, Parameter

from spile.cli.flags import ExtractFlags, pairs
from spile.errors import SpecError
from spile.launch.engines import ClusterJob
from spile.launch.kubernetes import KubernetesJob, SecretKey, to_yaml
from spile.launch.slurm import SlurmJob, to_script
from spile.launch.supervisor import stream_tasks
from spile.objects import is_remote
from spile.planning.machines import parse_machine

_CLUSTER = Group("The cluster", sort_key=0)


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


_SAME = (
    *("image", "namespace", "service_account", "gpus", "gpu_type", "spot", "queue", "disk_gb", "cache_claim"),
    *("keep_hours", "privileged", "jobset"),
)
"""The flags whose values are fields of the job."""


@Parameter(name="*", group=_CLUSTER)
@dataclass(frozen=True)
class KubernetesFlags:
    """Names and options of the Kubernetes cluster."""

    image: str
    """The image that the cluster pulls. spile docker build builds it; push it to your registry."""
    topology: str | None = None
    """The TPUs on GKE: v5e-8, v5litepod-64, … Several hosts act as one worker."""
    gpus: int = 0
    """GPUs of each pod (nvidia.com/gpu)."""
    gpu_type: str | None = None
    """The type of the GPUs on GKE: nvidia-l4, nvidia-h100-80gb, …"""
    hosts_per_worker: int = 1
    """Without --topology: pods that act as one worker."""
    spot: bool = False
    """Use spot machines of GKE."""
    jobset: bool = False
    """For many hosts: JobSets instead of a Service and Jobs."""
    namespace: str | None = None
    """The namespace. [default: kubectl's]"""
    service_account: str | None = None
    """The service account of the pods. It must be able to write to the bucket."""
    secret: list[str] | None = None
    """A variable from a secret, HF_TOKEN=huggingface/token."""
    volume: list[str] | None = None
    """A volume claim to mount, /data=my-claim."""
    node_selector: list[str] | None = None
    """A label that nodes must have, key=value."""
    queue: str | None = None
    """A LocalQueue of Kueue."""
    disk_gb: int = 50
    """Ephemeral storage that each pod requests, in GB."""
    cache_claim: str | None = None
    """A volume claim that keeps models between pods. [default: a folder of each pod]"""
    pull_secret: list[str] | None = None
    """A secret for pulling the image."""
    toleration: list[str] | None = None
    """A taint that pods tolerate: key=value:NoSchedule."""
    keep_hours: int = 168
    """Hours after which a finished job is deleted."""
    privileged: bool = False
    """Run TPU pods with all privileges, for GKE before 1.28."""

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
    *, kubernetes: KubernetesFlags, cluster: ClusterFlags = ClusterFlags(), flags: ExtractFlags = ExtractFlags()
) -> int:
    """Print Kubernetes manifests for a run: spile k8s job … | kubectl apply -f -

    Takes every flag of spile extract. Each worker is one pod of an Indexed Job, or a slice of several hosts with a Job
    or JobSet of its own. Workers claim one stream after another, so their number may change during the run. Nothing is
    sent to the cluster; kubectl apply --dry-run=server checks the output.
    """
    print(to_yaml(kubernetes.described(flags, cluster)), end="")
    return 0


@Parameter(name="*", group=_CLUSTER)
@dataclass(frozen=True)
class SlurmFlags:
    """Names and options of the Slurm cluster."""

    partition: str | None = None
    """The partition to run in."""
    account: str | None = None
    """The account to charge."""
    time: str | None = None
    """The time limit of one attempt, D-HH:MM:SS. A task that reaches it is requeued."""
    gpus: int = 0
    """GPUs of each host."""
    hosts_per_worker: int = 1
    """Hosts that act as one worker."""
    log_dir: str = "slurm-logs"
    """The folder for the logs."""
    setup: str | None = None
    """A shell line that runs before the worker, such as module load or activate."""
    sbatch: list[str] | None = None
    """An additional option of sbatch: --sbatch=--constraint=a100."""


def slurm_job(
    *,
    slurm: SlurmFlags = SlurmFlags(),
    cluster: ClusterFlags = ClusterFlags(),
    flags: ExtractFlags = ExtractFlags(),
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
