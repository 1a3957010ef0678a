"""What a machine may run: its own metadata names the sha256 of ``fleet.json``, and that file names those of all else.

Who may write the bucket may not write a machine's metadata: that takes the TPU API. A deploy writes the pin into every
machine of its fleet, and the startup script and the agent use nothing of the bucket that it does not cover.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from importlib import resources

from spile.errors import SpileError
from spile.fleet.manage import NodeResult, by_zone
from spile.fleet.provider import Provider
from spile.fleet.spec import FleetSpec, owns
from spile.objects.cloud.metadata import ask_metadata, google_metadata_url

__all__ = [
    "PIN",
    "REQUIREMENTS",
    "REQUIREMENTS_CUDA",
    "machine_requirements",
    "own_pin",
    "sha256",
    "slice_secret",
    "vouch",
]

PIN = "spile-sha256"
"""The metadata that holds it."""
_PATIENCE = 10.0
"""Seconds for the machine's own answer; the API knows it too."""
REQUIREMENTS, REQUIREMENTS_CUDA = "requirements.txt", "requirements-cuda.txt"


def slice_secret() -> dict[str, str]:
    """For the metadata of a machine that is being made: what its hosts know each other by at the roll call."""
    return {"spile-secret": secrets.token_hex(32)}


def sha256(data: bytes) -> str:
    """As pins are written."""
    return hashlib.sha256(data).hexdigest()


def machine_requirements(name: str = REQUIREMENTS) -> bytes:
    """What a machine with TPUs installs beside the wheel, each by its hashes; the other file: what GPUs need on top."""
    return resources.files("spile.fleet").joinpath(name).read_bytes()


def vouch(provider: Provider, fleet: FleetSpec, home: str) -> list[NodeResult]:
    """Tell every machine of the fleet that this deployment is to be run; those that could not be told."""
    pin = sha256(fleet.to_json())

    def zone_work(zone: str) -> list[NodeResult]:
        failed = []
        for node in provider.nodes(zone):
            if not owns(fleet.name, node) or node.metadata.get("spile-home", home) != home:
                continue
            if node.metadata.get(PIN) == pin:
                continue
            try:
                provider.set_metadata(zone, node.name, {**node.metadata, PIN: pin})
            except SpileError as error:
                failed.append(NodeResult(node.name, zone, "failed", f"it was not told of this deployment: {error}"))
        return failed

    return by_zone(fleet.zones, zone_work)


def own_pin(zone: str, node: str, project: str, wanted: str) -> str:
    """What this machine's metadata says, as its metadata server knows it, else the API."""
    url = google_metadata_url(f"instance/attributes/{PIN}", os.environ)
    said = ask_metadata("GET", url, {"Metadata-Flavor": "Google"}, _PATIENCE) or ""
    if said == wanted or not zone:
        return said
    from spile.fleet.cloud_tpu import CloudTpu, read_settings

    try:
        return CloudTpu(read_settings(os.environ, project=project)).node(zone, node).metadata.get(PIN, "")
    except SpileError as error:
        print(f"spile agent: {error}", flush=True)
        return said
