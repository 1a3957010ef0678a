"""Cloud TPU over plain REST: a thin client of the v2 API (v2alpha1 where only it will do)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import requests

from spile.errors import UserError
from spile.fleet.cloud.answers import (
    error_of,
    is_rate_limit,
    node_body,
    queued_body,
    read_node,
    read_operation,
    read_queued,
)
from spile.fleet.cloud.provider import (
    LostReply,
    Node,
    NodeRequest,
    NotAllowed,
    Operation,
    QueuedRequest,
    QueuedResource,
    Unavailable,
)
from spile.fleet.cloud.settings import CloudSettings

__all__ = ["CloudTpu", "backoff", "check_place", "open_session"]

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_TIMEOUT = (10.0, 60.0)
_TRIES = 6


def backoff(attempt: int, *, base: float = 0.5, cap: float = 30.0, chance: float = 1.0) -> float:
    """Seconds before try ``attempt`` (from 1): doubling, capped, and jittered between half and whole."""
    return float(min(cap, base * 2.0 ** min(attempt - 1, 30)) * (0.5 + 0.5 * chance))


def open_session(settings: CloudSettings) -> requests.Session:
    """A session that signs its requests with the user's application-default credentials."""
    if settings.anonymous:
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
    """The real cloud, or anything that speaks its API. Safe to call from several threads."""

    def __init__(
        self,
        settings: CloudSettings,
        *,
        session: requests.Session | None = None,
        sleep: Callable[[float], None] = time.sleep,
        tries: int = _TRIES,
    ) -> None:
        self._settings = settings
        self._session = session or open_session(settings)
        # The default pool of ten connections makes more zones than that wait, and warns.
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=64)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)
        self._sleep = sleep
        self._tries = tries

    @property
    def project(self) -> str:
        """Whose machines these are."""
        return self._settings.project

    def close(self) -> None:
        """Let go of the connections."""
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
            self._sleep(backoff(attempt, chance=random.random()))
        raise AssertionError("unreachable")

    def _once(
        self, method: str, url: str, doing: str, body: Mapping[str, Any] | None, params: Mapping[str, str] | None
    ) -> tuple[Any, bool]:
        """One try: the answer, or the error and whether trying again is safe and may help."""
        from google.auth.exceptions import GoogleAuthError

        repeatable = method != "POST"
        try:
            reply = self._session.request(method, url, json=body, params=params, timeout=_TIMEOUT)
        except GoogleAuthError as error:
            return NotAllowed(
                f"cannot {doing}", found=str(error), fix="run: gcloud auth application-default login"
            ), False
        except requests.exceptions.ConnectTimeout as error:
            return Unavailable(f"cannot {doing}", found=_cause(error), fix="check the network"), True
        except requests.exceptions.RequestException as error:
            if _never_sent(error):
                return Unavailable(f"cannot {doing}", found=_cause(error), fix="check the network"), True
            return LostReply(f"no answer to: {doing}", found=_cause(error)), repeatable
        if reply.ok:
            return _answer(reply, doing)
        message = _message(reply)
        slower = reply.status_code == 429 and is_rate_limit(message)
        again = slower or reply.status_code == 503 or (repeatable and reply.status_code >= 500)
        return error_of(reply.status_code, message, doing), again

    def _pages(self, path: str, key: str, doing: str, version: str = "v2") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            params = {"pageSize": "500", **({"pageToken": token} if token else {})}
            page = self._send("GET", path, doing, params=params, version=version)
            found.extend(page.get(key, []))
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def _parent(self, zone: str) -> str:
        return f"projects/{self._settings.project}/locations/{zone}"

    # -- nodes ------------------------------------------------------------------------------------------------------

    def nodes(self, zone: str) -> list[Node]:
        """All nodes of a zone; ``-`` means every zone."""
        return [read_node(raw) for raw in self._pages(f"{self._parent(zone)}/nodes", "nodes", f"list TPUs in {zone}")]

    def node(self, zone: str, name: str) -> Node:
        """One node, or Missing."""
        return read_node(self._send("GET", f"{self._parent(zone)}/nodes/{name}", f"look at TPU {name} in {zone}"))

    def create_node(self, zone: str, name: str, request: NodeRequest) -> Operation:
        """Ask for a node."""
        doing = f"create TPU {name} ({request.accelerator_type}) in {zone}"
        path = f"{self._parent(zone)}/nodes"
        return read_operation(self._send("POST", path, doing, body=node_body(request), params={"nodeId": name}))

    def delete_node(self, zone: str, name: str) -> Operation:
        """Ask for its end."""
        return read_operation(
            self._send("DELETE", f"{self._parent(zone)}/nodes/{name}", f"delete TPU {name} in {zone}")
        )

    def label_node(self, zone: str, name: str, labels: Mapping[str, str]) -> Operation:
        """Replace a node's labels."""
        return self._patch(zone, name, {"labels": dict(labels)}, "label")

    def set_metadata(self, zone: str, name: str, metadata: Mapping[str, str]) -> Operation:
        """Replace a node's metadata."""
        return self._patch(zone, name, {"metadata": dict(metadata)}, "change the metadata of")

    def _patch(self, zone: str, name: str, body: Mapping[str, Any], verb: str) -> Operation:
        path = f"{self._parent(zone)}/nodes/{name}"
        mask = {"updateMask": ",".join(body)}
        return read_operation(self._send("PATCH", path, f"{verb} TPU {name} in {zone}", body=body, params=mask))

    def operation(self, zone: str, name: str) -> Operation:
        """How far an operation is."""
        path = f"{self._parent(zone)}/operations/{name}"
        return read_operation(self._send("GET", path, f"look at operation {name} in {zone}"))

    # -- queued resources -------------------------------------------------------------------------------------------

    def queued(self, zone: str) -> list[QueuedResource]:
        """All queued resources of a zone; ``-`` means every zone."""
        path = f"{self._parent(zone)}/queuedResources"
        return [read_queued(raw) for raw in self._pages(path, "queuedResources", f"list queued resources in {zone}")]

    def create_queued(self, zone: str, name: str, request: QueuedRequest) -> Operation:
        """Stand in the queue."""
        alpha = request.best_effort
        parent = self._parent(zone)
        return read_operation(
            self._send(
                "POST",
                f"{parent}/queuedResources",
                f"queue for {name} ({request.node.accelerator_type}) in {zone}",
                body=queued_body(request, parent, name, alpha=alpha),
                params={"queuedResourceId": name},
                # Only v2alpha1 knows bestEffort.
                version="v2alpha1" if alpha else "v2",
            )
        )

    def delete_queued(self, zone: str, name: str, *, force: bool) -> Operation:
        """Leave the queue; ``force`` deletes its nodes too."""
        path = f"{self._parent(zone)}/queuedResources/{name}"
        params = {"force": "true"} if force else {}
        return read_operation(self._send("DELETE", path, f"delete queued resource {name} in {zone}", params=params))

    # -- what there is ----------------------------------------------------------------------------------------------

    def zones(self) -> list[str]:
        """The zones that have TPUs."""
        path = f"projects/{self._settings.project}/locations"
        return sorted(raw["locationId"] for raw in self._pages(path, "locations", "list zones"))

    def accelerator_types(self, zone: str) -> list[str]:
        """What a zone offers."""
        raws = self._pages(f"{self._parent(zone)}/acceleratorTypes", "acceleratorTypes", f"list TPU types in {zone}")
        return sorted(raw["type"] for raw in raws)

    def held(self, api: str, resource: str, permissions: Sequence[str]) -> list[str]:
        """Which of these permissions the account in use has on a project or a service account."""
        body = {"permissions": list(permissions)}
        doing = f"ask what your account may do with {resource}"
        answer = self._send("POST", f"{resource}:testIamPermissions", doing, body=body, version="v1", api=api)
        return [str(each) for each in answer.get("permissions", ())]


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _never_sent(error: requests.exceptions.RequestException) -> bool:
    """Whether no byte of the request can have reached the server."""
    return "NewConnectionError" in str(error) or "NameResolutionError" in str(error)


def _answer(reply: requests.Response, doing: str) -> tuple[dict[str, Any] | Unavailable, bool]:
    """What the API answered; a page of a proxy's in its place is no answer, and whether it was asked is not known."""
    try:
        found = reply.json() if reply.content else {}
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found, False
    shown = " ".join(reply.text[:100].split())
    return Unavailable(f"cannot {doing}", expected="the API's JSON", found=repr(shown), fix="check the network"), False


def _message(reply: requests.Response) -> str:
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text[:300]
    return str(message)


def check_place(provider: CloudTpu, zone: str, accelerator_type: str) -> None:
    """Refuse an unknown zone or type before anything is asked for."""
    zones = provider.zones()
    if zone not in zones:
        near = [name for name in zones if name.rpartition("-")[0] == zone.rpartition("-")[0]] or zones
        raise UserError(f"zone {zone} has no TPUs", expected=f"one of {', '.join(near[:12])}")
    types = provider.accelerator_types(zone)
    if accelerator_type not in types:
        family = [name for name in types if name.partition("-")[0] == accelerator_type.partition("-")[0]] or types
        raise UserError(f"zone {zone} has no {accelerator_type}", expected=f"one of {', '.join(family[:12])}")
