"""The flags that say which machines: the same for ``spile tpu`` and ``spile deploy``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from spile.cli.shell.flag import flag
from spile.errors import SpecError, UserError

if TYPE_CHECKING:
    from spile.fleet.cloud_tpu import CloudTpu
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import FleetSpec, Policy

__all__ = ["MachineFlags", "PlaceFlags", "confirm", "print_result", "print_results", "table_of"]

_PLACE = Group("Where", sort_key=1)
_MACHINE = Group("Which machines", sort_key=2)


@Parameter(name="*")
@dataclass(frozen=True)
class PlaceFlags:
    """Which fleet, where."""

    zones: Annotated[str | None, flag(_PLACE, "us-central1-a,us-central1-b [default: gcloud's compute/zone]")] = None
    fleet: Annotated[str, flag(_PLACE, "The fleet's name: the label of its machines.")] = "default"
    project: Annotated[str | None, flag(_PLACE, "The Google Cloud project. [default: gcloud's]")] = None
    name_prefix: Annotated[str, flag(_PLACE, "Machines are named PREFIX-ZONE-N.")] = "tpu"

    def client(self) -> CloudTpu:
        """The cloud."""
        from spile.fleet.cloud_tpu import CloudTpu, read_settings

        return CloudTpu(read_settings(os.environ, project=self.project))

    def zone_list(self) -> tuple[str, ...]:
        """The zones that were named."""
        from spile.fleet.cloud_tpu import gcloud_value

        text = self.zones or gcloud_value("compute", "zone", os.environ)
        if not text:
            raise SpecError("no zone", fix="pass --zones us-central1-a,us-central1-b")
        zones = tuple(word for word in text.replace(",", " ").split() if word)
        if len(set(zones)) != len(zones):
            raise SpecError("--zones", expected="each zone once", found=text)
        return zones


_MODELS = ("spot", "reserved", "best_effort")
"""Each says another way to pay: two of them at once are a mistake, not a wish."""


@Parameter(name="*")
@dataclass(frozen=True)
class MachineFlags:
    """What machines, and how many."""

    workers_per_zone: Annotated[int | None, flag(_MACHINE, "Machines in each zone. [default: 1]")] = None
    tpu_type: Annotated[
        str | None,
        flag(_MACHINE, "v3-8, v5litepod-8, v5e:2x4, …; a slice of many hosts is one worker. [default: v3-8]"),
    ] = None
    preemptible: Annotated[
        bool | None,
        flag(
            _MACHINE,
            "Cheaper machines that can be preempted at any time and live at most 24 hours. [default: yes; with "
            "--queued on demand, as in gcloud]",
        ),
    ] = None
    spot: Annotated[bool, flag(_MACHINE, "Like preemptible, without the 24 hours.", negative="")] = False
    reserved: Annotated[bool, flag(_MACHINE, "From the project's reservation.", negative="")] = False
    best_effort: Annotated[bool, flag(_MACHINE, "Queued: preemptible capacity.", negative="")] = False
    queued: Annotated[bool, flag(_MACHINE, "Stand in the queue for them (queued resources).", negative="")] = False
    runtime_version: Annotated[str | None, flag(_MACHINE, "The VM's image. [default: the type's]")] = None
    network: Annotated[str | None, flag(_MACHINE, "The VPC network.")] = None
    subnetwork: Annotated[str | None, flag(_MACHINE, "The VPC subnetwork.")] = None
    external_ips: Annotated[bool, flag(_MACHINE, "Give machines public addresses.")] = True
    service_account: Annotated[str | None, flag(_MACHINE, "Who the machines act as.")] = None

    def fleet(self, place: PlaceFlags, project: str, policy: Policy | None = None) -> FleetSpec:
        """The fleet that these flags ask for."""
        from spile.fleet.provider import NodeRequest
        from spile.fleet.spec import FleetSpec, default_runtime, plan_workers
        from spile.fleet.spec import Policy as DefaultPolicy
        from spile.planning.machines import parse_machine

        if self.best_effort and not self.queued:
            raise SpecError("--best-effort", expected="--queued beside it", found="--best-effort alone")
        chosen = [f"--{name.replace('_', '-')}" for name in _MODELS if getattr(self, name)]
        if len(chosen) > 1:
            raise SpecError("how machines are paid for", expected=f"one of {', '.join(chosen)}", found="all of them")
        machine = parse_machine(self.tpu_type or "v3-8")
        zones = place.zone_list()
        plain = not (self.spot or self.reserved or self.best_effort)
        request = NodeRequest(
            accelerator_type=machine.name,
            runtime_version=self.runtime_version or default_runtime(machine),
            preemptible=plain and (not self.queued if self.preemptible is None else self.preemptible),
            spot=self.spot,
            reserved=self.reserved,
            network=self.network,
            subnetwork=self.subnetwork,
            external_ips=self.external_ips,
            service_account=self.service_account,
            metadata=_ssh_keys(),
        )
        return FleetSpec(
            name=place.fleet,
            project=project,
            zones=zones,
            workers=plan_workers(
                zones, 1 if self.workers_per_zone is None else self.workers_per_zone, prefix=place.name_prefix
            ),
            machine=request,
            queued=self.queued,
            best_effort=self.best_effort,
            policy=policy or DefaultPolicy(),
        )


def _ssh_keys() -> dict[str, str]:
    """The key that gcloud would log in with, made where there is none, as gcloud does: ``spile run`` needs it.

    Given at birth, it needs no change of the machine. Who has no ssh here needs no key.
    """
    import getpass
    import shutil

    from spile.hosts.hosts import GCLOUD_KEY, ensure_key

    if shutil.which("ssh-keygen") is None and not GCLOUD_KEY.expanduser().is_file():
        return {}
    return {"ssh-keys": f"{getpass.getuser()}:{ensure_key()}"}


def confirm(question: str, *, yes: bool, console: Console) -> None:
    """Ask before something that cannot be undone."""
    if yes:
        return
    if not console.is_terminal:
        raise UserError(question, expected="an answer at a terminal, or --yes", found="neither")
    if console.input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("not confirmed", fix="nothing was changed")


def table_of(*columns: str) -> Table:
    """A plain table."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column not in ("DETAIL",))
    return table


def print_result(console: Console, result: NodeResult) -> None:
    """One machine, one line."""
    detail = f": {result.detail}" if result.detail else ""
    style = "red" if result.bad else None
    console.print(f"{result.name} in {result.zone}: {result.what}{detail}", style=style, markup=False, soft_wrap=True)


def print_results(console: Console, results: Sequence[NodeResult]) -> int:
    """One line per machine, worst last; 1 when something is not as it was asked for."""
    for result in sorted(results, key=lambda result: (result.bad, result.zone, result.name)):
        print_result(console, result)
    return int(any(result.bad for result in results))
