"""Deleting a machine that stands in a queued resource: the whole resource goes, so all of it must be the fleet's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

from spile.errors import CloudError, SpileError, UserError
from spile.fleet.history import History, Observed, Pulse, spec_zones
from spile.fleet.provider import (
    Missing,
    Node,
    NodeRequest,
    Operation,
    Provider,
    QueuedRequest,
    QueuedResource,
    Quota,
)
from spile.fleet.reconcile import Action, ActionOutcome, FleetCase, decide, intend, record, update_history
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, owns

__all__ = [
    "Round",
    "act",
    "delete_queued_of",
    "look",
    "request_for",
    "tick",
]


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


In = TypeVar("In")
Out = TypeVar("Out")
Metadata = Callable[[int], Mapping[str, str]]
"""A worker's machine's metadata."""


@dataclass(frozen=True)
class Round:
    """What one round saw and did."""

    observed: Observed
    history: History
    done: tuple[tuple[Action, ActionOutcome], ...] = ()
    problems: tuple[SpileError, ...] = ()
    """What went wrong while looking: an error for each zone that did not answer."""


def _each(pool: Executor | None, function: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
    return list(pool.map(function, items) if pool is not None else map(function, items))


def request_for(fleet: FleetSpec, worker: int, metadata: Mapping[str, str]) -> NodeRequest:
    """The machine that a worker gets."""
    labels = {**fleet.machine.labels, **fleet.labels, WORKER_LABEL: str(worker)}
    return replace(fleet.machine, labels=labels, metadata={**fleet.machine.metadata, **metadata})


def _zone_nodes(fleet: FleetSpec, provider: Provider, zone: str) -> list[Node]:
    nodes = provider.nodes(zone)
    if not fleet.queued:
        return nodes
    # A queued resource without its node stands for it: it waits, or it is dead and holds quota.
    named = {node.queued for node in nodes}
    return [*nodes, *(_stand_in(each) for each in provider.queued(zone) if each.name not in named)]


def _stand_in(queued: QueuedResource) -> Node:
    return Node(
        name=queued.nodes[0] if queued.nodes else queued.name,
        zone=queued.zone,
        state=queued.state.node,
        accelerator_type=queued.accelerator_type,
        uid=f"queued-{queued.name}-{queued.created}",
        created=queued.created,
        labels=queued.labels,
        queued=queued.name,
    )


def look(
    fleet: FleetSpec,
    provider: Provider,
    history: History,
    pulses: Mapping[int, Pulse],
    pool: Executor | None = None,
) -> tuple[Observed, tuple[SpileError, ...]]:
    """List every zone, and ask for every operation that the history waits for. A zone that fails holds up no other."""

    def listed(zone: str) -> tuple[str, list[Node] | SpileError]:
        try:
            return zone, _zone_nodes(fleet, provider, zone)
        except (CloudError, UserError) as error:
            return zone, error

    def asked(place: tuple[str, str]) -> Operation | None:
        try:
            return provider.operation(*place)
        except (CloudError, UserError):  # the listing tells in the end
            return None

    zones = _each(pool, listed, spec_zones(fleet))
    waiting = [past.pending for past in history.workers.values() if past.pending is not None]
    places = [(each.zone, each.operation) for each in waiting if each.operation]
    operations = [each for each in _each(pool, asked, places) if each is not None]
    errors = [found for _, found in zones if isinstance(found, SpileError)]
    observed = Observed(
        fleet=fleet.name,
        nodes=tuple(node for _, found in zones if isinstance(found, list) for node in found),
        unanswered=frozenset(zone for zone, found in zones if isinstance(found, SpileError)),
        operations={each.name: each for each in operations},
        pulses=pulses,
    )
    return observed, tuple(errors)


def act(
    fleet: FleetSpec,
    provider: Provider,
    actions: Iterable[Action],
    metadata: Metadata,
    held: Callable[[], bool],
    pool: Executor | None = None,
) -> list[tuple[Action, ActionOutcome]]:
    """Carry actions out, zones in parallel; a zone's creates end at its first refusal for quota."""
    zones: dict[str, list[Action]] = {}
    for action in actions:
        zones.setdefault(action.zone, []).append(action)

    def one_zone(mine: list[Action]) -> list[tuple[Action, ActionOutcome]]:
        done: list[tuple[Action, ActionOutcome]] = []
        full = False
        for action in mine:
            if not held():
                break
            if full and action.verb == "create":
                continue
            outcome = _perform(fleet, provider, action, metadata)
            full = full or isinstance(outcome.error, Quota)
            done.append((action, outcome))
        return done

    return [pair for done in _each(pool, one_zone, zones.values()) for pair in done]


def _perform(fleet: FleetSpec, provider: Provider, action: Action, metadata: Metadata) -> ActionOutcome:
    try:
        if action.verb == "create":
            request = request_for(fleet, action.worker, metadata(action.worker))
            if fleet.queued:
                queued = QueuedRequest(request, best_effort=fleet.best_effort)
                return ActionOutcome(provider.create_queued(action.zone, action.name, queued))
            return ActionOutcome(provider.create_node(action.zone, action.name, request))
        if action.verb == "delete":
            return ActionOutcome(_delete(fleet, provider, action))
        return ActionOutcome()
    except (CloudError, UserError) as error:
        return ActionOutcome(error=error)


def _delete(fleet: FleetSpec, provider: Provider, action: Action) -> Operation:
    """Delete the very machine that was decided about: one that has replaced it, or is not ours, stays."""
    if action.queued is not None:
        return delete_queued_of(provider, fleet.name, action.zone, action.queued)
    node = provider.node(action.zone, action.name)
    if node.uid != action.uid or not owns(fleet.name, node):
        raise Missing(f"{action.name} in {action.zone} is another machine now")
    return provider.delete_node(action.zone, action.name)


def tick(
    fleet: FleetSpec,
    provider: Provider,
    history: History,
    pulses: Mapping[int, Pulse],
    *,
    clock: Callable[[], float],
    held: Callable[[], bool],
    metadata: Metadata,
    save: Callable[[History], None],
    making: bool = True,
    pool: Executor | None = None,
) -> Round:
    """One round. Without the lease it only looks; with it, what it is about to ask for is saved before it asks.

    Not ``making``: machines go, and none is made.
    """
    observed, problems = look(fleet, provider, history, pulses, pool)
    history = update_history(FleetCase(fleet, observed, history, clock()))
    if not held():
        return Round(observed, history, (), problems)
    actions = [each for each in decide(FleetCase(fleet, observed, history, clock())) if making or each.verb != "create"]
    if any(action.verb == "create" for action in actions):
        save(intend(fleet, history, actions, clock()))
    done = act(fleet, provider, actions, metadata, held, pool)
    history = record(fleet, history, done, clock())
    if held():
        save(history)
    return Round(observed, history, tuple(done), problems)
