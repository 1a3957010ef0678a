"""Hosts, and how the system's ssh reaches them: named directly, or a TPU VM the way gcloud reaches it."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spile.errors import CloudError, Failure, SpecError, UserError
from spile.fleet.cloud.provider import Node, Provider
from spile.fleet.cloud.settings import read_settings
from spile.fleet.cloud.states import NodeState
from spile.fleet.cloud.tpu import CloudTpu

__all__ = ["GCLOUD_KEY", "Access", "Host", "ensure_key", "find_hosts", "hosts_of", "parse_hosts", "slices_named"]

GCLOUD_KEY = Path("~/.ssh/google_compute_engine")
GCLOUD_KNOWN_HOSTS = Path("~/.ssh/google_compute_known_hosts")

_NAMED = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<address>\[[^\]\s]+\]|[^:@\s]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True)
class Host:
    """One machine of a slice."""

    node: str
    """The slice's name; a host named directly is its own."""
    node_id: str
    """The TPU node's id, which a recreated node does not inherit; empty for a host named directly."""
    worker: int
    """The host's number within its slice."""
    address: str
    slice: int
    internal: str = ""
    """The address by which the other hosts know it."""
    port: int | None = None
    user: str | None = None
    alone: bool = True
    """It is its slice's only host."""

    @property
    def label(self) -> str:
        """Short, and different for every host: ``tpu-a-0``, or ``tpu-a-0:w2`` on a slice of many hosts."""
        return self.node if self.alone else f"{self.node}:w{self.worker}"

    @property
    def file_name(self) -> str:
        """The label, fit for a file's name."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.label).strip("-")


@dataclass(frozen=True)
class Access:
    """How to log in."""

    user: str | None = None
    key: Path | None = None
    options: tuple[str, ...] = ()
    """More of ssh's own options, ``Key=value``; they win."""
    connect_timeout: int = 10
    alive_interval: int = 2
    alive_count: int = 3
    program: str = field(default_factory=lambda: shutil.which("ssh") or "ssh")

    def command(self, host: Host, remote: str, *, compress: bool = False) -> list[str]:
        """The ssh command line that runs ``remote`` in the host's shell."""
        options = [
            *self.options,
            "BatchMode=yes",
            "LogLevel=ERROR",
            f"ConnectTimeout={self.connect_timeout}",
            f"ServerAliveInterval={self.alive_interval}",
            f"ServerAliveCountMax={self.alive_count}",
            *(["Compression=yes"] if compress else []),
            *(self._gcloud(host) if host.node_id else ["StrictHostKeyChecking=accept-new"]),
        ]
        words = [self.program, "-T"]
        for option in options:
            words += ["-o", option]
        key = self.key or (GCLOUD_KEY if host.node_id else None)
        if key is not None:
            words += ["-o", "IdentitiesOnly=yes", "-i", str(key.expanduser())]
        user = host.user or self.user or (getpass.getuser() if host.node_id else None)
        words += ["-p", str(host.port)] if host.port is not None else []
        words += ["-l", user] if user else []
        return [*words, "--", host.address, remote]

    @staticmethod
    def _gcloud(host: Host) -> list[str]:
        # The alias is made from the node's id, so a recreated node never trips over its predecessor's host key. The key
        # is remembered at first sight, and another under the same id is refused: somebody stands between.
        return [
            "CheckHostIP=no",
            "HashKnownHosts=no",
            "StrictHostKeyChecking=accept-new",
            f"UserKnownHostsFile={GCLOUD_KNOWN_HOSTS.expanduser()}",
            f"HostKeyAlias=tpu.{host.node_id}-{host.worker}",
        ]

    def check(self, hosts: Sequence[Host]) -> None:
        """Complain now about what every host would complain about."""
        if shutil.which(self.program) is None:
            raise UserError("no ssh here", expected="OpenSSH's client", fix="install openssh-client")
        key = self.key or (GCLOUD_KEY if any(host.node_id for host in hosts) else None)
        if key is not None and not key.expanduser().is_file():
            made = "; gcloud compute tpus tpu-vm ssh makes one and gives it to the node" if self.key is None else ""
            raise UserError("no such ssh key", expected="a private key", found=key, fix=f"name it with --ssh-key{made}")


def parse_hosts(groups: Sequence[str]) -> list[Host]:
    """Hosts named directly, ``user@address:port,…``; each group is a slice."""
    hosts: list[Host] = []
    for number, group in enumerate(groups):
        names = [name.strip() for name in group.split(",") if name.strip()]
        if not names:
            raise SpecError("--hosts names no host", expected="user@address:port,…", found=repr(group))
        for worker, name in enumerate(names):
            match = _NAMED.fullmatch(name)
            if match is None or name.startswith("-") or match["address"].startswith("-"):
                raise SpecError("a host that cannot be", expected="user@address:port", found=repr(name))
            port = int(match["port"]) if match["port"] else None
            if port is not None and not 0 < port < 65536:
                raise SpecError("a port that cannot be", expected="1 to 65535", found=port)
            address = match["address"].strip("[]")
            label = name.rpartition("@")[2]
            hosts.append(Host(label, "", worker, address, number, address, port, match["user"]))
    labels = [host.label for host in hosts]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise SpecError("a host is named twice", expected="each host once", found=", ".join(twice))
    return hosts


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


def ensure_key(path: Path = GCLOUD_KEY) -> str:
    """The public half of the key, made without a passphrase if absent: what goes in a node's ``ssh-keys`` metadata."""
    private = path.expanduser()
    public = private.with_name(private.name + ".pub")
    if not private.exists():
        private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        program = shutil.which("ssh-keygen")
        if program is None:
            raise UserError("no ssh-keygen here", fix="install openssh-client")
        words = [
            program,
            "-q",
            "-t",
            "rsa",
            "-N",
            "",
            "-C",
            f"{getpass.getuser()}@{os.uname().nodename}",
            "-f",
            str(private),
        ]
        made = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        if made.returncode != 0:
            raise Failure("ssh-keygen failed", found=made.stderr.strip() or made.returncode)
    if not public.exists():
        raise UserError("a private key without its public half", expected=public, fix=f"ssh-keygen -y -f {private}")
    return public.read_text(encoding="utf-8").strip()
