"""``spile k8s job``: the run as Kubernetes manifests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import ExtractFlags, flag, pairs
from spile.cli.shell.cluster_flags import ClusterFlags

if TYPE_CHECKING:
    from spile.launch.kubernetes import KubernetesJob

__all__ = ["KubernetesFlags", "job"]

_CLUSTER = Group("The cluster", sort_key=0)


@Parameter(name="*")
@dataclass(frozen=True)
class KubernetesFlags:
    """Names and options of the Kubernetes cluster."""

    image: Annotated[str, flag(_CLUSTER, "The image: spile docker build makes it, your registry holds it.")]
    topology: Annotated[
        str | None, flag(_CLUSTER, "GKE TPUs: v5e-8, v5litepod-64, …; many hosts act as one worker.")
    ] = None
    gpus: Annotated[int, flag(_CLUSTER, "GPUs of each pod (nvidia.com/gpu).")] = 0
    gpu_type: Annotated[str | None, flag(_CLUSTER, "GKE's name of them: nvidia-l4, nvidia-h100-80gb, …")] = None
    hosts_per_worker: Annotated[int, flag(_CLUSTER, "Without --topology: pods that act as one worker.")] = 1
    spot: Annotated[bool, flag(_CLUSTER, "GKE's spot machines.", negative="")] = False
    jobset: Annotated[bool, flag(_CLUSTER, "For many hosts: JobSets instead of a Service and Jobs.", negative="")] = (
        False
    )
    namespace: Annotated[str | None, flag(_CLUSTER, "The namespace. [default: kubectl's]")] = None
    service_account: Annotated[
        str | None, flag(_CLUSTER, "The pods' service account: one that may write the bucket.")
    ] = None
    secret: Annotated[
        list[str] | None, flag(_CLUSTER, "A variable from a secret, HF_TOKEN=huggingface/token.", negative="")
    ] = None
    volume: Annotated[list[str] | None, flag(_CLUSTER, "A claim that is mounted, /data=my-claim.", negative="")] = None
    node_selector: Annotated[list[str] | None, flag(_CLUSTER, "A node's label, key=value.", negative="")] = None
    queue: Annotated[str | None, flag(_CLUSTER, "A LocalQueue of Kueue.")] = None
    disk_gb: Annotated[int, flag(_CLUSTER, "Ephemeral storage that each pod requests, in GB.")] = 50
    cache_claim: Annotated[
        str | None, flag(_CLUSTER, "A claim that keeps models between pods. [default: a folder of each pod]")
    ] = None
    pull_secret: Annotated[
        list[str] | None, flag(_CLUSTER, "A secret with which the image is pulled.", negative="")
    ] = None
    toleration: Annotated[
        list[str] | None, flag(_CLUSTER, "A taint that pods tolerate: key=value:NoSchedule.", negative="")
    ] = None
    keep_hours: Annotated[int, flag(_CLUSTER, "Hours after which a finished job is deleted.")] = 168
    privileged: Annotated[
        bool, flag(_CLUSTER, "Run TPU pods with all privileges, for GKE before 1.28.", negative="")
    ] = False

    def described(self, flags: ExtractFlags, cluster: ClusterFlags) -> KubernetesJob:
        """Return the job for Kubernetes."""
        from spile.launch.kubernetes import KubernetesJob, SecretKey
        from spile.planning.machines import parse_machine

        machine = None if self.topology is None else parse_machine(self.topology)
        volumes = pairs("--volume", self.volume, "/path=claim")
        hosts = machine.hosts if machine is not None else self.hosts_per_worker
        return KubernetesJob(
            job=cluster.job(flags, hosts=hosts, shared=tuple(volumes)),
            image=self.image,
            namespace=self.namespace,
            service_account=self.service_account,
            machine=machine,
            gpus=self.gpus,
            gpu_type=self.gpu_type,
            spot=self.spot,
            secrets=tuple(SecretKey.parse(text) for text in self.secret or ()),
            volumes=volumes,
            node_selector=pairs("--node-selector", self.node_selector, "key=value"),
            queue=self.queue,
            disk_gb=self.disk_gb,
            cache_claim=self.cache_claim,
            pull_secrets=tuple(self.pull_secret or ()),
            tolerations=tuple(self.toleration or ()),
            keep_hours=self.keep_hours,
            privileged=self.privileged,
            jobset=self.jobset,
        )


def job(*, kubernetes: KubernetesFlags, cluster: ClusterFlags | None = None, flags: ExtractFlags | None = None) -> int:
    """Print the run as Kubernetes manifests: spile k8s job … | kubectl apply -f -

    Takes every flag of spile extract. One worker is an Indexed Job's pod with one stream; a slice of many hosts is a
    Job or JobSet of its own. Nothing is sent anywhere: --dry-run=server of kubectl asks the cluster what it thinks.
    """
    from spile.launch.kubernetes import to_yaml

    print(to_yaml(kubernetes.described(flags or ExtractFlags(), cluster or ClusterFlags())), end="")
    return 0
