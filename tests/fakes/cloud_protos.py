"""Google's own definition of the Cloud TPU API, as the judge of the fake's requests and answers.

The classes are those of the PyPI package ``google-cloud-tpu``. A field that they do not have is refused with the text
that Google's servers send.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import google.cloud.common  # noqa: F401  registers the type of an operation's metadata
from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.protobuf import json_format

_MODULES = {"v2": tpu_v2, "v2alpha1": tpu_v2alpha1}
_ENTITIES = {
    "nodes": "Node",
    "queuedResources": "QueuedResource",
    "acceleratorTypes": "AcceleratorType",
    "runtimeVersions": "RuntimeVersion",
}
_VERBS = {"POST": "Create", "PATCH": "Update", "DELETE": "Delete"}
_SYSTEM_PARAMETERS = {"alt", "$alt", "$.xgafv", "prettyPrint", "fields", "key", "quotaUser", "uploadType"}
"""Query parameters that every API of Google has."""
_NEWER = {("v2alpha1", "provisioningModel"), ("v2alpha1", "runDuration"), ("v2alpha1", "trafficConfig")}
"""Fields that gcloud 528's ``tpu_v2alpha1_messages.QueuedResource`` has, but not these classes."""


class Refused(ValueError):
    """A request that Google would refuse with status 400; the message is Google's."""


def check_request(
    version: str, method: str, kind: str, named: bool, params: Mapping[str, str], body: Mapping[str, Any]
) -> None:
    """Raise if a parameter or a field of the body is unknown to this version of the API."""
    if kind not in _ENTITIES:
        return
    entity, module = _ENTITIES[kind], _MODULES[version]
    verb = _VERBS.get(method) or ("Get" if named else "List")
    plural = "s" if verb == "List" else ""
    request = getattr(module, f"{verb}{entity}{plural}Request").pb()
    fields = {name for field in request.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    for name in params:
        if name not in fields | _SYSTEM_PARAMETERS:
            raise Refused(
                f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter. '
                f"Field '{name}' could not be found in request message."
            )
    if verb not in ("Create", "Update"):
        if body:
            raise Refused(f'Invalid JSON payload received. Unknown name "{next(iter(body))}": Cannot find field.')
        return
    try:
        json_format.ParseDict(known_fields(version, body), getattr(module, entity).pb()())
    except json_format.ParseError as error:
        raise Refused(_google_text(str(error), re.sub(r"(?<!^)([A-Z])", r"_\1", entity).lower())) from error


def _google_text(text: str, field: str) -> str:
    """Return Google's text for an error of the parser: ``Unknown name "x" at 'queued_resource.guaranteed'``."""
    found = re.search(r'has no field named "(\w+)" at "\w+\.?([^"]*)"', text)
    if found is None:
        return f"Invalid value at '{field}': {text}"
    inner = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", found[2]).lower()
    place = ".".join(part for part in (field, inner) if part)
    return f"Invalid JSON payload received. Unknown name \"{found[1]}\" at '{place}': Cannot find field."


def known_fields(version: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without the fields that only newer classes have."""
    return {name: value for name, value in body.items() if (version, name) not in _NEWER}


def as_v2(queued: Mapping[str, Any]) -> dict[str, Any]:
    """Return a queued resource without the fields that v2 does not have."""
    message = json_format.ParseDict(queued, tpu_v2.QueuedResource.pb()(), ignore_unknown_fields=True)
    return dict(json_format.MessageToDict(message))


def check_answer(version: str, method: str, kind: str, named: bool, answer: Mapping[str, Any]) -> None:
    """Raise if the classes cannot have written an answer."""
    module = _MODULES[version]
    if method != "GET" or kind == "operations":
        shape: Any = operations_pb2.Operation
    elif not kind:
        shape = locations_pb2.Location if named else locations_pb2.ListLocationsResponse
    else:
        entity = _ENTITIES[kind]
        shape = getattr(module, entity if named else f"List{entity}sResponse").pb()
    json_format.ParseDict(answer, shape())
