"""Create, adopt, delete, recreate and find machines. Zones are handled in parallel: a failing zone delays no other."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from spile.errors import CloudError, Interrupted, UserError
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.provider import (
    LostReply,
    Missing,
    NameTaken,
    Node,
    NodeState,
    Operation,
    QueuedResource,
    QueuedState,
    Quota,
    Stage,
    Unavailable,
)
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, Worker, owns
from spile.hosts.hosts import Host

Metadata = Callable[[str], Mapping[str, str]]
"""Returns the metadata of a new machine, given its name."""
T = TypeVar("T")

POLL_SECONDS = 2.0
"""Seconds between two requests for the state of an operation."""
_interrupted = threading.Event()
"""Set by Ctrl+C, so that waits in other threads end. Requests that were sent are still carried out."""


@dataclass(frozen=True)
class NodeResult:
    """The result for one machine."""

    name: str
    zone: str
    outcome: Literal[
        "created", "requested", "exists", "finished", "adopted", "deleted", "deleting", "failed", "skipped"
    ]
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "skipped")


def slice_secret() -> dict[str, str]:
    """Return the metadata entry with the secret by which the hosts of a new machine recognise each other."""
    return {"spile-secret": secrets.token_hex(32)}


def request_machine(
    provider: CloudTpu, fleet: FleetSpec, worker: int, zone: str, name: str, metadata: Metadata
) -> Operation:
    """Request the machine of a worker, as a node or as a queued resource."""
    request = replace(
        fleet.machine,
        labels={**fleet.machine.labels, **fleet.labels, WORKER_LABEL: str(worker)},
        metadata={**fleet.machine.metadata, **metadata(name)},
    )
    if fleet.queued:
        return provider.create_queued(zone, name, request, best_effort=fleet.best_effort)
    return provider.create_node(zone, name, request)


def delete_machine(provider: CloudTpu, fleet: str, zone: str, name: str, queued: str | None) -> Operation:
    """Delete a machine of the fleet. With a queued resource all nodes go, unless some are not the fleet's."""
    if queued is None:
        return provider.delete_node(zone, name)
    found = next((each for each in provider.queued(zone) if each.name == queued), None)
    if found is None:
        raise Missing(f"queued resource {queued} is not in {zone} any more")
    if found.labels.get(FLEET_LABEL, fleet) != fleet:
        raise Missing(f"queued resource {queued} in {zone} now belongs to another fleet")
    if found.labels.get(FLEET_LABEL) is None:  # One machine was adopted; the others may not belong to the fleet.
        others = {node.name for node in provider.nodes(zone) if not owns(fleet, node)}.intersection(found.nodes)
        if others:
            raise CloudError(
                f"queued resource {queued} in {zone} is not deleted",
                expected=f"only machines of fleet {fleet}",
                found=f"also {', '.join(sorted(others))}",
                fix=f"delete it by hand: gcloud compute tpus queued-resources delete {queued} --zone {zone} --force",
            )
    return provider.delete_queued(zone, queued)


def gather_zones(ask: Callable[[str], list[T]], zones: Sequence[str]) -> list[T]:
    """Return what ``ask`` returns for these zones, which are asked in parallel. The first error is raised."""
    _interrupted.clear()
    with ThreadPoolExecutor(max(1, len(zones))) as pool:
        try:
            return [each for found in pool.map(ask, zones) for each in found]
        except KeyboardInterrupt:
            _interrupted.set()
            raise


def list_nodes(provider: CloudTpu, zones: Sequence[str]) -> list[Node]:
    return gather_zones(provider.nodes, zones)


def queued_without_nodes(queued: Iterable[QueuedResource], nodes: Iterable[Node]) -> list[QueuedResource]:
    """Return the queued resources that have none of these nodes: they wait, or they are dead and hold quota."""
    named = {(node.zone, node.queued) for node in nodes}
    return [each for each in queued if (each.zone, each.name) not in named]


def for_each_zone(
    zones: Iterable[str],
    work: Callable[[str], list[NodeResult]],
    report: Callable[[NodeResult], None] = lambda _: None,
) -> list[NodeResult]:
    """Run ``work`` for each zone in its own thread. An error of one zone becomes a failed result."""

    def guarded(zone: str) -> list[NodeResult]:
        try:
            results = work(zone)
        except (CloudError, UserError) as error:
            results = [NodeResult("(all)", zone, "failed", error.line())]
        for result in results:
            report(result)
        return results

    return gather_zones(guarded, list(dict.fromkeys(zones)))


def wait_for_operation(provider: CloudTpu, operation: Operation) -> Operation:
    while not operation.done:
        _pause()
        operation = provider.operation(operation.zone, operation.name)
    return operation


