"""Who may write a bucket, as far as Google's API tells without anything being written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spile.objects.cloud.failures import RequestFailure
from spile.objects.cloud.rest import GoogleDialect, RestClient
from spile.objects.folder import Unwritable

__all__ = ["check_machines", "check_own"]

_NEEDED = ("storage.objects.create", "storage.objects.get", "storage.objects.list")
_ROLE = "roles/storage.objectAdmin"
_WRITERS = {_ROLE, "roles/storage.objectUser", "roles/storage.admin"}
_GIVE = "gcloud storage buckets add-iam-policy-binding gs://{bucket} --member={member} --role=" + _ROLE


def check_own(bucket: str) -> str:
    """A line that says that the account in use may write; :class:`Unwritable` where it may not."""
    try:
        lacking = [each for each in _NEEDED if each not in _ask(bucket, "/testPermissions", permissions=each)]
    except RequestFailure as failure:
        return f"gs://{bucket}: cannot tell whether your account may write it ({failure.cause})"
    if lacking:
        raise Unwritable(
            f"your account may not write gs://{bucket}",
            expected=", ".join(_NEEDED),
            found=f"no {', '.join(lacking)}",
            fix=f"ask its owner: {_GIVE.format(bucket=bucket, member='user:YOU')}",
        )
    return f"gs://{bucket}: your account may write it"


def check_machines(bucket: str, account: str | None) -> str:
    """A line about the machines' account. A bucket's policy proves who may; its project's may give more than it."""
    who = f"the machines' account {account or '(the project’s own)'}"
    if account is None:
        return f"gs://{bucket}: cannot tell whether {who} may write it: name one with --service-account"
    try:
        policy = _ask(bucket, "", optionsRequestedPolicyVersion="3")
    except RequestFailure as failure:
        return f"gs://{bucket}: cannot tell whether {who} may write it ({failure.cause})"
    member = f"serviceAccount:{account}"
    roles = {each.get("role") for each in policy if member in each.get("members", ()) and not each.get("condition")}
    if roles & _WRITERS:
        return f"gs://{bucket}: {who} may write it"
    return (
        f"gs://{bucket}: cannot tell whether {who} may write it: the bucket's policy does not say so; unless the "
        f"project's does, type: {_GIVE.format(bucket=bucket, member=member)}"
    )


def _ask(bucket: str, what: str, **query: str) -> list[Any]:
    """The permissions held, or the policy's bindings."""
    client = RestClient(GoogleDialect(), "storage")
    reply = client.request("GET", f"v1/b/{bucket}/iam{what}", query=query)
    try:
        found = json.loads(reply.body)
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise RequestFailure("a reply that is none of this API's")
    return list(found.get("permissions" if what else "bindings", ()))
