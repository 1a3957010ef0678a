"""What the refusals of Google's APIs mean: the class of the error, and what to type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spile.errors import CloudError, UserError
from spile.fleet.provider import BadRequest, Missing, NameTaken, NotAllowed, Quota, Stockout, Unavailable

# The API reports all three as "resource exhausted" (429, code 8); only the message tells them apart.
_RATE = re.compile(r"per minute|per second|rate limit|RATE_LIMIT_EXCEEDED", re.IGNORECASE)
_QUOTA = re.compile(
    r"quota (limit )?'[^']*' (has been exceeded|exhausted)|quota.{0,60}exceeded|exceed.{0,40}quota", re.I
)
_STOCK = re.compile(
    r"no more capacity|insufficient (reserved )?capacity|not enough resources|stockout|out of capacity", re.IGNORECASE
)
_GRANT = "type, or ask an owner to type: gcloud projects add-iam-policy-binding {project} --member=user:YOU --role="


@dataclass(frozen=True)
class _Refusal:
    """A refusal that is not about capacity, by its text or the reason in its details."""

    pattern: str
    problem: str
    fix: str
    kind: type[UserError] = NotAllowed


_REFUSALS = (
    _Refusal(
        r"requires a quota project",
        "your credentials name no quota project",
        "type: gcloud auth application-default set-quota-project {project}",
    ),
    _Refusal(
        r"required permission to use project|USER_PROJECT_DENIED",
        "your account may not use the quota project",
        _GRANT + "roles/serviceusage.serviceUsageConsumer",
    ),
    _Refusal(
        r"requires billing to be enabled|BILLING_DISABLED",
        "billing is not enabled for the project",
        "type: gcloud billing projects link {project} --billing-account=ID (gcloud billing accounts list shows the id)",
    ),
    _Refusal(
        r"API has not been used in project|SERVICE_DISABLED",
        "the API is not enabled in the project",
        "type: gcloud services enable {service} --project {project}, and try again after a few minutes",
    ),
    _Refusal(
        r"constraints/compute\.vmExternalIpAccess",
        "the organization forbids public addresses",
        "pass --no-external-ips; the network then needs Cloud NAT and Private Google Access",
    ),
    _Refusal(
        r"constraints/[\w.]+|organization policy|ORG_POLICY",
        "an organization policy forbids it",
        "ask the administrator of the organization, or use another zone or project",
    ),
    _Refusal(
        r"serviceAccounts\.actAs|act as service.?account|access to service account",
        "your account may not use the machines' service account",
        "type, or ask an owner to type: gcloud iam service-accounts add-iam-policy-binding ACCOUNT "
        "--project {project} --member=user:YOU --role=roles/iam.serviceAccountUser",
    ),
    _Refusal(
        r"no network named|networks/[\w-]+' (was|is) not found",
        "the network does not exist",
        "name one with --network, or type: gcloud compute networks create default --project {project} "
        "--subnet-mode=auto",
        BadRequest,
    ),
    _Refusal(r"Permission '?tpu\.|tpu\.\w+\.\w+' denied", "your account may not do this", _GRANT + "roles/tpu.admin"),
)


def is_rate_limit(message: str) -> bool:
    """Return whether a 429 is a rate limit and not a missing quota."""
    return bool(_RATE.search(message))


def error_of(
    status: int, message: str, doing: str, *, project: str = "PROJECT", details: object = None
) -> CloudError | UserError:
    """Return the error for an HTTP status, the API's message and the details of the error, as one line."""
    found = " ".join(message.split()) or f"status {status}"
    info = _error_info(details)
    text = f"{message} {info.get('reason', '')}"
    if _STOCK.search(message):
        return Stockout(f"no capacity to {doing}", found=found, fix="try another zone")
    for refusal in _REFUSALS if status in (400, 403, 404, 412) else ():
        if re.search(refusal.pattern, text):
            service = re.search(r"[a-z]+\.googleapis\.com", f"{info.get('metadata')} {message}")
            fix = refusal.fix.format(project=project, service=service[0] if service else "tpu.googleapis.com")
            return refusal.kind(f"cannot {doing}: {refusal.problem}", found=found, fix=fix)
    if status in (403, 429) and _QUOTA.search(message) and not is_rate_limit(message):
        page = f"https://console.cloud.google.com/iam-admin/quotas?project={project}"
        return Quota(f"no quota to {doing}", found=found, fix=f"ask for quota at {page}, or use another region or type")
    if status == 401:
        return NotAllowed(f"cannot {doing}", found=found, fix="run: gcloud auth application-default login")
    if status == 403:
        return NotAllowed(f"not allowed to {doing}", found=found, fix="ask for the role roles/tpu.admin")
    if status == 404:
        return Missing(f"cannot {doing}", found=found)
    if status == 409:
        return NameTaken(f"cannot {doing}", found=found)
    if status == 429 or status >= 500:
        return Unavailable(f"cannot {doing}", found=f"{found} (status {status})", fix="try again later")
    return BadRequest(f"cannot {doing}", found=found, fix="check the zone, the type and the version")


def _error_info(details: object) -> Mapping[str, Any]:
    """Return the ``ErrorInfo`` among the details of an error: its reason and metadata."""
    for each in details if isinstance(details, list) else ():
        if isinstance(each, Mapping) and str(each.get("@type", "")).endswith("google.rpc.ErrorInfo"):
            return each
    return {}
