"""Deploy a fleet: check the request, publish code and assignment, launch workers."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spile.data.split import StreamsPlan
from spile.errors import CloudError, DataError, ModelError, RunMismatch, SpecError, SpileError, UserError, untrusted
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
from spile.fleet.provider import NameTaken, NodeState, NotAllowed, Quota, QuotaLimit, Stage
from spile.fleet.spec import FleetSpec, Worker, owns
from spile.hosts.hosts import Access, Host
from spile.hosts.run import launch
from spile.models import model_files
from spile.objects import bucket_url, is_remote, open_folder
from spile.objects.clouds import GoogleBucket
from spile.objects.preflight import preflight
from spile.objects.retry import RequestFailure
from spile.planning.machines import Machine, parse_machine
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


_CREATE_MACHINES = ("tpu.nodes.create", "tpu.nodes.delete", "tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.update")
_WRITE_BUCKET = ("storage.objects.create", "storage.objects.get", "storage.objects.list")
_WRITER = "roles/storage.objectAdmin"
_WRITERS = {_WRITER, "roles/storage.objectUser", "roles/storage.admin"}


def check_access(urls: Iterable[str], account: str | None, client: CloudTpu | None = None) -> Iterator[str]:
    """Yield a line for each finding about write access to these buckets and, with ``client``, about creating machines.

    Raises :class:`Unwritable` or :class:`NotAllowed` if the operator lacks access.
    """
    for bucket in dict.fromkeys("/".join(url.split("/", 3)[:3]) for url in urls):
        if bucket.startswith("gs://"):
            yield check_bucket(bucket)
            yield check_machines_bucket(bucket, account)
        else:  # S3 has no API for this question, so an object is created and deleted.
            preflight(open_folder(bucket))
            yield f"{bucket}: your account may write it; machines may where --env gives them keys of S3 that may"
    if client is None:
        return
    project = client.project
    held = partial(client.granted_permissions, "cloudresourcemanager", f"projects/{project}", _CREATE_MACHINES)
    grant = f"gcloud projects add-iam-policy-binding {project} --member=user:YOU --role=roles/tpu.admin"
    yield _check_permissions(project, "create and delete its TPU VMs", _CREATE_MACHINES, held, grant)
    if account is not None:
        act_as = ("iam.serviceAccounts.actAs",)
        held = partial(client.granted_permissions, "iam", f"projects/-/serviceAccounts/{account}", act_as)
        grant = f"gcloud iam service-accounts add-iam-policy-binding {account} --member=user:YOU"
        grant += " --role=roles/iam.serviceAccountUser"
        yield _check_permissions(account, "create machines that act as it", act_as, held, grant)


def check_bucket(bucket: str) -> str:
    """Return a line about whether the operator may write to a Google bucket; raise :class:`NotAllowed` if not."""
    held = partial(_bucket_iam, bucket, "/testPermissions", {"permissions": _WRITE_BUCKET}, "permissions")
    return _check_permissions(bucket, "write it", _WRITE_BUCKET, held, _grant(bucket, "user:YOU"))


def check_machines_bucket(bucket: str, account: str | None) -> str:
    """Return a line about whether the machines' service account may write to a Google bucket.

    The bucket's policy can prove that it may, but not that it may not: the project's policy can grant more.
    """
    action = f"the machines' account {account or '(the project’s own)'} may write it"
    if account is None:
        return f"{bucket}: cannot tell whether {action}: name one with --service-account"
    try:
        policy = _bucket_iam(bucket, "", {"optionsRequestedPolicyVersion": "3"}, "bindings")
    except CloudError as error:
        return f"{bucket}: cannot tell whether {action} ({error.found})"
    member = f"serviceAccount:{account}"
    known = [each for each in policy if isinstance(each, Mapping) and isinstance(each.get("members"), list)]
    roles = {str(each.get("role")) for each in known if member in each["members"] and not each.get("condition")}
    if roles & _WRITERS:
        return f"{bucket}: {action}"
    return (
        f"{bucket}: cannot tell whether {action}: the bucket's policy does not say so; unless the project's does, "
        f"type: {_grant(bucket, member)}"
    )


def _check_permissions(
    place: str, action: str, needed: Sequence[str], held: Callable[[], Collection[str]], grant: str
) -> str:
    """Return a line about whether the operator may do something; raise :class:`NotAllowed` if not."""
    try:
        granted = held()
    except (CloudError, UserError) as error:  # The API is disabled, or the account may not read the policy.
        return f"{place}: cannot tell whether your account may {action} ({error.found})"
    missing = [each for each in needed if each not in granted]
    if missing:
        raise NotAllowed(
            f"{place}: your account may not {action}",
            expected=", ".join(needed),
            found=f"no {', '.join(missing)}",
            fix=f"ask its owner: {grant}",
        )
    return f"{place}: your account may {action}"


def _grant(bucket: str, member: str) -> str:
    return f"gcloud storage buckets add-iam-policy-binding {bucket} --member={member} --role={_WRITER}"


def _bucket_iam(bucket: str, path: str, query: Mapping[str, str | Sequence[str]], field: str) -> list[Any]:
    name = bucket.removeprefix("gs://")
    problem = f"the permissions of {bucket} cannot be read"
    try:
        body = GoogleBucket(name).request("GET", f"storage/v1/b/{name}/iam{path}", query)
    except RequestFailure as failure:
        raise CloudError(problem, found=failure.cause) from failure
    with untrusted(CloudError, problem):
        return [*json.loads(body).get(field, [])]


_QUOTA_NAMES = {"v5e": r"TPUV5s(Preemptible)?Litepod", "v5p": "TPUV5P", "v6e": "TPUV6E"}
"""How the names of a generation's quotas begin, if not as in ``TPUV3``."""


