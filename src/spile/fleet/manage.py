"""Create, adopt, delete, recreate and find machines. Zones are handled in parallel: a failing zone delays no other."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from spile.errors import CloudError, Interrupted, SpileError, UserError
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.provider import (
    Life,
    LostReply,
    Missing,
    NameTaken,
    Node,
    NodeRequest,
    NodeState,
    Operation,
    Provider,
    QueuedRequest,
    QueuedResource,
    QueuedState,
    Quota,
    Unavailable,
)
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, Worker, owns
from spile.hosts.hosts import Host

ReportResult = Callable[["NodeResult"], None]

Metadata = Callable[[int], Mapping[str, str]]
"""Return the metadata of the machine of a worker, given the worker's number."""

EVERY = 2.0
"""Seconds between two requests for the state of an operation."""
_stop = threading.Event()
"""Set by Ctrl+C, so that waits in other threads end. Requests that were sent are still carried out."""


@dataclass(frozen=True)
class NodeResult:
    """The result for one machine."""

    name: str
    zone: str
    what: Literal["created", "asked for", "there already", "adopted", "deleted", "deleting", "failed", "skipped"]
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.what in ("failed", "skipped")


def slice_secret() -> dict[str, str]:
    """Return the metadata entry with the secret by which the hosts of a new machine recognise each other."""
    return {"spile-secret": secrets.token_hex(32)}


def request_for(fleet: FleetSpec, worker: int, metadata: Mapping[str, str]) -> NodeRequest:
    labels = {**fleet.machine.labels, **fleet.labels, WORKER_LABEL: str(worker)}
    return replace(fleet.machine, labels=labels, metadata={**fleet.machine.metadata, **metadata})


def delete_queued_of(provider: Provider, fleet: str, zone: str, name: str) -> Operation:
    """Delete a queued resource of the fleet with its nodes, unless it contains machines that are not the fleet's."""
    found = next((each for each in provider.queued(zone) if each.name == name), None)
    if found is None:
        raise Missing(f"queued resource {name} is not in {zone} any more")
    if found.labels.get(FLEET_LABEL, fleet) != fleet:
        raise Missing(f"queued resource {name} in {zone} now belongs to another fleet")
    if found.labels.get(FLEET_LABEL) is None:  # One machine was adopted; the others may not belong to the fleet.
        others = {node.name for node in provider.nodes(zone) if not owns(fleet, node)}.intersection(found.nodes)
        if others:
            raise CloudError(
                f"queued resource {name} in {zone} is not deleted",
                expected=f"only machines of fleet {fleet}",
                found=f"also {', '.join(sorted(others))}",
                fix=f"delete it by hand: gcloud compute tpus queued-resources delete {name} --zone {zone} --force",
            )
    return provider.delete_queued(zone, name, force=True)


def list_nodes(provider: Provider, zones: Sequence[str]) -> list[Node]:
    """Return the nodes of these zones, requested in parallel. The first error is raised."""
    with ThreadPoolExecutor(max(1, len(zones))) as pool:
        return [node for nodes in pool.map(provider.nodes, zones) for node in nodes]


def list_waiting(provider: Provider, zones: Sequence[str], nodes: Sequence[Node]) -> list[QueuedResource]:
    """Return the queued resources of these zones that have none of these nodes."""
    there = {(node.zone, node.queued) for node in nodes} | {(node.zone, node.name) for node in nodes}
    with ThreadPoolExecutor(max(1, len(zones))) as pool:
        found = [each for queued in pool.map(provider.queued, zones) for each in queued]
    return [each for each in found if not {(each.zone, name) for name in (each.name, *each.nodes)} & there]


def by_zone(
    zones: Iterable[str], work: Callable[[str], list[NodeResult]], report: ReportResult = lambda _: None
) -> list[NodeResult]:
    """Run ``work`` for each zone in its own thread. An error of one zone becomes a failed result."""

    def guarded(zone: str) -> list[NodeResult]:
        try:
            return work(zone)
        except (CloudError, UserError) as error:
            failed = NodeResult("(all)", zone, "failed", error.line())
            report(failed)
            return [failed]

    chosen = list(dict.fromkeys(zones))
    _stop.clear()
    with ThreadPoolExecutor(max(1, len(chosen))) as pool:
        waiting = [pool.submit(guarded, zone) for zone in chosen]
        try:
            return [result for each in waiting for result in each.result()]
        except KeyboardInterrupt:
            _stop.set()
            raise


