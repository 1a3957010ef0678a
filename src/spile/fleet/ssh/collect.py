"""What hosts keep locally, brought back here: one folder a worker, checked, and resumed where it broke off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.transfer import Transfers, pull

__all__ = ["Collected", "collect_from", "folder_of"]


@dataclass(frozen=True)
class Collected:
    """What came from one host."""

    host: Host
    folder: Path
    files: int
    size: int
    received: int
    """Bytes that were not here yet."""


def folder_of(host: Host, hosts: Sequence[Host]) -> str:
    """``worker_2`` of one slice; ``tpu-a-1/worker_2`` of several."""
    many = len({other.slice for other in hosts}) > 1
    return f"{host.node.replace('/', '-')}/worker_{host.worker}" if many else f"worker_{host.worker}"


def collect_from(hosts: Sequence[Host], remote: str, into: Path, access: Access) -> list[Collected]:
    """Copy the hosts' folder ``remote`` here. Files that are here already, whole and equal, are not sent again."""
    folders = {host: into / folder_of(host, hosts) for host in hosts}

    moved = Transfers(access).on_all(hosts, lambda all_, host: pull(all_, host, remote, folders[host]))
    return [
        Collected(host, folders[host], each.files, each.size, each.sent)
        for host, each in zip(hosts, moved, strict=True)
    ]
