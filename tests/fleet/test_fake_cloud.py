"""The fake cloud is judged by clients that we did not write; then our own client is judged on the fake."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from google.api_core import exceptions as google_errors
from google.auth.credentials import AnonymousCredentials
from tests.fakes.cloud_server import FakeCloud

from clouds import GCLOUD, gcloud, gcloud_json
from spile.errors import CloudError, UserError
from spile.fleet.cloud_tpu import CloudTpu, check_zone
from spile.fleet.provider import (
    BadRequest,
    LostReply,
    Missing,
    NameTaken,
    NodeRequest,
    NodeState,
    NotAllowed,
    Operation,
    QueuedState,
    Quota,
    Stockout,
    Unavailable,
)

ZONE = "us-central1-a"
PARENT = f"projects/fake-project/locations/{ZONE}"
V3 = NodeRequest("v3-8", "tpu-ubuntu2204-base", preemptible=True, labels={"spile-fleet": "t"})


def wait_for_operation(client: CloudTpu, operation: Operation) -> Operation:
    while not operation.done:
        time.sleep(0.02)
        operation = client.operation(operation.zone, operation.name)
    return operation


# -- the real google-cloud-tpu ----------------------------------------------------------------------------------------


@pytest.fixture
def google_client(fake: FakeCloud) -> Iterator[object]:
    import google.cloud.common  # noqa: F401  the type of an operation's metadata
    from google.cloud import tpu_v2
    from google.cloud.tpu_v2.services.tpu.transports.rest import TpuRestTransport

    transport = TpuRestTransport(host=f"127.0.0.1:{fake.port}", url_scheme="http", credentials=AnonymousCredentials())
    yield tpu_v2.TpuClient(transport=transport)
    transport.close()
    # Polling operations opens a session of its own, which the client leaves open.
    transport.operations_client.transport._session.close()


def test_the_real_client_makes_sees_and_deletes_a_node(fake: FakeCloud, google_client) -> None:
    from google.cloud import tpu_v2

    node = tpu_v2.Node(
        accelerator_type="v3-8",
        runtime_version="tpu-ubuntu2204-base",
        scheduling_config=tpu_v2.SchedulingConfig(preemptible=True),
        labels={"a": "b"},
    )
    made = google_client.create_node(parent=PARENT, node_id="t0", node=node).result(timeout=120)
    assert made.state == tpu_v2.Node.State.READY
    assert made.network_endpoints[0].access_config.external_ip
    assert [each.name for each in google_client.list_nodes(parent=PARENT)] == [f"{PARENT}/nodes/t0"]
    assert [each.name for each in google_client.list_nodes(parent="projects/fake-project/locations/-")]
    with pytest.raises(google_errors.Conflict):
        google_client.create_node(parent=PARENT, node_id="t0", node=node)
    fake.admin("preempt", {"zone": ZONE, "name": "t0"})
    assert google_client.get_node(name=f"{PARENT}/nodes/t0").state == tpu_v2.Node.State.PREEMPTED
    google_client.delete_node(name=f"{PARENT}/nodes/t0").result(timeout=120)
    with pytest.raises(google_errors.NotFound):
        google_client.get_node(name=f"{PARENT}/nodes/t0")


def test_the_real_client_tells_quota_and_stockout(fake: FakeCloud, google_client) -> None:
    from google.cloud import tpu_v2

    node = tpu_v2.Node(accelerator_type="v3-8", runtime_version="tpu-ubuntu2204-base")
    fake.admin("quota", {"zone": ZONE, "limit": 0})
    with pytest.raises(google_errors.TooManyRequests, match="Quota limit"):
        google_client.create_node(parent=PARENT, node_id="t0", node=node)
    fake.admin("quota", {"zone": ZONE, "limit": None})
    fake.admin("stock", {"zone": ZONE, "available": False})
    with pytest.raises(google_errors.GoogleAPICallError, match="no more capacity"):
        google_client.create_node(parent=PARENT, node_id="t0", node=node).result(timeout=120)
    assert not list(google_client.list_nodes(parent=PARENT))


def test_the_real_client_queues(google_client) -> None:
    from google.cloud import tpu_v2

    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(
        parent=PARENT,
        node=tpu_v2.Node(accelerator_type="v3-8", runtime_version="tpu-ubuntu2204-base"),
        multislice_params={"node_count": 2, "node_id_prefix": "s"},
    )
    wanted = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    google_client.create_queued_resource(parent=PARENT, queued_resource_id="q", queued_resource=wanted).result(
        timeout=120
    )
    state = tpu_v2.QueuedResourceState.State
    name = f"{PARENT}/queuedResources/q"
    for _ in range(3000):
        if google_client.get_queued_resource(name=name).state.state == state.ACTIVE:
            break
        time.sleep(0.05)
    assert sorted(each.name for each in google_client.list_nodes(parent=PARENT)) == [
        f"{PARENT}/nodes/s-0",
        f"{PARENT}/nodes/s-1",
    ]
    with pytest.raises(google_errors.BadRequest):
        google_client.delete_queued_resource(request={"name": name})
    google_client.delete_queued_resource(request={"name": name, "force": True}).result(timeout=120)
    assert not list(google_client.list_nodes(parent=PARENT))


# -- the real gcloud --------------------------------------------------------------------------------------------------

needs_gcloud = pytest.mark.skipif(GCLOUD is None, reason="gcloud is not installed")
TPU_VM = ("compute", "tpus", "tpu-vm")
QUEUED = ("compute", "tpus", "queued-resources")


@needs_gcloud
@pytest.mark.slow
def test_gcloud_creates_lists_describes_and_deletes(fake: FakeCloud, tmp_path: Path) -> None:
    kind = ("--accelerator-type=v3-8", "--version=tpu-ubuntu2204-base", f"--zone={ZONE}")
    assert gcloud(fake, tmp_path, *TPU_VM, "create", "t0", *kind, "--preemptible", "--async").returncode == 0
    listed = gcloud(fake, tmp_path, *TPU_VM, "list", "--zone=-")
    assert "t0" in listed.stdout
    assert "v3-8" in listed.stdout
    described = gcloud_json(fake, tmp_path, *TPU_VM, "describe", "t0", f"--zone={ZONE}")
    assert isinstance(described, dict)
    assert described["schedulingConfig"]["preemptible"] is True
    fake.admin("quota", {"zone": ZONE, "limit": 1})
    refused = gcloud(fake, tmp_path, *TPU_VM, "create", "t1", *kind, "--spot")
    assert "RESOURCE_EXHAUSTED: Quota limit" in refused.stderr
    assert gcloud(fake, tmp_path, *TPU_VM, "delete", "t0", f"--zone={ZONE}").returncode == 0
    assert gcloud_json(fake, tmp_path, *TPU_VM, "list", f"--zone={ZONE}") == []


@needs_gcloud
@pytest.mark.slow
def test_gcloud_queues(fake: FakeCloud, tmp_path: Path) -> None:
    zone = "--zone=us-central2-b"
    kind = ("--accelerator-type=v4-8", "--runtime-version=tpu-ubuntu2204-base", zone)
    many = ("--node-count=2", "--node-prefix=s")
    assert gcloud(fake, tmp_path, *QUEUED, "create", "q", *kind, *many, "--reserved").returncode == 0
    assert (
        gcloud(fake, tmp_path, "alpha", *QUEUED, "create", "b", *kind, "--node-id=x", "--best-effort").returncode == 0
    )
    listed = gcloud_json(fake, tmp_path, *QUEUED, "list", zone)
    assert isinstance(listed, list)
    assert sorted(each["name"].rpartition("/")[2] for each in listed) == ["b", "q"]
    assert gcloud(fake, tmp_path, *QUEUED, "delete", "q", zone, "--force").returncode == 0
    described = gcloud(fake, tmp_path, *QUEUED, "describe", "q", zone)
    assert "NOT_FOUND" in described.stderr


@needs_gcloud
@pytest.mark.slow
def test_gcloud_logs_in_with_the_same_host_key_alias(fake: FakeCloud, tmp_path: Path, client: CloudTpu) -> None:
    wait_for_operation(client, client.create_node(ZONE, "t0", V3))
    line = gcloud(fake, tmp_path, *TPU_VM, "ssh", "t0", f"--zone={ZONE}", "--dry-run", "--command=ls")
    node = client.node(ZONE, "t0")
    assert f"HostKeyAlias=tpu.{node.uid}-0" in line.stdout
    assert node.endpoints[0].external is not None
    assert node.endpoints[0].external in line.stdout


# -- our client -------------------------------------------------------------------------------------------------------


def test_our_client_on_a_node(client: CloudTpu, fake: FakeCloud) -> None:
    operation = client.create_node(ZONE, "t0", V3)
    assert wait_for_operation(client, operation).error is None
    node = client.node(ZONE, "t0")
    assert (node.name, node.zone, node.state, node.preemptible) == ("t0", ZONE, NodeState.READY, True)
    assert node.labels == {"spile-fleet": "t"}
    wait_for_operation(client, client.label_node(ZONE, "t0", {"spile-fleet": "u"}))
    assert client.nodes("-")[0].labels == {"spile-fleet": "u"}
    wait_for_operation(client, client.delete_node(ZONE, "t0"))
    with pytest.raises(Missing):
        client.node(ZONE, "t0")


def test_our_client_queues_in_both_versions(client: CloudTpu) -> None:
    client.create_queued(ZONE, "q", V3, count=2, prefix="s")
    client.create_queued(ZONE, "b", V3, best_effort=True)
    for _ in range(3000):
        found = {each.name: each for each in client.queued(ZONE)}
        if all(each.state is QueuedState.ACTIVE for each in found.values()):
            break
        time.sleep(0.02)
    assert found["q"].nodes == ("s-0", "s-1")
    assert found["b"].nodes == ("b",)
    assert {node.queued for node in client.nodes(ZONE)} == {"q", "b"}
    wait_for_operation(client, client.delete_queued(ZONE, "q"))
    assert [node.name for node in client.nodes(ZONE)] == ["b"]


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (NodeRequest("v3-8", "r", reserved=True), f"{PARENT}/reservations/-"),
        (NodeRequest("v3-8", "r", reserved=True, reservation="mine"), f"{PARENT}/reservations/mine"),
        (
            NodeRequest("v3-8", "r", reserved=True, reservation=f"{PARENT}/reservations/shared"),
            f"{PARENT}/reservations/shared",
        ),
    ],
)
def test_a_reservation_is_named_as_gcloud_names_it(client: CloudTpu, asked: NodeRequest, sent: str) -> None:
    client.create_queued(ZONE, "q", asked)
    assert client.queued(ZONE)[0].reservation == sent


def test_the_fake_refuses_what_google_refuses(fake: FakeCloud) -> None:
    """By Google's own classes: the fake that knew only our own client accepted ``guaranteed.reserved`` in v2."""
    spec = {"nodeSpec": [{"parent": PARENT, "nodeId": "a", "node": {"acceleratorType": "v3-8", "runtimeVersion": "r"}}]}

    def refusal(version: str, place: str, body: dict[str, object]) -> str:
        reply = requests.post(f"{fake.url}{version}/{PARENT}/{place}", json=body, timeout=60)
        assert reply.status_code in (200, 400)
        return str(reply.json().get("error", {}).get("message", ""))

    reserved = {"tpu": spec, "guaranteed": {"reserved": True}}
    queued = "queuedResources?queuedResourceId="
    unknown = "Invalid JSON payload received. Unknown name"
    assert refusal("v2", f"{queued}q", reserved) == (
        f"{unknown} \"reserved\" at 'queued_resource.guaranteed': Cannot find field."
    )
    assert refusal("v2alpha1", f"{queued}q", reserved) == ""
    assert refusal("v2", f"{queued}r", {"tpu": spec, "bestEffort": {}}).startswith(f'{unknown} "bestEffort"')
    assert refusal("v2", "nodes?nodeId=n", {"acceleratorType": "v3-8", "spot": True}).startswith(f'{unknown} "spot"')
    assert refusal("v2", "nodes?nodeName=n", {}).startswith(f'{unknown} "nodeName": Cannot bind query parameter.')


