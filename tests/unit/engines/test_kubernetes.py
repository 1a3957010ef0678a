"""Manifests: strictly valid for three versions of Kubernetes, by its schemas and by the rules that schemas miss."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ports import free_port
from spile.cli.main import main
from spile.data.split import make_streams
from spile.engines.kubernetes import INDEX, KubernetesOptions, manifests, to_yaml
from spile.engines.registry import ClusterJob
from spile.errors import ExitCode, SpecError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.store.claims import ClaimReader
from spile.store.quarantine import Supervision

VERSIONS = ("1.31", "1.34", "1.37")
WORDS = ("spile", "worker", "--spec", "gs://b/out/spec.json", "--claim")
DNS = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def on_cluster(image: str = "spile:1", **options: Any) -> KubernetesOptions:
    return KubernetesOptions(name="run", image=image, **options)


def job_of(options: KubernetesOptions) -> ClusterJob:
    return ClusterJob(WORDS, options.num_workers or 3, "gs://b/out")


CASES = {
    "plain": on_cluster(),
    "tpu": on_cluster(num_workers=2, topology="v5e-8", spot=True, queue="q"),
    "gpu": on_cluster(cpus=8, memory_gb=64, gpus=1, gpu_type="nvidia-l4", spot=True),
    "any-gpu": on_cluster(gpus=8, node_selector=["gpu=a100"], volume=["/data=claim"]),
    "secret": on_cluster(env=["A=b"], namespace="ns", service_account="me", secret=["HF_TOKEN=hf/t"]),
    "slice": on_cluster(num_workers=2, topology="v5e-64"),
    "jobset": on_cluster(num_workers=2, topology="v5e-64", jobset=True),
    "gpu-hosts": on_cluster(num_workers=2, gpus=8, hosts_per_worker=4),
    "cache": on_cluster(num_workers=1, gpus=8, cache_claim="models", pull_secret=["hub"], hosts_per_worker=2),
    "old-gke": on_cluster(topology="v5e-8", privileged=True),
    "tolerant": on_cluster(toleration=["team=ml:NoSchedule", "slow:NoExecute"], disk_gb=7),
}
cases = pytest.mark.parametrize("case", CASES)


def jobs(options: KubernetesOptions, job: ClusterJob | None = None) -> Iterator[dict[str, Any]]:
    """Every Job, those inside JobSets too."""
    for each in manifests(options, job or job_of(options)):
        if each["kind"] == "Job":
            yield each
        for inner in each["spec"].get("replicatedJobs", []):
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **inner["template"]}


@pytest.mark.parametrize("version", VERSIONS)
@cases
def test_strictly_valid(case: str, version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate, which has the schemas, is not installed")
    import kubernetes_validate

    whole = [each for each in yaml.safe_load_all(to_yaml(CASES[case], job_of(CASES[case]))) if each["kind"] != "JobSet"]
    for each in [*whole, *jobs(CASES[case])]:
        kubernetes_validate.validate(each, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):  # it can fail
        kubernetes_validate.validate({**next(jobs(CASES[case])), "specs": {}}, version, strict=True)


@cases
def test_the_rules_that_schemas_miss(case: str) -> None:
    for each in jobs(CASES[case]):
        obey(each)


def obey(each: dict[str, Any]) -> None:
    """Check the rules of a real API server and of the kubelet."""
    spec, pod = each["spec"], each["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never", "with a podFailurePolicy"
    assert spec["podReplacementPolicy"] == "Failed", "with a podFailurePolicy"
    assert spec["completionMode"] == "Indexed", "with backoffLimitPerIndex, and for the index"
    assert 1 <= spec["parallelism"] <= spec["completions"] <= 100_000
    assert ("backoffLimitPerIndex" in spec) != ("backoffLimit" in spec)
    for rule in spec["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        codes = rule.get("onExitCodes", {"values": [1], "containerName": container["name"]})
        assert codes["values"] == sorted(set(codes["values"]))
        assert 0 not in codes["values"]
        assert codes["containerName"] == container["name"]
        assert rule["action"] != "FailIndex" or "backoffLimitPerIndex" in spec
    names = [variable["name"] for variable in container.get("env", [])]
    assert len(names) == len(set(names))
    limits, requests = (container["resources"].get(kind, {}) for kind in ("limits", "requests"))
    for name, amount in limits.items():
        assert "/" not in name or (amount == requests.get(name) and amount.isdecimal()), name
    assert {mount["name"] for mount in container.get("volumeMounts", [])} == {v["name"] for v in pod.get("volumes", [])}
    assert all(isinstance(word, str) for word in container["command"])
    assert pod["terminationGracePeriodSeconds"] >= 60


@cases
def test_names_are_hosts_and_coordinators_are_pods(case: str) -> None:
    described = CASES[case]
    whole = manifests(described, job_of(described))
    for each in whole:
        assert DNS.fullmatch(each["metadata"]["name"])
        if each["kind"] == "Job":  # its pods' host names
            assert DNS.fullmatch(f"{each['metadata']['name']}-{each['spec']['completions'] - 1}")
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())
    if described.hosts == 1:
        return
    for number, each in enumerate(one for one in whole if one["kind"] != "Service"):
        inner = each["spec"]["replicatedJobs"][0]["template"] if each["kind"] == "JobSet" else each
        pod = inner["spec"]["template"]["spec"]
        words = pod["containers"][0]["command"]
        assert words[words.index("--worker-name") + 1] == f"run-{number}-$(JOB_UID)"
        assert words[words.index("--process-id") + 1] == f"$({INDEX})"
        name = each["metadata"]["name"]
        if each["kind"] == "JobSet":
            assert words[words.index("--coordinator-address") + 1] == f"{name}-slice-0-0.{name}"
            continue
        service = whole[0]
        assert words[words.index("--coordinator-address") + 1] == f"{name}-0.{service['metadata']['name']}"
        assert pod["subdomain"] == service["metadata"]["name"]
        labels = inner["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["clusterIP"] == "None"


@cases
def test_the_same_flags_give_the_same_bytes(case: str) -> None:
    text = to_yaml(CASES[case], job_of(CASES[case]))
    assert text == to_yaml(CASES[case], job_of(CASES[case]))
    assert list(yaml.safe_load_all(text)) == manifests(CASES[case], job_of(CASES[case]))
    assert max(map(len, text.splitlines())) < 160


@given(st.integers(1, 20), st.sampled_from([1, 2, 16]), st.booleans())
def test_any_size_obeys(workers: int, hosts: int, jobset: bool) -> None:
    described = on_cluster(num_workers=workers, gpus=1, hosts_per_worker=hosts, jobset=jobset and hosts > 1)
    for each in jobs(described):
        obey(each)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["k8s", "job", "--image", "spile:1", "--model", "embedded", *words])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return out


@pytest.mark.slow
def test_the_containers_command_works_with_the_variables_that_kubernetes_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the kubelet does: $(NAME) is replaced, the variable is set; here in place of the image's root."""
    make_streams("embedded", tmp_path / "streams", 2)
    place = ["--dataset-dir", f"{tmp_path}/streams", "--output", f"{tmp_path}/out", "--volume", f"{tmp_path}=claim"]
    small = ["--layers", "0", "--max-seq-length", "64"]
    (found,) = yaml.safe_load_all(printed(capsys, *place, *small, "--num-workers", "1"))
    assert found["spec"]["completions"] == 1
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "spile"
    words = [expanded(word, {INDEX: "0", "JOB_UID": "u"}) for word in container["command"][1:]]
    ran = subprocess.run(
        [sys.executable, "-m", "spile.cli.main", *words],
        env={**os.environ, INDEX: "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    report = verify(open_folder(f"{tmp_path}/out"))
    assert report.ok, [problem.line() for problem in report.all_problems]
    assert {each.worker for each in ClaimReader(open_folder(f"{tmp_path}/out")).owners().values()} == {"spile-0-u"}


FINE = ("--output", "gs://b/o", "--dataset-dir", "gs://b/s", "--num-workers", "2")
BAD = {
    ("--output", "out", "--dataset-dir", "gs://b/s", "--num-workers", "2"): "--output out: expected a bucket, "
    "or a folder that all hosts share, found a folder of this machine",
    ("--output", "gs://b/o"): "no streams: expected --dataset-dir gs://… Make them: spile data streams",
    (*FINE, "--name", "A_b"): "--name: expected small letters, digits and dashes, 48 at most, found 'A_b'",
    (*FINE, "--secret", "x"): "--secret: expected VARIABLE=secret/key, found 'x'",
    (*FINE, "--worker-id", "2"): "--worker-id: expected none: the cluster numbers the workers, found 2",
    (*FINE, "--jobset"): "--jobset: expected a slice of many hosts, found one host. Leave it out.",
    (*FINE, "--gpus", "-1"): "--gpus: expected 0 or more, found -1",
    (*FINE, "--retries", "-3"): "--retries: expected 0 or more, found -3",
    (*FINE, "--hosts-per-worker", "0"): "--hosts-per-worker: expected 1 or more, found 0",
    (*FINE, "--namespace", "Bad Name"): "--namespace: expected a name of the cluster's: small letters, digits, dots "
    "and dashes, found 'Bad Name'",
    (*FINE, "--volume", "/data=A"): "--volume: expected a name of the cluster's: small letters, digits, dots "
    "and dashes, found 'A'",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_flags_are_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["k8s", "job", "--image", "spile:1", "--model", "embedded", *words])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"spile: {BAD[words]}\n")


@pytest.mark.slow
def test_the_commands_of_a_slices_pods_make_one_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both pods of the first Job, here; only the cluster's DNS is replaced, by this machine's address."""
    make_streams("embedded", tmp_path / "streams", 2)
    place = ["--dataset-dir", f"{tmp_path}/streams", "--output", f"{tmp_path}/out", "--volume", f"{tmp_path}=claim"]
    service, first = yaml.safe_load_all(printed(capsys, *place, "--num-workers", "1", "--hosts-per-worker", "2"))
    (container,) = first["spec"]["template"]["spec"]["containers"]
    host = f"{first['metadata']['name']}-0.{service['metadata']['name']}"
    assert host in container["command"]
    address = {host: f"127.0.0.1:{free_port()}"}
    pods = []
    for index in range(first["spec"]["completions"]):
        seen = {INDEX: str(index), "JOB_UID": "u"}
        words = [expanded(address.get(word, word), seen) for word in container["command"][1:]]
        env = {**os.environ, INDEX: str(index), "JAX_PLATFORMS": "cpu"}
        pods.append(subprocess.Popen([sys.executable, "-m", "spile.cli.main", *words], env=env))
    assert [pod.wait(200) for pod in pods] == [0, 0]
    report = verify(open_folder(f"{tmp_path}/out"), streams=[0])
    assert report.ok, [problem.line() for problem in report.all_problems]
    assert {path.stem.rpartition("-")[2] for path in (tmp_path / "out" / "stream_0").glob("*.safetensors")} == {
        "h00",
        "h01",
    }


def test_a_folder_next_to_the_mounted_one_is_not_shared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["k8s", "job", "--image", "i", "--volume", "/data=claim", "--model", "embedded", "--num-workers", "2"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--dataset-dir", "/data/streams", "--output", "/database/out"])
    assert ended.value.code == 2
    assert "--output /database/out: expected a bucket, or a folder that all hosts share" in capsys.readouterr().err


def pods(case: str) -> Iterator[dict[str, Any]]:
    for each in jobs(CASES[case]):
        yield each["spec"]["template"]["spec"]


@cases
def test_pods_fit_the_restricted_standard(case: str) -> None:
    """kubernetes.io/docs/concepts/security/pod-security-standards; TPU pods need root and one capability."""
    tpu = CASES[case].machine is not None
    if CASES[case].privileged:
        return
    for pod in pods(case):
        (container,) = pod["containers"]
        security = {**pod["securityContext"], **container["securityContext"]}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert "privileged" not in security
        assert security["allowPrivilegeEscalation"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["capabilities"].get("add", []) == (["SYS_RESOURCE"] if tpu else [])
        assert tpu or (security["runAsNonRoot"] is True and security["runAsUser"] == 1000)
        kinds = {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]}
        assert kinds <= {"emptyDir", "persistentVolumeClaim"}


@cases
def test_pods_ask_for_what_they_need(case: str) -> None:
    described = CASES[case]
    for pod in pods(case):
        (container,) = pod["containers"]
        requests = container["resources"]["requests"]
        assert {"cpu", "memory", "ephemeral-storage"} <= requests.keys()
        assert requests["ephemeral-storage"] == f"{described.disk_gb}G"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert ("/dev/shm" in mounts) == (described.gpus > 0)
        names = {volume["name"]: volume for volume in pod["volumes"]}
        if described.cache_claim:
            assert names[mounts["/cache"]]["persistentVolumeClaim"] == {"claimName": described.cache_claim}
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert env["XDG_CACHE_HOME"] == "/cache"
        assert pod.get("imagePullSecrets", []) == [{"name": name} for name in described.pull_secret or ()]
    for each in manifests(described, job_of(described)):
        assert each["kind"] == "Service" or each["spec"]["ttlSecondsAfterFinished"] == 168 * 3600


def test_taints_that_are_tolerated() -> None:
    (pod,) = pods("tolerant")
    assert pod["tolerations"] == [
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
        {"key": "slow", "operator": "Exists", "effect": "NoExecute"},
    ]
    (pod,) = pods("gpu")
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """As the kubelet does: k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


def test_no_text_of_the_user_is_expanded() -> None:
    hostile = "gs://b/$(HF_TOKEN)/$$(HF_TOKEN)/$x$"
    words = (*WORDS[:-1], hostile)
    run = ClusterJob(words, 1, "gs://b/out")
    for hosts in (1, 2):
        (each,) = jobs(on_cluster(env=[f"A={hostile}"], hosts_per_worker=hosts), run)
        (container,) = each["spec"]["template"]["spec"]["containers"]
        command = [expanded(word, {"HF_TOKEN": "secret", INDEX: "7"}) for word in container["command"]]
        assert hostile in command
        assert {"7", "run-7-$(JOB_UID)"} & set(command), "the pod's own number is"
        assert not any("secret" in word for word in command)
        env = {each["name"]: expanded(each.get("value", ""), {"HF_TOKEN": "secret"}) for each in container["env"]}
        assert env["A"] == hostile


@pytest.mark.parametrize("text", ["gs://b/out\nkind: Pod", "gs://b/\x1b[2J"])
def test_control_characters_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="control character"):
        ClusterJob(WORDS, 1, text)
    with pytest.raises(SpecError, match=r"--image contains the control character"):
        on_cluster(f"spile{text.replace(' ', '')}")
    with pytest.raises(SpecError, match=r"--node-selector contains the control character"):
        on_cluster(node_selector=[f"a={text}"])


