"""The machines of a deployment, made at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from spile.fleet.cloud_tpu import CloudTpu
    from spile.fleet.home import FleetHome
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import FleetSpec

__all__ = ["create_machines"]


def create_machines(client: CloudTpu, home: FleetHome, fleet: FleetSpec, console: Console) -> list[NodeResult]:
    """Make the machines, unless somebody monitors the fleet: then that one does."""
    import time

    from spile.fleet import manage
    from spile.fleet.lease import Lease
    from spile.fleet.monitor import machine_metadata, startup_script
    from spile.fleet.pins import sha256

    other = Lease(home.folder, clock=time.time, ttl=0.0).holder()
    if other is not None:
        console.print(f"{other.owner} monitors this fleet and makes its machines", markup=False)
        return []
    names = {worker.id: worker.name for worker in fleet.workers}
    script, pin = startup_script(), sha256(fleet.to_json())
    return manage.create(client, fleet, lambda worker: machine_metadata(home.folder.url, names[worker], script, pin))
