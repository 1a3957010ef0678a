"""Decide what a machine may run, independently of who may write the bucket.

A deploy records the sha256 of its ``fleet.json`` in two places outside the bucket: in the metadata of the fleet's
machines (which takes the TPU API to change) and on the computer that ran ``spile deploy``, one file per fleet in
``~/.local/state/spile/deployed`` (``$XDG_STATE_HOME``). ``fleet.json`` in turn holds the sha256 of every other file.
Machines run, and monitors create machines for, only a ``fleet.json`` that one of the two places names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from spile.errors import CloudError, SpecError, SpileError, UserError
from spile.fleet.history import spec_zones
from spile.fleet.manage import NodeResult, by_zone
from spile.fleet.provider import Provider
from spile.fleet.spec import FleetSpec, owns
from spile.objects import open_folder
from spile.objects.folder import Folder, NotFound
from spile.objects.machine import ask_metadata, google_metadata_url

PIN = "spile-sha256"
"""The key of the metadata entry with the sha256."""
_PATIENCE = 10.0
"""Seconds to wait for the metadata server; the API has the value too."""
REQUIREMENTS, REQUIREMENTS_CUDA = "requirements.txt", "requirements-cuda.txt"


def sha256(data: bytes) -> str:
    """Return the sha256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def machine_requirements(name: str = REQUIREMENTS) -> bytes:
    """Return the pinned requirements of a machine: for TPUs, or the additional ones for GPUs."""
    return resources.files("spile.fleet").joinpath(name).read_bytes()


def pin_machines(provider: Provider, fleet: FleetSpec, home: str) -> list[NodeResult]:
    """Write the sha256 of this deployment into the metadata of every machine; return the failures."""
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
                failed.append(
                    NodeResult(node.name, zone, "failed", f"its metadata does not name this deployment: {error}")
                )
        return failed

    return by_zone(fleet.zones, zone_work)


def own_pin(zone: str, node: str, project: str, wanted: str) -> str:
    """Return the sha256 in this machine's metadata, from the metadata server or the API."""
    url = google_metadata_url(f"instance/attributes/{PIN}", os.environ)
    pinned = ask_metadata("GET", url, {"Metadata-Flavor": "Google"}, _PATIENCE) or ""
    if pinned == wanted or not zone:
        return pinned
    from spile.fleet.cloud_tpu import CloudTpu, read_settings

    try:
        return CloudTpu(read_settings(os.environ, project=project)).node(zone, node).metadata.get(PIN, "")
    except SpileError as error:
        print(f"spile agent: {error}", flush=True)
        return pinned


class NotDeployed(UserError):
    """The bucket contains a deployment that is not known outside the bucket."""


def _state() -> Folder:
    base = os.environ.get("XDG_STATE_HOME")
    return open_folder(str((Path(base) if base else Path.home() / ".local" / "state") / "spile" / "deployed"))


def _key(home: str) -> str:
    return f"{hashlib.sha256(home.encode()).hexdigest()[:32]}.json"


def remember(home: str, pin: str) -> None:
    """Record on this computer which deployment the fleet at ``home`` runs."""
    _state().put(_key(home), json.dumps({"home": home, "sha256": pin}, indent=1).encode())


def known_here(home: str) -> str:
    """Return the sha256 that is recorded on this computer; empty if there is none."""
    try:
        found = json.loads(_state().get(_key(home)))
        return str(found["sha256"]) if found["home"] == home else ""
    except (NotFound, ValueError, KeyError, TypeError):
        return ""


def parse_deployment(text: str) -> str:
    """Parse ``sha256:…`` as ``spile deploy`` prints it."""
    digits = text.strip().lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise SpecError("--deployment", expected="sha256: and 64 digits, as spile deploy printed it", found=repr(text))
    return digits


def remember_deployment(home: str, found: str, deployment: str) -> None:
    """Record the deployment that the user names, if it is the one in the bucket."""
    wanted = parse_deployment(deployment)
    if wanted != found:
        raise NotDeployed(
            f"{home}/fleet.json is not that deployment",
            expected=f"sha256:{wanted}",
            found=f"sha256:{found}",
            fix="check who can write to the bucket, and deploy again",
        )
    remember(home, wanted)


def check_pinned(provider: Provider, home: str, fleet: FleetSpec, found: str) -> NotDeployed | None:
    """Return None if this computer or a machine's metadata names that ``fleet.json``; else the error.

    A value from a machine's metadata is recorded, so that an older ``fleet.json`` is not accepted later.
    """
    known = known_here(home)
    if known == found:
        return None
    for zone in spec_zones(fleet):
        try:
            nodes = provider.nodes(zone)
        except (CloudError, UserError):  # The monitor's round reports a zone that does not answer.
            continue
        if any(_names(node.metadata, home, found) for node in nodes if owns(fleet.name, node)):
            remember(home, found)
            return None
    return NotDeployed(
        f"{home}/fleet.json was deployed neither from this computer nor to a machine of the fleet",
        expected=f"sha256:{known}" if known else "one that is known outside of the bucket",
        found=f"sha256:{found}",
        fix="if spile deploy printed this hash on another computer, run spile monitor "
        f"{home} --deployment sha256:{found}; if not, check who can write to the bucket, and deploy again",
    )


def _names(metadata: Mapping[str, str], home: str, pin: str) -> bool:
    return metadata.get("spile-home") == home and metadata.get(PIN) == pin
