"""Queued resources by hand: machines that stand in the cloud's queue, several acting together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spile.errors import CloudError
from spile.fleet.manage import NodeResult, by_zone, pause, settle
from spile.fleet.pins import slice_secret
from spile.fleet.provider import Missing, Provider, QueuedRequest, QueuedResource, QueuedState
from spile.fleet.spec import FLEET_LABEL, FleetSpec

__all__ = ["queue", "unqueue", "wait_for_queued"]


def queue(
    provider: Provider, fleet: FleetSpec, prefix: str, count: int, *, name: str | None = None
) -> list[NodeResult]:
    """One queued resource in each zone, of ``count`` nodes that act together: multislice."""
    request = QueuedRequest(
        replace(
            fleet.machine,
            labels={**fleet.machine.labels, **fleet.labels},
            metadata={**fleet.machine.metadata, **slice_secret()},  # one for all: they hold one roll call
        ),
        node_count=count,
        node_prefix=prefix,
        best_effort=fleet.best_effort,
    )

    def zone_work(zone: str) -> list[NodeResult]:
        provider.create_queued(zone, name or prefix, request)
        return [NodeResult(name or prefix, zone, "asked for", f"{count} nodes {prefix}-0 …")]

    return by_zone(fleet.zones, zone_work)


def wait_for_queued(provider: Provider, zone: str, name: str, *, every: float | None = None) -> QueuedResource:
    """Wait until a queued resource is ACTIVE; one that failed or was suspended never will be."""
    while True:
        found = next((each for each in provider.queued(zone) if each.name == name), None)
        if found is None:
            raise Missing(f"queued resource {name} is not in {zone} any more")
        if found.state is QueuedState.ACTIVE:
            return found
        if found.state in (QueuedState.FAILED, QueuedState.SUSPENDED, QueuedState.SUSPENDING):
            detail = found.detail or found.state.meaning
            raise CloudError(f"queued resource {name} in {zone} is {found.state.value}", found=detail)
        pause(every)


def unqueue(provider: Provider, zones: Sequence[str], name: str, fleet: str, *, wait: bool = True) -> list[NodeResult]:
    """Delete a queued resource of the fleet and its nodes, in each of these zones where it is."""

    def zone_work(zone: str) -> list[NodeResult]:
        found = [each for each in provider.queued(zone) if each.name == name]
        if not found:
            return []
        if found[0].labels.get(FLEET_LABEL) != fleet:
            return [NodeResult(name, zone, "skipped", f"it is not of fleet {fleet}")]
        operation = provider.delete_queued(zone, name, force=True)
        if wait:
            settle(provider, operation)
        return [NodeResult(name, zone, "deleted" if wait else "deleting")]

    return by_zone(zones, zone_work)
