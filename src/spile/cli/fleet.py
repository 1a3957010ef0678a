"""``spile fleet list``, ``status``, ``stop``: fleets that were deployed, by their bucket."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from spile.cli.monitor import fleet_home
from spile.cli.shell.fleet_flags import confirm, table_of
from spile.errors import UserError
from spile.view.table import output

if TYPE_CHECKING:
    from spile.fleet.cloud_tpu import CloudTpu
    from spile.fleet.home import FleetHome

__all__ = ["list_fleets", "status", "stop"]

_ROOT = Parameter(help="The fleet's gs://bucket/fleet/NAME; or its bucket, with --fleet.")
_FLEET = Parameter(help="Its name, beside its bucket.")
_PROJECT = Parameter(help="The Google Cloud project. [default: the fleet's]")
_JSON = Parameter(name="--json", negative="", help="For programs.")


def list_fleets(
    bucket: Annotated[str, Parameter(help="The bucket's name, with or without gs://.")],
    *,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """List the fleets that were deployed to a bucket, with what each is doing."""
    from spile.fleet.home import FleetHome, fleet_url, fleets_of
    from spile.fleet.lease import Lease
    from spile.fleet.monitor import crash_loop
    from spile.objects import bucket_url

    url = bucket_url(bucket)
    rows: list[dict[str, Any]] = []
    for fleet in fleets_of(url):
        home = FleetHome.open(fleet_url(url, fleet.name))
        reports = home.read_reports()
        mine = [reports[worker.name] for worker in fleet.workers if worker.name in reports]
        finished = sum(each.verdict == "finished" and each.deployment == fleet.deployment for each in mine)
        failed = [f"{each.node} {each.verdict}" for each in mine if each.verdict in ("crashed", "refused")]
        failed += [f"{each.node}: {loop}" for each in mine if (loop := crash_loop(each))]
        holder = Lease(home.folder, clock=time.time, ttl=0.0).holder()
        state = home.read_stop(fleet) or ("finished" if finished == len(fleet.workers) else "deployed")
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
        done = f"{row['finished']} of {row['workers']}"
        table.add_row(
            str(row["name"]),
            done,
            ",".join(row["zones"]),
            str(row["output"]),
            str(row["state"]),
            row["monitor"] or "none",
            "; ".join(row["problems"]),
        )
    console.print(table)
    return 0


def status(
    root: Annotated[str, _ROOT],
    *,
    fleet: Annotated[str | None, _FLEET] = None,
    project: Annotated[str | None, _PROJECT] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """One look at a fleet, as spile monitor shows it; nothing is done."""
    from spile.cli.shell.healing import watch_fleet

    home = _home(root, fleet)
    return watch_fleet(
        home, _client(home, project), output(), interval=60.0, adjust=lambda each: each, once=True, as_json=as_json,
        watch_only=True,
    )  # fmt: skip


def stop(
    root: Annotated[str, _ROOT],
    *,
    fleet: Annotated[str | None, _FLEET] = None,
    project: Annotated[str | None, _PROJECT] = None,
    interval: Annotated[float, Parameter(help="Seconds between looks.")] = 5.0,
    wait: Annotated[
        bool,
        Parameter(name="--wait", negative="--async", help="Wait until the machines are gone; --async: ask and leave."),
    ] = True,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
) -> int:
    """End a fleet for good: no machine is made any more, those that are there go. What is stored stays.

    Whoever monitors it is told through the bucket, and deletes them; where nobody does, this command does.
    """
    from spile.cli.shell.healing import watch_fleet

    home, console = _home(root, fleet), output(soft_wrap=True)
    deployed = home.read_fleet()
    confirm(
        f"Stop fleet {deployed.name} and delete its machines ({len(deployed.workers)} workers)? What is stored stays.",
        yes=yes,
        console=console,
    )
    client = _client(home, project)
    home.order_stop(deployed)
    console.print(f"fleet {deployed.name} is told to stop", markup=False)
    watch_fleet(home, client, console, interval=interval, adjust=lambda each: each, once=not wait, makes=False)
    return 0


def _home(root: str, fleet: str | None) -> FleetHome:
    from spile.objects import bucket_url

    found = fleet_home(bucket_url(root), fleet)
    if found is None:
        raise UserError(f"{root} names no fleet", expected="gs://bucket/fleet/NAME, or a bucket and --fleet NAME")
    return found


def _client(home: FleetHome, project: str | None) -> CloudTpu:
    from spile.fleet.cloud_tpu import CloudTpu, read_settings

    return CloudTpu(read_settings(os.environ, project=project or home.read_fleet().project))
