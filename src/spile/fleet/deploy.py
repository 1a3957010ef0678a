"""A deployment: streams, code and assignments into the bucket, then workers onto machines."""

from __future__ import annotations

import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from spile.data.make.items import RowSelection
from spile.data.make.manifest import stream_name
from spile.data.make.split import make_streams
from spile.data.make.upload import read_manifest, upload
from spile.errors import DataError, SpecError
from spile.fleet.cloud.provider import Provider
from spile.fleet.cloud.states import NodeState
from spile.fleet.heal.monitor import machine_metadata, startup_script
from spile.fleet.home import FLEET, STARTUP, FleetHome
from spile.fleet.manage import NodeResult, list_nodes
from spile.fleet.spec import FleetSpec, owns
from spile.fleet.ssh.hosts import Access, Host, hosts_of
from spile.fleet.ssh.launch import launch
from spile.fleet.wheel import build_wheel
from spile.objects import open_folder
from spile.objects.folder import NotFound
from spile.version import __version__

__all__ = [
    "Deployment",
    "check_streams",
    "launch_over_ssh",
    "launch_waiting",
    "prepare_streams",
    "publish",
    "upload_streams",
]


@dataclass(frozen=True)
class Deployment:
    """What is deployed, beside the fleet's machines."""

    root: str
    streams: str | None
    arguments: tuple[str, ...]
    max_samples: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def on(self, fleet: FleetSpec) -> FleetSpec:
        """The fleet with this work, under a new deployment's name."""
        return replace(
            fleet,
            root=self.root,
            streams=self.streams,
            arguments=self.arguments,
            max_samples=self.max_samples,
            environment=dict(self.environment),
            deployment=f"{int(time.time()):x}-{secrets.token_hex(4)}",
            version=__version__,
        )


def prepare_streams(
    dataset: str, streams: str, count: int, *, column: str = "examples", seed: int = 0, say: Callable[[str], None]
) -> None:
    """Split a dataset into one stream a worker and put them in the bucket, skipping what is there already."""
    begun = read_manifest(open_folder(streams))
    with tempfile.TemporaryDirectory(prefix="spile-streams-") as folder:
        made = make_streams(dataset, Path(folder), count, selection=RowSelection(column=column), seed=seed, begun=begun)
        say(f"{made.tally.samples:,} samples of {dataset} in {count} streams")
        upload_streams(folder, streams, say)


def upload_streams(folder: str, streams: str, say: Callable[[str], None]) -> None:
    """Put a folder of streams in the bucket, skipping what is there already."""
    sent = upload(Path(folder), open_folder(streams))
    say(f"{len(sent.uploaded)} files uploaded to {sent.url}, {len(sent.skipped)} there already")


def check_streams(streams: str, fleet: FleetSpec) -> None:
    """Refuse to launch workers whose streams are not there."""
    folder = open_folder(streams)
    for worker in fleet.workers:
        try:
            folder.info(stream_name(worker.id))
        except NotFound as error:
            raise DataError(
                f"no {stream_name(worker.id)} in {streams}",
                expected=f"{len(fleet.workers)} streams, one a worker",
                fix="leave --skip-dataset out, or: spile data streams, spile data upload",
            ) from error


def publish(home: FleetHome, fleet: FleetSpec, say: Callable[[str], None]) -> FleetSpec:
    """Put the wheel, the startup script and, last, the assignment where machines look for them."""
    name, data = build_wheel()
    try:
        there = home.folder.info(name).size == len(data)
    except NotFound:
        there = False
    if not there:
        home.folder.put(name, data)
    home.folder.put(STARTUP, startup_script().encode())
    fleet = replace(fleet, wheel=name, former_zones=_former_zones(home, fleet))
    home.write_fleet(fleet)
    say(f"{name} ({len(data):,} bytes) and the assignment of {len(fleet.workers)} workers are in {home.folder.url}")
    return fleet


def _former_zones(home: FleetHome, fleet: FleetSpec) -> tuple[str, ...]:
    """The zones of the deployment before that this one does not use: machines may be left there."""
    try:
        before = FleetSpec.from_json(home.folder.get(FLEET))
    except NotFound:
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
            wanted = machine_metadata(home, worker.name, startup_script())
            provider.set_metadata(node.zone, node.name, {**node.metadata, **wanted})
            detail = "it was made without spile's startup script: pass --launch ssh (from its next boot on it has it)"
            results.append(NodeResult(worker.name, node.zone, "failed", detail))
    return results


def _script(text: str, home: str, host: Host, zone: str, force: bool) -> str:
    words = ["--home", home, "--node", host.node, "--zone", zone, "--host", str(host.worker)]
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
    text, by_name = startup_script(), {node.name: node for node in ready}
    done = launch(hosts, lambda host: _script(text, home, host, by_name[host.node].zone, force), access=access)
    for each in done:
        zone = by_name[each.host.node].zone
        results.append(
            NodeResult(each.host.label, zone, "failed", each.error.line())
            if each.error
            else NodeResult(each.host.label, zone, "created", "launched")
        )
    return results