def _pause() -> None:
    """Wait between two requests. Ctrl+C in another thread ends the wait."""
    if _interrupted.wait(POLL_SECONDS):
        raise Interrupted(
            "stopped waiting", fix="the cloud continues with these requests; check them with spile tpu status"
        )


def create(
    provider: CloudTpu,
    fleet: FleetSpec,
    metadata: Metadata,
    *,
    wait: bool = True,
    report: Callable[[NodeResult], None] = lambda _: None,
) -> list[NodeResult]:
    """Create the machines of the fleet that do not exist. After a quota error no more are requested in that zone."""

    def zone_work(zone: str) -> list[NodeResult]:
        existing = {node.name: node for node in provider.nodes(zone)}
        asked: list[tuple[str, Operation | None]] = []
        results: list[NodeResult] = []
        full = ""
        for worker in (worker for worker in fleet.workers if worker.zone == zone):
            if worker.name in existing:
                results.append(_existing_result(fleet, existing[worker.name]))
            elif full:
                results.append(NodeResult(worker.name, zone, "skipped", full))
            else:
                try:
                    asked.append((worker.name, _request(provider, fleet, worker, metadata)))
                except (CloudError, UserError) as error:
                    results.append(NodeResult(worker.name, zone, "failed", error.line()))
                    full = error.line() if isinstance(error, Quota) else ""
        for name, operation in asked:
            if wait and operation is not None:
                results.append(_wait_until_created(provider, fleet.name, zone, name, operation))
            else:
                results.append(NodeResult(name, zone, "requested"))
        return results

    return for_each_zone([worker.zone for worker in fleet.workers], zone_work, report)


def _existing_result(fleet: FleetSpec, node: Node) -> NodeResult:
    if not owns(fleet.name, node):
        taken = NameTaken(
            f"{node.name} in {node.zone} is not of fleet {fleet.name}",
            found=f"fleet {node.labels.get(FLEET_LABEL, 'none')}",
            fix=f"take it over with --adopt {node.name}, or use other zones",
        )
        return NodeResult(node.name, node.zone, "failed", taken.line())
    if node.state.stage is Stage.DEAD:
        detail = f"it is {node.state.value}; create it again with: spile tpu recreate-preempted"
        return NodeResult(node.name, node.zone, "failed", detail)
    return NodeResult(node.name, node.zone, "exists", node.state.value)


def _request(provider: CloudTpu, fleet: FleetSpec, worker: Worker, metadata: Metadata) -> Operation | None:
    """Request a machine. Return None if the answer was lost and the machine exists."""
    try:
        return request_machine(provider, fleet, worker.id, worker.zone, worker.name, metadata)
    except (LostReply, Unavailable):
        with suppress(CloudError, UserError):
            if owns(fleet.name, provider.node(worker.zone, worker.name)):
                return None
        raise


def _wait_until_created(provider: CloudTpu, fleet: str, zone: str, name: str, operation: Operation) -> NodeResult:
    """Wait for a machine; delete what a failed request leaves, because it holds quota."""
    try:
        error = wait_for_operation(provider, operation).error
    except (CloudError, UserError) as unknown:
        detail = f"its state is unknown; check it with spile tpu status: {unknown.line()}"
        return NodeResult(name, zone, "requested", detail)
    if error is None:
        return NodeResult(name, zone, "created")
    left = ""
    try:
        node = provider.node(zone, name)
        if owns(fleet, node) and node.state.stage is not Stage.ENDING:
            provider.delete_node(zone, name)
            left = " (what it left is being deleted)"
    except Missing:
        left = " (it left nothing behind)"
    except (CloudError, UserError):
        left = " (it may have left something behind; check with spile tpu status)"
    return NodeResult(name, zone, "failed", error.line() + left)


def _label(provider: CloudTpu, fleet: str, node: Node, worker: int | None) -> NodeResult:
    labels = {**node.labels, FLEET_LABEL: fleet}
    if worker is not None:
        labels[WORKER_LABEL] = str(worker)
    wait_for_operation(provider, provider.label_node(node.zone, node.name, labels))
    return NodeResult(node.name, node.zone, "adopted", f"as worker {worker}" if worker is not None else "")


def _named_nodes(provider: CloudTpu, zones: Sequence[str], names: Collection[str]) -> dict[str, Node]:
    nodes = {node.name: node for node in list_nodes(provider, zones) if node.name in names}
    missing = sorted(set(names) - set(nodes))
    if missing:
        raise UserError(f"no machine {', '.join(missing)} in {', '.join(zones)}", fix="check --zones")
    return nodes


def named_workers(provider: CloudTpu, zones: Sequence[str], names: Sequence[str]) -> tuple[Worker, ...]:
    """Return a worker for each of these existing machines, in the given order."""
    nodes = _named_nodes(provider, zones, names)
    return tuple(Worker(number, name, nodes[name].zone) for number, name in enumerate(dict.fromkeys(names)))