def test_pages_are_all_read(client: CloudTpu, fake: FakeCloud) -> None:
    reply = requests.get(f"{fake.url}v2/{PARENT}/nodes", params={"pageSize": 2}, timeout=60).json()
    assert reply == {}
    for number in range(5):
        client.create_node(ZONE, f"t{number}", V3)
    reply = requests.get(f"{fake.url}v2/{PARENT}/nodes", params={"pageSize": 2}, timeout=60).json()
    assert len(reply["nodes"]) == 2
    assert reply["nextPageToken"] == "2"
    assert len(client.nodes(ZONE)) == 5


@pytest.mark.parametrize(
    ("status", "message", "kind", "text"),
    [
        (401, "Request had invalid authentication credentials.", NotAllowed, "gcloud auth application-default login"),
        (403, "Permission 'tpu.nodes.create' denied", NotAllowed, "roles/tpu.admin"),
        (404, "Resource was not found", Missing, "was not found"),
        (409, "Resource already exists", NameTaken, "already exists"),
        (429, "Quota limit 'X' has been exceeded. Limit: 0 in region r.", Quota, "no quota to create TPU t0 (v3-8)"),
        (429, "Quota exceeded for 'Create requests per minute per user'", Unavailable, "status 429"),
        (500, "Internal error", Unavailable, "status 500"),
        (503, "Try later", Unavailable, "status 503"),
        (400, "Accelerator type not found", BadRequest, "Check the zone, the type and the version."),
    ],
)
def test_each_status_is_one_line(
    client: CloudTpu, fake: FakeCloud, status: int, message: str, kind: type, text: str
) -> None:
    fake.admin("fault", {"method": "POST", "status": status, "message": message, "count": 99})
    with pytest.raises((CloudError, UserError)) as caught:
        client.create_node(ZONE, "t0", V3)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("page", ["<html>please\nlog in</html>", "[]"])
