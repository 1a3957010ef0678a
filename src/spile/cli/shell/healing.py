"""Watching a fleet at the prompt and healing it meanwhile: what ``spile monitor`` and ``spile deploy`` share."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from spile.fleet.home import FleetHome
    from spile.fleet.monitor import FleetMonitor, FleetStatus
    from spile.fleet.provider import Provider
    from spile.fleet.spec import FleetSpec

__all__ = ["adjusted", "watch_fleet"]


def adjusted(interval: float, keep_finished: bool) -> Callable[[FleetSpec], FleetSpec]:
    """What this monitor's flags change of the fleet's own policy."""

    def adjust(fleet: FleetSpec) -> FleetSpec:
        policy = replace(fleet.policy, interval=interval)
        if keep_finished:
            policy = replace(policy, delete_finished=False)
        return replace(fleet, policy=policy)

    return adjust


def watch_fleet(
    home: FleetHome,
    provider: Provider,
    console: Console,
    *,
    interval: float,
    adjust: Callable[[FleetSpec], FleetSpec],
    once: bool = False,
    as_json: bool = False,
    watch_only: bool = False,
    makes: bool = True,
    metrics_port: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Watch and heal until all is finished. Ctrl+C stops the watching and nothing else. 1: it fell short.

    ``makes`` False: machines go, and none is made.
    """
    from spile.fleet.monitor import FleetMonitor
    from spile.view.fleet import watch
    from spile.view.metrics import MetricsServer

    def seen(status: FleetStatus) -> FleetStatus:
        metrics.update(status.to_json())
        return status

    with (
        ThreadPoolExecutor(16, thread_name_prefix="fleet") as pool,
        _ends_like_ctrl_c(),
        MetricsServer(metrics_port) as metrics,
    ):
        monitor = FleetMonitor(home, provider, pool=pool, adjust=adjust, watch_only=watch_only, makes=makes)
        try:
            if once or as_json:
                status = _first(monitor)
                _show_once(console, status, as_json)
                return int(status.over and status.failed)
            looks = iter([_first(monitor)])
            status = watch(lambda: seen(next(looks, None) or monitor.step()), console, interval=interval, sleep=sleep)
            return int(status.failed)
        except KeyboardInterrupt:
            console.print("stopped watching; everything goes on. The same command watches again.", markup=False)
            return 0
        finally:
            monitor.close()


@contextmanager
def _ends_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the watching as Ctrl+C does, so that the lease is given back."""

    def raised(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raised)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first(monitor: FleetMonitor) -> FleetStatus:
    """The first look: a mistake, such as no credentials, ends it here; later ones may be hiccups."""
    status = monitor.step()
    if status.refusal is not None:
        raise status.refusal
    return status


def _show_once(console: Console, status: FleetStatus, as_json: bool) -> None:
    from spile.view.fleet import render

    if as_json:
        print(json.dumps(status.to_json(), indent=1))
    else:
        console.print(render(status))
