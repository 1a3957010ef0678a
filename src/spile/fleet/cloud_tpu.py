"""The client of the Cloud TPU API: requests, retries, and the conversion of its JSON and errors to our types."""

from __future__ import annotations

import configparser
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import requests

from spile.errors import UserError, untrusted
from spile.fleet.provider import (
    Endpoint,
    LostReply,
    Node,
    NodeRequest,
    NodeState,
    NotAllowed,
    Operation,
    QueuedResource,
    QueuedState,
    Unavailable,
)
from spile.fleet.refusals import error_of, is_rate_limit

_MOST_NODES = 10_000
"""More nodes in one queued resource are an error of the server."""

# Maps the gRPC codes of operations to the HTTP status with the same meaning.
_STATUS_OF_CODE = {3: 400, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 13: 500, 14: 503, 16: 401}


def _reads(what: str) -> ContextDecorator:
    """Return a decorator of a parser of the API's JSON: malformed JSON raises a one-line cloud error."""
    return untrusted(Unavailable, f"the API's answer is not a valid {what}", fix="try again later")


def _seconds(text: str | None) -> float:
    if not text:
        return 0.0
    # The API sends nanoseconds, which fromisoformat does not accept.
    text = re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")
    return datetime.fromisoformat(text).timestamp()


def _parts(name: str) -> tuple[str, str]:
    words = name.split("/")
    return words[3], words[-1]


@_reads("node")
def read_node(raw: Mapping[str, Any]) -> Node:
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


@_reads("queued resource")
def read_queued(raw: Mapping[str, Any]) -> QueuedResource:
    """Parse a queued resource from the API's JSON, of either version."""
    zone, name = _parts(raw["name"])
    specs = raw.get("tpu", {}).get("nodeSpec", [])
    state = raw.get("state", {})
    names: list[str] = []
    prefix = None
    for spec in specs:
        many = spec.get("multisliceParams") or spec.get("multiNodeParams")
        if many:
            prefix = many.get("nodeIdPrefix") or name
            count = int(many["nodeCount"])
            if count > _MOST_NODES:
                raise ValueError(f"{count} nodes in one queued resource")
            names.extend(f"{prefix}-{number}" for number in range(count))
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
        reservation=raw.get("reservationName"),
        created=_seconds(raw.get("createTime")),
        accelerator_type=node.get("acceleratorType", ""),
        labels=dict(node.get("labels", {})),
        detail=state.get("failedData", {}).get("error", {}).get("message", ""),
    )


@_reads("operation")
def read_operation(raw: Mapping[str, Any]) -> Operation:
    """Parse an operation from the API's JSON; its failure, if any, becomes a typed error."""
    zone, name = _parts(raw["name"])
    meta = raw.get("metadata", {})
    target = str(meta.get("target", "")).rpartition("/")[2]
    verb = str(meta.get("verb", ""))
    error = None
    if raw.get("error"):
        code = int(raw["error"].get("code", 13))
        doing, status = f"{verb or 'change'} {target or name} in {zone}", _STATUS_OF_CODE.get(code, 500)
        project, details = raw["name"].split("/")[1], raw["error"].get("details")
        error = error_of(status, raw["error"].get("message", ""), doing, project=project, details=details)
    return Operation(name=name, zone=zone, done=bool(raw.get("done")), error=error)


def node_body(request: NodeRequest) -> dict[str, Any]:
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


def queued_body(
    request: NodeRequest, parent: str, name: str, count: int, prefix: str | None, best_effort: bool
) -> dict[str, Any]:
    """Return a queued request as the API's JSON. v2alpha1, which best effort needs, spells multislice differently.

    A reservation is named in full, as gcloud names it: ``-`` is any reservation of the project.
    """
    node = node_body(request)
    scheduling = node.pop("schedulingConfig", {})
    spec: dict[str, Any] = {"parent": parent, "node": node}
    if count > 1 or prefix:
        many = {"nodeCount": count, "nodeIdPrefix": prefix or name}
        spec["multiNodeParams" if best_effort else "multisliceParams"] = many
    else:
        spec["nodeId"] = name
    body: dict[str, Any] = {"tpu": {"nodeSpec": [spec]}}
    if best_effort:
        body["bestEffort"] = {}
    elif scheduling.get("reserved"):
        reservation = request.reservation or "-"
        body["reservationName"] = reservation if "/" in reservation else f"{parent}/reservations/{reservation}"
    elif scheduling:
        body["spot"] = {}
    return body


