"""Deleting a machine that stands in a queued resource: the whole resource goes, so all of it must be the fleet's."""

from __future__ import annotations

from spile.errors import CloudError
from spile.fleet.cloud.provider import Missing, Operation, Provider
from spile.fleet.spec import FLEET_LABEL, owns

__all__ = ["delete_queued_of"]


def delete_queued_of(provider: Provider, fleet: str, zone: str, name: str) -> Operation:
    """Delete a fleet's queued resource with its nodes, as it is now: one that is, or holds, somebody else's stays."""
    found = next((each for each in provider.queued(zone) if each.name == name), None)
    if found is None:
        raise Missing(f"queued resource {name} is not in {zone} any more")
    if found.labels.get(FLEET_LABEL, fleet) != fleet:
        raise Missing(f"queued resource {name} in {zone} is another fleet's now")
    if found.labels.get(FLEET_LABEL) is None:  # a machine of it was adopted: the others may be anybody's
        others = {node.name for node in provider.nodes(zone) if not owns(fleet, node)}.intersection(found.nodes)
        if others:
            raise CloudError(
                f"queued resource {name} in {zone} is not deleted",
                expected=f"machines of fleet {fleet} alone",
                found=f"{', '.join(sorted(others))} beside them",
                fix=f"delete it by hand: gcloud compute tpus queued-resources delete {name} --zone {zone} --force",
            )
    return provider.delete_queued(zone, name, force=True)