def check_quota(client: CloudTpu, fleet: FleetSpec, new: Sequence[Worker]) -> Iterator[str]:
    """Yield a line for each limit that the fleet's machines count against. Raise :class:`Quota` if one is too small.

    The API lists limits, not what is in use, so the machines in the fleet's zones are counted. Quota is no promise of
    capacity, and machines of other products, such as GKE, are not known here.
    """
    try:
        limits = client.quotas()
    except (CloudError, UserError) as error:
        enable = f"gcloud services enable cloudquotas.googleapis.com --project {client.project}"
        yield f"quota: not checked ({error.found}). To let spile read it: {enable}"
        return
    machine = parse_machine(fleet.machine.accelerator_type)
    cheap = fleet.machine.preemptible or fleet.machine.spot or fleet.best_effort
    limits = [each for each in limits if _counts(each, machine, cheap=cheap, reserved=fleet.machine.reserved)]
    nodes = list_nodes(client, fleet.zones)
    missing = [worker.zone for worker in new]
    used = [
        (node.zone, _size(node.accelerator_type))
        for node in nodes
        if node.preemptible == cheap and _generation(node.accelerator_type) == machine.generation
    ]
    for zone in fleet.zones:
        known = [(limit, place) for limit in limits for place in (zone, _region(zone)) if place in limit.values]
        if not known:
            yield f"{zone}: quota for {machine.name} is not known: the project's list has no limit for it"
        for limit, place in known:
            count = sum(1 for each in missing if place in (each, _region(each)))
            held = sum(size for each, size in used if place in (each, _region(each)))
            yield _compare(limit, place, held, count, machine)


def _compare(limit: QuotaLimit, place: str, held: int, count: int, machine: Machine) -> str:
    value, needed = limit.values[place], held + count * _size(machine.name)
    in_use = f" and {held} in use" if held else ""
    if value >= 0 and needed > value:
        raise Quota(
            f"{place}: quota {limit.name} is too small for this fleet",
            expected=f"{needed}, for {counted(count, 'new machine')} {machine.name}{in_use}",
            found=str(value),
            fix="ask for more quota, deploy fewer workers, or use another zone or --tpu-type",
        )
    allowed = "is not limited" if value < 0 else f"is {value}"
    return f"{place}: quota {limit.name} {allowed}; the fleet needs {needed}"


def _counts(limit: QuotaLimit, machine: Machine, *, cheap: bool, reserved: bool) -> bool:
    """Return whether machines of this type and tier count against the limit."""
    name, small = limit.name, machine.chips <= 8
    if not re.match(_QUOTA_NAMES.get(machine.generation, f"TPU{machine.generation.upper()}"), name):
        return False
    if machine.generation == "v5e" and ("Serving" in name) != small:
        return False
    if machine.generation in ("v2", "v3") and ("Pod" in name) != (machine.cores > 8):
        return False
    return ("Preemptible" in name) == cheap and ("Reserved" in name) == reserved


def _generation(accelerator_type: str) -> str:
    try:
        return parse_machine(accelerator_type).generation
    except SpecError:
        return ""


def _size(accelerator_type: str) -> int:
    """Return the number in ``v3-8``: what quota counts, cores or chips."""
    return int(accelerator_type.rpartition("-")[2])


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]


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
