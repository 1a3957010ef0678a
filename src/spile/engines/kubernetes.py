"""The run as Kubernetes manifests: one Indexed Job, or one Job or JobSet for each slice of several hosts.

A worker claims one stream after another. Its name contains the uid of its Job, so that jobs of the same name in two
clusters can share a run; it is the same for each pod that replaces another, which so takes its own stream back at once.

Pods fit the Pod Security standard "restricted", except on TPUs, whose driver needs root and locked memory. Why
a pod ends, and what its Job does then:

    a pod ends because                                   the Job
    its node is preempted, drained or lost               starts a new pod, not counted
    it was asked to stop (exit code 130 or 143)          the same
    another worker owns the stream (3)                   the same
    another host of its slice was lost (4)               the same
    of a mistake in the flags or the data (2)            fails: the index, the Job or the JobSet
    of any other error                                   starts a new pod, ``retries`` times
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from spile.engines.registry import ClusterJob, ClusterOptions, check_texts, refuse_control_characters
from spile.errors import ExitCode, SpecError
from spile.planning.machines import Machine, parse_machine
from spile.spec.amounts import counted
from spile.spec.options import check_number, parse_pairs
from spile.store.quarantine import RESUMABLE, UNKNOWN, VARIABLE

INDEX = "JOB_COMPLETION_INDEX"
"""The variable that Kubernetes sets in each pod of an Indexed Job, and expands in a command."""
_JOB_UID = {"JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']"}
_SUPERVISION = {
    "JOB_INDEX": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    "JOB_FAILURES": "metadata.annotations['batch.kubernetes.io/job-index-failure-count']",
    "JOB_DISRUPTIONS": "metadata.annotations['batch.kubernetes.io/job-index-ignored-failure-count']",
}
"""What the Job controller writes on a pod about the earlier pods of its index. A worker that ended with an error of its
own says so in its stream's folder, so a failure that it says nothing about was a kill. JOB_INDEX repeats INDEX, which
Kubernetes adds after these variables, so that they cannot refer to it."""
CONTAINER = "spile"
_GPU = "nvidia.com/gpu"
_TPU = "google.com/tpu"
_GKE = "cloud.google.com"
_NODE_POOL = f"{_GKE}/gke-nodepool"
_JOB_NAME = "batch.kubernetes.io/job-name"
_USER = 1000
"""The user of the image."""
_CACHE = "/cache"
"""The folder for models and compiled programs: a claim, or a folder of the pod."""
_SHARED_MEMORY = "8Gi"
_CPUS, _MEMORY_GB = 2, 8
"""Requests if none are given. A pod without requests is evicted first."""
_LOCKED_MEMORY = "68719476736"
"""KiB of locked memory that libtpu wants, by GKE's documentation of TPU pods without privileges."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_SECRET = re.compile(r"[A-Za-z_]\w*=[a-z0-9][a-z0-9.-]*/[\w.-]+", re.ASCII)
_TOLERATION = re.compile(r"[\w./-]+(=[\w.-]+)?:(NoSchedule|NoExecute|PreferNoSchedule)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(ClusterOptions):
    """The flags of ``spile k8s job``."""

    image: str
    """The image that the cluster pulls. spile docker build builds it; push it to your registry."""
    topology: str | None = None
    """The TPUs on GKE: v5e-8, v5litepod-64, … All hosts of a slice act as one worker."""
    gpu_type: str | None = None
    """The type of the GPUs on GKE: nvidia-l4, nvidia-h100-80gb, …"""
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

    @property
    def machine(self) -> Machine | None:
        """The TPU slice."""
        return None if self.topology is None else parse_machine(self.topology)

    @property
    def hosts(self) -> int:
        """The number of pods that act as one worker."""
        return self.hosts_per_worker if self.machine is None else self.machine.hosts

    @property
    def volumes(self) -> dict[str, str]:
        """Persistent volume claims by mount path."""
        return parse_pairs("--volume", self.volume, "/path=claim")

    @property
    def labels(self) -> dict[str, str]:
        """The labels that nodes must have."""
        return parse_pairs("--node-selector", self.node_selector, "key=value")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_texts("--image", "[^ ]+", "an image that the cluster can pull", self.image)
        check_number("--disk-gb", self.disk_gb, 1)
        check_number("--keep-hours", self.keep_hours, 0)
        if self.gpus and self.topology is not None:
            raise SpecError("two kinds of accelerators", expected="--topology or --gpus", found="both")
        if self.gpu_type is not None and not self.gpus:
            raise SpecError("--gpu-type", expected="--gpus N as well", found="no --gpus")
        if self.jobset and self.hosts == 1:
            raise SpecError("--jobset", expected="a slice of many hosts", found="one host", fix="leave it out")
        if self.privileged and self.topology is None:
            raise SpecError("--privileged", expected="--topology as well", found="no TPUs", fix="leave it out")
        check_texts("--volume", "(?s)/.*", "/path=claim", *self.volumes)
        check_texts("--secret", _SECRET, "VARIABLE=secret/key", *(self.secret or ()))
        check_texts("--toleration", _TOLERATION, "key=value:NoSchedule or key:NoSchedule", *(self.toleration or ()))
        self._check_names()

    def _check_names(self) -> None:
        named = {
            "--namespace": [self.namespace],
            "--service-account": [self.service_account],
            "--queue": [self.queue],
            "--cache-claim": [self.cache_claim],
            "--volume": self.volumes.values(),
            "--pull-secret": self.pull_secret or (),
        }
        for flag, names in named.items():
            check_texts(flag, _NAME, "a name of the cluster's: small letters, digits, dots and dashes", *names)
        texts = [("--image", self.image), ("--gpu-type", self.gpu_type or "")]
        texts += [("--volume", path) for path in self.volumes]
        texts += [("--node-selector", text) for pair in self.labels.items() for text in pair]
        for flag, text in texts:
            refuse_control_characters(flag, text)


def manifests(options: KubernetesOptions, job: ClusterJob) -> list[dict[str, Any]]:
    if options.hosts == 1:
        return [_indexed_job(options, job)]
    names = [f"{options.name}-{number}" for number in range(job.workers)]
    if options.jobset:
        return [_jobset(options, job, name) for name in names]
    return [_service(options), *(_slice_job(options, job, name) for name in names)]


def to_yaml(options: KubernetesOptions, job: ClusterJob) -> str:
    """Return the manifests as a file with instructions at the top. The same flags give the same text."""
    workers = counted(job.workers, "worker")
    head = (
        f"# {workers}{_machine_text(options)}. kubectl apply -f THIS; watch with: spile monitor {job.root}\n"
        "# Apply it again, under any name, to continue: what is committed is not done again.\n"
    )
    parts = manifests(options, job)
    text: str = yaml.dump_all(parts, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    return head + text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes text of several lines, such as a script, line by line."""

    def represent_text(self, text: str) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _machine_text(options: KubernetesOptions) -> str:
    if options.machine is not None:
        return f", each on a {options.machine.name} ({counted(options.hosts, 'host')})"
    return f", each with {options.gpus} GPUs on {options.hosts} hosts" if options.gpus else ""


def _literal(text: str) -> str:
    """Escape text for a command or a variable: the kubelet would expand ``$(NAME)``, secrets included."""
    return text.replace("$", "$$")


def _labels(options: KubernetesOptions) -> dict[str, str]:
    return {"app.kubernetes.io/name": "spile", "app.kubernetes.io/instance": options.name}


def _metadata(options: KubernetesOptions, name: str, **annotations: str) -> dict[str, Any]:
    labels = _labels(options)
    if options.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    found: dict[str, Any] = {"name": name}
    if options.namespace is not None:
        found["namespace"] = options.namespace
    return {**found, "labels": labels, **({"annotations": annotations} if annotations else {})}


# -- jobs -------------------------------------------------------------------------------------------------------------


def _failure_policy(mistake: str) -> dict[str, Any]:
    """Return the podFailurePolicy; ``mistake`` is the action for exit code 2."""
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": mistake, "onExitCodes": _codes(ExitCode.REFUSED)},
            {"action": "Ignore", "onExitCodes": _codes(ExitCode.FENCED, *RESUMABLE)},
        ]
    }


def _codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": sorted(map(int, codes))}


def _indexed_job(options: KubernetesOptions, job: ClusterJob) -> dict[str, Any]:
    words = [*_worker(job, f"{options.name}-$({INDEX})"), "--num-processes", "1"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(options, options.name),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.workers,
            "parallelism": job.workers,
            "backoffLimitPerIndex": options.retries,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _failure_policy("FailIndex"),
            "ttlSecondsAfterFinished": options.keep_hours * 3600,
            "template": _template(options, words),
        },
    }


def _worker(job: ClusterJob, name: str) -> list[str]:
    """Return the command of the worker of this name."""
    return [*map(_literal, job.words), "--worker-name", f"{name}-$(JOB_UID)"]


def _slice_spec(options: KubernetesOptions, job: ClusterJob, name: str, coordinator: str) -> dict[str, Any]:
    """Return a Job in which all hosts of a slice act as the worker of this name."""
    place = ["--num-processes", str(options.hosts), "--process-id", f"$({INDEX})", "--coordinator-address", coordinator]
    words = [*_worker(job, name), *place]
    return {
        "completionMode": "Indexed",
        "completions": options.hosts,
        "parallelism": options.hosts,
        "backoffLimit": options.retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": _failure_policy("FailJob"),
        "template": _template(options, words),
    }


def _slice_job(options: KubernetesOptions, job: ClusterJob, name: str) -> dict[str, Any]:
    spec = _slice_spec(options, job, name, f"{name}-0.{options.name}")
    spec["ttlSecondsAfterFinished"] = options.keep_hours * 3600
    spec["template"]["spec"]["subdomain"] = options.name
    if options.machine is not None:
        spec["template"]["spec"]["affinity"] = _one_node_pool(name)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(options, name), "spec": spec}


def _one_node_pool(name: str) -> dict[str, Any]:
    """Keep the pods of one Job in one node pool, which is one slice, and those of other Jobs out of it."""

    def term(operator: str) -> list[dict[str, Any]]:
        expressions = [
            {"key": "app.kubernetes.io/name", "operator": "In", "values": ["spile"]},
            {"key": _JOB_NAME, "operator": operator, "values": [name]},
        ]
        return [{"topologyKey": _NODE_POOL, "labelSelector": {"matchExpressions": expressions}}]

    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"podAffinity": {required: term("In")}, "podAntiAffinity": {required: term("NotIn")}}


def _jobset(options: KubernetesOptions, job: ClusterJob, name: str) -> dict[str, Any]:
    """Return a JobSet, whose controller creates the Service and restarts all hosts of a slice when one fails."""
    spec = {**_slice_spec(options, job, name, f"{name}-slice-0-0.{name}"), "backoffLimit": 0}
    annotations = {} if options.machine is None else {"alpha.jobset.sigs.k8s.io/exclusive-topology": _NODE_POOL}
    # A Job fails with the reason PodFailurePolicy only for a mistake; every other failure restarts the slice.
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(options, name, **annotations),
        "spec": {
            "failurePolicy": {"maxRestarts": options.retries, "rules": [mistake]},
            "ttlSecondsAfterFinished": options.keep_hours * 3600,
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _service(options: KubernetesOptions) -> dict[str, Any]:
    """Return the headless Service that gives hosts their names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options, options.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": options.name},
        },
    }