def settle(provider: Provider, operation: Operation, every: float | None = None) -> Operation:
    while not operation.done:
        pause(every)
        operation = provider.operation(operation.zone, operation.name)
    return operation


def pause(every: float | None) -> None:
    """Wait between two requests. Ctrl+C in another thread ends the wait."""
    if _stop.wait(EVERY if every is None else every):
        raise Interrupted(
            "stopped waiting", fix="the cloud continues with these requests; check them with spile tpu status"
        )


def create(
    provider: Provider,
    fleet: FleetSpec,
    metadata: Metadata,
    *,
    adopt_names: Collection[str] = (),
    wait: bool = True,
    report: ReportResult = lambda _: None,
    every: float | None = None,
) -> list[NodeResult]:
    def zone_work(zone: str) -> list[NodeResult]:
        existing = {node.name: node for node in provider.nodes(zone)}
        waiting: list[tuple[Worker, Operation | None]] = []
        results: list[NodeResult] = []
        full = ""
        for worker in (worker for worker in fleet.workers if worker.zone == zone):
            node = existing.get(worker.name)
            if node is not None:
                results.append(_existing(provider, fleet, worker, node, adopt_names))
            elif full:
                results.append(NodeResult(worker.name, zone, "skipped", full))
            else:
                asked = _ask(provider, fleet, worker, metadata)
                if isinstance(asked, Quota):
                    full = asked.line()
                if isinstance(asked, SpileError):
                    results.append(NodeResult(worker.name, zone, "failed", asked.line()))
                else:
                    waiting.append((worker, asked))
        for result in results:
            report(result)
        for worker, operation in waiting:
            result = NodeResult(worker.name, zone, "asked for")
            if wait and operation is not None:
                result = _awaited(provider, fleet, worker, operation, every)
            report(result)
            results.append(result)
        return results

    return by_zone([worker.zone for worker in fleet.workers], zone_work, report)


def _existing(
    provider: Provider, fleet: FleetSpec, worker: Worker, node: Node, adopt_names: Collection[str]
) -> NodeResult:
    if owns(fleet.name, node):
        if node.state.life is Life.DEAD:
            detail = f"it is {node.state.value}; make it anew with: spile tpu recreate-preempted"
            return NodeResult(worker.name, node.zone, "failed", detail)
        return NodeResult(worker.name, node.zone, "there already", node.state.value)
    if worker.name in adopt_names:
        return _label(provider, fleet.name, node, worker.id)
    taken = NameTaken(
        f"{worker.name} in {node.zone} is not of fleet {fleet.name}",
        found=f"fleet {node.labels.get(FLEET_LABEL, 'none')}",
        fix=f"take it over with --adopt {worker.name}, or use other zones",
    )
    return NodeResult(worker.name, node.zone, "failed", taken.line())


def _ask(
    provider: Provider, fleet: FleetSpec, worker: Worker, metadata: Metadata
) -> Operation | CloudError | UserError | None:
    """Request a machine. Return None if the answer was lost and the machine exists."""
    request = request_for(fleet, worker.id, metadata(worker.id))
    try:
        if fleet.queued:
            queued = QueuedRequest(request, best_effort=fleet.best_effort)
            return provider.create_queued(worker.zone, worker.name, queued)
        return provider.create_node(worker.zone, worker.name, request)
    except (LostReply, Unavailable) as error:
        try:
            node = provider.node(worker.zone, worker.name)
        except CloudError:
            return error
        return None if owns(fleet.name, node) else error
    except (CloudError, UserError) as error:
        return error