def test_a_jobset_fails_for_a_mistake_and_restarts_for_an_error() -> None:
    for each in manifests(CASES["jobset"], job_of(CASES["jobset"])):
        policy = each["spec"]["failurePolicy"]
        assert policy["maxRestarts"] == 6
        assert policy["rules"] == [
            {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ]
    for each in jobs(CASES["jobset"]):
        actions = {
            code: rule["action"]
            for rule in each["spec"]["podFailurePolicy"]["rules"]
            for code in rule.get("onExitCodes", {"values": ["disruption"]})["values"]
        }
        assert actions == {"disruption": "Ignore", 2: "FailJob", 3: "Ignore", 4: "Ignore", 130: "Ignore", 143: "Ignore"}
        assert each["spec"]["backoffLimit"] == 0, "any other failure is the JobSet's to count"


def test_a_lost_host_costs_no_retry() -> None:
    for each in jobs(CASES["slice"]):
        assert each["spec"]["backoffLimit"] == 6
        (rule,) = [
            rule
            for rule in each["spec"]["podFailurePolicy"]["rules"]
            if "onExitCodes" in rule and rule["action"] == "Ignore"
        ]
        assert ExitCode.HOST_LOST in rule["onExitCodes"]["values"]


def test_a_slice_stays_in_one_node_pool() -> None:
    for each in manifests(CASES["slice"], job_of(CASES["slice"]))[1:]:
        affinity = each["spec"]["template"]["spec"]["affinity"]
        for kind, operator in (("podAffinity", "In"), ("podAntiAffinity", "NotIn")):
            (term,) = affinity[kind]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "cloud.google.com/gke-nodepool"
            assert {
                "key": "batch.kubernetes.io/job-name",
                "operator": operator,
                "values": [each["metadata"]["name"]],
            } in (term["labelSelector"]["matchExpressions"])


def test_a_kill_is_blamed_on_the_pods_of_one_worker_only() -> None:
    """Workers share the uid of their Job, and each stream may change hands: the index tells them apart."""
    (container,) = next(pods("plain"))["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert list(env).index("JOB_INDEX") < list(env).index("SPILE_SUPERVISOR"), "a variable may refer to earlier ones"
    pod = {"JOB_UID": "u", "JOB_INDEX": "3", "JOB_FAILURES": "2", "JOB_DISRUPTIONS": "1"}
    told = Supervision.from_environment({"SPILE_SUPERVISOR": expanded(env["SPILE_SUPERVISOR"] or "", pod)})
    assert told == Supervision("u-3", kills=2, others=1, how="?")
    name = container["command"][container["command"].index("--worker-name") + 1]
    assert expanded(name, {"JOB_COMPLETION_INDEX": "3", "JOB_UID": "u"}) == "run-3-u"