def test_a_page_in_the_place_of_an_answer_is_one_line(
    client: CloudTpu, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    """A proxy's, with status 200: no traceback, and the fleet's monitor takes the zone for one that did not answer."""

    def request(*_: object, **__: object) -> requests.Response:
        reply = requests.Response()
        reply.status_code, reply._content = 200, page.encode()
        return reply

    monkeypatch.setattr(client._session, "request", request)
    with pytest.raises(Unavailable, match=r"cannot list TPUs in .*: expected the API's JSON, found '.*'\. Check"):
        client.nodes(ZONE)


def test_reads_are_retried_and_creates_are_not(client: CloudTpu, fake: FakeCloud) -> None:
    fake.admin("fault", {"method": "GET", "status": 500, "count": 3})
    assert client.nodes(ZONE) == []
    fake.admin("fault", {"method": "POST", "path": "/nodes"})
    with pytest.raises(LostReply, match="no answer to: create TPU t0"):
        client.create_node(ZONE, "t0", V3)
    assert [node.name for node in client.nodes(ZONE)] == ["t0"], "the request was carried out"


def test_stockout_shows_in_the_operation_and_leaves_nothing(client: CloudTpu, fake: FakeCloud) -> None:
    fake.admin("stock", {"zone": ZONE, "available": False})
    operation = wait_for_operation(client, client.create_node(ZONE, "t0", V3))
    assert isinstance(operation.error, Stockout)
    assert f"no capacity to create t0 in {ZONE}" in str(operation.error)
    assert client.nodes(ZONE) == []


def test_nothing_listens_at_the_address(tmp_path: Path) -> None:
    from spile.fleet.cloud_tpu import CloudSettings

    client = CloudTpu(CloudSettings("p", endpoint="http://127.0.0.1:1/", anonymous=True), sleep=lambda _: None)
    with pytest.raises(Unavailable, match="cannot create TPU t0"):
        client.create_node(ZONE, "t0", V3)
    client.close()


def test_unknown_zone_and_type(client: CloudTpu) -> None:
    with pytest.raises(UserError, match="zone us-central1-x has no TPUs: expected one of us-central1-a"):
        check_zone(client, "us-central1-x", "v3-8")
    with pytest.raises(UserError, match="has no v3-9: expected one of v3-"):
        check_zone(client, ZONE, "v3-9")
    with pytest.raises(NotAllowed, match="may not exist"):
        client.nodes("us-central1-x")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    from spile.fleet.cloud_tpu import open_session

    def none(**_: object) -> None:
        raise DefaultCredentialsError("none")

    monkeypatch.setattr(google.auth, "default", none)
    with pytest.raises(NotAllowed, match=r"no Google credentials\. Run: gcloud auth application-default login"):
        open_session(anonymous=False)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
def test_a_web_page_cannot_command_the_fake_cloud(fake: FakeCloud, headers: dict[str, str]) -> None:
    """It starts processes: a page that a browser on this machine shows must not reach it, by any name."""
    reply = requests.post(f"{fake.url}admin/clock", json={"advance": 1}, headers=headers, timeout=60)
    assert reply.status_code == 403
    assert requests.post(f"{fake.url}admin/clock", json={"advance": 0}, timeout=60).status_code == 200
