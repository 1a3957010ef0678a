"""``spile monitor``, ``spile fleet`` and ``spile tpu``: fleets and their machines."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from spile.cli.flags import (
    MANY,
    AsJson,
    MachineFlags,
    PlaceFlags,
    Yes,
    confirm,
    log,
    plain_table,
    print_json,
    print_result,
    print_results,
)
from spile.cli.view import serve_page
from spile.errors import SpecError, UserError
from spile.fleet import manage
from spile.fleet.cloud_tpu import CloudTpu, check_zone, read_settings
from spile.fleet.home import FleetHome, Lease, accept_deployment, find_home, fleet_url, fleets_of, refuse_if_monitored
from spile.fleet.manage import NodeResult, slice_secret, wait_for_queued
from spile.fleet.monitor import FleetMonitor, FleetStatus, worker_problems
from spile.fleet.provider import Node, NodeState, QueuedResource, Stage
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, Worker, owns, plan_workers
from spile.objects import bucket_url, open_folder
from spile.run.signals import handle_signals
from spile.spec.amounts import counted
from spile.spec.options import check_number
from spile.store.layout import RUN
from spile.store.run import read_run
from spile.store.snapshot import Snapshot, SnapshotReader
from spile.store.stored_stream import finished_quarantines
from spile.view import fleet as fleet_view
from spile.view import stream_table as streams_view
from spile.view.metrics import LOOPBACK, serve_metrics
from spile.view.table import output


def watch_fleet(
    home: FleetHome,
    provider: CloudTpu,
    console: Console,
    *,
    interval: float,
    keep_finished: bool = False,
    once: bool = False,
    as_json: bool = False,
    watch_only: bool = False,
    may_create: bool = True,
    metrics_port: int | None = None,
    metrics_host: str = LOOPBACK,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Watch a fleet and replace its machines until it is finished; return 1 if it failed. Ctrl+C only stops watching.

    If ``may_create`` is False, machines are deleted but none is created.
    """
    policy = {"interval": interval, **({"delete_finished": False} if keep_finished else {})}

    def look() -> FleetStatus:
        status = next(looks, None) or monitor.step()
        show_metrics(status.to_json())
        return status

    with (
        ThreadPoolExecutor(16, thread_name_prefix="fleet") as pool,
        handle_signals(signal.default_int_handler, signal.SIGTERM),  # Like Ctrl+C, so that the lease is released.
        serve_metrics(metrics_port, metrics_host) as show_metrics,
    ):
        monitor = FleetMonitor(home, provider, pool=pool, policy=policy, watch_only=watch_only, may_create=may_create)
        try:
            first = monitor.step()
            if first.refusal is not None:  # The cloud refuses all requests. Errors in later rounds may be temporary.
                raise first.refusal
            if as_json:
                print_json(first.to_json())
            elif once:
                console.print(fleet_view.render(first))
            if once or as_json:
                return int(first.over and first.failed)
            looks = iter([first])
            return int(fleet_view.watch(look, console, interval=interval, sleep=sleep).failed)
        except KeyboardInterrupt:
            console.print("stopped watching; the fleet continues. Run the same command to watch it again.")
            return 0
        finally:
            monitor.close()


def monitor(
    root: str = "./activations",
    *,
    fleet: str | None = None,
    interval: float = 60.0,
    once: bool = False,
    as_json: AsJson = False,
    watch_only: bool = False,
    budget: float | None = None,
    keep_finished: bool = False,
    deployment: str | None = None,
    metrics_port: int | None = None,
    metrics_host: str = LOOPBACK,
    web: bool = False,
    project: str | None = None,
) -> int:
    """Watch a dataset grow, from its ledgers and its workers' heartbeats; with a fleet, replace its dead machines.

    Ctrl+C stops the display; the workers continue. The command ends when every stream is done.

    Args:
        root: A folder, gs://bucket/prefix, s3://… or az://…; or a fleet's gs://bucket/fleet/NAME.
        fleet: The name of a fleet that was deployed to ROOT's bucket. Its dead machines are replaced.
        interval: Seconds between two updates.
        once: Update once and exit. With a fleet, also replace dead machines once.
        as_json: Print the state once, as JSON.
        watch_only: With a fleet: only show it, and change no machine.
        budget: With a fleet: change the cost in dollars at which its machines are deleted.
        keep_finished: With a fleet: keep machines whose work is finished.
        deployment: With a fleet that was deployed from another computer: the sha256:… that spile deploy printed there.
        metrics_port: Serve OpenMetrics for Prometheus at http://127.0.0.1:PORT/metrics while it watches.
        metrics_host: With --metrics-port: the address to listen on; 0.0.0.0 lets other machines read the metrics.
        web: Also show the run in the browser; its address is printed.
        project: The Google Cloud project. [default: gcloud's]
    """
    check_number("--interval", interval, 0.1, 86400)
    home = find_home(root, fleet)
    if home is None:
        with serve_page(root, web):
            return _watch_dataset(root, interval, once, as_json, metrics_port, metrics_host)
    client = _open_client(home, project)
    deployed, found = home.read_pinned()
    if deployment is not None:
        accept_deployment(home.folder.url, found, deployment)
    if budget is not None:
        home.order_budget(replace(deployed, policy=replace(deployed.policy, budget=budget)), budget)
    with serve_page(root, web, fleet=fleet):
        return watch_fleet(
            home, client, output(), interval=interval, keep_finished=keep_finished, once=once, as_json=as_json,
            watch_only=watch_only, metrics_port=metrics_port, metrics_host=metrics_host,
        )  # fmt: skip


