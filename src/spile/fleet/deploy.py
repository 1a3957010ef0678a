"""Deploy a fleet: check the request, publish code and assignment, launch workers."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spile.data.split import StreamsPlan
from spile.errors import DataError, ModelError, RunMismatch, SpecError, SpileError, UserError
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.home import (
    REQUIREMENTS,
    STARTUP,
    FleetHome,
    fleets_of,
    machine_metadata,
    machine_requirements,
    sha256,
    startup_script,
)
from spile.fleet.install import build_wheel
from spile.fleet.manage import NodeResult, gather_zones, hosts_of, list_nodes, slice_secret
from spile.fleet.monitor import zone_nodes
from spile.fleet.provider import NameTaken, NodeState, Stage
from spile.fleet.spec import FleetSpec, Worker, owns
from spile.hosts.hosts import Access, Host
from spile.hosts.run import launch
from spile.models import model_files
from spile.objects import bucket_url, is_remote, open_folder
from spile.objects.preflight import preflight
from spile.run.claiming import planned_streams
from spile.spec.amounts import counted
from spile.spec.run import EMBEDDED, RunSpec
from spile.store.heartbeat import Liveness
from spile.store.layout import find_streams
from spile.store.snapshot import SnapshotReader
from spile.store.writer import read_stream
from spile.version import __version__


def check_model(spec: RunSpec) -> None:
    """Check that machines can read the model and that it has the requested layers. No weights are downloaded."""
    if spec.model != EMBEDDED and not is_remote(spec.model) and Path(spec.model).expanduser().exists():
        raise ModelError(
            f"{spec.model} is on this computer, where machines cannot read it",
            expected="a name on the hub, or gs://…",
            fix=f"copy it: gcloud storage cp -r {spec.model} gs://BUCKET/models/",
        )
    spec.selected_taps(model_files.find(spec.model, spec.revision, weights=False).config.n_layers)


def check_buckets(urls: Iterable[str]) -> None:
    """Raise if one of these buckets cannot be written. Create and delete an object in each."""
    for bucket in dict.fromkeys("/".join(url.split("/", 3)[:3]) for url in urls):
        preflight(open_folder(bucket))


def check_root(bucket: str, fleet: FleetSpec, streams: StreamsPlan, *, cleared: bool) -> None:
    """Raise if the output contains other rows. ``cleared``: what this fleet's own workers stored will be removed."""
    for other in fleets_of(bucket):
        if other.name != fleet.name and other.root == fleet.root and not _over(bucket, other):
            raise UserError(
                f"fleet {other.name} writes to {fleet.root}",
                expected="a separate output for each fleet",
                fix="give another --gcs-prefix, or stop that one: spile fleet stop",
            )
    root = open_folder(fleet.root)
    mine = set(range(fleet.stream_count))
    for number, name in find_streams(root).items():
        record = read_stream(root.child(name))
        if record is None or (cleared and number in mine):
            continue
        check_stored(number, record.identity.sha256, f"{root.url}/{name}", streams, mine=number in mine)


def check_stored(number: int, sha256: str, where: str, streams: StreamsPlan, *, mine: bool) -> None:
    """Raise if the stored rows are not from the stream that their worker will get."""
    entries = streams.manifest.streams if streams.manifest is not None else None
    if entries is None:
        return
    wanted = entries[number].sha256 if mine else None
    if wanted != sha256:
        raise RunMismatch(
            f"{where} holds rows of another dataset or of another split",
            expected=f"stream sha256 {wanted}" if wanted else f"{len(entries)} streams, this one not among them",
            found=f"sha256 {sha256}",
            fix="give another --gcs-prefix, so that none of it is lost",
        )


def refuse_active_streams(root: str, numbers: list[int]) -> None:
    """Raise if a worker is still writing one of these streams, which must not be removed then."""
    for view in SnapshotReader(open_folder(root), time.time).take().streams:
        if view.number not in numbers or view.age is None or view.phase.ended:
            continue
        if view.age < Liveness(view.interval).dead:
            raise DataError(
                f"{root}/{view.name} is being written",
                found=f"a worker's heartbeat of {view.age:.0f} s ago",
                fix="end it first: spile fleet stop",
            )


