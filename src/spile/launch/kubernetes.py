"""The run as Kubernetes manifests: an Indexed Job, or a Job or JobSet for each slice of several hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from spile.errors import Fenced, SpecError, UserError
from spile.launch.engines import ClusterJob
from spile.plan.machines import Machine

__all__ = [
    "INDEX",
    "KubernetesJob",
    "SecretKey",
    "manifests",
    "to_yaml",
]


INDEX = "JOB_COMPLETION_INDEX"
"""What Kubernetes sets in each pod of an Indexed Job, and expands in a command."""
CONTAINER = "spile"
_GPU = "nvidia.com/gpu"
_TPU = "google.com/tpu"
_GKE = "cloud.google.com"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class SecretKey:
    """One key of a secret of the cluster, as a variable: a manifest never holds the secret itself."""

    variable: str
    secret: str
    key: str

    @classmethod
    def parse(cls, text: str) -> SecretKey:
        """``HF_TOKEN=huggingface/token``."""
        match = re.fullmatch(r"([A-Za-z_]\w*)=([a-z0-9][a-z0-9.-]*)/([\w.-]+)", text, re.ASCII)
        if match is None:
            raise SpecError("--secret", expected="VARIABLE=secret/key", found=repr(text))
        return cls(*match.groups())


@dataclass(frozen=True)
class KubernetesJob:
    """The job, and what the cluster calls things."""

    job: ClusterJob
    image: str
    namespace: str | None = None
    service_account: str | None = None
    machine: Machine | None = None
    """A TPU slice, on GKE."""
    gpus: int = 0
    gpu_type: str | None = None
    """GKE's name: ``nvidia-l4``; elsewhere ``node_selector`` says it."""
    spot: bool = False
    secrets: tuple[SecretKey, ...] = ()
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Claims by where they are mounted."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    queue: str | None = None
    """A LocalQueue of Kueue."""
    jobset: bool = False

    def __post_init__(self) -> None:
        if not self.image or " " in self.image:
            raise SpecError("--image", expected="an image that the cluster can pull", found=repr(self.image))
        if self.gpus < 0:
            raise SpecError("--gpus", expected="0 or more", found=str(self.gpus))
        if self.gpus and self.machine is not None:
            raise SpecError("two kinds of accelerators", expected="--topology or --gpus", found="both")
        if self.gpu_type is not None and not self.gpus:
            raise SpecError("--gpu-type", expected="--gpus N beside it", found="no --gpus")
        if self.jobset and self.job.hosts == 1:
            raise SpecError("--jobset", expected="a slice of many hosts", found="one host", fix="leave it out")
        for path in self.volumes:
            if not path.startswith("/"):
                raise SpecError("--volume", expected="/path=claim", found=repr(path))
        names = [("--namespace", self.namespace), ("--service-account", self.service_account), ("--queue", self.queue)]
        for flag, name in [*names, *(("--volume", claim) for claim in self.volumes.values())]:
            if name is not None and not _NAME.fullmatch(name):
                expected = "a name of the cluster's: small letters, digits, dots and dashes"
                raise SpecError(flag, expected=expected, found=repr(name))


def manifests(job: KubernetesJob) -> list[dict[str, Any]]:
    """What ``kubectl apply`` takes, in order."""
    if job.job.hosts == 1:
        return [_indexed_job(job)]
    if job.jobset:
        return [_jobset(job, stream) for stream in job.job.streams]
    return [_service(job), *(_slice_job(job, stream) for stream in job.job.streams)]


def to_yaml(job: KubernetesJob) -> str:
    """As a file, with what to do with it on top; the same for the same flags."""
    run = job.job
    watch = f"spile monitor {run.root}"
    head = [
        f"# {len(run.streams)} streams, {run.at_once} at once{_on(job)}. kubectl apply -f THIS; watch with: {watch}",
        "# Apply it again, under any name, to go on: what is committed is not done again.",
    ]
    text: str = yaml.safe_dump_all(manifests(job), sort_keys=False, width=10_000, allow_unicode=True)
    return "\n".join(head) + "\n" + text


def _on(job: KubernetesJob) -> str:
    if job.machine is not None:
        return f", each on a {job.machine.name} ({job.job.hosts} {'host' if job.job.hosts == 1 else 'hosts'})"
    return f", each with {job.gpus} GPUs on {job.job.hosts} hosts" if job.gpus else ""


def _labels(job: KubernetesJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "spile", "app.kubernetes.io/instance": job.job.name}


def _metadata(job: KubernetesJob, name: str, **more: str) -> dict[str, Any]:
    labels = _labels(job)
    if job.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = job.queue
    found: dict[str, Any] = {"name": name}
    if job.namespace is not None:
        found["namespace"] = job.namespace
    return {**found, "labels": labels, **({"annotations": more} if more else {})}


def _failure_policy() -> dict[str, Any]:
    """A disruption is nobody's error; a mistake is not worth another try; a fenced worker waits for its turn."""
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailIndex", "onExitCodes": _codes(UserError.exit_code)},
            {"action": "Ignore", "onExitCodes": _codes(Fenced.exit_code)},
        ]
    }


