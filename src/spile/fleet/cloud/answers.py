"""The cloud's words as ours: JSON to nouns, and status codes and messages to typed errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

from spile.errors import CloudError, UserError, untrusted
from spile.fleet.cloud.provider import (
    BadRequest,
    Endpoint,
    Missing,
    NameTaken,
    Node,
    NodeRequest,
    NotAllowed,
    Operation,
    QueuedRequest,
    QueuedResource,
    Quota,
    Stockout,
    Unavailable,
)
from spile.fleet.cloud.states import NodeState, QueuedState

__all__ = ["error_of", "is_rate_limit", "node_body", "queued_body", "read_node", "read_operation", "read_queued"]

# Both are "resource exhausted" (429, code 8) to the API; only the message tells them apart.
_RATE = re.compile(r"per minute|per second|rate limit|RATE_LIMIT_EXCEEDED", re.IGNORECASE)
_QUOTA = re.compile(r"\bquota\b", re.IGNORECASE)
_STOCK = re.compile(
    r"no more capacity|insufficient (reserved )?capacity|not enough resources|stockout|out of capacity", re.IGNORECASE
)

# gRPC's codes, as operations carry them, to the HTTP status that means the same.
_STATUS_OF_CODE = {3: 400, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 13: 500, 14: 503, 16: 401}


def is_rate_limit(message: str) -> bool:
    """Whether a 429 means "slower", not "no"."""
    return bool(_RATE.search(message))


def error_of(status: int, message: str, doing: str) -> CloudError | UserError:
    """The error for an HTTP status and the API's message, as one line."""
    found = " ".join(message.split()) or f"status {status}"
    if _STOCK.search(message):
        return Stockout(f"no capacity to {doing}", found=found, fix="another zone may have some")
    if _QUOTA.search(message) and not is_rate_limit(message) and status in (403, 429):
        return Quota(f"no quota to {doing}", found=found, fix="ask for quota, or use another region or type")
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


Read = TypeVar("Read")


def _answer(what: str) -> Callable[[Callable[[Mapping[str, Any]], Read]], Callable[[Mapping[str, Any]], Read]]:
    """A reader of the API's JSON: what is none is an error of the cloud's, in one line."""

    def wrapped(read: Callable[[Mapping[str, Any]], Read]) -> Callable[[Mapping[str, Any]], Read]:
        @wraps(read)
        def checked(raw: Mapping[str, Any]) -> Read:
            with untrusted(Unavailable, f"the API's answer is no {what}", fix="try again later"):
                return read(raw)

        return checked

    return wrapped


def _seconds(text: str | None) -> float:
    if not text:
        return 0.0
    # Nanoseconds, which the API sends, are more than fromisoformat takes.
    text = re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")
    return datetime.fromisoformat(text).timestamp()


def _parts(name: str) -> tuple[str, str]:
    words = name.split("/")
    return words[3], words[-1]


@_answer("node")
def read_node(raw: Mapping[str, Any]) -> Node:
    """A node from the API's JSON."""
    zone, name = _parts(raw["name"])
    scheduling = raw.get("schedulingConfig", {})
    return Node(
        name=name,
        zone=zone,
        state=NodeState.parse(raw.get("state")),
        accelerator_type=raw.get("acceleratorType", ""),
        uid=str(raw.get("id") or raw.get("createTime", "")),
        created=_seconds(raw.get("createTime")),
        preemptible=bool(scheduling.get("preemptible") or scheduling.get("spot")),
        labels=dict(raw.get("labels", {})),
        metadata=dict(raw.get("metadata", {})),
        endpoints=tuple(
            Endpoint(end.get("ipAddress", ""), end.get("accessConfig", {}).get("externalIp"))
            for end in raw.get("networkEndpoints", [])
        ),
        health=raw.get("healthDescription", ""),
        queued=_parts(raw["queuedResource"])[1] if raw.get("queuedResource") else None,
        request=_request_of(raw),
    )