def _over(bucket: str, fleet: FleetSpec) -> bool:
    """Return whether a fleet is finished or was stopped, as far as its bucket shows."""
    home = FleetHome.open(f"{bucket}/fleet/{fleet.name}")
    try:
        if home.read_stop(fleet):
            return True
        reports = home.read_reports()
    except SpileError:
        return False
    mine = [reports.get(worker.name) for worker in fleet.workers]
    return all(each is not None and each.deployment == fleet.deployment and each.verdict == "finished" for each in mine)


_SHOWN = ("output", "dataset_dir")
"""Fields of the run spec that have a name of their own in the list of changes."""


def changes(before: FleetSpec, now: FleetSpec) -> list[str]:
    """Return what a deployment would change in the existing one, as lines ``root: A → B``; empty if nothing changes."""
    facts = {
        "output": (before.root, now.root),
        "streams": (before.streams, now.streams),
        **{name: (before.run.get(name), now.run.get(name)) for name in {**before.run, **now.run} if name not in _SHOWN},
        "workers": (_places(before), _places(now)),
        "machines": (before.machine.accelerator_type, now.machine.accelerator_type),
    }
    lines = [f"{name}: {old or 'none'} → {new or 'none'}" for name, (old, new) in facts.items() if old != new]
    names = {**before.environment, **now.environment}  # The values may be secrets.
    if others := [name for name in names if before.environment.get(name) != now.environment.get(name)]:
        lines.append(f"variables: {', '.join(others)}")
    return lines


def _places(fleet: FleetSpec) -> str:
    names = [worker.name for worker in fleet.workers]
    return f"{len(names)} ({names[0]} … {names[-1]})"


def fleet_bucket(flag: str, text: str) -> str:
    """Return ``name``, ``gs://name/x`` or ``s3://name/x`` as a URL. Refuse folders: machines lose their disks."""
    url = bucket_url(text)
    scheme, _, rest = url.partition("://")
    if scheme not in ("gs", "s3") or not rest or text.startswith(("/", ".", "~")):
        raise SpecError(
            flag,
            expected="a bucket, gs://NAME or s3://NAME: a machine's disk is deleted with the machine",
            found=repr(text),
        )
    return url


def deployment_of(fleet: FleetSpec, run: RunSpec, streams: StreamsPlan, **more: Any) -> FleetSpec:
    """Return the fleet with its work, under the name of a new deployment."""
    return replace(
        fleet,
        run=run.for_stream(0).to_dict(),
        stream_count=streams.count,
        deployment=f"{int(time.time()):x}-{secrets.token_hex(4)}",
        version=__version__,
        **more,
    )


def publish(home: FleetHome, fleet: FleetSpec, log: Callable[[str], None]) -> FleetSpec:
    """Upload the wheel, the startup script and, last, ``fleet.json``."""
    name, data = build_wheel()
    files = {name: data, STARTUP: startup_script().encode(), REQUIREMENTS: machine_requirements()}
    for key, content in files.items():
        home.folder.put(key, content)
    hashes = {key: sha256(content) for key, content in files.items()}
    fleet = replace(fleet, wheel=name, hashes=hashes, former_zones=_former_zones(home, fleet))
    home.write_fleet(fleet)
    workers = counted(len(fleet.workers), "worker")
    log(f"{name} ({len(data):,} bytes) and the assignment of {workers} are in {home.folder.url}")
    log(f"for spile monitor on another computer: --deployment sha256:{sha256(fleet.to_json())}")
    return fleet


def _former_zones(home: FleetHome, fleet: FleetSpec) -> tuple[str, ...]:
    """Return the zones that only earlier deployments use: machines may be left there."""
    before = home.find_fleet()
    if before is None:
        return ()
    return tuple(sorted({*before.zones, *before.former_zones} - {*fleet.zones}))


_LAUNCH = "spile-launch"
"""The metadata entry of a machine that has to be launched over ssh, because it booted without the startup script."""


def refuse_machines_of_others(provider: CloudTpu, fleet: FleetSpec, home: str) -> None:
    """Raise if a machine with the name of one of the workers belongs to a deployment in another bucket."""
    names = {worker.name for worker in fleet.workers}
    for node in list_nodes(provider, fleet.zones):
        theirs = node.metadata.get("spile-home", home)
        if node.name in names and theirs != home:
            raise NameTaken(
                f"{node.name} in {node.zone} works for the fleet {theirs}",
                expected=f"a machine of {home}, or none of this name",
                fix="give this fleet its own --fleet NAME and --name-prefix NAME, "
                f"or end that one: spile fleet stop {theirs}",
            )