def _watch_dataset(
    root: str, interval: float, once: bool, as_json: bool, metrics_port: int | None, metrics_host: str
) -> int:
    folder = open_folder(root)
    if read_run(folder) is None:
        if once or as_json:
            raise UserError(f"no dataset at {folder.url}", expected=f"a folder with {RUN}", found="none")
        log(f"no dataset at {folder.url} yet; waiting for a worker to begin one")
    reader = SnapshotReader(folder)
    if as_json:
        print_json(reader.take().to_json())
        return 0
    with serve_metrics(metrics_port, metrics_host) as show_metrics:

        def look() -> Snapshot:
            snapshot = reader.take()
            show_metrics(snapshot.to_json())
            return snapshot

        streams_view.watch(look, output(), interval=interval, once=once)
    return 0


def list_fleets(bucket: str, *, as_json: AsJson = False) -> int:
    """List the fleets that were deployed to a bucket, with the state of each.

    Args:
        bucket: The bucket's name, with or without gs://.
        as_json: Print JSON.
    """
    url = bucket_url(bucket)
    rows = [_describe_fleet(fleet, FleetHome.open(fleet_url(url, fleet.name))) for fleet in fleets_of(url)]
    if as_json:
        print_json(rows)
        return 0
    if not rows:
        log(f"no fleet in {url}")
        return 0
    table = plain_table("FLEET", "DONE", "ZONES", "OUTPUT", "STATE", "MONITOR", "PROBLEMS")
    for row in rows:
        done, zones = f"{row['finished']} of {row['workers']}", ",".join(row["zones"])
        problems = "; ".join(row["problems"])
        table.add_row(row["name"], done, zones, row["output"], row["state"], row["monitor"] or "none", problems)
    output(soft_wrap=True).print(table)
    return 0


def _describe_fleet(fleet: FleetSpec, home: FleetHome) -> dict[str, Any]:
    reports = {name: each for name, each in home.read_reports().items() if each.deployment == fleet.deployment}
    finished = sum(each.verdict == "finished" for each in reports.values())
    history = home.read_history()
    stopped = home.read_stop(fleet) or (history.stopped if history.deployment == fleet.deployment else "")
    holder = Lease(home.folder, clock=time.time, ttl=0.0).holder()
    problems = [] if stopped else list(worker_problems(fleet, reports, history))
    problems += [f"quarantined: {sample}" for sample in finished_quarantines(open_folder(fleet.root))]
    return {
        "name": fleet.name,
        "workers": len(fleet.workers),
        "finished": finished,
        "zones": list(fleet.zones),
        "output": fleet.root,
        "state": "finished" if finished == len(fleet.workers) else stopped or "deployed",
        "monitor": holder.owner if holder else None,
        "problems": problems,
    }


def status(root: str, *, fleet: str | None = None, project: str | None = None, as_json: AsJson = False) -> int:
    """Show a fleet once, as spile monitor does, without changing anything.

    Args:
        root: The fleet's gs://bucket/fleet/NAME; or its bucket, with --fleet.
        fleet: The name of the fleet, if ROOT is a bucket.
        project: The Google Cloud project. [default: the fleet's]
        as_json: Print JSON.
    """
    home = _open_home(root, fleet)
    client, interval = _open_client(home, project), home.read_fleet().policy.interval
    return watch_fleet(home, client, output(), interval=interval, once=True, as_json=as_json, watch_only=True)