def _request_of(raw: Mapping[str, Any]) -> NodeRequest:
    scheduling, network = raw.get("schedulingConfig", {}), raw.get("networkConfig", {})
    return NodeRequest(
        accelerator_type=raw.get("acceleratorType", ""),
        runtime_version=raw.get("runtimeVersion", ""),
        preemptible=bool(scheduling.get("preemptible")),
        spot=bool(scheduling.get("spot")),
        reserved=bool(scheduling.get("reserved")),
        network=network.get("network"),
        subnetwork=network.get("subnetwork"),
        external_ips=bool(network.get("enableExternalIps", False)),
        service_account=raw.get("serviceAccount", {}).get("email"),
        labels=dict(raw.get("labels", {})),
        metadata=dict(raw.get("metadata", {})),
        tags=tuple(raw.get("tags", ())),
    )


@_answer("queued resource")
def read_queued(raw: Mapping[str, Any]) -> QueuedResource:
    """A queued resource from the API's JSON, of either version."""
    zone, name = _parts(raw["name"])
    specs = raw.get("tpu", {}).get("nodeSpec", [])
    state = raw.get("state", {})
    names: list[str] = []
    prefix = None
    for spec in specs:
        many = spec.get("multisliceParams") or spec.get("multiNodeParams")
        if many:
            prefix = many.get("nodeIdPrefix") or name
            names.extend(f"{prefix}-{number}" for number in range(int(many["nodeCount"])))
        elif spec.get("nodeId"):
            names.append(spec["nodeId"])
    node = specs[0].get("node", {}) if specs else {}
    return QueuedResource(
        name=name,
        zone=zone,
        state=QueuedState.parse(state.get("state")),
        nodes=tuple(names),
        prefix=prefix,
        best_effort="bestEffort" in raw,
        created=_seconds(raw.get("createTime")),
        accelerator_type=node.get("acceleratorType", ""),
        labels=dict(node.get("labels", {})),
        detail=state.get("failedData", {}).get("error", {}).get("message", ""),
    )


@_answer("operation")
def read_operation(raw: Mapping[str, Any]) -> Operation:
    """An operation from the API's JSON; its failure, if any, as a typed error."""
    zone, name = _parts(raw["name"])
    meta = raw.get("metadata", {})
    target = str(meta.get("target", "")).rpartition("/")[2]
    verb = str(meta.get("verb", ""))
    error = None
    if raw.get("error"):
        code = int(raw["error"].get("code", 13))
        doing = f"{verb or 'change'} {target or name} in {zone}"
        error = error_of(_STATUS_OF_CODE.get(code, 500), raw["error"].get("message", ""), doing)
    return Operation(name=name, zone=zone, done=bool(raw.get("done")), error=error, target=target, verb=verb)


def node_body(request: NodeRequest) -> dict[str, Any]:
    """A request as the API's JSON."""
    network = {"enableExternalIps": request.external_ips}
    scheduling = {name: True for name in ("preemptible", "spot", "reserved") if getattr(request, name)}
    body: dict[str, Any] = {
        "acceleratorType": request.accelerator_type,
        "runtimeVersion": request.runtime_version,
        "networkConfig": {
            **network,
            **({"network": request.network} if request.network else {}),
            **({"subnetwork": request.subnetwork} if request.subnetwork else {}),
        },
        "schedulingConfig": scheduling,
        "labels": dict(request.labels),
        "metadata": dict(request.metadata),
        "tags": list(request.tags),
        # The machine reads and writes the bucket, and deletes itself when its work is done.
        "serviceAccount": {
            **({"email": request.service_account} if request.service_account else {}),
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        },
    }
    return {key: value for key, value in body.items() if value not in ({}, [])}


def queued_body(request: QueuedRequest, parent: str, name: str, *, alpha: bool) -> dict[str, Any]:
    """A queued request as the API's JSON. Multislice is spelled differently in the two versions."""
    node = node_body(request.node)
    scheduling = node.pop("schedulingConfig", {})
    spec: dict[str, Any] = {"parent": parent, "node": node}
    if request.node_count > 1 or request.node_prefix:
        many = {"nodeCount": request.node_count, "nodeIdPrefix": request.node_prefix or name}
        spec["multiNodeParams" if alpha else "multisliceParams"] = many
    else:
        spec["nodeId"] = name
    body: dict[str, Any] = {"tpu": {"nodeSpec": [spec]}}
    if request.best_effort:
        body["bestEffort"] = {}
    elif scheduling.get("reserved"):
        body["guaranteed"] = {"reserved": True}
    elif scheduling:
        body["spot"] = {}
    return body
