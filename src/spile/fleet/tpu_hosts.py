"""The hosts of TPU VMs: the machines that a name or a prefix stands for, as hosts that ssh reaches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from spile.errors import CloudError, UserError
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.provider import Node, NodeState, Provider
from spile.hosts.hosts import Host

__all__ = ["find_hosts", "hosts_of", "slices_named"]


def slices_named(prefix: str, names: Iterable[str]) -> list[str]:
    """The node of just that name, or all named ``prefix-0``, ``prefix-1``, … in the order of their numbers."""
    known = set(names)
    if prefix in known:
        return [prefix]
    numbered = {name: re.fullmatch(re.escape(prefix) + r"-(\d+)", name) for name in known}
    return sorted((name for name, match in numbered.items() if match), key=lambda name: int(name.rpartition("-")[2]))


def hosts_of(nodes: Iterable[Node], prefix: str, *, internal_ip: bool = False, zone: str | None = None) -> list[Host]:
    """Every host of every slice that the prefix names; among nodes of one name, ``zone`` decides."""
    by_name: dict[str, list[Node]] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(node)
    names = slices_named(prefix, by_name)
    if not names:
        found = ", ".join(sorted(by_name)[:8]) + (" …" if len(by_name) > 8 else "") if by_name else "no TPU VM at all"
        raise UserError(
            f"no TPU VM named {prefix}, nor {prefix}-0, {prefix}-1, …",
            found=found,
            fix="look at spile tpu list, or name --zone and --project",
        )
    chosen = [_only(by_name[name], zone) for name in names]
    unready = [f"{node.name} is {node.state}" for node in chosen if node.state != NodeState.READY]
    if unready:
        raise CloudError(
            "not every slice is READY", found=", ".join(unready), fix="wait, or spile tpu recreate-preempted"
        )
    return [host for number, node in enumerate(chosen) for host in _hosts_of_node(node, number, internal_ip)]


def _only(nodes: Sequence[Node], zone: str | None) -> Node:
    here = [node for node in nodes if node.zone == zone] or list(nodes)
    if len(here) > 1:
        zones = ", ".join(sorted(node.zone for node in here))
        raise UserError(f"{here[0].name} is in {len(here)} zones", found=zones, fix="choose one with --zone")
    return here[0]


def _hosts_of_node(node: Node, number: int, internal_ip: bool) -> list[Host]:
    hosts = []
    for worker, end in enumerate(node.endpoints):
        address = end.internal if internal_ip else end.external or end.internal
        if not address:
            raise CloudError(f"{node.name} has no address for worker {worker}", fix="wait until it is READY")
        alone = len(node.endpoints) == 1
        hosts.append(
            Host(node.name, node.uid or node.name, worker, address, number, end.internal or address, alone=alone)
        )
    if not hosts:
        raise CloudError(f"{node.name} has no network endpoint", fix="wait until it is READY")
    return hosts


def find_hosts(
    prefix: str,
    provider: Provider | None = None,
    *,
    project: str | None = None,
    zone: str | None = None,
    internal_ip: bool = False,
) -> list[Host]:
    """Ask the cloud for the hosts that a prefix names: in one zone, or in all."""
    preferred = zone
    if provider is None:
        settings = read_settings(os.environ, project=project)
        provider, preferred = CloudTpu(settings), zone or settings.zone
    return hosts_of(provider.nodes(zone or "-"), prefix, internal_ip=internal_ip, zone=preferred)