def stop(
    root: str,
    *,
    fleet: str | None = None,
    project: str | None = None,
    interval: float = 5.0,
    wait: Annotated[bool, Parameter(negative="--async")] = True,
    yes: Yes = False,
) -> int:
    """Stop a fleet: create no more machines and delete the existing ones. Stored data is kept.

    A running monitor is notified through the bucket and deletes the machines. Without one, this command does.

    Args:
        root: The fleet's gs://bucket/fleet/NAME; or its bucket, with --fleet.
        fleet: The name of the fleet, if ROOT is a bucket.
        project: The Google Cloud project. [default: the fleet's]
        interval: Seconds between two updates.
        wait: Wait until the machines are deleted. --async returns at once.
        yes: Do not ask for confirmation.
    """
    home = _open_home(root, fleet)
    deployed = home.read_fleet()
    workers = f"{len(deployed.workers)} workers"
    confirm(f"Stop fleet {deployed.name} and delete its machines ({workers})? Stored data is kept.", yes=yes)
    client = _open_client(home, project)
    home.order_stop(deployed)
    log(f"fleet {deployed.name} was asked to stop")
    watch_fleet(home, client, output(soft_wrap=True), interval=interval, once=not wait, may_create=False)
    return 0


def _open_home(root: str, fleet: str | None) -> FleetHome:
    found = find_home(bucket_url(root), fleet)
    if found is None:
        expected = "gs://bucket/fleet/NAME, or a bucket and --fleet NAME"
        raise UserError(f"{root} does not name a fleet", expected=expected)
    return found


def _open_client(home: FleetHome, project: str | None) -> CloudTpu:
    return CloudTpu(read_settings(project or home.read_fleet().project))