_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
TPU_ENDPOINT = "https://tpu.googleapis.com/"


@dataclass(frozen=True)
class CloudSettings:
    """The project and the address of the API."""

    project: str
    zone: str | None = None
    endpoint: str = TPU_ENDPOINT
    anonymous: bool = False
    """Whether to send no credentials, which a local fake of the API does not need."""

    def api(self, name: str) -> str:
        """Return the address of another Google API, such as ``iam``. A fake serves all APIs at one address."""
        return f"https://{name}.googleapis.com/" if self.endpoint == TPU_ENDPOINT else self.endpoint


def _configuration(environment: Mapping[str, str]) -> configparser.ConfigParser:
    home = Path(environment.get("HOME") or Path.home())
    folder = Path(environment.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")
    name = environment.get("CLOUDSDK_ACTIVE_CONFIG_NAME")
    if not name:
        active = folder / "active_config"
        name = active.read_text(errors="replace").strip() if active.is_file() else "default"
    parser = configparser.ConfigParser(interpolation=None)
    with untrusted(UserError, f"gcloud's settings in {folder} cannot be read", fix="run: gcloud config list"):
        parser.read([folder / "properties", folder / "configurations" / f"config_{name}"])
    return parser


def gcloud_value(section: str, key: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what ``gcloud config get section/key`` would print: the variable first, then gcloud's files."""
    variable = environment.get(f"CLOUDSDK_{section}_{key}".upper())
    if variable:
        return variable
    return _configuration(environment).get(section, key, fallback=None) or None


def read_settings(project: str | None = None, environment: Mapping[str, str] = os.environ) -> CloudSettings:
    """Return the settings from the flags, the environment and gcloud's configuration."""
    project = project or gcloud_value("core", "project", environment) or environment.get("GOOGLE_CLOUD_PROJECT")
    if not project:
        raise UserError("no Google Cloud project", fix="pass --project, or run: gcloud config set project NAME")
    if not _PROJECT.fullmatch(project):
        raise UserError("--project", expected="a project's id: letters, digits, - . and :", found=repr(project))
    endpoint = (
        environment.get("SPILE_TPU_ENDPOINT")
        or gcloud_value("api_endpoint_overrides", "tpu", environment)
        or TPU_ENDPOINT
    )
    disabled = (gcloud_value("auth", "disable_credentials", environment) or "").lower() in ("1", "true", "yes", "on")
    return CloudSettings(
        project=project,
        zone=gcloud_value("compute", "zone", environment),
        endpoint=endpoint.rstrip("/") + "/",
        # Google never uses plain http, so a token must not be sent over it.
        anonymous=disabled or endpoint.startswith("http://"),
    )


_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_TIMEOUT = (10.0, 60.0)
_TRIES = 6


def open_session(*, anonymous: bool) -> requests.Session:
    """Return a session that signs its requests with the user's application-default credentials."""
    if anonymous:
        return requests.Session()
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import AuthorizedSession

    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as error:
        raise NotAllowed("no Google credentials", fix="run: gcloud auth application-default login") from error
    session: requests.Session = AuthorizedSession(credentials)
    return session


class CloudTpu:
    """The client of the Cloud TPU API or of a server that implements it. Safe to use from several threads.

    Methods raise the errors of :mod:`~spile.fleet.provider` and never repeat a request that may have been carried out.
    """

    def __init__(
        self,
        settings: CloudSettings,
        *,
        session: requests.Session | None = None,
        sleep: Callable[[float], None] = time.sleep,
        tries: int = _TRIES,
    ) -> None:
        self._settings = settings
        if session is not None:
            self._session = session
        self._sleep = sleep
        self._tries = tries

    @property
    def project(self) -> str:
        return self._settings.project

    @cached_property
    def _session(self) -> requests.Session:
        """The session, opened by the first request: a dry run needs no credentials."""
        session = open_session(anonymous=self._settings.anonymous)
        # With the default pool of ten connections, requests for more than ten zones would wait and log warnings.
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=64)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        return session

    def has_credentials(self) -> bool:
        try:
            return self._session is not None
        except NotAllowed:
            return False

    def close(self) -> None:
        if "_session" in self.__dict__:
            self._session.close()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        version: str = "v2",
        api: str | None = None,
    ) -> dict[str, Any]:
        url = f"{self._settings.api(api) if api else self._settings.endpoint}{version}/{path}"
        for attempt in range(1, self._tries + 1):
            error, again = self._once(method, url, doing, body, params)
            if isinstance(error, dict):
                return error
            if not again or attempt == self._tries:
                raise error
            self._sleep(min(30.0, 2.0 ** (attempt - 2)) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def _once(
        self, method: str, url: str, doing: str, body: Mapping[str, Any] | None, params: Mapping[str, str] | None
    ) -> tuple[Any, bool]:
        """Send the request once; return the answer, or the error, and whether a retry is safe and may help."""
        from google.auth.exceptions import GoogleAuthError

        repeatable = method != "POST"
        try:
            reply = self._session.request(method, url, json=body, params=params, timeout=_TIMEOUT)
        except GoogleAuthError as error:
            return NotAllowed(
                f"cannot {doing}", found=str(error), fix="run: gcloud auth application-default login"
            ), False
        except requests.exceptions.RequestException as error:
            if _never_sent(error):
                return Unavailable(f"cannot {doing}", found=_describe(error), fix="check the network"), True
            return LostReply(f"no answer to: {doing}", found=_describe(error)), repeatable
        if reply.ok:
            return _parse_reply(reply, doing)
        message, details = _message(reply)
        slower = reply.status_code == 429 and is_rate_limit(message)
        again = slower or reply.status_code == 503 or (repeatable and reply.status_code >= 500)
        return error_of(reply.status_code, message, doing, project=self.project, details=details), again

    def _pages(
        self, path: str, key: str, doing: str, version: str = "v2", api: str | None = None
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token, seen = "", set[str]()
        while True:
            params = {"pageSize": "500", **({"pageToken": token} if token else {})}
            page = self._send("GET", path, doing, params=params, version=version, api=api)
            with untrusted(Unavailable, f"the API's answer is not a valid page of {key}", fix="try again later"):
                items = page.get(key, [])
                if not isinstance(items, list) or "error" in page:  # an empty list would mean: no machines
                    raise ValueError(str(page)[:100])
                found.extend(dict(each) for each in items)
                token = str(page.get("nextPageToken") or "")
                if token in seen:
                    raise ValueError("a page that was read already")
            if not token:
                return found
            seen.add(token)

    def _parent(self, zone: str) -> str:
        return f"projects/{self._settings.project}/locations/{zone}"

    # -- nodes ------------------------------------------------------------------------------------------------------

    def nodes(self, zone: str) -> list[Node]:
        """Return all nodes of a zone; ``-`` means every zone."""
        return [read_node(raw) for raw in self._pages(f"{self._parent(zone)}/nodes", "nodes", f"list TPUs in {zone}")]

    def node(self, zone: str, name: str) -> Node:
        return read_node(self._send("GET", f"{self._parent(zone)}/nodes/{name}", f"get TPU {name} in {zone}"))

    def create_node(self, zone: str, name: str, request: NodeRequest) -> Operation:
        """Request a node. A stockout is reported by the operation later."""
        doing = f"create TPU {name} ({request.accelerator_type}) in {zone}"
        path = f"{self._parent(zone)}/nodes"
        return read_operation(self._send("POST", path, doing, body=node_body(request), params={"nodeId": name}))

    def delete_node(self, zone: str, name: str) -> Operation:
        return read_operation(
            self._send("DELETE", f"{self._parent(zone)}/nodes/{name}", f"delete TPU {name} in {zone}")
        )

    def label_node(self, zone: str, name: str, labels: Mapping[str, str]) -> Operation:
        return self._patch(zone, name, {"labels": dict(labels)}, "label")

    def set_metadata(self, zone: str, name: str, metadata: Mapping[str, str]) -> Operation:
        return self._patch(zone, name, {"metadata": dict(metadata)}, "change the metadata of")

    def _patch(self, zone: str, name: str, body: Mapping[str, Any], verb: str) -> Operation:
        path = f"{self._parent(zone)}/nodes/{name}"
        mask = {"updateMask": ",".join(body)}
        return read_operation(self._send("PATCH", path, f"{verb} TPU {name} in {zone}", body=body, params=mask))

    def operation(self, zone: str, name: str) -> Operation:
        path = f"{self._parent(zone)}/operations/{name}"
        return read_operation(self._send("GET", path, f"get operation {name} in {zone}"))

    # -- queued resources -------------------------------------------------------------------------------------------

    def queued(self, zone: str) -> list[QueuedResource]:
        path = f"{self._parent(zone)}/queuedResources"
        doing = f"list queued resources in {zone}"
        # v2 does not show which of them are best effort.
        return [read_queued(raw) for raw in self._pages(path, "queuedResources", doing, version="v2alpha1")]

    def create_queued(
        self,
        zone: str,
        name: str,
        request: NodeRequest,
        *,
        count: int = 1,
        prefix: str | None = None,
        best_effort: bool = False,
    ) -> Operation:
        """Request a queued resource: one node, or ``count`` nodes ``prefix-0`` … that act as one (multislice)."""
        parent = self._parent(zone)
        return read_operation(
            self._send(
                "POST",
                f"{parent}/queuedResources",
                f"queue for {name} ({request.accelerator_type}) in {zone}",
                body=queued_body(request, parent, name, count, prefix, best_effort),
                params={"queuedResourceId": name},
                version="v2alpha1" if best_effort else "v2",
            )
        )

    def delete_queued(self, zone: str, name: str) -> Operation:
        """Delete a queued resource and its nodes."""
        path, doing = f"{self._parent(zone)}/queuedResources/{name}", f"delete queued resource {name} in {zone}"
        return read_operation(self._send("DELETE", path, doing, params={"force": "true"}))

    # -- zones, machine types and permissions -----------------------------------------------------------------------

    def zones(self) -> list[str]:
        path = f"projects/{self._settings.project}/locations"
        return _field_values(self._pages(path, "locations", "list zones"), "locationId")

    def accelerator_types(self, zone: str) -> list[str]:
        raws = self._pages(f"{self._parent(zone)}/acceleratorTypes", "acceleratorTypes", f"list TPU types in {zone}")
        return _field_values(raws, "type")


def _field_values(raws: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    with untrusted(Unavailable, f"the API's answer has an entry without {key}", fix="try again later"):
        return sorted(str(raw[key]) for raw in raws)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _never_sent(error: requests.exceptions.RequestException) -> bool:
    """Return whether no byte of the request can have reached the server."""
    never = isinstance(error, requests.exceptions.ConnectTimeout)
    return never or "NewConnectionError" in str(error) or "NameResolutionError" in str(error)


def _parse_reply(reply: requests.Response, doing: str) -> tuple[dict[str, Any] | Unavailable, bool]:
    """Return the API's answer. A proxy's page is an error: whether the API received the request is not known."""
    try:
        found = reply.json()
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found, False
    shown = " ".join(reply.text[:100].split())
    return Unavailable(f"cannot {doing}", expected="the API's JSON", found=repr(shown), fix="check the network"), False


def _message(reply: requests.Response) -> tuple[str, object]:
    """Return the message and the details of an error."""
    try:
        error = reply.json()["error"]
        return str(error["message"]), error.get("details")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return reply.text[:300], None


def check_zone(provider: CloudTpu, zone: str, accelerator_type: str) -> None:
    """Raise for an unknown zone or machine type before anything is requested."""
    types = _types_of(provider, zone, provider.zones())
    if accelerator_type not in types:
        family = [name for name in types if name.partition("-")[0] == accelerator_type.partition("-")[0]] or types
        raise UserError(
            f"zone {zone} has no {accelerator_type}",
            expected=f"one of {', '.join(family[:12])}",
            fix="choose one with --tpu-type, or other --zones",
        )


def _types_of(provider: CloudTpu, zone: str, zones: Sequence[str]) -> list[str]:
    """Return the machine types of a zone; raise if it is not among the zones with TPUs."""
    if zone not in zones:
        near = [name for name in zones if name.rpartition("-")[0] == zone.rpartition("-")[0]] or zones
        raise UserError(f"zone {zone} has no TPUs", expected=f"one of {', '.join(near[:12])}")
    return provider.accelerator_types(zone)


DEFAULT_TYPES = ("v5litepod-8", "v6e-8", "v4-8", "v3-8")
"""The machine types without --tpu-type, the preferred one first."""


def default_type(provider: CloudTpu, zones: Sequence[str]) -> str:
    """Return the first of the default machine types that every zone offers."""
    known = provider.zones()
    offered = {zone: _types_of(provider, zone, known) for zone in zones}
    for name in DEFAULT_TYPES:
        if all(name in types for types in offered.values()):
            return name
    has = {zone: [name for name in DEFAULT_TYPES if name in types] for zone, types in offered.items()}
    raise UserError(
        f"no machine type is in every zone: {', '.join(zones)}",
        expected=f"one of {', '.join(DEFAULT_TYPES)}",
        found="; ".join(f"{zone}: {', '.join(names) or 'none of them'}" for zone, names in has.items()),
        fix="name one with --tpu-type, or use zones that share one",
    )
