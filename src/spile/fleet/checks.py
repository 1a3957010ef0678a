"""What can be known before a deployment costs money or touches anybody's data, and is checked before."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from spile.errors import DataError, ModelError, RunMismatch, SpileError, UserError
from spile.fleet.cloud_tpu import CloudTpu, check_roles
from spile.fleet.home import FleetHome, fleets_of
from spile.fleet.spec import FleetSpec
from spile.fleet.streams import StreamsPlan
from spile.models import model_files
from spile.models.architecture import ModelConfig
from spile.objects import is_remote, open_folder
from spile.objects.cloud import access
from spile.objects.preflight import preflight
from spile.spec.run import EMBEDDED, ExtractSpec
from spile.spec.taps import select_taps
from spile.store.clearing import stream_has_commits
from spile.store.layout import stream_folder
from spile.store.snapshot import SnapshotReader
from spile.store.stream import read_stream
from spile.store.streams import find_streams

__all__ = ["begun", "changes", "check_access", "check_model", "check_root", "check_stored", "refuse_at_work"]


def check_model(spec: ExtractSpec) -> ModelConfig:
    """The model is one that machines can read, and has the layers that are asked for. No weights are fetched."""
    if spec.model != EMBEDDED and not is_remote(spec.model) and Path(spec.model).expanduser().exists():
        raise ModelError(
            f"{spec.model} is on this computer, where machines cannot read it",
            expected="a name on the hub, or gs://…",
            fix=f"copy it: gcloud storage cp -r {spec.model} gs://BUCKET/models/",
        )
    config = model_files.find(spec.model, spec.revision, weights=False).config
    select_taps(spec.sites, spec.layers, config.n_layers, spec.heads, spec.top_k)
    return config


def check_access(urls: Iterable[str], account: str | None, client: CloudTpu | None = None) -> Iterator[str]:
    """A line for each finding about who may write these buckets, and with a ``client`` who may make machines.

    :class:`Unwritable` or :class:`NotAllowed` where the operator may not.
    """
    for bucket in dict.fromkeys("/".join(url.split("/", 3)[:3]) for url in urls):
        name = bucket.partition("://")[2]
        if bucket.startswith("gs://"):
            yield access.check_own(name)
            yield access.check_machines(name, account)
        else:  # S3 has nobody to ask: an object is made and removed
            preflight(open_folder(bucket))
            yield f"{bucket}: your account may write it; machines may where --env gives them keys of S3 that may"
    if client is not None:
        yield from check_roles(client, account)


def check_root(bucket: str, fleet: FleetSpec, streams: StreamsPlan, *, cleared: bool) -> None:
    """Nobody else's rows are where this fleet will write. ``cleared``: what its own workers made will be removed."""
    for other in fleets_of(bucket):
        if other.name != fleet.name and other.root == fleet.root and not _over(bucket, other):
            raise UserError(
                f"fleet {other.name} writes to {fleet.root}",
                expected="a place of its own for each fleet",
                fix="give another --gcs-prefix, or stop that one: spile fleet stop",
            )
    root = open_folder(fleet.root)
    mine = {worker.id for worker in fleet.workers}
    for number in find_streams(root):
        record = read_stream(root.child(stream_folder(number)))
        if record is None or (cleared and number in mine):
            continue
        where = f"{root.url}/{stream_folder(number)}"
        check_stored(number, record.identity.sha256, where, streams, mine=number in mine)


def check_stored(number: int, sha256: str, where: str, streams: StreamsPlan, *, mine: bool) -> None:
    """Rows that are stored already must be of the very stream that their worker will be given."""
    entries = streams.manifest.streams if streams.manifest is not None else None
    if entries is None:
        return
    wanted = entries[number].sha256 if mine else None
    if wanted != sha256:
        raise RunMismatch(
            f"{where} holds rows of another dataset or of another split",
            expected=f"stream sha256 {wanted}" if wanted else f"{len(entries)} streams, this one not among them",
            found=f"sha256 {sha256}",
            fix="give another --gcs-prefix, so that nothing of it is lost",
        )


def begun(root: str, fleet: FleetSpec) -> list[int]:
    """The fleet's streams of which something is stored."""
    folder = open_folder(root)
    return [worker.id for worker in fleet.workers if stream_has_commits(folder, worker.id)]


def refuse_at_work(root: str, numbers: list[int]) -> None:
    """Nothing is removed under a worker that writes."""
    for view in SnapshotReader(open_folder(root), time.time).take().streams:
        if view.number in numbers and view.age is not None and view.age < 300 and not view.phase.ended:
            raise DataError(
                f"{root}/{stream_folder(view.number)} is being written",
                found=f"a worker's sign of life {view.age:.0f} s ago",
                fix="end it first: spile fleet stop",
            )


def _over(bucket: str, fleet: FleetSpec) -> bool:
    """Whether a fleet is done or was stopped: as far as its bucket tells."""
    home = FleetHome.open(f"{bucket}/fleet/{fleet.name}")
    try:
        if home.read_stop(fleet):
            return True
        reports = home.read_reports()
    except SpileError:
        return False
    mine = [reports.get(worker.name) for worker in fleet.workers]
    return all(each is not None and each.deployment == fleet.deployment and each.verdict == "finished" for each in mine)


def changes(before: FleetSpec, now: FleetSpec) -> list[str]:
    """What a deployment would change of the one that is there: ``root: A → B``, one each; empty: nothing."""
    return list(_changes(before, now))


def _changes(before: FleetSpec, now: FleetSpec) -> Iterator[str]:
    facts = {
        "output": (before.root, now.root),
        "streams": (before.streams, now.streams),
        "split": (before.split, now.split),
        "flags": (" ".join(before.arguments), " ".join(now.arguments)),
        "max-samples": (before.max_samples, now.max_samples),
        "workers": (_places(before), _places(now)),
        "machines": (before.machine.accelerator_type, now.machine.accelerator_type),
    }
    for name, (old, new) in facts.items():
        if old != new and not (name == "split" and not before.split):
            yield f"{name}: {old or 'none'} → {new or 'none'}"
    names = {**before.environment, **now.environment}  # values may be secrets
    if others := [name for name in names if before.environment.get(name) != now.environment.get(name)]:
        yield f"variables: {', '.join(others)}"


def _places(fleet: FleetSpec) -> str:
    names = [worker.name for worker in fleet.workers]
    return f"{len(names)} ({names[0]} … {names[-1]})"