def prepare_bare_machines(provider: CloudTpu, fleet: FleetSpec, home: FleetHome) -> list[str]:
    """Return the fleet's machines that were created without spile's startup script, and give it to them.

    The script in their metadata counts from their next boot on. Until then they have to be launched over ssh. A machine
    that has not reported since its creation is launched again: an earlier attempt may have failed.
    """
    names, reports = {worker.name for worker in fleet.workers}, home.read_reports()
    bare = []
    for node in list_nodes(provider, fleet.zones):
        if node.name not in names or not owns(fleet.name, node) or node.state.stage is not Stage.RUNNING:
            continue
        if node.metadata.get("spile-home") == home.folder.url:
            report = reports.get(node.name)
            if _LAUNCH not in node.metadata or (report is not None and report.updated > node.created):
                continue
        wanted = machine_metadata(home.folder.url, sha256(fleet.to_json()), node.name)
        wanted[_LAUNCH] = "ssh"
        kept = {key: node.metadata[key] for key in slice_secret() if key in node.metadata}  # Its hosts may use it.
        provider.set_metadata(node.zone, node.name, {**node.metadata, **wanted, **kept})
        bare.append(node.name)
    return bare


def unfinished_streams(fleet: FleetSpec, streams: StreamsPlan, cleared: Collection[int]) -> list[int]:
    """Return the streams that workers would claim. ``cleared``: the streams whose data will be removed."""
    data = replace(RunSpec.from_dict(fleet.run).data, dataset_dir=str(streams.local or streams.url))
    views = {view.number: view for view in SnapshotReader(open_folder(fleet.root)).take().streams}
    return [
        number
        for number, planned in planned_streams(data).items()
        if number in cleared or number not in views or not planned.is_done(views[number])
    ]


def machines_to_create(provider: CloudTpu, fleet: FleetSpec, *, monitored: bool) -> list[Worker]:
    """Return the workers without a machine; ``monitored``: a monitor also replaces dead machines and moves others."""
    nodes = gather_zones(partial(zone_nodes, fleet, provider), fleet.zones)
    if monitored:
        alive = {node.name for node in nodes if node.state.stage is not Stage.DEAD}
        return [worker for worker in fleet.workers if worker.name not in alive]
    taken = {(node.zone, node.name) for node in nodes}
    return [worker for worker in fleet.workers if (worker.zone, worker.name) not in taken]


def _without_machine(worker: Worker, needed: bool, fix: str) -> NodeResult:
    if not needed:
        return NodeResult(worker.name, worker.zone, "finished", "no stream is left for it, so it needs no machine")
    return NodeResult(worker.name, worker.zone, "failed", f"there is no such machine{fix}")


def list_existing(provider: CloudTpu, fleet: FleetSpec, left: int) -> list[NodeResult]:
    """Return a result for each worker: its machine takes the deployment by itself, or there is none.

    Without a machine for each of the ``left`` unfinished streams, a missing machine is a failure.
    """
    nodes = {node.name: node for node in list_nodes(provider, fleet.zones) if owns(fleet.name, node)}
    alive = sum(node.state.stage in (Stage.RUNNING, Stage.STARTING) for node in nodes.values())
    results = []
    for worker in fleet.workers:
        node = nodes.get(worker.name)
        if node is None:
            fix = " of this fleet; create it with --create-tpus or --monitor"
            results.append(_without_machine(worker, alive < left, fix))
        else:
            results.append(NodeResult(worker.name, node.zone, "exists", "it takes this deployment by itself"))
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
    provider: CloudTpu,
    fleet: FleetSpec,
    home: str,
    access: Access,
    left: int,
    *,
    only: Collection[str] | None = None,
    internal_ip: bool = False,
    force: bool = False,
) -> list[NodeResult]:
    """Run the startup script on every host of every machine that is READY, all at once; ``only`` on these machines.

    Without a machine for each of the ``left`` unfinished streams, a missing machine is a failure.
    """
    names = {worker.name for worker in fleet.workers if only is None or worker.name in only}
    nodes = [node for node in list_nodes(provider, fleet.zones) if owns(fleet.name, node) and node.name in names]
    ready = [node for node in nodes if node.state is NodeState.READY]
    results = [
        NodeResult(node.name, node.zone, "failed", f"it is {node.state.value}") for node in nodes if node not in ready
    ]
    missing = names - {node.name for node in nodes}
    results += [_without_machine(worker, len(ready) < left, "") for worker in fleet.workers if worker.name in missing]
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
