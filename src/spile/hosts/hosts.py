"""Hosts, and how ssh reaches them: hosts named by address, or TPU VMs as gcloud reaches them."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spile.errors import Failure, SpecError, UserError

GCLOUD_KEY = Path("~/.ssh/google_compute_engine")
_SSH_CONFIG = Path(__file__).with_name("ssh_config")
GCLOUD_KNOWN_HOSTS = Path("~/.ssh/google_compute_known_hosts")

_NAMED = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<address>\[[^\]\s]+\]|[^:@\s]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True)
class Host:
    """One host of a slice."""

    node: str
    """The name of the slice; a host named by address is its own slice."""
    node_id: str
    """The id of the TPU node, which a recreated node does not keep; empty for a host named by address."""
    worker: int
    """The number of the host in its slice."""
    address: str
    slice: int
    internal: str = ""
    """The address at which the other hosts reach it."""
    port: int | None = None
    user: str | None = None
    alone: bool = True
    """Whether it is the only host of its slice."""

    @property
    def label(self) -> str:
        """A short, unique name: ``tpu-a-0``, or ``tpu-a-0:w2`` in a slice of several hosts."""
        return self.node if self.alone else f"{self.node}:w{self.worker}"

    @property
    def file_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.label).strip("-")


@dataclass(frozen=True)
class Access:
    """How to log in."""

    user: str | None = None
    key: Path | None = None
    options: tuple[str, ...] = ()
    """Additional options of ssh, ``Key=value``, which take precedence."""

    def command(self, host: Host, remote: str) -> list[str]:
        """Return the ssh command line that runs ``remote`` in the host's shell."""
        options = [
            *self.options,
            "BatchMode=yes",
            "LogLevel=ERROR",
            "ConnectTimeout=10",
            "ServerAliveInterval=2",
            "ServerAliveCountMax=3",
            *(self._gcloud(host) if host.node_id else []),
        ]
        command = ["ssh", "-T", "-F", str(_SSH_CONFIG)]
        for option in options:
            command += ["-o", option]
        key = self.key or (GCLOUD_KEY if host.node_id else None)
        if key is not None:
            command += ["-o", "IdentitiesOnly=yes", "-i", str(key.expanduser())]
        user = host.user or self.user or (getpass.getuser() if host.node_id else None)
        command += ["-p", str(host.port)] if host.port is not None else []
        command += ["-l", user] if user else []
        return [*command, "--", host.address, remote]

    @staticmethod
    def _gcloud(host: Host) -> list[str]:
        # The alias contains the node's id, so a recreated node does not conflict with its predecessor's host key.
        return [
            "CheckHostIP=no",
            "HashKnownHosts=no",
            f"UserKnownHostsFile={GCLOUD_KNOWN_HOSTS.expanduser()}",
            f"HostKeyAlias=tpu.{host.node_id}-{host.worker}",
        ]

    def check(self, hosts: Sequence[Host]) -> None:
        """Raise now for problems that every host would report."""
        if shutil.which("ssh") is None:
            raise UserError("no ssh here", expected="OpenSSH's client", fix="install openssh-client")
        key = self.key or (GCLOUD_KEY if any(host.node_id for host in hosts) else None)
        if key is not None and not key.expanduser().is_file():
            made = "; gcloud compute tpus tpu-vm ssh makes one and gives it to the node" if self.key is None else ""
            raise UserError("no such ssh key", expected="a private key", found=key, fix=f"name it with --ssh-key{made}")


def parse_hosts(groups: Sequence[str]) -> list[Host]:
    """Parse hosts named by address, ``user@address:port,…``; each group is a slice."""
    hosts: list[Host] = []
    for number, group in enumerate(groups):
        names = [name.strip() for name in group.split(",") if name.strip()]
        if not names:
            raise SpecError("--hosts names no host", expected="user@address:port,…", found=repr(group))
        for worker, name in enumerate(names):
            match = _NAMED.fullmatch(name)
            if match is None or name.startswith("-") or match["address"].startswith("-"):
                raise SpecError("--hosts contains an invalid host", expected="user@address:port", found=repr(name))
            port = int(match["port"]) if match["port"] else None
            if port is not None and not 0 < port < 65536:
                raise SpecError("--hosts contains an invalid port", expected="1 to 65535", found=port)
            address = match["address"].strip("[]")
            label = name.rpartition("@")[2]
            hosts.append(Host(label, "", worker, address, number, address, port, match["user"]))
    labels = [host.label for host in hosts]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise SpecError("a host is named twice", expected="each host once", found=", ".join(twice))
    return hosts


def ensure_key(path: Path = GCLOUD_KEY) -> str:
    """Return the public key for a node's ``ssh-keys`` metadata; create a key without a passphrase if there is none."""
    private = path.expanduser()
    public = private.with_name(private.name + ".pub")
    if not private.exists():
        private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if shutil.which("ssh-keygen") is None:
            raise UserError("no ssh-keygen here", fix="install openssh-client")
        owner = f"{getpass.getuser()}@{os.uname().nodename}"
        command = ["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-C", owner, "-f", str(private)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if made.returncode != 0:
            raise Failure("ssh-keygen failed", found=made.stderr.strip() or made.returncode)
    if not public.exists():
        raise UserError(
            "a private key without its public half", expected=public, fix=f"create it with: ssh-keygen -y -f {private}"
        )
    return public.read_text(encoding="utf-8").strip()