def _awaited(
    provider: Provider, fleet: FleetSpec, worker: Worker, operation: Operation, every: float | None
) -> NodeResult:
    try:
        operation = settle(provider, operation, every=every)
    except (CloudError, UserError) as error:
        detail = f"its state is unknown; check it with spile tpu status: {error.line()}"
        return NodeResult(worker.name, worker.zone, "asked for", detail)
    if operation.error is None:
        return NodeResult(worker.name, worker.zone, "created")
    detail = operation.error.line()
    try:
        # The remains of a failed request hold quota.
        node = provider.node(worker.zone, worker.name)
        if owns(fleet.name, node) and node.state.life is not Life.LEAVING:
            provider.delete_node(worker.zone, worker.name)
            detail += " (what it left is being deleted)"
    except Missing:
        detail += " (it left nothing behind)"
    except (CloudError, UserError):
        detail += " (it may have left something behind; check with spile tpu status)"
    return NodeResult(worker.name, worker.zone, "failed", detail)


def _label(provider: Provider, fleet: str, node: Node, worker: int | None) -> NodeResult:
    labels = {**node.labels, FLEET_LABEL: fleet}
    if worker is not None:
        labels[WORKER_LABEL] = str(worker)
    settle(provider, provider.label_node(node.zone, node.name, labels))
    return NodeResult(node.name, node.zone, "adopted", f"as worker {worker}" if worker is not None else "")


def named_workers(provider: Provider, zones: Sequence[str], names: Sequence[str]) -> tuple[Worker, ...]:
    """Return a worker for each of these existing machines, in the given order."""
    nodes = {node.name: node for node in list_nodes(provider, zones)}
    missing = [name for name in names if name not in nodes]
    if missing:
        raise UserError(f"no machine {', '.join(missing)} in {', '.join(zones)}", fix="check --zones")
    return tuple(Worker(number, name, nodes[name].zone) for number, name in enumerate(dict.fromkeys(names)))


def adopt(provider: Provider, fleet: FleetSpec, names: Collection[str]) -> list[NodeResult]:
    """Label existing machines as the fleet's. A machine with a worker's name becomes that worker's machine."""
    workers = {(worker.zone, worker.name): worker.id for worker in fleet.workers}
    nodes = [node for node in list_nodes(provider, fleet.zones) if node.name in names]
    missing = set(names) - {node.name for node in nodes}
    if missing:
        raise UserError(f"no machine {', '.join(sorted(missing))} in {', '.join(fleet.zones)}", fix="check --zones")
    other = [node for node in nodes if node.labels.get(FLEET_LABEL, fleet.name) != fleet.name]
    if other:
        found = f"fleet {other[0].labels[FLEET_LABEL]}"
        raise UserError(f"{other[0].name} belongs to another fleet", found=found, fix="delete it there first")
    return [_label(provider, fleet.name, node, workers.get((node.zone, node.name))) for node in nodes]


def delete(
    provider: Provider, nodes: Sequence[Node], fleet: str, *, wait: bool = True, every: float | None = None
) -> list[NodeResult]:
    """Delete machines of the fleet. Machines without the fleet's label are refused."""

    def zone_work(zone: str) -> list[NodeResult]:
        asked: list[tuple[Node, Operation | None]] = []
        queued: dict[str | None, Operation] = {}
        results: list[NodeResult] = []
        for node in (node for node in nodes if node.zone == zone):
            if not owns(fleet, node):
                results.append(NodeResult(node.name, zone, "skipped", f"it is not of fleet {fleet}"))
                continue
            try:
                operation = queued.get(node.queued) or _ask_delete(provider, fleet, node)
                queued |= {} if node.queued is None else {node.queued: operation}
                asked.append((node, operation))
            except Missing:
                asked.append((node, None))
            except (CloudError, UserError) as error:
                results.append(NodeResult(node.name, zone, "failed", error.line()))
        return [*results, *(_deleted(provider, node, operation, wait, every) for node, operation in asked)]

    return by_zone([node.zone for node in nodes], zone_work)


