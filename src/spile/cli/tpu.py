"""``spile tpu create``, ``delete``, ``status``, ``list``, ``recreate-preempted``: a fleet's machines, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from spile.cli.shell.fleet_flags import MachineFlags, PlaceFlags, confirm, print_result, print_results, table_of
from spile.errors import SpecError
from spile.view.table import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spile.fleet.provider import Node, QueuedResource

__all__ = ["create", "delete", "list_all", "recreate_preempted", "status"]

_YES = Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")
_WAIT = Parameter(name="--wait", negative="--async", help="Wait until it is done; --async: ask and leave.")
_JSON = Parameter(name="--json", negative="", help="For programs.")
_PLACE = PlaceFlags()
_MACHINES = MachineFlags()


def _console() -> Console:
    return output(soft_wrap=True)


def create(
    *,
    place: PlaceFlags = _PLACE,
    machines: MachineFlags = _MACHINES,
    adopt: Annotated[
        list[str] | None,
        Parameter(help="Existing machines to label as this fleet's.", consume_multiple=True, negative=""),
    ] = None,
    node_prefix: Annotated[
        str | None, Parameter(help="With --queued: one resource of nodes PREFIX-0 … in each zone.")
    ] = None,
    node_count: Annotated[int, Parameter(help="With --node-prefix: how many nodes act together.")] = 1,
    queued_id: Annotated[
        str | None, Parameter(help="With --node-prefix: the resource's own name. [default: the prefix]")
    ] = None,
    name: Annotated[str | None, Parameter(help="Create one machine with exactly this name, in one zone.")] = None,
    wait: Annotated[bool, _WAIT] = True,
) -> int:
    """Create ``tpu-{zone}-{n}`` in every zone, in parallel, or one machine by --name. Existing machines stay."""
    from spile.fleet import manage
    from spile.fleet.cloud_tpu import check_place
    from spile.fleet.manage import slice_secret
    from spile.fleet.spec import Worker

    client = place.client()
    fleet = machines.fleet(place, client.project)
    if name is not None:
        if len(fleet.zones) > 1 or machines.workers_per_zone is not None or node_prefix:
            raise SpecError("--name", expected="one zone, no --workers-per-zone and no --node-prefix", found=repr(name))
        fleet = replace(fleet, workers=(Worker(0, name, fleet.zones[0]),))
    if node_prefix and not machines.queued:
        raise SpecError("--node-prefix", expected="--queued beside it", found="--node-prefix alone")
    if queued_id and not node_prefix:
        raise SpecError("--queued-id", expected="--node-prefix beside it", found="--queued-id alone")
    for zone in fleet.zones:
        check_place(client, zone, fleet.machine.accelerator_type)
    console = _console()
    console.print(f"{fleet.machine.accelerator_type}, {fleet.tier}", markup=False)
    if node_prefix:
        results = manage.queue(client, fleet, node_prefix, node_count, name=queued_id)
        code = print_results(console, results)
        for result in [each for each in results if wait and not each.bad]:
            manage.wait_for_queued(client, result.zone, result.name)
            console.print(f"{result.name} in {result.zone}: ACTIVE", markup=False)
        return code
    if adopt:
        adopted = manage.adopt(client, fleet, adopt)
        named = {result.name for result in adopted}
        if machines.workers_per_zone is None or named >= {worker.name for worker in fleet.workers}:
            return print_results(console, adopted)  # only those: nobody asked for more machines
    results = manage.create(
        client,
        fleet,
        lambda _: slice_secret(),
        adopt_names=adopt or (),
        wait=wait,
        report=lambda result: print_result(console, result),
    )
    if machines.queued and wait:
        for result in [each for each in results if not each.bad]:
            manage.wait_for_queued(client, result.zone, result.name)
            console.print(f"{result.name} in {result.zone}: ACTIVE", markup=False)
    return int(any(result.bad for result in results))


def delete(
    *,
    place: PlaceFlags = _PLACE,
    workers_per_zone: Annotated[
        int | None, Parameter(help="Only the first so many of each zone. [default: all of the fleet's there]")
    ] = None,
    node_prefix: Annotated[str | None, Parameter(help="A queued resource, with its nodes.")] = None,
    queued_id: Annotated[str | None, Parameter(help="The same, by the name it was given of its own.")] = None,
    wait: Annotated[bool, _WAIT] = True,
    yes: Annotated[bool, _YES] = False,
) -> int:
    """Delete the fleet's machines. Machines without its label are never touched."""
    from spile.fleet import manage
    from spile.fleet.lease import refuse_monitored
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import owns, plan_workers

    client, console = place.client(), _console()
    zones = place.zone_list()
    if queued := queued_id or node_prefix:
        confirm(f"Delete the queued resource {queued} and its nodes?", yes=yes, console=console)
        return print_results(console, manage.unqueue(client, zones, queued, place.fleet, wait=wait))
    nodes = manage.list_nodes(client, zones)
    mine, foreign = [node for node in nodes if owns(place.fleet, node)], []
    if workers_per_zone is not None:
        names = {
            (worker.zone, worker.name) for worker in plan_workers(zones, workers_per_zone, prefix=place.name_prefix)
        }
        mine = [node for node in mine if (node.zone, node.name) in names]
        foreign = [node for node in nodes if (node.zone, node.name) in names and not owns(place.fleet, node)]
    code = print_results(
        console, [NodeResult(node.name, node.zone, "skipped", f"it is not of fleet {place.fleet}") for node in foreign]
    )
    if not mine:
        console.print(f"no machine of fleet {place.fleet} in {', '.join(zones)}", markup=False)
        return code
    refuse_monitored(mine, place.fleet)
    names_text = ", ".join(node.name for node in mine[:8]) + (f" and {len(mine) - 8} more" if len(mine) > 8 else "")
    confirm(f"Delete {len(mine)} machine{'s' * (len(mine) != 1)} ({names_text})?", yes=yes, console=console)
    return max(code, print_results(console, manage.delete(client, mine, place.fleet, wait=wait)))


