"""Whether the account in use may run a fleet, as far as Google's API tells without anything being made."""

from __future__ import annotations

from collections.abc import Iterator

from spile.errors import CloudError, UserError
from spile.fleet.cloud.provider import NotAllowed
from spile.fleet.cloud.tpu import CloudTpu

__all__ = ["check_roles"]

_MACHINES = ("tpu.nodes.create", "tpu.nodes.delete", "tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.update")
_ACT_AS = ("iam.serviceAccounts.actAs",)


def check_roles(client: CloudTpu, account: str | None) -> Iterator[str]:
    """A line for each finding; :class:`NotAllowed` where the account may not make machines, or not act as theirs."""
    project = f"projects/{client.project}"
    give = f"gcloud projects add-iam-policy-binding {client.project} --member=user:YOU --role=roles/tpu.admin"
    yield _check(client, "cloudresourcemanager", project, _MACHINES, "make and delete its TPU VMs", give)
    if account is not None:
        there = f"projects/-/serviceAccounts/{account}"
        give = f"gcloud iam service-accounts add-iam-policy-binding {account} --member=user:YOU"
        give += " --role=roles/iam.serviceAccountUser"
        yield _check(client, "iam", there, _ACT_AS, "make machines that act as it", give)


def _check(client: CloudTpu, api: str, resource: str, needed: tuple[str, ...], what: str, give: str) -> str:
    name = resource.rpartition("/")[2]
    try:
        held = client.held(api, resource, needed)
    except (CloudError, UserError) as error:  # the API is off, or the account may not even ask
        return f"{name}: cannot tell whether your account may {what} ({error.found})"
    lacking = [each for each in needed if each not in held]
    if lacking:
        raise NotAllowed(
            f"{name}: your account may not {what}",
            expected=", ".join(needed),
            found=f"no {', '.join(lacking)}",
            fix=f"ask its owner: {give}",
        )
    return f"{name}: your account may {what}"