def _deleted(
    provider: Provider, node: Node, operation: Operation | None, wait: bool, every: float | None
) -> NodeResult:
    if operation is None:
        return NodeResult(node.name, node.zone, "deleted")
    if not wait:
        return NodeResult(node.name, node.zone, "deleting")
    try:
        failed = settle(provider, operation, every=every).error
    except (CloudError, UserError) as error:
        detail = f"requested, but its state is unknown; check it with spile tpu status: {error.line()}"
        return NodeResult(node.name, node.zone, "failed", detail)
    return (
        NodeResult(node.name, node.zone, "failed", failed.line())
        if failed
        else NodeResult(node.name, node.zone, "deleted")
    )


def _ask_delete(provider: Provider, fleet: str, node: Node) -> Operation:
    if node.queued is not None:
        return delete_queued_of(provider, fleet, node.zone, node.queued)
    return provider.delete_node(node.zone, node.name)


def recreate(provider: Provider, nodes: Sequence[Node], fleet: FleetSpec) -> list[NodeResult]:
    """Delete the dead machines of a fleet and create each again with its type, labels and startup script."""
    dead = [node for node in nodes if owns(fleet.name, node) and node.state.life is Life.DEAD]
    queued = {
        (zone, each.name): each
        for zone in sorted({node.zone for node in dead if node.queued is not None})
        for each in provider.queued(zone)
    }
    gone = delete(provider, dead, fleet.name)
    by_place = {(node.zone, node.name): node for node in dead}
    results = [result for result in gone if result.bad]

    def zone_work(zone: str) -> list[NodeResult]:
        done: list[NodeResult] = []
        for result in (result for result in gone if result.zone == zone and not result.bad):
            node = by_place[zone, result.name]
            resource = queued.pop((zone, node.queued or ""), None)
            if node.queued is not None and resource is None:
                done.append(NodeResult(node.name, zone, "asked for", f"with queued resource {node.queued}"))
                continue
            request = node.request or fleet.machine
            worker = Worker(0, node.name, zone)
            one = replace(fleet, machine=replace(request, labels={}, metadata={}))
            try:
                operation = _ask_again(provider, node, request, resource)
                done.append(_awaited(provider, one, worker, operation, None))
            except (CloudError, UserError) as error:
                done.append(NodeResult(node.name, zone, "failed", error.line()))
        return done

    return [*results, *by_zone([result.zone for result in gone if not result.bad], zone_work)]


def _ask_again(provider: Provider, node: Node, request: NodeRequest, queued: QueuedResource | None) -> Operation:
    """Request the same machine again, or the whole queued resource that it was part of."""
    if queued is None:
        return provider.create_node(node.zone, node.name, request)
    whole = QueuedRequest(
        request, node_count=len(queued.nodes) or 1, node_prefix=queued.prefix, best_effort=queued.best_effort
    )
    return provider.create_queued(node.zone, queued.name, whole)


def queue(
    provider: Provider, fleet: FleetSpec, prefix: str, count: int, *, name: str | None = None
) -> list[NodeResult]:
    """Request one queued resource per zone with ``count`` nodes that act together (multislice)."""
    request = QueuedRequest(
        replace(
            fleet.machine,
            labels={**fleet.machine.labels, **fleet.labels},
            metadata={**fleet.machine.metadata, **slice_secret()},  # All nodes share one secret, as one worker.
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
        pause(every)


def unqueue(provider: Provider, zones: Sequence[str], name: str, fleet: str, *, wait: bool = True) -> list[NodeResult]:
    """Delete a queued resource of the fleet and its nodes, in each of these zones."""

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
            fix="look at spile tpu list, or give --zone and --project",
        )
    chosen = [_only(by_name[name], zone) for name in names]
    unready = [f"{node.name} is {node.state}" for node in chosen if node.state != NodeState.READY]
    if unready:
        raise CloudError(
            "not every slice is READY", found=", ".join(unready), fix="wait, or run: spile tpu recreate-preempted"
        )
    return [host for number, node in enumerate(chosen) for host in _hosts_of_node(node, number, internal_ip)]


def _only(nodes: Sequence[Node], zone: str | None) -> Node:
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
    settings = read_settings(os.environ, project=project)
    nodes = CloudTpu(settings).nodes(zone or "-")
    return hosts_of(nodes, prefix, internal_ip=internal_ip, zone=zone or settings.zone)
