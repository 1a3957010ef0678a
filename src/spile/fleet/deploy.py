"""A deployment: streams, code and assignments into the bucket, then workers onto machines."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spile.errors import SpecError
from spile.fleet.home import STARTUP, FleetHome
from spile.fleet.install import build_wheel
from spile.fleet.manage import NodeResult, list_nodes
from spile.fleet.monitor import machine_metadata, startup_script
from spile.fleet.pins import REQUIREMENTS, machine_requirements, sha256, slice_secret
from spile.fleet.provider import NodeState, Provider
from spile.fleet.spec import FleetSpec, owns
from spile.fleet.tpu_hosts import hosts_of
from spile.hosts.hosts import Access, Host
from spile.hosts.run import launch
from spile.objects import bucket_url
from spile.version import __version__

__all__ = [
    "Deployment",
    "fleet_bucket",
    "launch_over_ssh",
    "launch_waiting",
    "publish",
]


def fleet_bucket(flag: str, text: str) -> str:
    """``name``, ``gs://name/x`` or ``s3://name/x`` as a URL; a fleet's home is a bucket, for machines' disks go."""
    url = bucket_url(text)
    scheme, _, rest = url.partition("://")
    if scheme not in ("gs", "s3") or not rest or text.startswith(("/", ".", "~")):
        raise SpecError(
            flag,
            expected="a bucket, gs://NAME or s3://NAME: a machine's own disk goes with the machine",
            found=repr(text),
        )
    return url


@dataclass(frozen=True)
class Deployment:
    """What is deployed, beside the fleet's machines."""

    root: str
    streams: str | None
    arguments: tuple[str, ...]
    split: str | None = None
    max_samples: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    """As the command line gave them, for the next deployment to remember."""
    notify: tuple[str, ...] = ()

    def on(self, fleet: FleetSpec) -> FleetSpec:
        """The fleet with this work, under a new deployment's name."""
        return replace(
            fleet,
            root=self.root,
            streams=self.streams,
            split=self.split or "",
            arguments=self.arguments,
            flags=dict(self.flags),
            notify=self.notify,
            max_samples=self.max_samples,
            environment=dict(self.environment),
            deployment=f"{int(time.time()):x}-{secrets.token_hex(4)}",
            version=__version__,
        )


def publish(home: FleetHome, fleet: FleetSpec, log: Callable[[str], None]) -> FleetSpec:
    """Put the wheel, the startup script and, last, the assignment where machines look for them."""
    name, data = build_wheel()
    files = {name: data, STARTUP: startup_script().encode(), REQUIREMENTS: machine_requirements()}
    for key, content in files.items():
        home.folder.put(key, content)
    hashes = {key: sha256(content) for key, content in files.items()}
    fleet = replace(fleet, wheel=name, hashes=hashes, former_zones=_former_zones(home, fleet))
    home.write_fleet(fleet)
    log(f"{name} ({len(data):,} bytes) and the assignment of {len(fleet.workers)} workers are in {home.folder.url}")
    log(f"for spile monitor on another computer: --deployment sha256:{sha256(fleet.to_json())}")
    return fleet


def _former_zones(home: FleetHome, fleet: FleetSpec) -> tuple[str, ...]:
    """The zones of the deployment before that this one does not use: machines may be left there."""
    before = home.find_fleet()
    if before is None:
        return ()
    return tuple(sorted({*before.zones, *before.former_zones} - {*fleet.zones}))


def launch_waiting(provider: Provider, fleet: FleetSpec, home: str) -> list[NodeResult]:
    """Machines that are there: those with our startup script notice the deployment; others need ssh or a reboot."""
    results = []
    nodes = {node.name: node for node in list_nodes(provider, fleet.zones) if owns(fleet.name, node)}
    for worker in fleet.workers:
        node = nodes.get(worker.name)
        if node is None:
            detail = "there is no such machine of this fleet; make it with --create-tpus, or let --monitor make it"
            results.append(NodeResult(worker.name, worker.zone, "failed", detail))
        elif node.metadata.get("spile-home") == home:
            results.append(NodeResult(worker.name, node.zone, "there already", "it takes this deployment by itself"))
        else:
            wanted = machine_metadata(home, worker.name, startup_script(), sha256(fleet.to_json()))
            kept = {key: node.metadata[key] for key in slice_secret() if key in node.metadata}  # its hosts may use it
            provider.set_metadata(node.zone, node.name, {**node.metadata, **wanted, **kept})
            detail = "it was made without spile's startup script: pass --launch ssh (from its next boot on it has it)"
            results.append(NodeResult(worker.name, node.zone, "failed", detail))
    return results


def _script(text: str, home: str, host: Host, zone: str, pin: str, force: bool) -> str:
    words = ["--home", home, "--node", host.node, "--zone", zone, "--host", str(host.worker), "--pin", pin]
    end = "SPILE_STARTUP_ENDS_HERE"
    return (
        f'file="$(mktemp)"\ncat > "$file" <<\'{end}\'\n{text}\n{end}\n'
        "as_root=sudo; [ \"$(id -u)\" = 0 ] && as_root=''\n"
        f'$as_root bash "$file" {shlex.join(words)}{" --force" if force else ""}; code=$?; rm -f "$file"; exit $code\n'
    )


def launch_over_ssh(
    provider: Provider, fleet: FleetSpec, home: str, access: Access, *, internal_ip: bool = False, force: bool = False
) -> list[NodeResult]:
    """Run the startup script on every host of every machine that is READY, all at once."""
    names = {worker.name for worker in fleet.workers}
    nodes = [node for node in list_nodes(provider, fleet.zones) if owns(fleet.name, node) and node.name in names]
    ready = [node for node in nodes if node.state is NodeState.READY]
    results = [
        NodeResult(node.name, node.zone, "failed", f"it is {node.state.value}") for node in nodes if node not in ready
    ]
    missing = names - {node.name for node in nodes}
    zones = {worker.name: worker.zone for worker in fleet.workers}
    results += [NodeResult(name, zones[name], "failed", "there is no such machine") for name in sorted(missing)]
    if not ready:
        raise SpecError("no machine to log in to", expected="READY machines of the fleet", found=str(len(nodes)))
    hosts = [host for node in ready for host in hosts_of([node], node.name, internal_ip=internal_ip)]
    access.check(hosts)
    text, pin, by_name = startup_script(), sha256(fleet.to_json()), {node.name: node for node in ready}
    done = launch(hosts, lambda host: _script(text, home, host, by_name[host.node].zone, pin, force), access=access)
    for each in done:
        zone = by_name[each.host.node].zone
        results.append(
            NodeResult(each.host.label, zone, "failed", each.error.line())
            if each.error
            else NodeResult(each.host.label, zone, "created", "launched")
        )
    return results
