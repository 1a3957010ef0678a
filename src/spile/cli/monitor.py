"""``spile monitor``: each stream's samples, shards, state and rate, once or live; with a fleet it also heals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from spile.errors import SpecError, UserError
from spile.view.table import output

if TYPE_CHECKING:
    from spile.fleet.home import FleetHome

__all__ = ["fleet_home", "monitor"]


def monitor(
    root: Annotated[
        str, Parameter(help="A folder, gs://bucket/prefix, s3://… or az://…; or a fleet's gs://bucket/fleet/NAME.")
    ] = ("./activations"),
    *,
    fleet: Annotated[
        str | None, Parameter(help="A fleet that was deployed to ROOT's bucket: watch and heal it.")
    ] = None,
    interval: Annotated[float, Parameter(help="Seconds between looks.")] = 60.0,
    once: Annotated[bool, Parameter(negative="", help="Look once (with a fleet: and heal once) and exit.")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="One look, as JSON.")] = False,
    watch_only: Annotated[bool, Parameter(negative="", help="With a fleet: look, and do nothing.")] = False,
    budget: Annotated[
        float | None, Parameter(help="With a fleet: dollars after which it is deleted, from now on.")
    ] = None,
    keep_finished: Annotated[bool, Parameter(negative="", help="With a fleet: keep machines that are done.")] = False,
    deployment: Annotated[
        str | None,
        Parameter(help="With a fleet that another computer deployed: the sha256:… that spile deploy printed there."),
    ] = None,
    metrics_port: Annotated[
        int | None, Parameter(help="Serve OpenMetrics for Prometheus at http://HOST:PORT/metrics while it watches.")
    ] = None,
    project: Annotated[str | None, Parameter(help="The Google Cloud project. [default: gcloud's]")] = None,
) -> int:
    """Watch a dataset grow, from its ledgers and its workers' heartbeats; with a fleet, replace its dead machines.

    Ctrl+C stops watching; everything goes on. Ends by itself when every stream is done.
    """
    if not 0.1 <= interval <= 86400:
        raise SpecError("--interval", expected="from 0.1 to 86400 seconds", found=f"{interval:g}")
    home = fleet_home(root, fleet)
    console = output()
    if home is not None:
        import os

        from spile.cli.shell.healing import adjusted, watch_fleet
        from spile.fleet.cloud_tpu import CloudTpu, read_settings
        from spile.fleet.pins import remember_deployment

        deployed, found = home.read_pinned()
        if deployment is not None:
            remember_deployment(home.folder.url, found, deployment)
        client = CloudTpu(read_settings(os.environ, project=project or deployed.project))
        if budget is not None:  # for every monitor from now on, not for this one alone
            home.order_budget(replace(deployed, policy=replace(deployed.policy, budget=budget)), budget)
        adjust = adjusted(interval, keep_finished)
        return watch_fleet(
            home, client, console, interval=interval, adjust=adjust, once=once, as_json=as_json, watch_only=watch_only,
            metrics_port=metrics_port,
        )  # fmt: skip
    return _watch_root(root, console, interval, once, as_json, metrics_port)


def fleet_home(root: str, fleet: str | None) -> FleetHome | None:
    """The fleet that is meant: named beside its bucket or its dataset, or by its own folder."""
    from spile.fleet.home import FLEET, FleetHome, fleet_url
    from spile.objects import open_folder
    from spile.objects.folder import NotFound

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
        f"no fleet {fleet or last} at {root}", expected=f"{places[0]}/{FLEET}", fix="spile deploy makes one"
    )


def _watch_root(
    root: str, console: Console, interval: float, once: bool, as_json: bool, metrics_port: int | None
) -> int:
    from spile.objects import open_folder
    from spile.store.heartbeat import Snapshot, SnapshotReader
    from spile.store.layout import RUN
    from spile.store.stream import read_run
    from spile.view.metrics import MetricsServer
    from spile.view.streams import watch

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

        watch(look, console, interval=interval, once=once)
    return 0
