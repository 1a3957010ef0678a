"""``spile deploy``: data, code and workers onto a fleet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter
from rich.console import Console

from spile.cli.extract import GCS_PREFIX, ExtractFlags
from spile.cli.shell.fleet_flags import MachineFlags, PlaceFlags, print_results
from spile.errors import SpecError
from spile.spec.run import EMBEDDED

if TYPE_CHECKING:
    from spile.fleet.cloud.tpu import CloudTpu
    from spile.fleet.home import FleetHome
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import FleetSpec

__all__ = ["deploy", "extract_words"]

_STEPS = Group("Which steps", sort_key=0)
_OURS = frozenset(
    {
        "dataset", "dataset_dir", "worker_id", "max_samples", "output", "output_dir", "gcs_bucket", "gcs_prefix",
        "upload_to_gcs", "delete_local_after_upload",
    }
)  # fmt: skip
"""What deploy decides for every worker."""


def _flag(text: str, **more: object) -> Parameter:
    return Parameter(group=_STEPS, help=text, **more)  # type: ignore[arg-type]


def extract_words(flags: ExtractFlags, *, without: Collection[str] = _OURS) -> tuple[str, ...]:
    """The flags that differ from their defaults, as ``spile extract`` on a machine will read them."""
    words: list[str] = []
    for field in fields(flags):
        value = getattr(flags, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name in without or value == default:
            continue
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, list | tuple):
            words += [name, *map(str, value)]
        else:
            words += [name, str(value)]
    return tuple(words)


def deploy(
    *,
    place: PlaceFlags = PlaceFlags(),  # noqa: B008
    machines: MachineFlags = MachineFlags(),  # noqa: B008
    flags: ExtractFlags = ExtractFlags(),  # noqa: B008
    create_tpus: Annotated[bool, _flag("Make the machines that are not there.", negative="")] = False,
    skip_dataset: Annotated[bool, _flag("The streams are in the bucket already.", negative="")] = False,
    skip_launch: Annotated[bool, _flag("Only prepare: streams, code, assignment.", negative="")] = False,
    launch: Annotated[
        Literal["startup", "ssh"], _flag("How workers start: by themselves at boot, or over ssh.")
    ] = "startup",
    force: Annotated[bool, _flag("With --launch ssh: install anew.", negative="")] = False,
    monitor: Annotated[bool, _flag("Then watch and heal, as spile monitor does.", negative="")] = False,
    interval: Annotated[float, _flag("Seconds between looks.")] = 60.0,
    budget: Annotated[float | None, _flag("Dollars after which the fleet is deleted.")] = None,
    keep_finished: Annotated[bool, _flag("Do not delete machines whose work is finished.", negative="")] = False,
    env: Annotated[
        list[str] | None, _flag("NAME=value for every worker, such as HF_TOKEN; kept in the bucket.", negative="")
    ] = None,
    user: Annotated[str | None, _flag("The login for ssh. [default: yours]")] = None,
    ssh_key: Annotated[Path | None, _flag("The private key for ssh. [default: gcloud's]")] = None,
    internal_ip: Annotated[bool, _flag("ssh to internal addresses.", negative="")] = False,
) -> int:
    """Split the dataset into a stream a worker, put streams and code in the bucket, and start every worker.

    Every flag of spile extract goes to every worker. Machines need nothing but the bucket: what is preempted and made
    again resumes by itself.
    """
    from spile.cli.shell.healing import adjusted, watch_fleet
    from spile.fleet.cloud.tpu import check_place
    from spile.fleet.deploy import launch_waiting, publish
    from spile.fleet.home import FleetHome, fleet_url
    from spile.fleet.spec import Policy

    client = place.client()
    policy = Policy(interval=interval, budget=budget, delete_finished=not keep_finished)
    bucket, fleet = _plan(machines.fleet(place, client.project, policy), flags, _variables(env or []))
    for zone in () if skip_launch else fleet.zones:
        check_place(client, zone, fleet.machine.accelerator_type)
    console = Console(highlight=False, soft_wrap=True)
    home = FleetHome.open(fleet_url(bucket, fleet.name))
    list(home.folder.list("fleet.json"))  # a bucket that is not there is told now, before anything is made
    _data(fleet, flags, skip_dataset, console)
    fleet = publish(home, fleet, lambda line: console.print(line, markup=False))
    if skip_launch:
        console.print("prepared; launch with: spile deploy --skip-dataset …", markup=False)
        return 0
    results: list[NodeResult] = []
    if create_tpus and (launch == "ssh" or not monitor):  # else the monitor makes them, and heals meanwhile
        results = _create(client, home, fleet, console)
    elif launch == "startup" and not monitor:
        results = launch_waiting(client, fleet, home.folder.url)
    if launch == "ssh":
        from spile.fleet.deploy import launch_over_ssh
        from spile.fleet.ssh.hosts import Access

        access = Access(user=user, key=ssh_key)
        results = [result for result in results if result.bad]
        results += launch_over_ssh(client, fleet, home.folder.url, access, internal_ip=internal_ip, force=force)
    code = print_results(console, results)
    if monitor:
        adjust = adjusted(interval, budget, keep_finished)
        return watch_fleet(home, client, console, interval=interval, adjust=adjust)
    console.print(f"watch and heal with: spile monitor {home.folder.url}", markup=False)
    return code


def _variables(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise SpecError("--env", expected="NAME=value", found=repr(name))
        found[name] = value
    return found


def _plan(fleet: FleetSpec, flags: ExtractFlags, variables: dict[str, str]) -> tuple[str, FleetSpec]:
    """The bucket, and the fleet with its work; every mistake of a flag is found here, before anything is made."""
    from spile.fleet.deploy import Deployment
    from spile.objects import bucket_url, is_remote

    if not flags.gcs_bucket:
        raise SpecError("no bucket", expected="--gcs-bucket NAME, with or without gs://")
    bucket = bucket_url(flags.gcs_bucket)
    root = flags.output or f"{bucket}/{(flags.gcs_prefix or GCS_PREFIX).strip('/')}"
    here = replace(flags, output=root, output_dir=None, upload_to_gcs=False)
    replace(here, dataset=EMBEDDED, dataset_dir=f"{bucket}/datasets").spec()
    # A folder of this computer is no place that machines can read: its streams go to the bucket.
    remote = flags.dataset_dir if flags.dataset_dir and is_remote(flags.dataset_dir) else f"{bucket}/datasets"
    work = Deployment(root, remote, extract_words(flags), flags.max_samples, variables)
    return bucket, work.on(fleet)


def _data(fleet: FleetSpec, flags: ExtractFlags, skip: bool, console: Console) -> None:
    """Put the streams where workers read them: split a dataset, or take a folder of streams as it is."""
    from spile.fleet.deploy import check_streams, prepare_streams, upload_streams

    def say(line: str) -> None:
        console.print(line, markup=False)

    streams = fleet.streams or ""
    if flags.dataset_dir and flags.dataset_dir != streams and not skip:
        upload_streams(flags.dataset_dir, streams, say)
    if skip or flags.dataset_dir:
        check_streams(streams, fleet)
        return
    column = "examples" if flags.column == "text" else flags.column
    prepare_streams(flags.dataset, streams, len(fleet.workers), column=column, seed=flags.seed, say=say)


def _create(client: CloudTpu, home: FleetHome, fleet: FleetSpec, console: Console) -> list[NodeResult]:
    """Make the machines, unless somebody monitors the fleet: then that one does."""
    import time

    from spile.fleet import manage
    from spile.fleet.heal.lease import Lease
    from spile.fleet.heal.monitor import machine_metadata, startup_script

    other = Lease(home.folder, clock=time.time, ttl=0.0).holder()
    if other is not None:
        console.print(f"{other.who} monitors this fleet and makes its machines", markup=False)
        return []
    names = {worker.id: worker.name for worker in fleet.workers}
    script = startup_script()
    return manage.create(client, fleet, lambda worker: machine_metadata(home.folder.url, names[worker], script))
