"""Every package asks the metadata server by its IP address: a name server that hangs would cost ten seconds each."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import spile
from spile.fleet.home import own_pin
from spile.objects.machine import machine_region
from spile.run.pod.identity import MetadataTimeouts, gce_metadata

NAME = "metadata.google.internal"


def _attribute(folder: Path) -> str | None:
    (folder / "product_name").write_text("Google Compute Engine\n")
    read = gce_metadata({}, product=folder / "product_name", devices=folder, timeouts=MetadataTimeouts(0.5, 0.2))
    assert read is not None
    return read("agent-worker-number")


@pytest.mark.parametrize(
    "ask", [lambda _: machine_region({}), lambda _: own_pin("", "node", "project", "pin") or None, _attribute]
)
def test_no_name_server_is_asked(
    ask: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.delenv(name, raising=False)
    assert ask(tmp_path) is None
    assert {str(ipaddress.ip_address(host)) for host in asked} == {"169.254.169.254"}


def test_the_startup_script_neither() -> None:
    assert NAME not in (Path(spile.__file__).parent / "fleet" / "startup.sh").read_text()