def _codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}


def _indexed_job(job: KubernetesJob) -> dict[str, Any]:
    run = job.job
    if run.streams != tuple(range(len(run.streams))):
        raise SpecError(
            "streams of a Kubernetes job", expected="0, 1, 2, … without a gap", found=f"{len(run.streams)} others"
        )
    words = [*run.words, "--stream", f"$({INDEX})", "--num-processes", "1"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, run.name),
        "spec": {
            "completionMode": "Indexed",
            "completions": len(run.streams),
            "parallelism": run.at_once,
            "backoffLimitPerIndex": run.retries,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _failure_policy(),
            "template": _template(job, words),
        },
    }


def _slice_spec(job: KubernetesJob, stream: int, coordinator: str, subdomain: str | None) -> dict[str, Any]:
    """All hosts of a slice: they start together, and one's failure ends the others by itself."""
    run = job.job
    words = [*run.words, "--stream", str(stream), "--num-processes", str(run.hosts)]
    words += ["--process-id", f"$({INDEX})", "--coordinator-address", coordinator]
    return {
        "completionMode": "Indexed",
        "completions": run.hosts,
        "parallelism": run.hosts,
        "backoffLimit": run.retries * run.hosts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {**rule, "action": "FailJob"} if rule["action"] == "FailIndex" else rule
                for rule in _failure_policy()["rules"]
            ]
        },
        "template": _template(job, words, subdomain),
    }


def _slice_job(job: KubernetesJob, stream: int) -> dict[str, Any]:
    name = f"{job.job.name}-{stream}"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, name),
        "spec": _slice_spec(job, stream, f"{name}-0.{job.job.name}", job.job.name),
    }


def _jobset(job: KubernetesJob, stream: int) -> dict[str, Any]:
    """The JobSet controller makes the Service, and starts all hosts of a slice anew when one fails."""
    name = f"{job.job.name}-{stream}"
    spec = {**_slice_spec(job, stream, f"{name}-slice-0-0.{name}", None), "backoffLimit": 0}
    together = {} if job.machine is None else {"alpha.jobset.sigs.k8s.io/exclusive-topology": f"{_GKE}/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, name, **together),
        "spec": {
            "failurePolicy": {"maxRestarts": job.job.retries * 10},
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _service(job: KubernetesJob) -> dict[str, Any]:
    """Names for the hosts, which know each other before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": job.job.name},
        },
    }


def _template(job: KubernetesJob, words: list[str], subdomain: str | None = None) -> dict[str, Any]:
    run = job.job
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": run.grace}
    if subdomain is not None:
        spec["subdomain"] = subdomain
    if job.service_account is not None:
        spec["serviceAccountName"] = job.service_account
    if selector := _selector(job):
        spec["nodeSelector"] = selector
    if job.spot:
        spec["tolerations"] = [
            {"key": f"{_GKE}/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    spec["containers"] = [_container(job, words)]
    if job.volumes:
        spec["volumes"] = [
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(job.volumes.values())
        ]
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _selector(job: KubernetesJob) -> dict[str, str]:
    found = {}
    if job.machine is not None:
        found[f"{_GKE}/gke-tpu-accelerator"] = job.machine.gke
        found[f"{_GKE}/gke-tpu-topology"] = job.machine.grid
    if job.gpu_type is not None:
        found[f"{_GKE}/gke-accelerator"] = job.gpu_type
    if job.spot:
        found[f"{_GKE}/gke-spot"] = "true"
    return {**found, **job.node_selector}


def _container(job: KubernetesJob, words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": CONTAINER, "image": job.image, "command": words}
    if env := list(_variables(job)):
        found["env"] = env
    found["resources"] = _resources(job)
    if job.volumes:
        found["volumeMounts"] = [
            {"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(job.volumes)
        ]
    # The image's user is not root; a TPU's device files are root's.
    tpu = {"privileged": True, "runAsUser": 0}
    found["securityContext"] = tpu if job.machine is not None else {"allowPrivilegeEscalation": False}
    return found


def _variables(job: KubernetesJob) -> Iterator[dict[str, Any]]:
    for name, value in job.job.env.items():
        yield {"name": name, "value": value}
    for each in job.secrets:
        yield {"name": each.variable, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}


def _resources(job: KubernetesJob) -> dict[str, Any]:
    """Chips are limits, and so requests; processors and memory are requests alone, so that idle ones are of use."""
    asked: dict[str, str] = {}
    if job.job.cpus is not None:
        asked["cpu"] = str(job.job.cpus)
    if job.job.memory_gb is not None:
        asked["memory"] = f"{job.job.memory_gb}G"
    chips = {}
    if job.machine is not None:
        chips[_TPU] = str(job.machine.chips_per_host)
    if job.gpus:
        chips[_GPU] = str(job.gpus)
    limits = {**chips, **({"memory": asked["memory"]} if "memory" in asked else {})}
    return {name: value for name, value in (("requests", {**asked, **chips}), ("limits", limits)) if value}