def adopt(provider: CloudTpu, fleet: FleetSpec, names: Collection[str]) -> list[NodeResult]:
    """Label existing machines as the fleet's. A machine with a worker's name becomes that worker's machine."""
    workers = {(worker.zone, worker.name): worker.id for worker in fleet.workers}
    nodes = _named_nodes(provider, fleet.zones, names).values()
    for node in nodes:
        owner = node.labels.get(FLEET_LABEL, fleet.name)
        if owner != fleet.name:
            raise UserError(
                f"{node.name} belongs to another fleet", found=f"fleet {owner}", fix="delete it there first"
            )
    return [_label(provider, fleet.name, node, workers.get((node.zone, node.name))) for node in nodes]


def delete(provider: CloudTpu, nodes: Sequence[Node], fleet: str, *, wait: bool = True) -> list[NodeResult]:
    """Delete machines of the fleet. Machines without the fleet's label are refused."""

    def zone_work(zone: str) -> list[NodeResult]:
        asked: list[tuple[Node, Operation]] = []
        queued: dict[str | None, Operation] = {}
        results: list[NodeResult] = []
        for node in (node for node in nodes if node.zone == zone):
            if not owns(fleet, node):
                results.append(NodeResult(node.name, zone, "skipped", f"it is not of fleet {fleet}"))
                continue
            try:
                if node.queued is None or node.queued not in queued:
                    operation = delete_machine(provider, fleet, zone, node.name, node.queued)
                    queued[node.queued] = operation
                asked.append((node, queued[node.queued]))
            except Missing:
                results.append(NodeResult(node.name, zone, "deleted"))
            except (CloudError, UserError) as error:
                results.append(NodeResult(node.name, zone, "failed", error.line()))
        return [*results, *(_wait_until_deleted(provider, node, operation, wait) for node, operation in asked)]

    return for_each_zone([node.zone for node in nodes], zone_work)


def _wait_until_deleted(provider: CloudTpu, node: Node, operation: Operation, wait: bool) -> NodeResult:
    if not wait:
        return NodeResult(node.name, node.zone, "deleting")
    try:
        error = wait_for_operation(provider, operation).error
    except (CloudError, UserError) as unknown:
        detail = f"requested, but its state is unknown; check it with spile tpu status: {unknown.line()}"
        return NodeResult(node.name, node.zone, "failed", detail)
    return NodeResult(node.name, node.zone, "failed" if error else "deleted", error.line() if error else "")


def recreate(provider: CloudTpu, nodes: Sequence[Node], fleet: str) -> list[NodeResult]:
    """Delete the dead machines of a fleet and create each again with its type, labels and startup script."""
    dead = {(node.zone, node.name): node for node in nodes if owns(fleet, node) and node.state.stage is Stage.DEAD}
    queued = {
        (zone, each.name): each
        for zone in sorted({node.zone for node in dead.values() if node.queued is not None})
        for each in provider.queued(zone)
    }
    deleted = delete(provider, list(dead.values()), fleet)

    def zone_work(zone: str) -> list[NodeResult]:
        results: list[NodeResult] = []
        for name in (result.name for result in deleted if result.zone == zone and not result.failed):
            node = dead[zone, name]
            resource = queued.pop((zone, node.queued or ""), None)
            if node.queued is not None and resource is None:
                results.append(NodeResult(name, zone, "requested", f"with queued resource {node.queued}"))
                continue
            try:
                operation = _request_again(provider, node, resource)
                results.append(_wait_until_created(provider, fleet, zone, name, operation))
            except (CloudError, UserError) as error:
                results.append(NodeResult(name, zone, "failed", error.line()))
        return results

    failed = [result for result in deleted if result.failed]
    return [*failed, *for_each_zone([result.zone for result in deleted if not result.failed], zone_work)]


def _request_again(provider: CloudTpu, node: Node, queued: QueuedResource | None) -> Operation:
    """Request the same machine again, or the whole queued resource that it was part of."""
    if queued is None:
        return provider.create_node(node.zone, node.name, node.request)
    count, prefix = len(queued.nodes) or 1, queued.prefix
    request = replace(node.request, reserved=queued.reservation is not None, reservation=queued.reservation)
    return provider.create_queued(
        node.zone, queued.name, request, count=count, prefix=prefix, best_effort=queued.best_effort
    )


