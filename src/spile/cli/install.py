"""``spile install``: this very version, onto every host of a slice that was made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spile.cli.shell.host_flags import HostFlags
from spile.cli.shell.log import log
from spile.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spile.hosts.hosts import Host

__all__ = ["install", "put_on"]


def install(
    *,
    where: HostFlags = HostFlags(),  # noqa: B008  (frozen)
    force: Annotated[bool, Parameter(negative="", help="Install anew what is there already.")] = False,
) -> int:
    """Put this very version of spile onto every host, with a Python that is new enough, and on PATH.

    In ~/.spile, for TPUs or GPUs where the host has some. The same version again changes nothing.
    """
    put_on(where.find(), where, force=force)
    return 0


def put_on(hosts: Sequence[Host], where: HostFlags, *, force: bool = False) -> None:
    """Install on all; a host where it failed is told with its last line."""
    from spile.fleet.install import install_on

    name, done = install_on(hosts, where.access(), force=force)
    bad = [each for each in done if each.error is not None]
    if bad:
        told = "; ".join(str(each.error) for each in bad[:4])
        raise Failure(
            f"not installed on {len(bad)} of {len(hosts)} hosts", found=told, fix="the log: ~/.spile/startup.log"
        )
    log(f"{name} is on {len(hosts)} hosts, as spile on PATH")
