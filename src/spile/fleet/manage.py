"""Machines by hand: create, adopt, delete, recreate. Zones in parallel; one dry zone never holds another up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from spile.errors import CloudError, Interrupted, SpileError, UserError
from spile.fleet.provider import (
    Life,
    LostReply,
    Missing,
    NameTaken,
    Node,
    NodeRequest,
    Operation,
    Provider,
    QueuedRequest,
    QueuedResource,
    Quota,
    Unavailable,
)
from spile.fleet.round import Metadata, delete_queued_of, request_for
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, Worker, owns

__all__ = [
    "NodeResult", "adopt", "by_zone", "create", "delete", "list_nodes", "list_waiting", "named_workers", "pause",
    "recreate", "settle",
]  # fmt: skip

ReportResult = Callable[["NodeResult"], None]

EVERY = 2.0
"""Seconds between two looks at an operation."""
_stop = threading.Event()
"""Set by Ctrl+C: waits in other threads end. What was asked for goes on."""


@dataclass(frozen=True)
class NodeResult:
    """What came of one machine."""

    name: str
    zone: str
    what: Literal["created", "asked for", "there already", "adopted", "deleted", "deleting", "failed", "skipped"]
    detail: str = ""

    @property
    def bad(self) -> bool:
        """Whether it is not as it was asked for."""
        return self.what in ("failed", "skipped")


def list_nodes(provider: Provider, zones: Sequence[str]) -> list[Node]:
    """The nodes of these zones, asked in parallel; the first zone's error is raised."""
    with ThreadPoolExecutor(max(1, len(zones))) as pool:
        return [node for nodes in pool.map(provider.nodes, zones) for node in nodes]


def list_waiting(provider: Provider, zones: Sequence[str], nodes: Sequence[Node]) -> list[QueuedResource]:
    """The queued resources of these zones that have none of these nodes yet, or no longer."""
    there = {(node.zone, node.queued) for node in nodes} | {(node.zone, node.name) for node in nodes}
    with ThreadPoolExecutor(max(1, len(zones))) as pool:
        found = [each for queued in pool.map(provider.queued, zones) for each in queued]
    return [each for each in found if not {(each.zone, name) for name in (each.name, *each.nodes)} & there]


def by_zone(
    zones: Iterable[str], work: Callable[[str], list[NodeResult]], report: ReportResult = lambda _: None
) -> list[NodeResult]:
    """Each zone in a thread of its own; a zone that fails as a whole is a failed result, not the end of the others."""

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
    """Wait for an operation's end."""
    while not operation.done:
        pause(every)
        operation = provider.operation(operation.zone, operation.name)
    return operation


def pause(every: float | None) -> None:
    """Wait between two looks; Ctrl+C in another thread ends it."""
    if _stop.wait(EVERY if every is None else every):
        raise Interrupted("stopped waiting", fix="what was asked for goes on: look with spile tpu status")


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
    """Make every machine of a fleet that is not there."""

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
    """Ask for a machine. None: the answer was lost, and the machine is there."""
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
        detail = f"lost sight of it: {error.line()}; look with spile tpu status"
        return NodeResult(worker.name, worker.zone, "asked for", detail)
    if operation.error is None:
        return NodeResult(worker.name, worker.zone, "created")
    detail = operation.error.line()
    try:
        # What a failed create left behind holds quota.
        node = provider.node(worker.zone, worker.name)
        if owns(fleet.name, node) and node.state.life is not Life.LEAVING:
            provider.delete_node(worker.zone, worker.name)
            detail += "; what it left is being deleted"
    except Missing:
        detail += "; it left nothing behind"
    except (CloudError, UserError):
        detail += "; look with spile tpu status whether it left something behind"
    return NodeResult(worker.name, worker.zone, "failed", detail)


def _label(provider: Provider, fleet: str, node: Node, worker: int | None) -> NodeResult:
    labels = {**node.labels, FLEET_LABEL: fleet}
    if worker is not None:
        labels[WORKER_LABEL] = str(worker)
    settle(provider, provider.label_node(node.zone, node.name, labels))
    return NodeResult(node.name, node.zone, "adopted", f"as worker {worker}" if worker is not None else "")


def named_workers(provider: Provider, zones: Sequence[str], names: Sequence[str]) -> tuple[Worker, ...]:
    """A worker for each of these machines, which somebody else named, in the order given."""
    nodes = {node.name: node for node in list_nodes(provider, zones)}
    missing = [name for name in names if name not in nodes]
    if missing:
        raise UserError(f"no machine {', '.join(missing)} in {', '.join(zones)}", fix="check --zones")
    return tuple(Worker(number, name, nodes[name].zone) for number, name in enumerate(dict.fromkeys(names)))


def adopt(provider: Provider, fleet: FleetSpec, names: Collection[str]) -> list[NodeResult]:
    """Label existing machines as the fleet's; one whose name is a worker's becomes that worker's."""
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
    """Delete machines of the fleet; foreign ones are refused even when asked for."""

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
        detail = f"asked for, and lost sight of it: {error.line()}; look with spile tpu status"
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


def recreate(
    provider: Provider,
    nodes: Sequence[Node],
    fleet: FleetSpec,
    *,
    every: float | None = None,
) -> list[NodeResult]:
    """Delete the dead machines of a fleet and make each again as it was: its type, its labels, its startup script."""
    dead = [node for node in nodes if owns(fleet.name, node) and node.state.life is Life.DEAD]
    queued = {
        (zone, each.name): each
        for zone in sorted({node.zone for node in dead if node.queued is not None})
        for each in provider.queued(zone)
    }
    gone = delete(provider, dead, fleet.name, every=every)
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
                done.append(_awaited(provider, one, worker, operation, every))
            except (CloudError, UserError) as error:
                done.append(NodeResult(node.name, zone, "failed", error.line()))
        return done

    return [*results, *by_zone([result.zone for result in gone if not result.bad], zone_work)]


def _ask_again(provider: Provider, node: Node, request: NodeRequest, queued: QueuedResource | None) -> Operation:
    """For the same machine, or the whole queued resource that it was one of."""
    if queued is None:
        return provider.create_node(node.zone, node.name, request)
    whole = QueuedRequest(
        request, node_count=len(queued.nodes) or 1, node_prefix=queued.prefix, best_effort=queued.best_effort
    )
    return provider.create_queued(node.zone, queued.name, whole)