def queue(provider: CloudTpu, fleet: FleetSpec, prefix: str, count: int, name: str) -> list[NodeResult]:
    """Request one queued resource per zone with ``count`` nodes that act together (multislice)."""
    request = replace(
        fleet.machine,
        labels={**fleet.machine.labels, **fleet.labels},
        metadata={**fleet.machine.metadata, **slice_secret()},  # All nodes share one secret, as one worker.
    )

    def zone_work(zone: str) -> list[NodeResult]:
        provider.create_queued(zone, name, request, count=count, prefix=prefix, best_effort=fleet.best_effort)
        return [NodeResult(name, zone, "requested", f"{count} nodes {prefix}-0 …")]

    return for_each_zone(fleet.zones, zone_work)


def wait_for_queued(provider: CloudTpu, zone: str, name: str) -> QueuedResource:
    """Wait until a queued resource is ACTIVE. One that failed or was suspended raises an error."""
    while True:
        found = next((each for each in provider.queued(zone) if each.name == name), None)
        if found is None:
            raise Missing(f"queued resource {name} is not in {zone} any more")
        if found.state is QueuedState.ACTIVE:
            return found
        if found.state in (QueuedState.FAILED, QueuedState.SUSPENDED, QueuedState.SUSPENDING):
            detail = found.detail or found.state.meaning
            raise CloudError(f"queued resource {name} in {zone} is {found.state.value}", found=detail)
        _pause()


def unqueue(provider: CloudTpu, zones: Sequence[str], name: str, fleet: str, *, wait: bool = True) -> list[NodeResult]:
    """Delete a queued resource of the fleet and its nodes, in each of these zones."""

    def zone_work(zone: str) -> list[NodeResult]:
        found = [each for each in provider.queued(zone) if each.name == name]
        if not found:
            return []
        if found[0].labels.get(FLEET_LABEL) != fleet:
            return [NodeResult(name, zone, "skipped", f"it is not of fleet {fleet}")]
        operation = provider.delete_queued(zone, name)
        if wait:
            wait_for_operation(provider, operation)
        return [NodeResult(name, zone, "deleted" if wait else "deleting")]

    return for_each_zone(zones, zone_work)


def slices_named(prefix: str, names: Iterable[str]) -> list[str]:
    """Return the node with exactly that name, or all nodes ``prefix-0``, ``prefix-1``, … by number."""
    known = set(names)
    if prefix in known:
        return [prefix]
    numbered = {name: re.fullmatch(re.escape(prefix) + r"-(\d+)", name) for name in known}
    return sorted((name for name, match in numbered.items() if match), key=lambda name: int(name.rpartition("-")[2]))


def hosts_of(nodes: Iterable[Node], prefix: str, *, internal_ip: bool = False, zone: str | None = None) -> list[Host]:
    """Return every host of every slice that the prefix names. ``zone`` chooses among nodes of the same name."""
    by_name: dict[str, list[Node]] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(node)
    names = slices_named(prefix, by_name)
    if not names:
        found = ", ".join(sorted(by_name)[:8]) + (" …" if len(by_name) > 8 else "") if by_name else "no TPU VM at all"
        raise UserError(
            f"no TPU VM named {prefix}, nor {prefix}-0, {prefix}-1, …",
            found=found,
            fix="check the names with spile tpu list, or give --zone and --project",
        )
    chosen = [_in_one_zone(by_name[name], zone) for name in names]
    unready = [f"{node.name} is {node.state}" for node in chosen if node.state != NodeState.READY]
    if unready:
        raise CloudError(
            "not every slice is READY", found=", ".join(unready), fix="wait, or run: spile tpu recreate-preempted"
        )
    return [host for number, node in enumerate(chosen) for host in _hosts_of_node(node, number, internal_ip)]


def _in_one_zone(nodes: Sequence[Node], zone: str | None) -> Node:
    here = [node for node in nodes if node.zone == zone] or list(nodes)
    if len(here) > 1:
        zones = ", ".join(sorted(node.zone for node in here))
        raise UserError(f"{here[0].name} is in {len(here)} zones", found=zones, fix="choose one with --zone")
    return here[0]


def _hosts_of_node(node: Node, number: int, internal_ip: bool) -> list[Host]:
    hosts = []
    for worker, end in enumerate(node.endpoints):
        address = end.internal if internal_ip else end.external or end.internal
        if not address:
            raise CloudError(f"{node.name} has no address for worker {worker}", fix="wait until it is READY")
        alone = len(node.endpoints) == 1
        hosts.append(
            Host(node.name, node.uid or node.name, worker, address, number, end.internal or address, alone=alone)
        )
    if not hosts:
        raise CloudError(f"{node.name} has no network endpoint", fix="wait until it is READY")
    return hosts


def find_hosts(prefix: str, *, project: str | None, zone: str | None, internal_ip: bool) -> list[Host]:
    settings = read_settings(project)
    nodes = CloudTpu(settings).nodes(zone or "-")
    return hosts_of(nodes, prefix, internal_ip=internal_ip, zone=zone or settings.zone)
