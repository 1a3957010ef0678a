"""The flags that say which hosts, and how to log in: the same for every command that goes there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.cli.shell.flag import flag
from spile.errors import SpecError

if TYPE_CHECKING:
    from spile.hosts.hosts import Access, Host

__all__ = ["HostFlags"]

_WHICH = Group("Which hosts", sort_key=2)
_LOGIN = Group("How to log in", sort_key=3)


@Parameter(name="*")
@dataclass(frozen=True)
class HostFlags:
    """Which hosts, and how to log in."""

    tpu_prefix: Annotated[str | None, flag(_WHICH, "The TPU VM of this name, or all slices PREFIX-0, PREFIX-1, …")] = (
        None
    )
    hosts: Annotated[
        list[str] | None, flag(_WHICH, "Instead: user@address:port,…; given again, one more slice.", negative="")
    ] = None
    project: Annotated[str | None, flag(_WHICH, "The Google Cloud project. [default: gcloud's]")] = None
    zone: Annotated[str | None, flag(_WHICH, "The zone to look in. [default: all]")] = None
    internal_ip: Annotated[bool, flag(_LOGIN, "Use internal addresses, from a machine in the same network.")] = False
    user: Annotated[str | None, flag(_LOGIN, "The login. [default: yours]")] = None
    ssh_key: Annotated[Path | None, flag(_LOGIN, "The private key. [default, for TPU VMs: gcloud's]")] = None
    ssh_option: Annotated[
        list[str] | None, flag(_LOGIN, "One of ssh's options, such as ProxyJump=bastion.", negative="")
    ] = None

    def access(self) -> Access:
        """How to log in."""
        from spile.hosts.hosts import Access

        return Access(user=self.user, key=self.ssh_key, options=tuple(self.ssh_option or ()))

    def find(self) -> list[Host]:
        """The hosts that the prefix names in the cloud, or those named directly."""
        from spile.fleet.manage import find_hosts
        from spile.hosts.hosts import parse_hosts

        if bool(self.tpu_prefix) == bool(self.hosts):
            problem = "hosts named twice" if self.hosts else "no hosts"
            raise SpecError(problem, expected="either --tpu-prefix or --hosts")
        if self.hosts:
            return parse_hosts(self.hosts)
        return find_hosts(self.tpu_prefix or "", project=self.project, zone=self.zone, internal_ip=self.internal_ip)
