"""The errors that a first use of a Google Cloud project meets: the body as Google sends it, and the line of spile.

The bodies are quoted from Google's documentation and from public threads; numbers of projects are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fakes.cloud_server import FakeCloud

from spile.errors import CloudError, SpileError, UserError
from spile.fleet.cloud_tpu import CloudTpu, read_operation
from spile.fleet.provider import BadRequest, NodeRequest, NotAllowed, Operation, Quota, Stockout
from spile.fleet.reconcile import Action, record
from spile.fleet.spec import FleetSpec, History, plan_workers
from spile.hosts.hosts import Host
from spile.hosts.run import ssh_error

ZONE = "us-central1-a"
_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_LATER = "wait a few minutes for the action to propagate to our systems and retry."


@dataclass(frozen=True)
class First:
    """One error."""

    source: str
    status: int
    message: str
    kind: type[SpileError]
    problem: str
    fix: str
    details: list[dict[str, Any]] = field(default_factory=list)


def info(reason: str, service: str = "tpu.googleapis.com") -> list[dict[str, Any]]:
    metadata = {"consumer": "projects/1", "service": service}
    return [{"@type": _INFO, "reason": reason, "domain": "googleapis.com", "metadata": metadata}]


REQUESTS = {
    "quota project": First(
        "github.com/GoogleCloudPlatform/cloud-foundation-fabric/issues/2622, with the name of this API",
        403,
        "Your application is authenticating by using local Application Default Credentials. The tpu.googleapis.com API "
        "requires a quota project, which is not set by default. To learn how to set your quota project, see "
        "https://cloud.google.com/docs/authentication/adc-troubleshooting/user-creds .",
        NotAllowed,
        "your credentials name no quota project",
        "gcloud auth application-default set-quota-project fake-project.",
        info("SERVICE_DISABLED"),
    ),
    "API disabled": First(
        "GoogleCloudPlatform/training-data-analyst, poetry.ipynb: the answer of tpu.googleapis.com",
        403,
        "Cloud TPU API has not been used in project 1 before or it is disabled. Enable it by visiting "
        "https://console.developers.google.com/apis/api/tpu.googleapis.com/overview?project=1 then retry. If you "
        f"enabled this API recently, {_LATER}",
        NotAllowed,
        "the API is not enabled in the project",
        "gcloud services enable tpu.googleapis.com --project fake-project, and try again after a few minutes.",
        info("SERVICE_DISABLED"),
    ),
    "billing disabled": First(
        "the same body of vision.googleapis.com in a public tutorial; the service is replaced",
        403,
        "This API method requires billing to be enabled. Please enable billing on project #1 by visiting "
        "https://console.developers.google.com/billing/enable?project=1 then retry. If you enabled billing for this "
        f"project recently, {_LATER}",
        NotAllowed,
        "billing is not enabled for the project",
        "gcloud billing projects link fake-project --billing-account=ID",
        info("BILLING_DISABLED"),
    ),
    "organization policy": First(
        "github.com/gardener/gardener-extension-provider-gcp/issues/415",
        412,
        "Constraint constraints/compute.vmExternalIpAccess violated for project 1. Add instance "
        "projects/1/zones/us-central1-a/instances/t0 to the constraint to use external IP with it.",
        NotAllowed,
        "the organization forbids public addresses",
        "Pass --no-external-ips; the network then needs Cloud NAT and Private Google Access.",
    ),
    "another organization policy": First(
        "github.com/fortinet/fortigate-terraform-deploy/issues/34",
        412,
        "Constraint constraints/compute.requireShieldedVm violated for project projects/1.",
        NotAllowed,
        "an organization policy forbids it",
        "Ask the administrator of the organization",
    ),
    "permission": First(
        "the text: github.com/tensorflow/tpu/issues/296; the details: "
        "github.com/GoogleCloudPlatform/t5x-on-vertex-ai/issues/5",
        403,
        f"Permission 'tpu.nodes.create' denied on 'projects/fake-project/locations/{ZONE}/nodes/t0'",
        NotAllowed,
        "your account may not do this",
        "gcloud projects add-iam-policy-binding fake-project --member=user:YOU --role=roles/tpu.admin.",
        info("IAM_PERMISSION_DENIED"),
    ),
    "service account": First(
        "github.com/dzlab/deeplearning.ai/issues/5",
        400,
        "You do not have permission to act as service_account: 1-compute@developer.gserviceaccount.com. (or it may not "
        "exist).",
        NotAllowed,
        "your account may not use the machines' service account",
        "--project fake-project --member=user:YOU --role=roles/iam.serviceAccountUser.",
    ),
    "no default network": First(
        "github.com/GoogleCloudPlatform/gke-monitoring-tutorial/issues/27",
        400,
        'Project "fake-project" has no network named "default".',
        BadRequest,
        "the network does not exist",
        "name one with --network, or type: gcloud compute networks create default --project fake-project "
        "--subnet-mode=auto.",
    ),
    "quota": First(
        "the log of a create of v5litepod-8 in a public repository, 25 August 2025",
        429,
        "Quota limit 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone us-east5-a.",
        Quota,
        "no quota to create TPU t0 (v3-8)",
        "Ask for quota at https://console.cloud.google.com/iam-admin/quotas?project=fake-project",
        [
            {
                "@type": "type.googleapis.com/google.rpc.QuotaFailure",
                "violations": [
                    {
                        "subject": "project:1",
                        "description": "Quota 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' exhausted. Limit 4 in "
                        "zone us-east5-a",
                    }
                ],
            }
        ],
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_refused_request_says_what_to_type(client: CloudTpu, fake: FakeCloud, name: str) -> None:
    first = REQUESTS[name]
    fault = {"method": "POST", "status": first.status, "message": first.message, "details": first.details or None}
    fake.admin("fault", {**fault, "count": 9})
    with pytest.raises((CloudError, UserError)) as caught:
        client.create_node(ZONE, "t0", NodeRequest("v3-8", "r"))
    line = caught.value.line()
    assert type(caught.value) is first.kind
    assert first.problem in line
    assert first.fix.rstrip(".").lower() in line.lower()
    assert "\n" not in line


def test_a_stockout_is_told_by_the_operation() -> None:
    """Source: github.com/thevasudevgupta/gsoc-wav2vec2/issues/11."""
    message = (
        'There is no more capacity in the zone "europe-west4-a"; you can try in another zone where Cloud TPU Nodes are '
        "offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0xba393c906974e61]"
    )
    raw = {"name": f"projects/p/locations/{ZONE}/operations/o", "done": True, "error": {"code": 8, "message": message}}
    error = read_operation({**raw, "metadata": {"verb": "create", "target": "x/t0"}}).error
    assert isinstance(error, Stockout)
    assert error.line().startswith(f"no capacity to create t0 in {ZONE}")


@pytest.mark.parametrize("name", REQUESTS)
def test_only_a_missing_quota_blocks_the_zone(client: CloudTpu, fake: FakeCloud, name: str) -> None:
    """ "Requires a quota project" was read as a lack of quota, and no machine was requested there for 30 minutes."""
    first = REQUESTS[name]
    fake.admin("fault", {"method": "POST", "status": first.status, "message": first.message, "count": 9})
    with pytest.raises((CloudError, UserError)) as caught:
        client.create_node(ZONE, "t0", NodeRequest("v3-8", "r"))
    fleet = FleetSpec("f", "p", (ZONE,), plan_workers((ZONE,), 1), NodeRequest("v3-8", "r"))
    action = Action("create", 0, ZONE, "tpu-us-central1-a-0", "")
    history = record(fleet, History(), [(action, Operation(error=caught.value))], 1000.0)
    assert bool(history.blocks) == (name == "quota")
    assert first.problem in history.workers[0].note


@pytest.mark.parametrize(
    ("message", "problem", "fix"),
    [
        (  # OS Login: https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-ssh-errors
            "ann@10.0.0.2: Permission denied (publickey).",
            "the host refused the login",
            "gcloud compute os-login ssh-keys add",
        ),
        (  # github.com/google-github-actions/ssh-compute/issues/44
            "ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting [4033: 'not authorized'].\n"
            "kex_exchange_identification: Connection closed by remote host",
            "IAP refuses the tunnel",
            "roles/iap.tunnelResourceAccessor",
        ),
        (  # https://cloud.google.com/iap/docs/using-tcp-forwarding
            "ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting [4003: 'failed to connect to backend'].\n"
            "kex_exchange_identification: Connection closed by remote host",
            "IAP cannot reach the host",
            "35.235.240.0/20",
        ),
    ],
)
def test_a_refused_login_says_what_to_type(message: str, problem: str, fix: str) -> None:
    line = ssh_error(Host("t0", "1", 0, "10.0.0.2", 0), 255, message).line()
    assert problem in line
    assert fix in line