# -- pods -------------------------------------------------------------------------------------------------------------


def _template(options: KubernetesOptions, words: list[str]) -> dict[str, Any]:
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": options.grace}
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secret]
    if selector := _selector(options):
        spec["nodeSelector"] = selector
    if tolerations := list(_tolerations(options)):
        spec["tolerations"] = tolerations
    spec["securityContext"] = _pod_security(options)
    volumes = list(_volumes(options))
    spec["containers"] = [_container(options, words, [mount for _, mount in volumes])]
    spec["volumes"] = [volume for volume, _ in volumes]
    return {"metadata": {"labels": _labels(options)}, "spec": spec}


def _selector(options: KubernetesOptions) -> dict[str, str]:
    found = {}
    if options.machine is not None:
        found[f"{_GKE}/gke-tpu-accelerator"] = options.machine.gke
        found[f"{_GKE}/gke-tpu-topology"] = options.machine.grid
    if options.gpu_type is not None:
        found[f"{_GKE}/gke-accelerator"] = options.gpu_type
    if options.spot:
        found[f"{_GKE}/gke-spot"] = "true"
    return {**found, **options.labels}


def _tolerations(options: KubernetesOptions) -> Iterator[dict[str, Any]]:
    if options.spot:
        yield {"key": f"{_GKE}/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    if options.machine is not None or options.gpus:
        resource = _TPU if options.machine is not None else _GPU
        yield {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    for text in options.toleration or ():
        taint, _, effect = text.rpartition(":")
        key, _, value = taint.partition("=")
        equal = {"operator": "Exists"} if not value else {"operator": "Equal", "value": value}
        yield {"key": key, **equal, "effect": effect}


def _pod_security(options: KubernetesOptions) -> dict[str, Any]:
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    if options.machine is not None:
        return {} if options.privileged else seccomp
    return {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER, **seccomp}


def _container_security(options: KubernetesOptions) -> dict[str, Any]:
    """Return the restricted context; for TPUs, root with the one capability that GKE's documentation asks for."""
    if options.machine is None:
        return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if options.privileged:
        return {"privileged": True, "runAsUser": 0}
    capabilities = {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}
    return {"allowPrivilegeEscalation": False, "runAsUser": 0, "capabilities": capabilities}


def _volumes(options: KubernetesOptions) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each volume with its mount: the model cache, shared memory for GPUs, and the user's claims."""
    claim = {"persistentVolumeClaim": {"claimName": options.cache_claim}}
    yield (
        {"name": "cache", **(claim if options.cache_claim else {"emptyDir": {}})},
        {"name": "cache", "mountPath": _CACHE},
    )
    if options.gpus:
        memory = {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}
        yield {"name": "shared-memory", "emptyDir": memory}, {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
    for number, (path, name) in enumerate(options.volumes.items()):
        volume = {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": name}}
        yield volume, {"name": f"volume-{number}", "mountPath": path}


def _container(options: KubernetesOptions, words: list[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    if options.machine is not None and not options.privileged:
        words = ["/bin/bash", "-c", _literal(f'ulimit -l {_LOCKED_MEMORY} && exec "$@"'), "spile", *words]
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": words,
        "env": list(_variables(options)),
        "resources": _resources(options),
        "volumeMounts": mounts,
        "securityContext": _container_security(options),
    }


def _variables(options: KubernetesOptions) -> Iterator[dict[str, Any]]:
    own = {"XDG_CACHE_HOME": _CACHE, "HF_HOME": f"{_CACHE}/huggingface"}
    for name, value in {**own, **options.variables}.items():
        yield {"name": name, "value": _literal(value)}
    single_host = options.hosts == 1  # Only a Job with a backoff limit for each index counts the failures of an index.
    for name, path in {**_JOB_UID, **(_SUPERVISION if single_host else {})}.items():
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    if single_host:
        yield {"name": VARIABLE, "value": f"$(JOB_UID)-$(JOB_INDEX):$(JOB_FAILURES):$(JOB_DISRUPTIONS):{UNKNOWN}"}
    for text in options.secret or ():  # A manifest names the secrets of the cluster and never contains them.
        variable, _, place = text.partition("=")
        secret, _, key = place.partition("/")
        yield {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _resources(options: KubernetesOptions) -> dict[str, Any]:
    """Return requests, with limits for chips and for memory that the user named. CPUs have no limit."""
    chips: dict[str, str] = {}
    if options.machine is not None:
        chips[_TPU] = str(options.machine.chips_per_host)
    if options.gpus:
        chips[_GPU] = str(options.gpus)
    requests = {
        "cpu": str(options.cpus or _CPUS),
        "memory": f"{options.memory_gb or _MEMORY_GB}G",
        "ephemeral-storage": f"{options.disk_gb}G",
        **chips,
    }
    limits = {**chips, **({} if options.memory_gb is None else {"memory": requests["memory"]})}
    return {"requests": requests, **({"limits": limits} if limits else {})}
