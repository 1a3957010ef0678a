"""``spile deploy``: put data and code in a bucket and start the workers of a fleet."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter

from spile.cli.aliases import GUIDE_DATASET, GUIDE_STREAMS, with_guide_model
from spile.cli.flags import (
    GCS_PREFIX,
    MANY,
    ExtractFlags,
    MachineFlags,
    PlaceFlags,
    RunFlags,
    confirm,
    given_flags,
    log,
    print_results,
)
from spile.data.split import StreamsPlan, existing_streams, local_streams, of_stream, split_streams
from spile.errors import RunMismatch, SpecError
from spile.fleet import manage
from spile.fleet.cloud_tpu import CloudTpu, check_zone
from spile.fleet.deploy import (
    changes,
    check_buckets,
    check_model,
    check_root,
    deployment_of,
    fleet_bucket,
    launch_over_ssh,
    list_existing,
    machines_to_create,
    prepare_bare_machines,
    publish,
    refuse_active_streams,
    refuse_machines_of_others,
    unfinished_streams,
)
from spile.fleet.home import FleetHome, Lease, check_pinned, fleet_url, machine_metadata, pin_machines, sha256
from spile.fleet.manage import NodeResult, named_workers
from spile.fleet.monitor import check_webhook
from spile.fleet.spec import FleetSpec, Policy, Worker, keep_numbers
from spile.hosts.hosts import Access
from spile.objects import is_remote, open_folder
from spile.planning.cost import START_SECONDS, Estimate, Rates
from spile.planning.machines import list_prices, parse_machine
from spile.spec.amounts import counted, duration, size
from spile.spec.options import parse_pairs
from spile.spec.run import RunSpec
from spile.store.cleanup import clear_stream
from spile.store.run import read_run
from spile.view.table import output

if TYPE_CHECKING:
    from spile.planning.forecast import Forecast

_COUNTED_SAMPLES = 200
"""The number of samples of the first stream whose tokens a dry run counts."""


@Parameter(name="*", group=Group("Which steps", sort_key=0))
@dataclass(frozen=True)
class DeployFlags:
    """The flags of ``spile deploy`` itself."""

    create_tpus: bool = False
    """Create the machines that do not exist yet."""
    adopt: Annotated[list[str] | None, MANY] = None
    """Use these existing machines instead of creating new ones. They are reached over ssh."""
    skip_dataset: bool = False
    """Use the streams in the bucket. Flags that are not given keep their earlier values."""
    num_streams: int | None = None
    """Split the dataset into this many streams, which the workers claim one after another: more than workers, so that
    the fleet can grow later. [default: as before; else one per worker]"""
    skip_launch: bool = False
    """Only prepare streams, code and assignments; start no worker."""
    dry_run: bool = False
    """Check everything and print what would be created and its cost. Create nothing."""
    launch: Literal["startup", "ssh"] = "startup"
    """How workers start: at boot (startup), or over ssh."""
    force: bool = False
    """With --launch ssh: install again."""
    monitor: bool = False
    """Then monitor the fleet, as spile monitor does."""
    interval: float = 60.0
    """Seconds between two updates."""
    budget: float | None = None
    """The cost in dollars at which the machines are deleted."""
    keep_finished: bool = False
    """Do not delete machines whose work is finished."""
    env: list[str] | None = None
    """NAME=value for every worker. It is stored in the bucket, where every reader can see it. For a token, use
    NAME=secret:projects/P/secrets/S; each machine reads it from Secret Manager."""
    notify: list[str] | None = None
    """A webhook, such as Slack's. It is called when a worker is given up, the budget is reached, or the fleet stops,
    finishes or is silent."""
    yes: bool = False
    """Do not ask before replacing an earlier deployment of this fleet, or before --overwrite removes data."""
    user: str | None = None
    """The user name for ssh. [default: yours]"""
    ssh_key: Path | None = None
    """The private key for ssh. [default: gcloud's]"""
    internal_ip: bool = False
    """Use internal addresses for ssh."""

    def policy(self, budget: float | None) -> Policy:
        chosen = self.budget if self.budget is not None else budget
        return Policy(interval=self.interval, budget=chosen, delete_finished=not self.keep_finished)


Flags = TypeVar("Flags", PlaceFlags, MachineFlags, RunFlags, DeployFlags)

_NOT_REUSED = frozenset(
    {
        *("dataset", "dataset_dir", "split", "config_name", "worker_id", "output_dir", "gcs_bucket", "upload_to_gcs"),
        *("local_copy", "delete_local_after_upload", "checkpointing", "overwrite", "expect_split", "guide_script"),
    }
)
"""Flags of a run that are for one deployment only, or for workers by hand."""
_REUSED = frozenset(
    {"zones", "name_prefix", "env", "notify", "keep_finished"}
    | {each.name for kind in (MachineFlags, ExtractFlags) for each in fields(kind) if each.name not in _NOT_REUSED}
)
"""The flags that a later deployment with --skip-dataset reuses."""
_TIERS = frozenset({"preemptible", "spot", "reserved", "best_effort"})


def worker_spec(flags: RunFlags, root: str, streams: str, split: str | None = None) -> RunSpec:
    """Return the run spec of every worker, whose data is already split into streams."""
    given = flags.with_output(root).with_values(dataset=None, dataset_dir=streams).values()
    fixed = {
        "expect_split": split, "split": None, "config_name": None, "worker_id": 0, "local_copy": None,
    }  # fmt: skip
    return RunSpec.from_dict({**given, **fixed}, "flags")


def deploy(
    *,
    place: PlaceFlags = PlaceFlags(),
    machines: MachineFlags = MachineFlags(),
    flags: ExtractFlags = ExtractFlags(),
    steps: DeployFlags = DeployFlags(),
) -> int:
    """Split the dataset into streams, upload streams and code to the bucket, and start the workers.

    Takes every flag of spile extract, which every worker gets. Machines need only the bucket: a machine that is
    preempted and created again resumes. Before a deployed fleet is changed, the command asks for confirmation.
    """
    if not flags.gcs_bucket:
        raise SpecError("no bucket", expected="--gcs-bucket NAME, with or without gs://")
    bucket = fleet_bucket("--gcs-bucket", flags.gcs_bucket)
    client = place.client()
    home = FleetHome.open(fleet_url(bucket, place.fleet))
    before = home.find_fleet()  # A missing bucket is reported here, before anything is created.
    if before is not None and steps.skip_dataset:
        before = _read_trusted_fleet(client, home, yes=steps.yes)
    request = _Request(place, machines, flags, steps).complete(before if steps.skip_dataset else None)
    asked = client if not steps.dry_run or client.has_credentials() else None
    if asked is None:
        log("zones and machines are not checked: no Google credentials. Run: gcloud auth application-default login")
    request, line = request.with_type(asked, before)
    fleet = request.fleet(client, home, before)
    _check_request(asked, fleet, request)
    if line:
        log(line)
    if asked is not None and not steps.skip_launch:
        refuse_machines_of_others(client, fleet, home.folder.url)
    if not steps.dry_run:
        check_buckets((bucket, request.root(bucket)))
    with _streams(fleet, request, bucket, before) as streams:
        streams.check(len(fleet.workers))
        fleet = request.with_work(fleet, bucket, streams)
        if steps.skip_dataset:
            streams.check_limit(worker_spec(request.flags, "gs://b/x", streams.url).data)
        cleared = [*request.flags.streams_to_clear(open_folder(fleet.root), range(fleet.stream_count))]
        refuse_active_streams(fleet.root, cleared)
        try:
            check_root(bucket, fleet, streams, cleared=bool(cleared))
        except RunMismatch as error:
            request, fleet = request.in_own_folder(error, fleet, bucket, streams)
            check_root(bucket, fleet, streams, cleared=False)
        left = len(unfinished_streams(fleet, streams, cleared))
        if not left:
            log(f"{fleet.root} is complete: nothing is deployed, and no machine is needed")
            return 0
        found = _forecast(streams, request, fleet)
        fleet = _with_length(fleet, found)
        if found.limit is not None:
            log(found.limit.sentence())
        changed = changes(before, fleet) if before is not None else []
        if fleet.policy.budget is None and not steps.skip_launch and fleet.price:
            most = counted(len(fleet.workers), "machine")
            log(f"no --budget: {most} cost at most ${fleet.price * len(fleet.workers) * 24:,.2f} a day (list prices)")
        if steps.dry_run:
            new = _new_machines(asked, fleet, steps)
            _print_plan(fleet, streams, request, found, changed, cleared, new, left)
            return 0
        _confirm_changes(fleet, changed, cleared, yes=steps.yes)
        streams.put(log)
    for number in cleared:
        clear_stream(open_folder(fleet.root), number)
    fleet = publish(home, fleet, log)
    if steps.skip_launch:
        code = print_results(pin_machines(client, fleet, home.folder.url) if before is not None else [])
        log(_launch_hint(place, steps, bucket, again=before is not None))
        return code
    return _launch(client, home, fleet, request.steps, left)


@dataclass(frozen=True)
class _Request:
    """What the command line asks for, with the flags of an earlier deployment that it reuses."""

    place: PlaceFlags
    machines: MachineFlags
    flags: RunFlags
    steps: DeployFlags
    workers: tuple[Worker, ...] = ()
    """The workers of the earlier deployment; empty if they are planned again."""

    def reusable_flags(self) -> dict[str, Any]:
        """Return the given flags that a later deployment with --skip-dataset reuses, by name."""
        groups = (self.flags, self.machines, self.place, self.steps)
        every = {name: value for group in groups for name, value in given_flags(group).items()}
        return {name: value for name, value in every.items() if name in _REUSED}

    def complete(self, before: FleetSpec | None) -> _Request:
        """Return the request with the flags of an earlier deployment and the model of the guides, and check it."""
        request = self if before is None else self._with_flags_of(before)
        flags = request.flags
        if flags.worker_id is not None:
            raise SpecError("--worker-id", expected="none: a fleet numbers its workers", found=str(flags.worker_id))
        if flags.output_dir is not None:
            folder = f"--output-dir {flags.output_dir}"
            log(f"{folder} is not used: the dataset is stored in the bucket, not on the machines")
        return replace(request, flags=with_guide_model(flags, log))

    def _with_flags_of(self, before: FleetSpec) -> _Request:
        """Return the request with the earlier value of each flag that was not given; print these flags.

        Values of environment variables and addresses of webhooks are not shown.
        """
        now = self.reusable_flags()
        changed = {name for name, value in now.items() if value != before.flags.get(name)}
        replaced = set(now)
        if changed & (_TIERS | {"queued"}):  # They exclude each other, and --queued changes their default.
            replaced |= _TIERS
        if changed & {"output", "gcs_prefix"}:
            replaced |= {"output", "gcs_prefix"}
        old = {name: value for name, value in before.flags.items() if name in _REUSED and name not in replaced}
        hidden = {"env": [f"{name}=…" for name in before.environment], "notify": ["…"]}
        if old:
            shown = _flag_words({name: hidden.get(name, old[name]) for name in old})
            log(f"flags of the last deployment: {' '.join(shown)}")
        same = now.keys().isdisjoint({"zones", "workers_per_zone", "name_prefix"})
        return _Request(
            _fill_flags(self.place, old),
            _fill_flags(self.machines, old),
            _fill_flags(self.flags, old),
            _fill_flags(self.steps, old),
            before.workers if same else (),
        )

    def with_type(self, client: CloudTpu | None, before: FleetSpec | None) -> tuple[_Request, str]:
        """Return the request with a machine type, which the fleet keeps, and a line about it."""
        known = before.machine.accelerator_type if before is not None else ""
        machines, line = self.machines.with_type(client, self.place, known)
        return replace(self, machines=machines), line

    def fleet(self, client: CloudTpu, home: FleetHome, before: FleetSpec | None) -> FleetSpec:
        """Return the fleet that the request asks for, without its work."""
        budget = home.with_orders(before).policy.budget if before is not None and self.steps.skip_dataset else None
        fleet = self.machines.fleet(self.place, client.project, self.steps.policy(budget))
        workers = self.workers or fleet.workers
        if self.steps.adopt:
            workers = named_workers(client, fleet.zones, self.steps.adopt)
        return replace(fleet, workers=keep_numbers(workers, before.workers if before is not None else ()))

    def root(self, bucket: str) -> str:
        """Return the folder of the dataset, which may be in another bucket."""
        if self.flags.output is not None:
            if not is_remote(self.flags.output):
                raise SpecError(
                    "--output",
                    expected="gs://… or s3://…: a machine's disk is deleted with the machine",
                    found=repr(self.flags.output),
                )
            return fleet_bucket("--output", self.flags.output)
        return f"{bucket}/{(self.flags.gcs_prefix or GCS_PREFIX).strip('/')}"

    def with_work(self, fleet: FleetSpec, bucket: str, streams: StreamsPlan) -> FleetSpec:
        return deployment_of(
            fleet,
            worker_spec(self.flags, self.root(bucket), streams.url, streams.split),
            streams,
            environment=parse_pairs("--env", self.steps.env),
            notify=tuple(self.steps.notify or ()),
            flags={**self.reusable_flags(), "zones": ",".join(fleet.zones)},
        )

    def in_own_folder(
        self, error: RunMismatch, fleet: FleetSpec, bucket: str, streams: StreamsPlan
    ) -> tuple[_Request, FleetSpec]:
        """Return the fleet with an output folder of its own, if no folder was named.

        A trial and a production run of the same bucket are split differently, so one cannot continue the other.
        """
        named = self.flags.gcs_prefix is not None or self.flags.output is not None
        if named or self.root(bucket) != f"{bucket}/{GCS_PREFIX}" or not streams.split:
            raise error
        prefix = f"{GCS_PREFIX}-{streams.split[:8]}"
        log(f"{error.problem}: this run is stored in {bucket}/{prefix}")
        request = replace(self, flags=self.flags.with_values(gcs_prefix=prefix))
        return request, request.with_work(fleet, bucket, streams)


def _fill_flags(flags: Flags, values: Mapping[str, Any]) -> Flags:
    """Return the flags with those of the values that they have a field for."""
    return replace(flags, **{each.name: values[each.name] for each in fields(flags) if each.name in values})


def _read_trusted_fleet(provider: CloudTpu, home: FleetHome, *, yes: bool) -> FleetSpec:
    """Return the fleet that the bucket describes, if its hash is pinned outside of the bucket or the user confirms."""
    fleet, pin = home.read_pinned()
    mismatch = check_pinned(provider, home.folder.url, fleet, pin)
    if mismatch is not None:
        confirm(f"{mismatch.problem}. Use its flags and machines anyway?", yes=yes)
    return fleet


def _launch_hint(place: PlaceFlags, steps: DeployFlags, bucket: str, *, again: bool) -> str:
    """Return what is true after ``--skip-launch``, and the command that launches."""
    chosen = {**given_flags(place), **given_flags(steps)}
    repeated = ("fleet", "project", "adopt", "launch", "user", "ssh_key", "internal_ip")
    create = [] if steps.adopt else ["--create-tpus"]
    flags = _flag_words({name: chosen[name] for name in repeated if name in chosen})
    words = ["--gcs-bucket", bucket, *flags, "--skip-dataset", *create]
    machines = "existing machines of the fleet use it from now on; " if again else ""
    return f"prepared; {machines}launch with: spile deploy {shlex.join(words)}"


def _flag_words(values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def _check_request(client: CloudTpu | None, fleet: FleetSpec, request: _Request) -> None:
    """Raise the errors that can be known before anything is created."""
    request.root("gs://b")
    parse_pairs("--env", request.steps.env)
    for url in request.steps.notify or ():
        check_webhook(url)
    check_model(worker_spec(request.flags, "gs://b/x", "gs://b/datasets"))
    if client is not None and not request.steps.skip_launch:
        for zone in fleet.zones:
            check_zone(client, zone, fleet.machine.accelerator_type)


@contextmanager
def _streams(fleet: FleetSpec, request: _Request, bucket: str, before: FleetSpec | None) -> Iterator[StreamsPlan]:
    """Yield the streams for the workers: existing ones, those of a folder, or those of a dataset that is split now."""
    flags, target = request.flags, f"{bucket}/datasets"
    if flags.dataset is not None and flags.dataset_dir is not None:
        raise SpecError("two datasets", expected="--dataset or --dataset-dir", found="both")
    folder = flags.dataset_dir
    if folder is None and flags.dataset is None and not request.steps.skip_dataset:
        if flags.guide_script is None:
            raise SpecError("no dataset for a fleet", expected="--dataset, --dataset-dir or --skip-dataset")
        if Path(GUIDE_STREAMS).is_dir():
            folder = GUIDE_STREAMS
        log(f"no dataset was given: using {folder or GUIDE_DATASET}, as in the guides")
    if folder is not None and not is_remote(folder) and not request.steps.skip_dataset:
        yield local_streams(Path(folder), target)
    elif request.steps.skip_dataset or folder is not None:
        remote = folder if folder is not None and is_remote(folder) else None
        deployed = before.streams if before is not None else None
        yield existing_streams(remote or deployed or target)
    else:
        dataset = flags.dataset or GUIDE_DATASET
        data = flags.with_output(bucket).spec().data
        known = before.stream_count if before is not None else 0
        # A trial may have had fewer streams than this fleet has workers: then the dataset is split again.
        count = request.steps.num_streams or max(known, len(fleet.workers))
        with split_streams(dataset, target, count, data=data, log=log, limited=True) as made:
            yield made


def _confirm_changes(fleet: FleetSpec, changed: list[str], cleared: list[int], *, yes: bool) -> None:
    if changed:
        what = f"Fleet {fleet.name} is already deployed with other settings: {'; '.join(changed)}"
        confirm(f"{what}. Replace it?", yes=yes)
    if cleared:
        confirm(f"Permanently remove the data of {counted(len(cleared), 'stream')} in {fleet.root}?", yes=yes)


def _launch(client: CloudTpu, home: FleetHome, fleet: FleetSpec, steps: DeployFlags, left: int) -> int:
    """Create or find the machines and start the workers on them. ``left``: the number of unfinished streams."""
    from spile.cli.fleet import watch_fleet  # Here, because chains of imports are kept short.

    results: list[NodeResult] = []
    ssh = steps.launch == "ssh" or bool(steps.adopt)
    if steps.adopt:
        results = manage.adopt(client, fleet, steps.adopt)
    bare = [] if ssh else prepare_bare_machines(client, fleet, home)
    not_pinned = pin_machines(client, fleet, home.folder.url)
    made_here = ssh or not steps.monitor  # Otherwise the monitor creates them.
    if steps.create_tpus and not steps.adopt and made_here:
        results = _create_machines(client, home, fleet)
    elif not ssh and not steps.monitor:
        results = list_existing(client, fleet, left)
    if ssh or bare:
        if bare:
            log(f"{', '.join(bare)}: created without spile's startup script; the worker is started over ssh")
        access = Access(user=steps.user, key=steps.ssh_key)
        results = [each for each in results if (each.failed if ssh else each.name not in bare)]
        results += launch_over_ssh(
            client, fleet, home.folder.url, access, left, only=None if ssh else bare,
            internal_ip=steps.internal_ip, force=steps.force,
        )  # fmt: skip
    code = print_results([*results, *not_pinned])
    if steps.monitor:
        console = output(soft_wrap=True)
        return watch_fleet(home, client, console, interval=steps.interval, keep_finished=steps.keep_finished)
    log(f"watch and heal with: spile monitor {home.folder.url}")
    return code


def _create_machines(client: CloudTpu, home: FleetHome, fleet: FleetSpec) -> list[NodeResult]:
    """Create the machines, unless a monitor is running: then the monitor creates them."""
    other = Lease(home.folder).holder()
    if other is not None:
        log(f"{other.owner} monitors this fleet and creates its machines")
        return []
    return manage.create(client, fleet, partial(machine_metadata, home.folder.url, sha256(fleet.to_json())))


def _new_machines(client: CloudTpu | None, fleet: FleetSpec, steps: DeployFlags) -> list[Worker]:
    """Return the workers for which this command creates a machine."""
    if steps.skip_launch or not (steps.monitor or (steps.create_tpus and not steps.adopt)):
        return []
    if client is None:
        return list(fleet.workers)
    return machines_to_create(client, fleet, monitored=steps.monitor)


def _print_plan(
    fleet: FleetSpec,
    streams: StreamsPlan,
    request: _Request,
    forecast: Forecast,
    changed: list[str],
    cleared: list[int],
    new: Sequence[Worker],
    left: int,
) -> None:
    """Print what would be created, changed and paid, for ``--dry-run``.

    Args:
        fleet: The fleet that would be deployed.
        streams: Its streams.
        request: What the command line asks for.
        forecast: The sizes of one stream.
        changed: What would change in the deployed fleet.
        cleared: The streams whose data would be removed.
        new: The workers for which a machine would be created.
        left: The number of unfinished streams.

    """
    workers, price = len(fleet.workers), fleet.price
    if new:
        zones = ", ".join(dict.fromkeys(worker.zone for worker in new))
        log(
            f"would be created: {counted(len(new), 'machine')} {fleet.machine.accelerator_type} ({new[0].name} …) "
            f"in {zones}, ${price:,.2f} an hour each, ${price * len(new):,.2f} together"
        )
    else:
        steps = request.steps
        asked = steps.create_tpus or steps.monitor or steps.adopt
        why = "all exist" if asked else "neither --create-tpus nor --monitor is given"
        log(f"would be created: no machine ({'--skip-launch' if steps.skip_launch else why})")
    log(f"streams: {streams.url}" + (f", from {streams.local}" if streams.local else ", which exist already"))
    log(f"output: {fleet.root}")
    streams_left = counted(fleet.stream_count, "stream") + (
        f" ({left} unfinished)" if left < fleet.stream_count else ""
    )
    log(f"workers: {workers}, which claim {streams_left} one after another")
    if changed:
        log(f"fleet {fleet.name} is already deployed and would change: {'; '.join(changed)}")
    if cleared:
        log(f"would be removed after confirmation: the data of {counted(len(cleared), 'stream')} in {fleet.root}")
    found, prices = _estimate(forecast, fleet, left), list_prices()
    cheap = fleet.machine.preemptible or fleet.machine.spot or fleet.best_effort
    dollars = found.dollars.preemptible if cheap else found.dollars.on_demand
    log(
        f"about {duration(found.hours * 3600)}, ${dollars:,.2f}, {size(found.volume.bytes)} stored "
        f"(assumed: {duration(START_SECONDS)} to boot, install, load and compile, {Rates.efficiency:.0%} of the chips' "
        f"peak, no preemption; {prices.source}, as of {prices.as_of})"
    )
    if warning := prices.warning(date.today()):
        log(warning)
    log("nothing was created")


def _forecast(streams: StreamsPlan, request: _Request, fleet: FleetSpec) -> Forecast:
    """Return the sizes of the first stream, with the limit of length of the existing run or of the fleet's machines."""
    from spile.planning.forecast import plan

    spec = worker_spec(request.flags, "gs://b/x", str(streams.local or streams.url))
    spec = replace(spec, data=of_stream(spec.data))
    machine, existing = parse_machine(fleet.machine.accelerator_type), read_run(open_folder(fleet.root))
    return plan(spec, _COUNTED_SAMPLES, machines=[machine], existing=existing)


def _with_length(fleet: FleetSpec, found: Forecast) -> FleetSpec:
    """Return the fleet whose workers all have the limit of length that was forecast."""
    long = found.spec.data.long_policy(found.kind)
    return replace(fleet, run={**fleet.run, "max_seq_length": found.spec.data.longest, "long": long})


def _estimate(found: Forecast, fleet: FleetSpec, left: int) -> Estimate:
    """Return an estimate for the streams that are left, if all of them are as long as the first one."""
    whole = replace(found, lengths=replace(found.lengths, samples=found.lengths.samples * left))
    machine, rates = parse_machine(fleet.machine.accelerator_type), Rates(start_seconds=START_SECONDS)
    return whole.on(machine, list_prices(), rates=rates, workers=len(fleet.workers))