def _first_of_each_zone(place: PlaceFlags, workers_per_zone: int | None, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that are among the first machines of each zone; all of them if no number is given."""
    if workers_per_zone is None:
        return list(nodes)
    planned = plan_workers(place.zone_list(), workers_per_zone, prefix=place.name_prefix)
    names = {(worker.zone, worker.name) for worker in planned}
    return [node for node in nodes if (node.zone, node.name) in names]


def create(
    *,
    place: PlaceFlags = PlaceFlags(),
    machines: MachineFlags = MachineFlags(),
    adopt: Annotated[list[str] | None, MANY] = None,
    node_prefix: str | None = None,
    node_count: int = 1,
    queued_id: str | None = None,
    name: str | None = None,
    wait: Annotated[bool, Parameter(negative="--async")] = True,
) -> int:
    """Create ``tpu-{zone}-{n}`` in every zone, in parallel, or one machine by --name. Existing machines stay.

    Args:
        adopt: Existing machines to add to this fleet.
        node_prefix: With --queued: one queued resource with nodes PREFIX-0, PREFIX-1, … in each zone.
        node_count: With --node-prefix: the number of nodes.
        queued_id: With --node-prefix: the name of the queued resource. [default: the prefix]
        name: Create one machine with exactly this name, in one zone.
        wait: Wait until it is done. --async returns at once.
    """
    client = place.client()
    machines, line = machines.with_type(client, place)
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
        check_zone(client, zone, fleet.machine.accelerator_type)
    if line:
        log(line)
    log(f"{fleet.machine.accelerator_type}, {fleet.tier}")
    if node_prefix:
        results = manage.queue(client, fleet, node_prefix, node_count, queued_id or node_prefix)
        print_results(results)
    else:
        if adopt:
            adopted = manage.adopt(client, fleet, adopt)
            named = {result.name for result in adopted}
            if machines.workers_per_zone is None or named >= {worker.name for worker in fleet.workers}:
                return print_results(adopted)  # No further machines were requested.
        results = manage.create(client, fleet, lambda _: slice_secret(), wait=wait, report=print_result)
    for result in results if machines.queued and wait else ():
        if not result.failed:
            wait_for_queued(client, result.zone, result.name)
            log(f"{result.name} in {result.zone}: ACTIVE")
    return int(any(result.failed for result in results))


def delete(
    *,
    place: PlaceFlags = PlaceFlags(),
    workers_per_zone: int | None = None,
    node_prefix: str | None = None,
    queued_id: str | None = None,
    wait: Annotated[bool, Parameter(negative="--async")] = True,
    yes: Yes = False,
) -> int:
    """Delete the fleet's machines. Machines without its label are never touched.

    Args:
        workers_per_zone: Only the first N machines of each zone. [default: all of the fleet's there]
        node_prefix: Delete the queued resource with this prefix, and its nodes.
        queued_id: The name of that queued resource, if it is not the prefix.
        wait: Wait until it is done. --async returns at once.
        yes: Do not ask for confirmation.
    """
    client, zones = place.client(), place.zone_list()
    if queued := queued_id or node_prefix:
        confirm(f"Delete the queued resource {queued} and its nodes?", yes=yes)
        return print_results(manage.unqueue(client, zones, queued, place.fleet, wait=wait))
    chosen = _first_of_each_zone(place, workers_per_zone, manage.list_nodes(client, zones))
    mine = [node for node in chosen if owns(place.fleet, node)]
    foreign = [node for node in chosen if node not in mine] if workers_per_zone is not None else []
    reason = f"it is not of fleet {place.fleet}"
    code = print_results([NodeResult(node.name, node.zone, "skipped", reason) for node in foreign])
    if not mine:
        log(f"no machine of fleet {place.fleet} in {', '.join(zones)}")
        return code
    refuse_if_monitored(mine, place.fleet)
    names = ", ".join(node.name for node in mine[:8]) + (f" and {len(mine) - 8} more" if len(mine) > 8 else "")
    confirm(f"Delete {counted(len(mine), 'machine')} ({names})?", yes=yes)
    return max(code, print_results(manage.delete(client, mine, place.fleet, wait=wait)))


def tpu_status(
    *, place: PlaceFlags = PlaceFlags(), workers_per_zone: int | None = None, as_json: AsJson = False
) -> int:
    """Show the fleet's machines in these zones, and its queued resources.

    With --workers-per-zone, missing machines are listed too.

    Args:
        workers_per_zone: The number of machines that each zone should have.
        as_json: Print JSON.
    """
    zones, client = place.zone_list(), place.client()
    nodes = manage.list_nodes(client, zones)
    waiting = manage.queued_without_nodes(manage.gather_zones(client.queued, zones), nodes)
    queued = [each for each in waiting if each.labels.get(FLEET_LABEL) == place.fleet]
    shown = [node for node in nodes if owns(place.fleet, node)]
    if workers_per_zone is not None:
        there = {(node.zone, node.name): node for node in nodes}
        planned = plan_workers(zones, workers_per_zone, prefix=place.name_prefix)
        shown = [
            there.get((each.zone, each.name)) or Node(each.name, each.zone, NodeState.NOT_FOUND) for each in planned
        ]
    _print_machines(shown, place.fleet, as_json, queued)
    return 0


def list_all(*, zone: str = "-", project: str | None = None, as_json: AsJson = False) -> int:
    """List every TPU VM of the project, with its fleet.

    Args:
        zone: A zone; - for all.
        project: The Google Cloud project. [default: gcloud's]
        as_json: Print JSON.
    """
    _print_machines(PlaceFlags(project=project).client().nodes(zone), None, as_json)
    return 0


def recreate_preempted(
    *, place: PlaceFlags = PlaceFlags(), workers_per_zone: int | None = None, yes: Yes = False
) -> int:
    """Delete the fleet's preempted, terminated and stopped machines and create each of them again.

    Args:
        workers_per_zone: Only the first N machines of each zone.
        yes: Do not ask for confirmation.
    """
    client, zones = place.client(), place.zone_list()
    chosen = _first_of_each_zone(place, workers_per_zone, manage.list_nodes(client, zones))
    dead = [node for node in chosen if owns(place.fleet, node) and node.state.stage is Stage.DEAD]
    if not dead:
        log(f"no dead machine of fleet {place.fleet} in {', '.join(zones)}")
        return 0
    confirm(f"Recreate {', '.join(f'{node.name} ({node.state.value})' for node in dead)}?", yes=yes)
    return print_results(manage.recreate(client, dead, place.fleet))


def _print_machines(
    nodes: Sequence[Node], fleet: str | None, as_json: bool, queued: Sequence[QueuedResource] = ()
) -> None:
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
        print_json(rows)
        return
    table = plain_table("NAME", "ZONE", "STATUS", "TYPE", "FLEET", "WORKER", "ADDRESS")
    for row in rows:
        words = [row[key] or "" for key in ("name", "zone", "state", "type", "fleet", "worker")]
        table.add_row(*map(str, words), next(iter(row["addresses"]), ""))
    output(soft_wrap=True).print(table)
    states = Counter(node.state.value for node in nodes)
    parts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    of = f" of fleet {fleet}" if fleet else ""
    waits = f", {len(queued)} in the queue" if queued else ""
    log(f"{counted(len(nodes), 'machine')}{of}: {parts or 'none'}{waits}")
    for each in queued:
        log(f"{each.name} in {each.zone}: {each.state.value}: {each.state.meaning}")
