"""``spile deploy``: data, code and workers onto a fleet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from spile.cli.aliases import GUIDES_DATASET, GUIDES_STREAMS, with_model
from spile.cli.flags import (
    GCS_PREFIX,
    ExtractFlags,
    MachineFlags,
    PlaceFlags,
    RunFlags,
    confirm,
    flag,
    print_results,
    variables,
)
from spile.cli.shell import redeploying
from spile.cli.shell.creating import create_machines
from spile.cli.shell.remembering import as_before, given, words_of
from spile.errors import RunMismatch, SpecError
from spile.objects.opening import is_remote
from spile.view.table import output

if TYPE_CHECKING:
    from rich.console import Console

    from spile.fleet.cloud_tpu import CloudTpu
    from spile.fleet.deploy import StreamsPlan
    from spile.fleet.home import FleetHome
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import FleetSpec, Policy
    from spile.spec.run import RunSpec

__all__ = ["DeployFlags", "deploy", "extract_words"]

_STEPS = Group("Which steps", sort_key=0)
_OURS = frozenset(
    {
        "dataset", "dataset_dir", "split", "config_name", "worker_id", "expect_split", "max_samples", "output",
        "output_dir", "gcs_bucket", "gcs_prefix", "upload_to_gcs", "delete_local_after_upload", "checkpointing",
        "overwrite",
    }
)  # fmt: skip
"""What deploy decides for every worker: an order to remove a stream must not go to every life of its worker."""
_NOT_AGAIN = frozenset({"dataset", "dataset_dir", "gcs_bucket", "checkpointing", "overwrite"})
"""What a second deployment does not take from the first one's command line."""


@Parameter(name="*")
@dataclass(frozen=True)
class DeployFlags:
    """The flags of ``spile deploy`` itself."""

    create_tpus: Annotated[bool, flag(_STEPS, "Make the machines that are not there.", negative="")] = False
    adopt: Annotated[
        list[str] | None,
        flag(
            _STEPS,
            "The machines: these, which somebody else made and named; over ssh.",
            consume_multiple=True,
            negative="",
        ),
    ] = None
    skip_dataset: Annotated[
        bool, flag(_STEPS, "The streams are in the bucket already; flags not given are as before.", negative="")
    ] = False
    num_streams: Annotated[
        int | None,
        flag(
            _STEPS,
            "Split the dataset into this many streams, which the workers claim one after another: more than workers, "
            "so that the fleet can grow later. [default: as before; else one per worker]",
        ),
    ] = None
    skip_launch: Annotated[bool, flag(_STEPS, "Only prepare: streams, code, assignment.", negative="")] = False
    dry_run: Annotated[
        bool, flag(_STEPS, "Check all, say what would be made and what it costs; make nothing.", negative="")
    ] = False
    launch: Annotated[
        Literal["startup", "ssh"], flag(_STEPS, "How workers start: by themselves at boot, or over ssh.")
    ] = "startup"
    force: Annotated[bool, flag(_STEPS, "With --launch ssh: install anew.", negative="")] = False
    monitor: Annotated[bool, flag(_STEPS, "Then watch and heal, as spile monitor does.", negative="")] = False
    interval: Annotated[float, flag(_STEPS, "Seconds between looks.")] = 60.0
    budget: Annotated[float | None, flag(_STEPS, "Dollars after which the fleet is deleted.")] = None
    keep_finished: Annotated[bool, flag(_STEPS, "Do not delete machines whose work is finished.", negative="")] = False
    env: Annotated[
        list[str] | None,
        flag(
            _STEPS,
            "NAME=value for every worker, kept in the bucket for all who read it; for a token "
            "NAME=secret:projects/P/secrets/S, which each machine asks Secret Manager for.",
            negative="",
        ),
    ] = None
    notify: Annotated[
        list[str] | None,
        flag(_STEPS, "A webhook for given up, budget, stopped, finished, silent; Slack's too.", negative=""),
    ] = None
    yes: Annotated[
        bool,
        flag(_STEPS, "Do not ask: replace another deployment of this fleet, remove with --overwrite.", negative=""),
    ] = False
    user: Annotated[str | None, flag(_STEPS, "The login for ssh. [default: yours]")] = None
    ssh_key: Annotated[Path | None, flag(_STEPS, "The private key for ssh. [default: gcloud's]")] = None
    internal_ip: Annotated[bool, flag(_STEPS, "ssh to internal addresses.", negative="")] = False

    def policy(self, budget: float | None) -> Policy:
        """How patient the monitor is."""
        from spile.fleet.spec import Policy

        chosen = self.budget if self.budget is not None else budget
        return Policy(interval=self.interval, budget=chosen, delete_finished=not self.keep_finished)


