"""Malformed answers of the Cloud TPU API: each ends in one line, and none is mistaken for an empty list of machines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from spile.errors import SpileError
from spile.fleet.cloud_tpu import CloudSettings, CloudTpu
from spile.fleet.provider import NodeRequest

NAME = "projects/p/locations/z/nodes/n"
BODIES: dict[str, bytes] = {
    "empty": b"",
    "page of a proxy": b"<html><body>Sign in</body></html>",
    "cut off": json.dumps({"nodes": [{"name": NAME}]}).encode()[:-3],
    "error with status 200": b'{"error": {"code": 403, "message": "no", "status": "PERMISSION_DENIED"}}',
    "number": b"3",
    "list": b"[]",
    "deep": b"[" * 200_000,
    "not UTF-8": b"\xff\xfe{}",
    "items that are text": b'{"nodes": "abc", "queuedResources": "abc", "locations": "abc", "acceleratorTypes": "abc"}',
    "items of text": b'{"nodes": ["abc"], "queuedResources": ["abc"], "locations": [3], "acceleratorTypes": [[]]}',
    "items without a name": b'{"nodes": [{}], "queuedResources": [{}], "locations": {}, "acceleratorTypes": {}}',
    "wrong types": b'{"name": 3, "nodes": [{"name": 3}], "queuedResources": [{"name": []}], "locations": 3, '
    b'"acceleratorTypes": 3, "permissions": 3}',
    "page without end": b'{"nextPageToken": "again"}',
    "token of a wrong type": b'{"nextPageToken": {"a": 1}}',
    "null": b'{"nodes": null, "queuedResources": null, "locations": null, "acceleratorTypes": null}',
}


class Answering(requests.Session):
    """Answers every request with the same bytes."""

    def __init__(self, body: bytes, status: int) -> None:
        super().__init__()
        self.reply = requests.Response()
        self.reply._content, self.reply.status_code = body, status

    def request(self, *_: Any, **__: Any) -> requests.Response:  # type: ignore[override]
        return self.reply


@pytest.mark.parametrize("status", [200, 404, 503])
@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_answer_ends_in_one_line(name: str, status: int) -> None:
    client = CloudTpu(CloudSettings("p"), session=Answering(BODIES[name], status), sleep=lambda _: None)
    calls = {
        "nodes": lambda: client.nodes("z"),
        "node": lambda: client.node("z", "n"),
        "queued": lambda: client.queued("z"),
        "zones": client.zones,
        "accelerator_types": lambda: client.accelerator_types("z"),
        "operation": lambda: client.operation("z", "o"),
        "delete_node": lambda: client.delete_node("z", "n"),
        "create_node": lambda: client.create_node("z", "n", NodeRequest("v3-8", "r")),
    }
    for call in calls.values():
        with pytest.raises(SpileError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_a_list_without_machines_is_an_empty_object() -> None:
    client = CloudTpu(CloudSettings("p"), session=Answering(b"{}\n", 200))
    assert client.nodes("z") == []
