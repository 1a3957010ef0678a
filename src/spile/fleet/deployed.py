"""What was deployed, as it is known outside of the bucket: who may write a bucket may not say what machines run.

A deploy leaves the sha256 of its ``fleet.json`` on the computer that it was typed on, a file for each fleet in
``~/.local/state/spile/deployed`` (``$XDG_STATE_HOME``), and, through the TPU API, in the metadata of the fleet's
machines. A monitor makes machines for a ``fleet.json`` that one of the two names, and for no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from spile.errors import CloudError, SpecError, UserError
from spile.fleet.history import spec_zones
from spile.fleet.pins import PIN
from spile.fleet.provider import Provider
from spile.fleet.spec import FleetSpec, owns
from spile.objects import open_folder
from spile.objects.folder import Folder, NotFound

__all__ = ["NotDeployed", "known_here", "parse_deployment", "remember", "told", "vouched"]


class NotDeployed(UserError):
    """The bucket holds a deployment that nobody is known to have made."""


def _state() -> Folder:
    base = os.environ.get("XDG_STATE_HOME")
    return open_folder(str((Path(base) if base else Path.home() / ".local" / "state") / "spile" / "deployed"))


def _key(home: str) -> str:
    return f"{hashlib.sha256(home.encode()).hexdigest()[:32]}.json"


def remember(home: str, pin: str) -> None:
    """From now on that is what the fleet at ``home`` runs, and nothing that was deployed before."""
    _state().put(_key(home), json.dumps({"home": home, "sha256": pin}, indent=1).encode())


def known_here(home: str) -> str:
    """The sha256 that this computer remembers; empty where it deployed nothing there and was told of nothing."""
    try:
        found = json.loads(_state().get(_key(home)))
        return str(found["sha256"]) if found["home"] == home else ""
    except (NotFound, ValueError, KeyError, TypeError):
        return ""


def parse_deployment(text: str) -> str:
    """``sha256:…``, as ``spile deploy`` prints it."""
    digits = text.strip().lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise SpecError("--deployment", expected="sha256: and 64 digits, as spile deploy printed it", found=repr(text))
    return digits


def told(home: str, found: str, deployment: str) -> None:
    """Somebody who knows says what was deployed: remembered, if it is what the bucket holds."""
    wanted = parse_deployment(deployment)
    if wanted != found:
        raise NotDeployed(
            f"{home}/fleet.json is not that deployment",
            expected=f"sha256:{wanted}",
            found=f"sha256:{found}",
            fix="where nobody deployed since, somebody else wrote the bucket: deploy again, and see who may write it",
        )
    remember(home, wanted)


def vouched(provider: Provider, home: str, fleet: FleetSpec, found: str) -> NotDeployed | None:
    """None where this computer, or the metadata of a machine of the fleet, names that ``fleet.json``; else why not.

    What a machine named is remembered, so that an older one, put back, is none that this computer knows.
    """
    known = known_here(home)
    if known == found:
        return None
    for zone in spec_zones(fleet):
        try:
            nodes = provider.nodes(zone)
        except (CloudError, UserError):  # a zone that does not answer names nothing; the round's own look tells of it
            continue
        if any(_names(node.metadata, home, found) for node in nodes if owns(fleet.name, node)):
            remember(home, found)
            return None
    return NotDeployed(
        f"{home}/fleet.json was deployed neither from this computer nor to a machine of the fleet",
        expected=f"sha256:{known}" if known else "one that is known outside of the bucket",
        found=f"sha256:{found}",
        fix="if that is what spile deploy printed elsewhere: spile monitor "
        f"{home} --deployment sha256:{found}; if not, see who may write the bucket, and deploy again",
    )


def _names(metadata: Mapping[str, str], home: str, pin: str) -> bool:
    return metadata.get("spile-home") == home and metadata.get(PIN) == pin