def extract_words(flags: RunFlags, *, without: Collection[str] = _OURS) -> tuple[str, ...]:
    """The flags that differ from their defaults, as ``spile extract`` on a machine will read them."""
    return tuple(words_of(flags, without))


def deploy(
    *,
    place: PlaceFlags = PlaceFlags(),  # noqa: B008
    machines: MachineFlags = MachineFlags(),  # noqa: B008
    flags: ExtractFlags = ExtractFlags(),  # noqa: B008
    steps: DeployFlags = DeployFlags(),  # noqa: B008
) -> int:
    """Split the dataset into a stream per worker, put streams and code in the bucket, and start every worker.

    Every flag of spile extract goes to every worker, and every variable of the guides counts. Machines need nothing but
    the bucket: what is preempted and made again resumes by itself. A fleet that is deployed already and would change
    is asked about first.
    """
    from spile.cli.shell.dry_run import show
    from spile.fleet.deploy import changes, check_access, check_root, fleet_bucket, publish
    from spile.fleet.home import FleetHome, fleet_url
    from spile.fleet.pins import pin_machines

    if not flags.gcs_bucket:
        raise SpecError("no bucket", expected="--gcs-bucket NAME, with or without gs://")
    bucket = fleet_bucket("--gcs-bucket", flags.gcs_bucket)
    console = output(soft_wrap=True)
    client = place.client()
    home = FleetHome.open(fleet_url(bucket, place.fleet))
    before = home.find_fleet()  # a bucket that is not there is told now, before anything is made
    if before is not None and steps.skip_dataset:
        before = redeploying.known_fleet(client, home, console, yes=steps.yes)
    asked = _Asked(place, machines, flags, steps).settled(before, console)
    fleet = asked.fleet(client, home, before)
    _check(client, fleet, asked)
    account, asker = fleet.machine.service_account, None if steps.skip_launch else client
    for line in check_access((bucket, asked.root(bucket)), account, asker):
        console.print(line, markup=False)
    with _streams(fleet, asked, bucket, before, console) as streams:
        streams.check(len(fleet.workers))
        fleet = asked.work(fleet, bucket, streams)
        cleared = _to_clear(fleet, asked.flags)
        try:
            check_root(bucket, fleet, streams, cleared=bool(cleared))
        except RunMismatch as error:
            asked, fleet = asked.in_own_folder(error, fleet, bucket, streams, console)
            check_root(bucket, fleet, streams, cleared=False)
        changed = changes(before, fleet) if before is not None else []
        if steps.dry_run:
            return show(console, fleet, streams, asked.flags, changed, cleared)
        _ask(console, fleet, changed, cleared, yes=steps.yes)
        streams.put(lambda line: console.print(line, markup=False))
    _clear(fleet, cleared)
    fleet = publish(home, fleet, lambda line: console.print(line, markup=False))
    if steps.skip_launch:
        code = print_results(console, pin_machines(client, fleet, home.folder.url) if before is not None else [])
        console.print(redeploying.prepared(place, steps, bucket, again=before is not None), markup=False)
        return code
    return _launch(client, home, fleet, asked.steps, console)