def status(
    *,
    place: PlaceFlags = _PLACE,
    workers_per_zone: Annotated[int | None, Parameter(help="How many each zone should have.")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Show the fleet's machines in these zones, and what stands in the queue for it.

    With --workers-per-zone also those that are not there.
    """
    from spile.fleet import manage
    from spile.fleet.provider import Node, NodeState
    from spile.fleet.spec import FLEET_LABEL, owns, plan_workers

    zones, client = place.zone_list(), place.client()
    nodes = manage.list_nodes(client, zones)
    queued = [each for each in manage.list_waiting(client, zones, nodes) if each.labels.get(FLEET_LABEL) == place.fleet]
    shown = [node for node in nodes if owns(place.fleet, node)]
    if workers_per_zone is not None:
        there = {(node.zone, node.name): node for node in nodes}
        planned = plan_workers(zones, workers_per_zone, prefix=place.name_prefix)
        shown = [
            there.get((worker.zone, worker.name)) or Node(worker.name, worker.zone, NodeState.NOT_FOUND)
            for worker in planned
        ]
    _show(shown, place.fleet, as_json, queued)
    return 0


def list_all(
    *,
    zone: Annotated[str, Parameter(help="A zone; - for all.")] = "-",
    project: Annotated[str | None, Parameter(help="The Google Cloud project. [default: gcloud's]")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """List every TPU VM of the project, with its fleet."""
    nodes = PlaceFlags(project=project).client().nodes(zone)
    _show(nodes, None, as_json)
    return 0


def recreate_preempted(
    *,
    place: PlaceFlags = _PLACE,
    workers_per_zone: Annotated[int | None, Parameter(help="Only the first so many of each zone.")] = None,
    yes: Annotated[bool, _YES] = False,
) -> int:
    """Delete the fleet's preempted, terminated and stopped machines and make each again as it was."""
    from spile.fleet import manage
    from spile.fleet.provider import Life
    from spile.fleet.spec import owns, plan_workers

    client, console = place.client(), _console()
    zones = place.zone_list()
    fleet = MachineFlags(workers_per_zone=workers_per_zone or 1).fleet(place, client.project)
    nodes = manage.list_nodes(client, zones)
    dead = [node for node in nodes if owns(place.fleet, node) and node.state.life is Life.DEAD]
    if workers_per_zone is not None:
        names = {
            (worker.zone, worker.name) for worker in plan_workers(zones, workers_per_zone, prefix=place.name_prefix)
        }
        dead = [node for node in dead if (node.zone, node.name) in names]
    if not dead:
        console.print(f"no dead machine of fleet {place.fleet} in {', '.join(zones)}", markup=False)
        return 0
    confirm(f"Recreate {', '.join(f'{node.name} ({node.state.value})' for node in dead)}?", yes=yes, console=console)
    return print_results(console, manage.recreate(client, dead, fleet))


def _show(nodes: Sequence[Node], fleet: str | None, as_json: bool, queued: Sequence[QueuedResource] = ()) -> None:
    from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL

    rows = [
        {
            "name": node.name,
            "zone": node.zone,
            "state": node.state.value,
            "type": node.accelerator_type,
            "preemptible": node.preemptible,
            "fleet": node.labels.get(FLEET_LABEL),
            "worker": node.labels.get(WORKER_LABEL),
            "addresses": [end.external or end.internal for end in node.endpoints],
        }
        for node in nodes
    ]
    rows += [
        {
            "name": each.name,
            "zone": each.zone,
            "state": each.state.value,
            "type": each.accelerator_type,
            "preemptible": None,
            "fleet": each.labels.get(FLEET_LABEL),
            "worker": None,
            "addresses": [],
        }
        for each in queued
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = table_of("NAME", "ZONE", "STATUS", "TYPE", "FLEET", "WORKER", "ADDRESS")
    for row in rows:
        words = [row[key] or "" for key in ("name", "zone", "state", "type", "fleet", "worker")]
        addresses = row["addresses"]
        first = addresses[0] if isinstance(addresses, list) and addresses else ""
        table.add_row(*map(str, words), str(first))
    console = _console()
    console.print(table)
    counted = {node.state.value for node in nodes}
    parts = [f"{sum(node.state == state for node in nodes)} {state}" for state in sorted(counted)]
    of = f" of fleet {fleet}" if fleet else ""
    waits = f", {len(queued)} in the queue" if queued else ""
    console.print(
        f"{len(nodes)} machine{'s' * (len(nodes) != 1)}{of}: {', '.join(parts) or 'none'}{waits}", markup=False
    )
    for each in queued:
        console.print(f"{each.name} in {each.zone}: {each.state.value}: {each.state.meaning}", markup=False)
