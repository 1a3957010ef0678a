"""``spile monitor``, ``spile fleet`` and ``spile tpu``: fleets and their machines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from spile.cli.flags import MachineFlags, PlaceFlags, confirm, print_result, print_results, table_of
from spile.cli.view import web_of
from spile.errors import SpecError, UserError
from spile.fleet import manage
from spile.fleet.cloud_tpu import CloudTpu, check_place, read_settings
from spile.fleet.home import FLEET, FleetHome, Lease, fleet_url, fleets_of, refuse_monitored, remember_deployment
from spile.fleet.manage import NodeResult, slice_secret, wait_for_queued
from spile.fleet.monitor import FleetMonitor, FleetStatus, worker_problems
from spile.fleet.provider import Life, Node, NodeState, QueuedResource
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, Worker, owns, plan_workers
from spile.objects import bucket_url, open_folder
from spile.objects.folder import NotFound
from spile.store.layout import RUN
from spile.store.snapshot import Snapshot, SnapshotReader
from spile.store.stream import read_run
from spile.store.streams import finished_quarantines
from spile.view import fleet as fleet_view
from spile.view import streams as streams_view
from spile.view.metrics import MetricsServer
from spile.view.table import output
from spile.worker.signals import handled


def monitor_policy(interval: float, keep_finished: bool) -> dict[str, Any]:
    """Return the fields of the fleet's policy that the flags of a monitor change."""
    return {"interval": interval, **({"delete_finished": False} if keep_finished else {})}