@dataclass(frozen=True)
class _Asked:
    """The whole command line."""

    place: PlaceFlags
    machines: MachineFlags
    flags: RunFlags
    steps: DeployFlags

    def settled(self, before: FleetSpec | None, console: Console) -> _Asked:
        """With what an earlier deployment said, where this one takes its streams, and the guides' model."""

        def log(line: str) -> None:
            console.print(line, markup=False)

        place, machines, flags, steps = self.place, self.machines, self.flags, self.steps
        if steps.skip_dataset and before is not None:
            flags, words = as_before(flags, before.flags.get("extract", {}), _NOT_AGAIN)
            machines, more = as_before(machines, before.flags.get("machines", {}))
            place, where = redeploying.place_as_before(place, before)
            steps, rest = redeploying.steps_as_before(steps, before)
            if taken := [*words, *more, *where, *rest]:
                log(f"as before: {' '.join(taken)}")
        if flags.worker_id is not None:
            raise SpecError("--worker-id", expected="none: a fleet numbers its workers", found=str(flags.worker_id))
        if flags.output_dir is not None:
            log(f"--output-dir {flags.output_dir} is not used: a machine's disk goes with it, the bucket is the home")
        return _Asked(place, machines, with_model(flags, "a fleet", log), steps)

    def fleet(self, client: CloudTpu, home: FleetHome, before: FleetSpec | None) -> FleetSpec:
        from spile.fleet.manage import named_workers
        from spile.fleet.spec import keep_numbers

        budget = home.ordered(before).policy.budget if before is not None and self.steps.skip_dataset else None
        fleet = self.machines.fleet(self.place, client.project, self.steps.policy(budget))
        workers = named_workers(client, fleet.zones, self.steps.adopt) if self.steps.adopt else fleet.workers
        return replace(fleet, workers=keep_numbers(workers, before.workers if before is not None else ()))

    def root(self, bucket: str) -> str:
        """Where the dataset goes: the bucket that was named, or another one."""
        from spile.fleet.deploy import fleet_bucket

        if self.flags.output is not None:
            if not is_remote(self.flags.output):
                raise SpecError(
                    "--output",
                    expected="gs://… or s3://…: a machine's own disk goes with the machine",
                    found=repr(self.flags.output),
                )
            return fleet_bucket("--output", self.flags.output)
        return f"{bucket}/{(self.flags.gcs_prefix or GCS_PREFIX).strip('/')}"

    def work(self, fleet: FleetSpec, bucket: str, streams: StreamsPlan) -> FleetSpec:
        """The fleet with its work."""
        from spile.fleet.deploy import deployment_of

        said = {"extract": given(self.flags, _NOT_AGAIN), "machines": given(self.machines)}
        said |= {
            "place": given(self.place, ("zones", "fleet", "project")),
            "steps": redeploying.told_of_steps(self.steps),
        }
        return deployment_of(
            fleet,
            self.run_spec(self.root(bucket), streams.url, streams.split),
            streams,
            environment=variables(self.steps.env),
            notify=tuple(self.steps.notify or ()),
            flags=said,
        )

    def in_own_folder(
        self, error: RunMismatch, fleet: FleetSpec, bucket: str, streams: StreamsPlan, console: Console
    ) -> tuple[_Asked, FleetSpec]:
        """Return the fleet with an output folder of its own, if no folder was named.

        A trial and a production run of the same bucket are split differently, so one cannot continue the other.
        """
        if self.flags.gcs_prefix is not None or self.flags.output is not None or not streams.split:
            raise error
        prefix = f"{GCS_PREFIX}-{streams.split[:8]}"
        console.print(f"{error.problem}: this run is stored in {bucket}/{prefix}", markup=False)
        asked = replace(self, flags=self.flags.replaced(gcs_prefix=prefix))
        return asked, asked.work(fleet, bucket, streams)

    def run_spec(self, root: str, streams: str, split: str | None = None) -> RunSpec:
        """Return the run spec of every worker.

        What deploy does once (splitting the dataset, removing what is stored) is not part of it: a worker that is
        started again must not do it again.
        """
        flags = self.flags.stored_in(root).replaced(
            dataset=None, dataset_dir=streams, split=None, config_name=None, worker_id=None,
            expect_split=split, checkpointing=True, overwrite=False, delete_local_after_upload=False,
        )  # fmt: skip
        return flags.spec()


def _check(client: CloudTpu, fleet: FleetSpec, asked: _Asked) -> None:
    """Every mistake that can be known now."""
    from spile.fleet.cloud_tpu import check_place
    from spile.fleet.deploy import check_model
    from spile.fleet.monitor import check_url

    asked.root("gs://b")
    variables(asked.steps.env)
    for url in asked.steps.notify or ():
        check_url(url)
    check_model(asked.run_spec("gs://b/x", "gs://b/datasets"))
    for zone in () if asked.steps.skip_launch else fleet.zones:
        check_place(client, zone, fleet.machine.accelerator_type)


