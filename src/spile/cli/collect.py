"""``spile collect``: what hosts keep locally, brought back here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from spile.cli.shell.host_flags import HostFlags

__all__ = ["collect"]

REMOTE = "/tmp/activations"  # noqa: S108  (where the guides' containers write)


def collect(
    path: Annotated[str, Parameter(help="The folder on the hosts.")] = REMOTE,
    *,
    into: Annotated[Path, Parameter(help="Where to: worker_0, worker_1, … below it.")] = Path("collected_activations"),
    where: HostFlags = HostFlags(),  # noqa: B008  (frozen)
) -> int:
    """Bring a folder of every host back here, one folder per worker: for runs that used no bucket.

    Parts of one dataset, as a pod's hosts keep them on their own disks, are put together there too. Files are checked
    as they come. Run it again to go on where it broke off: what is here already is not sent again.
    """
    from spile.hosts.files import assemble, collect_from
    from spile.view.table import output as output_console

    console = output_console(soft_wrap=True)
    collected = collect_from(where.find(), path, into, where.access())
    for got in collected:
        sent = f"{got.size / 1e6:.1f} MB, {got.received / 1e6:.1f} MB sent"
        console.print(f"{got.host.label}: {got.files} files ({sent}) → {got.folder}", markup=False)
    if assemble(into, [got.folder for got in collected]):
        console.print(f"together they are one dataset; next: spile verify {into}", markup=False)
    return 0