def watch_fleet(
    home: FleetHome,
    provider: CloudTpu,
    console: Console,
    *,
    interval: float,
    policy: Mapping[str, Any] | None = None,
    once: bool = False,
    as_json: bool = False,
    watch_only: bool = False,
    makes: bool = True,
    metrics_port: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Watch a fleet and replace its machines until it is finished; return 1 if it failed. Ctrl+C only stops watching.

    If ``makes`` is False, machines are deleted but none is created.
    """

    def seen(status: FleetStatus) -> FleetStatus:
        metrics.update(status.to_json())
        return status

    with (
        ThreadPoolExecutor(16, thread_name_prefix="fleet") as pool,
        handled(signal.default_int_handler, signal.SIGTERM),  # Like Ctrl+C, so that the lease is released.
        MetricsServer(metrics_port) as metrics,
    ):
        monitor = FleetMonitor(home, provider, pool=pool, policy=policy, watch_only=watch_only, makes=makes)
        try:
            if once or as_json:
                status = _first(monitor)
                _show_once(console, status, as_json)
                return int(status.over and status.failed)
            looks = iter([_first(monitor)])
            status = fleet_view.watch(
                lambda: seen(next(looks, None) or monitor.step()), console, interval=interval, sleep=sleep
            )
            return int(status.failed)
        except KeyboardInterrupt:
            console.print("stopped watching; everything goes on. The same command watches again.", markup=False)
            return 0
        finally:
            monitor.close()


def _first(monitor: FleetMonitor) -> FleetStatus:
    """Run the first round; raise if the cloud refuses all requests. Errors in later rounds may be temporary."""
    status = monitor.step()
    if status.refusal is not None:
        raise status.refusal
    return status


def _show_once(console: Console, status: FleetStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status.to_json(), indent=1))
    else:
        console.print(fleet_view.render(status))


def monitor(
    root: Annotated[
        str, Parameter(help="A folder, gs://bucket/prefix, s3://… or az://…; or a fleet's gs://bucket/fleet/NAME.")
    ] = ("./activations"),
    *,
    fleet: Annotated[
        str | None,
        Parameter(help="The name of a fleet that was deployed to ROOT's bucket. Its dead machines are replaced."),
    ] = None,
    interval: Annotated[float, Parameter(help="Seconds between two updates.")] = 60.0,
    once: Annotated[
        bool, Parameter(negative="", help="Update once and exit. With a fleet, also replace dead machines once.")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print the state once, as JSON.")] = False,
    watch_only: Annotated[
        bool, Parameter(negative="", help="With a fleet: only show it, and change no machine.")
    ] = False,
    budget: Annotated[
        float | None, Parameter(help="With a fleet: change the cost in dollars at which its machines are deleted.")
    ] = None,
    keep_finished: Annotated[
        bool, Parameter(negative="", help="With a fleet: keep machines whose work is finished.")
    ] = False,
    deployment: Annotated[
        str | None,
        Parameter(
            help="With a fleet that was deployed from another computer: the sha256:… that spile deploy printed there."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None, Parameter(help="Serve OpenMetrics for Prometheus at http://HOST:PORT/metrics while it watches.")
    ] = None,
    web: Annotated[
        bool, Parameter(negative="", help="Also show the run in the browser; its address is printed.")
    ] = False,
    project: Annotated[str | None, Parameter(help="The Google Cloud project. [default: gcloud's]")] = None,
) -> int:
    """Watch a dataset grow, from its ledgers and its workers' heartbeats; with a fleet, replace its dead machines.

    Ctrl+C stops the display; the workers continue. The command ends when every stream is done.
    """
    if not 0.1 <= interval <= 86400:
        raise SpecError("--interval", expected="from 0.1 to 86400 seconds", found=f"{interval:g}")

    home = fleet_home(root, fleet)
    console = output()
    if home is not None:
        client = _client(home, project)
        _change_fleet(home, deployment, budget)
        with web_of(root, web, fleet=fleet):
            return watch_fleet(
                home, client, console, interval=interval, policy=monitor_policy(interval, keep_finished), once=once,
                as_json=as_json, watch_only=watch_only, metrics_port=metrics_port,
            )  # fmt: skip
    with web_of(root, web):
        return _watch_root(root, console, interval, once, as_json, metrics_port)


def _change_fleet(home: FleetHome, deployment: str | None, budget: float | None) -> None:
    """Trust the given deployment from this computer on, and change the budget for every monitor."""
    deployed, found = home.read_pinned()
    if deployment is not None:
        remember_deployment(home.folder.url, found, deployment)
    if budget is not None:
        home.order_budget(replace(deployed, policy=replace(deployed.policy, budget=budget)), budget)


def fleet_home(root: str, fleet: str | None) -> FleetHome | None:
    """Return the fleet that ``--fleet`` names next to its bucket or dataset, or whose own folder ``root`` is."""
    above, _, last = root.rstrip("/").rpartition("/")
    places = [fleet_url(root, fleet), fleet_url(above, fleet)] if fleet is not None else [root]
    if fleet is None and "/fleet/" not in f"{above}/":
        return None
    for place in places:
        try:
            open_folder(place).info(FLEET)
            return FleetHome.open(place)
        except NotFound:
            continue
    raise UserError(
        f"no fleet {fleet or last} at {root}", expected=f"{places[0]}/{FLEET}", fix="create one with: spile deploy"
    )


def _watch_root(
    root: str, console: Console, interval: float, once: bool, as_json: bool, metrics_port: int | None
) -> int:

    folder = open_folder(root)
    if read_run(folder) is None:
        if once or as_json:
            raise UserError(f"no dataset at {folder.url}", expected=f"a folder with {RUN}", found="none")
        console.print(
            f"no dataset at {folder.url} yet; waiting for a worker to begin one", markup=False, soft_wrap=True
        )
    reader = SnapshotReader(folder)
    if as_json:
        print(json.dumps(reader.take().to_json(), indent=1))
        return 0
    with MetricsServer(metrics_port) as metrics:

        def look() -> Snapshot:
            snapshot = reader.take()
            metrics.update(snapshot.to_json())
            return snapshot

        streams_view.watch(look, console, interval=interval, once=once)
    return 0


_ROOT = Parameter(help="The fleet's gs://bucket/fleet/NAME; or its bucket, with --fleet.")
_FLEET = Parameter(help="The name of the fleet, if ROOT is a bucket.")
_PROJECT = Parameter(help="The Google Cloud project. [default: the fleet's]")
_JSON = Parameter(name="--json", negative="", help="Print JSON.")
_YES = Parameter(name=["--yes", "-y"], negative="", help="Do not ask for confirmation.")


def list_fleets(
    bucket: Annotated[str, Parameter(help="The bucket's name, with or without gs://.")],
    *,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """List the fleets that were deployed to a bucket, with the state of each."""
    url = bucket_url(bucket)
    rows: list[dict[str, Any]] = []
    for fleet in fleets_of(url):
        home = FleetHome.open(fleet_url(url, fleet.name))
        reports = {name: each for name, each in home.read_reports().items() if each.deployment == fleet.deployment}
        finished = sum(each.verdict == "finished" for each in reports.values())
        history = home.read_history()
        stopped = home.read_stop(fleet) or (history.stopped if history.deployment == fleet.deployment else "")
        holder = Lease(home.folder, clock=time.time, ttl=0.0).holder()
        state = "finished" if finished == len(fleet.workers) else stopped or "deployed"
        failed = [] if stopped else list(worker_problems(fleet, reports, history))
        failed += [f"quarantined: {sample}" for sample in finished_quarantines(open_folder(fleet.root))]
        rows.append(
            {
                "name": fleet.name,
                "workers": len(fleet.workers),
                "finished": finished,
                "zones": list(fleet.zones),
                "output": fleet.root,
                "state": state,
                "monitor": holder.owner if holder else None,
                "problems": failed,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    console = output(soft_wrap=True)
    if not rows:
        console.print(f"no fleet in {url}", markup=False)
        return 0
    table = table_of("FLEET", "DONE", "ZONES", "OUTPUT", "STATE", "MONITOR", "PROBLEMS")
    for row in rows:
        done, zones, problems = (
            f"{row['finished']} of {row['workers']}",
            ",".join(row["zones"]),
            "; ".join(row["problems"]),
        )
        table.add_row(row["name"], done, zones, row["output"], row["state"], row["monitor"] or "none", problems)
    console.print(table)
    return 0


def status(
    root: Annotated[str, _ROOT],
    *,
    fleet: Annotated[str | None, _FLEET] = None,
    project: Annotated[str | None, _PROJECT] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Show a fleet once, as spile monitor does, without changing anything."""
    home = _home(root, fleet)
    return watch_fleet(
        home, _client(home, project), output(), interval=60.0, once=True, as_json=as_json, watch_only=True
    )


def stop(
    root: Annotated[str, _ROOT],
    *,
    fleet: Annotated[str | None, _FLEET] = None,
    project: Annotated[str | None, _PROJECT] = None,
    interval: Annotated[float, Parameter(help="Seconds between two updates.")] = 5.0,
    wait: Annotated[
        bool,
        Parameter(
            name="--wait", negative="--async", help="Wait until the machines are deleted. --async returns at once."
        ),
    ] = True,
    yes: Annotated[bool, _YES] = False,
) -> int:
    """Stop a fleet: create no more machines and delete the existing ones. Stored data is kept.

    A running monitor is notified through the bucket and deletes the machines. Without one, this command does.
    """
    home, console = _home(root, fleet), output(soft_wrap=True)
    deployed = home.read_fleet()
    confirm(
        f"Stop fleet {deployed.name} and delete its machines ({len(deployed.workers)} workers)? What is stored stays.",
        yes=yes,
        console=console,
    )
    client = _client(home, project)
    home.order_stop(deployed)
    console.print(f"fleet {deployed.name} is asked to stop", markup=False)
    watch_fleet(home, client, console, interval=interval, once=not wait, makes=False)
    return 0


def _home(root: str, fleet: str | None) -> FleetHome:
    found = fleet_home(bucket_url(root), fleet)
    if found is None:
        raise UserError(
            f"{root} does not name a fleet", expected="gs://bucket/fleet/NAME, or a bucket and --fleet NAME"
        )
    return found


def _client(home: FleetHome, project: str | None) -> CloudTpu:
    return CloudTpu(read_settings(os.environ, project=project or home.read_fleet().project))


_WAIT = Parameter(name="--wait", negative="--async", help="Wait until it is done. --async returns at once.")
_PLACE = PlaceFlags()
_MACHINES = MachineFlags()


def _planned(place: PlaceFlags, workers_per_zone: int) -> set[tuple[str, str]]:
    """Return zone and name of the first machines of each zone."""
    planned = plan_workers(place.zone_list(), workers_per_zone, prefix=place.name_prefix)
    return {(worker.zone, worker.name) for worker in planned}


def create(
    *,
    place: PlaceFlags = _PLACE,
    machines: MachineFlags = _MACHINES,
    adopt: Annotated[
        list[str] | None,
        Parameter(help="Existing machines to add to this fleet.", consume_multiple=True, negative=""),
    ] = None,
    node_prefix: Annotated[
        str | None, Parameter(help="With --queued: one queued resource with nodes PREFIX-0, PREFIX-1, … in each zone.")
    ] = None,
    node_count: Annotated[int, Parameter(help="With --node-prefix: the number of nodes.")] = 1,
    queued_id: Annotated[
        str | None, Parameter(help="With --node-prefix: the name of the queued resource. [default: the prefix]")
    ] = None,
    name: Annotated[str | None, Parameter(help="Create one machine with exactly this name, in one zone.")] = None,
    wait: Annotated[bool, _WAIT] = True,
) -> int:
    """Create ``tpu-{zone}-{n}`` in every zone, in parallel, or one machine by --name. Existing machines stay."""
    client = place.client()
    fleet = machines.fleet(place, client.project)
    if name is not None:
        if len(fleet.zones) > 1 or machines.workers_per_zone is not None or node_prefix:
            raise SpecError("--name", expected="one zone, no --workers-per-zone and no --node-prefix", found=repr(name))
        fleet = replace(fleet, workers=(Worker(0, name, fleet.zones[0]),))
    if node_prefix and not machines.queued:
        raise SpecError("--node-prefix", expected="--queued as well", found="--node-prefix alone")
    if queued_id and not node_prefix:
        raise SpecError("--queued-id", expected="--node-prefix as well", found="--queued-id alone")
    for zone in fleet.zones:
        check_place(client, zone, fleet.machine.accelerator_type)
    console = output(soft_wrap=True)
    console.print(f"{fleet.machine.accelerator_type}, {fleet.tier}", markup=False)
    if node_prefix:
        results = manage.queue(client, fleet, node_prefix, node_count, queued_id or node_prefix)
        code = print_results(console, results)
        if wait:
            _wait_until_active(client, results, console)
        return code
    if adopt:
        adopted = manage.adopt(client, fleet, adopt)
        named = {result.name for result in adopted}
        if machines.workers_per_zone is None or named >= {worker.name for worker in fleet.workers}:
            return print_results(console, adopted)  # No further machines were requested.
    results = manage.create(
        client,
        fleet,
        lambda _: slice_secret(),
        adopt_names=adopt or (),
        wait=wait,
        report=lambda result: print_result(console, result),
    )
    if machines.queued and wait:
        _wait_until_active(client, results, console)
    return int(any(result.bad for result in results))


def _wait_until_active(client: CloudTpu, results: Iterable[NodeResult], console: Console) -> None:
    """Wait until the queued resources that were requested are active."""
    for result in results:
        if not result.bad:
            wait_for_queued(client, result.zone, result.name)
            console.print(f"{result.name} in {result.zone}: ACTIVE", markup=False)


def delete(
    *,
    place: PlaceFlags = _PLACE,
    workers_per_zone: Annotated[
        int | None, Parameter(help="Only the first N machines of each zone. [default: all of the fleet's there]")
    ] = None,
    node_prefix: Annotated[
        str | None, Parameter(help="Delete the queued resource with this prefix, and its nodes.")
    ] = None,
    queued_id: Annotated[
        str | None, Parameter(help="The name of that queued resource, if it is not the prefix.")
    ] = None,
    wait: Annotated[bool, _WAIT] = True,
    yes: Annotated[bool, _YES] = False,
) -> int:
    """Delete the fleet's machines. Machines without its label are never touched."""
    client, console = place.client(), output(soft_wrap=True)
    zones = place.zone_list()
    if queued := queued_id or node_prefix:
        confirm(f"Delete the queued resource {queued} and its nodes?", yes=yes, console=console)
        return print_results(console, manage.unqueue(client, zones, queued, place.fleet, wait=wait))
    nodes = manage.list_nodes(client, zones)
    mine, foreign = [node for node in nodes if owns(place.fleet, node)], []
    if workers_per_zone is not None:
        names = _planned(place, workers_per_zone)
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


def tpu_status(
    *,
    place: PlaceFlags = _PLACE,
    workers_per_zone: Annotated[
        int | None, Parameter(help="The number of machines that each zone should have.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Show the fleet's machines in these zones, and its queued resources.

    With --workers-per-zone, missing machines are listed too.
    """
    zones, client = place.zone_list(), place.client()
    nodes = manage.list_nodes(client, zones)
    waiting = manage.without_nodes(manage.from_zones(client.queued, zones), nodes)
    queued = [each for each in waiting if each.labels.get(FLEET_LABEL) == place.fleet]
    shown = [node for node in nodes if owns(place.fleet, node)]
    if workers_per_zone is not None:
        there = {(node.zone, node.name): node for node in nodes}
        planned = plan_workers(zones, workers_per_zone, prefix=place.name_prefix)
        shown = [
            there.get((each.zone, each.name)) or Node(each.name, each.zone, NodeState.NOT_FOUND) for each in planned
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
    workers_per_zone: Annotated[int | None, Parameter(help="Only the first N machines of each zone.")] = None,
    yes: Annotated[bool, _YES] = False,
) -> int:
    """Delete the fleet's preempted, terminated and stopped machines and create each of them again."""
    client, console = place.client(), output(soft_wrap=True)
    zones = place.zone_list()
    nodes = manage.list_nodes(client, zones)
    dead = [node for node in nodes if owns(place.fleet, node) and node.state.life is Life.DEAD]
    if workers_per_zone is not None:
        names = _planned(place, workers_per_zone)
        dead = [node for node in dead if (node.zone, node.name) in names]
    if not dead:
        console.print(f"no dead machine of fleet {place.fleet} in {', '.join(zones)}", markup=False)
        return 0
    confirm(f"Recreate {', '.join(f'{node.name} ({node.state.value})' for node in dead)}?", yes=yes, console=console)
    return print_results(console, manage.recreate(client, dead, place.fleet))


def _show(nodes: Sequence[Node], fleet: str | None, as_json: bool, queued: Sequence[QueuedResource] = ()) -> None:
    rows: list[dict[str, Any]] = []
    every: list[Node | QueuedResource] = [*nodes, *queued]
    for each in every:
        node = each if isinstance(each, Node) else None
        rows.append(
            {
                "name": each.name,
                "zone": each.zone,
                "state": each.state.value,
                "type": each.accelerator_type,
                "preemptible": node and node.preemptible,
                "fleet": each.labels.get(FLEET_LABEL),
                "worker": node and node.labels.get(WORKER_LABEL),
                "addresses": [end.external or end.internal for end in node.endpoints] if node else [],
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = table_of("NAME", "ZONE", "STATUS", "TYPE", "FLEET", "WORKER", "ADDRESS")
    for row in rows:
        words = [row[key] or "" for key in ("name", "zone", "state", "type", "fleet", "worker")]
        table.add_row(*map(str, words), next(iter(row["addresses"]), ""))
    console = output(soft_wrap=True)
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