@contextmanager
def _streams(
    fleet: FleetSpec, asked: _Asked, bucket: str, before: FleetSpec | None, console: Console
) -> Iterator[StreamsPlan]:
    """The streams that the workers will read: those that are there, a folder's, or a dataset split now."""
    from spile.fleet.deploy import existing_streams, local_streams, split_streams

    def log(line: str) -> None:
        console.print(line, markup=False)

    flags, below, there = asked.flags, f"{bucket}/datasets", before.streams if before is not None else None
    if flags.dataset is not None and flags.dataset_dir is not None:
        raise SpecError("two datasets", expected="--dataset or --dataset-dir", found="both")
    folder = flags.dataset_dir
    if folder is None and flags.dataset is None and not asked.steps.skip_dataset and Path(GUIDES_STREAMS).is_dir():
        log(f"no dataset was named: {GUIDES_STREAMS}, as in the guides")
        folder = GUIDES_STREAMS
    if folder is not None and not is_remote(folder) and not asked.steps.skip_dataset:
        yield local_streams(Path(folder), below)
    elif asked.steps.skip_dataset or folder is not None:
        remote = folder if folder is not None and is_remote(folder) else None
        yield existing_streams(remote or there or below)
    else:
        if flags.dataset is None:
            log(f"no dataset was named: {GUIDES_DATASET}, as in the guides")
        dataset = flags.dataset or GUIDES_DATASET
        data = flags.stored_in(bucket).spec().data
        known = before.stream_count if before is not None else 0
        # A trial may have had fewer streams than this fleet has workers: then the dataset is split again.
        count = asked.steps.num_streams or max(known, len(fleet.workers))
        with split_streams(dataset, below, count, data=data, log=log) as made:
            yield made


def _to_clear(fleet: FleetSpec, flags: RunFlags) -> list[int]:
    """The streams that ``--no-checkpointing --overwrite`` removes: once, now, and never by a worker."""
    from spile.fleet.deploy import begun, refuse_at_work

    if flags.checkpointing is not False:
        return []
    found = begun(fleet.root, fleet)
    if found and not flags.overwrite:
        raise SpecError(
            "--no-checkpointing",
            expected="streams without commits",
            found=f"commits of {len(found)} streams in {fleet.root}",
            fix="leave it out to resume, or give another --gcs-prefix",
        )
    refuse_at_work(fleet.root, found)
    return found


def _ask(console: Console, fleet: FleetSpec, changed: list[str], cleared: list[int], *, yes: bool) -> None:
    """What would be replaced or removed is asked about, once."""
    if changed:
        question = f"Fleet {fleet.name} is deployed already, with another task: {'; '.join(changed)}. Replace it?"
        confirm(question, yes=yes, console=console)
    if cleared:
        confirm(f"Remove what is stored of {len(cleared)} streams in {fleet.root}, for good?", yes=yes, console=console)


def _clear(fleet: FleetSpec, cleared: list[int]) -> None:
    from spile.objects import open_folder
    from spile.store.cleanup import clear_stream

    for number in cleared:
        clear_stream(open_folder(fleet.root), number)


def _launch(client: CloudTpu, home: FleetHome, fleet: FleetSpec, steps: DeployFlags, console: Console) -> int:
    """The machines, and the workers on them."""
    from spile.cli.fleet import adjusted, watch_fleet
    from spile.fleet import manage
    from spile.fleet.deploy import launch_over_ssh, list_existing, prepare_bare_machines
    from spile.fleet.pins import pin_machines
    from spile.hosts.hosts import Access

    results: list[NodeResult] = []
    ssh = steps.launch == "ssh" or bool(steps.adopt)
    if steps.adopt:
        results = manage.adopt(client, fleet, steps.adopt)
    bare = [] if ssh else prepare_bare_machines(client, fleet, home.folder.url)
    untold = pin_machines(client, fleet, home.folder.url)
    made_here = ssh or not steps.monitor  # else the monitor makes them, and heals meanwhile
    if steps.create_tpus and not steps.adopt and made_here:
        results = create_machines(client, home, fleet, console)
    elif not ssh and not steps.monitor:
        results = list_existing(client, fleet)
    if ssh or bare:
        if bare:
            line = "created without spile's startup script; the worker is started over ssh"
            console.print(f"{', '.join(bare)}: {line}", markup=False)
        access = Access(user=steps.user, key=steps.ssh_key)
        results = [each for each in results if (each.bad if ssh else each.name not in bare)]
        results += launch_over_ssh(
            client, fleet, home.folder.url, access, only=None if ssh else bare, internal_ip=steps.internal_ip,
            force=steps.force,
        )  # fmt: skip
    code = print_results(console, [*results, *untold])
    if steps.monitor:
        adjust = adjusted(steps.interval, steps.keep_finished)
        return watch_fleet(home, client, console, interval=steps.interval, adjust=adjust)
    console.print(f"watch and heal with: spile monitor {home.folder.url}", markup=False)
    return code
