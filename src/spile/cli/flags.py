"""Flags and small helpers that several commands share. The flags of a run derive from the fields of the run spec.

The help of a flag is the docstring of its field, or its line in ``Args`` of the command. cyclopts reads both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from cyclopts import Group, Parameter
from rich.table import Table

from spile.cli.program import COMMON_FLAGS
from spile.errors import SpecError, UserError, printable
from spile.objects import is_remote
from spile.spec.options import CommandName, FlagGroup, check_number
from spile.spec.run import RunSpec, SpecField, make_spec, spec_fields
from spile.spec.taps import parse_layers
from spile.view.table import output

if TYPE_CHECKING:
    from spile.fleet.cloud_tpu import CloudTpu
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import FleetSpec, Policy
    from spile.hosts.hosts import Access, Host
    from spile.objects.folder import Folder
    from spile.run.pod.identity import Identity
    from spile.run.pod.pod import WorkerGroup

AsJson = Annotated[bool, Parameter(name="--json")]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"])]
NEGATABLE = Parameter(negative_bool="no-")
"""For a switch that can also be given as ``--no-NAME``. Other switches only have their own name."""
MANY = Parameter(consume_multiple=True)
"""For a flag that takes several values: ``--taps attn mlp``."""


def log(line: str) -> None:
    """Print a line to stdout at once, without characters that its encoding does not have."""
    encoding = sys.stdout.encoding or "ascii"
    line = printable(line)
    print(line.encode(encoding, "ignore").decode(encoding), flush=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def stream_numbers(text: str | None) -> tuple[int, ...] | None:
    """Parse ``--streams 5-9,12``. None stands for all streams."""
    return None if text is None else parse_layers(text, "--streams")


GCS_PREFIX = "activations"
"""The folder of the dataset in a bucket that is given without a folder."""

_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(get_args(FlagGroup), 1)}
_COMMON = Group(COMMON_FLAGS, sort_key=0)


@dataclass(frozen=True)
class RunFlags:
    """The flags of a run. Each is None if it was not given; the run spec has the defaults."""

    answers: ClassVar[bool] = False
    """Whether the run generates answers."""

    if TYPE_CHECKING:

        def __init__(self, **flags: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def values(self) -> dict[str, Any]:
        """Return the fields of the run spec that the flags ask for, by name.

        Raises:
            SpecError: If two flags exclude each other.
        """
        if self.dataset_dir is not None and self.dataset is not None:
            raise SpecError("two datasets", expected="--dataset or --dataset-dir", found="both")
        if self.overwrite and self.checkpointing is not False:
            raise SpecError("--overwrite", expected="--no-checkpointing as well", found="--overwrite alone")
        known = {each.name for each in spec_fields()}
        values = {name: value for name, value in given_flags(self).items() if name in known}
        output, local_copy = self._output_and_copy()
        if output is not None:
            values["output"] = output
        if local_copy is not None and not self.delete_local_after_upload:
            values["local_copy"] = local_copy
        if self.answers and self.output_dir is not None:
            values["answers_dir"] = self.output_dir
        if self.answers and self.n_tasks is not None:
            if self.max_samples is not None:
                raise SpecError("two limits", expected="--n-tasks or --max-samples", found="both")
            check_number("--n-tasks", self.n_tasks, 1, 1 << 40)
            values["max_samples"] = self.n_tasks * (self.predictions_per_task or 1)
        return values

    def spec(self) -> RunSpec:
        return make_spec(self.values(), infer=self.answers, source="flags")

    def with_output(self, root: str) -> Self:
        """Return the flags of the same run with its output in ``root``."""
        return self.with_values(output=root, output_dir=None, local_copy=None, gcs_bucket=None, upload_to_gcs=None)

    def streams_to_clear(self, root: Folder, streams: Iterable[int]) -> dict[int, str]:
        """Return the versions of the streams that ``--no-checkpointing --overwrite`` clears; raise as it does."""
        from spile.store.cleanup import streams_to_clear

        if self.checkpointing is not False:
            return {}
        return streams_to_clear(root, streams, overwrite=bool(self.overwrite))

    def with_values(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def _output_and_copy(self) -> tuple[str | None, str | None]:
        """Return the output, and the folder of the local copy if the output is a bucket.

        The folder of the guides (``--output-dir``, or ``--activations-dir`` with answers) is the output if no other is
        given; otherwise it is the local copy.
        """
        flag, folder = "--output-dir", self.output_dir
        if self.answers:
            flag, folder = "--activations-dir", self.activations_dir
        bucket = self._bucket_url()
        if bucket and self.output is not None:
            found = f"{self.output}, {bucket}"
            raise SpecError("--output and --gcs-bucket both given", expected="one of them", found=found)
        output = bucket or self.output
        if output is None:
            return folder, self.local_copy
        if folder is not None and not is_remote(output):
            raise SpecError(f"{flag} with --output", expected="a bucket, of which it is the local copy", found=output)
        return output, folder or self.local_copy

    def _bucket_url(self) -> str | None:
        """Return the folder that ``--gcs-bucket`` and ``--gcs-prefix`` name."""
        if self.upload_to_gcs and not self.gcs_bucket:
            raise SpecError("--upload-to-gcs", expected="--gcs-bucket as well", found="no bucket")
        if not self.gcs_bucket or self.upload_to_gcs is False:
            return None
        bucket = self.gcs_bucket.removeprefix("gs://").strip("/")
        prefix = self.gcs_prefix if self.gcs_prefix is not None else "" if "/" in bucket else GCS_PREFIX
        return "gs://" + "/".join(part for part in (bucket, prefix.strip("/")) if part)


def given_flags(flags: Any) -> dict[str, Any]:
    """Return the flags of a group that do not have their default, by name."""
    values = {each.name: (getattr(flags, each.name), each.default) for each in fields(flags)}
    return {name: value for name, (value, default) in values.items() if value != default}


_Field = tuple[str, Any, Any]
"""A field of a dataclass: its name, its annotated type and its default."""


def _spec_flag(each: SpecField, command: CommandName) -> _Field:
    """Return the flag of a field of the run spec.

    A common flag of the command is also in the group that its short ``--help`` shows.
    """
    option, hint = each.option, _without_none(each.hint)
    many = get_origin(hint) is tuple and each.name != "mesh_shape"
    kind = list[str] if many else str if option.parse is not None else hint
    more: dict[str, Any] = {"consume_multiple": True} if many else {}
    if hint is bool and each.default is not False:
        more["negative_bool"] = "no-"
    text = option.help + (f" [default: {default}]" if (default := _default_text(each)) else "")
    group = _GROUPS[option.group]
    groups = (group, _COMMON) if command in option.common else group
    return each.name, Annotated[kind | None, Parameter(group=groups, help=text, **more)], field(default=None)


def _default_text(each: SpecField) -> str:
    if each.option.default:
        return each.option.default
    if each.default in (None, False, (), ""):
        return ""
    return "yes" if each.default is True else str(each.default)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(each for each in get_args(hint) if each is not type(None))
    return hint


def _own_flag(name: str, kind: Any, group: str, text: str, **more: Any) -> _Field:
    """Return a flag that is no field of the run spec: an act of this command, or another form of some fields."""
    return name, Annotated[kind | None, Parameter(group=_GROUPS[group], help=text, **more)], field(default=None)


_RESUME = "Resume from the ledger. --no-checkpointing starts again, and is refused if commits exist. [default: yes]"
_OVERWRITE = "With --no-checkpointing: remove the existing commits of the stream, once. Only on the command line."
_STORED = (
    _own_flag("checkpointing", bool, "Output", _RESUME, negative_bool="no-"),
    _own_flag("overwrite", bool, "Output", _OVERWRITE),
    _own_flag("delete_local_after_upload", bool, "Output", "Make no local copy of what is stored in a bucket."),
)
_UPLOAD = "Store the dataset in that bucket; =False: do not. [default: yes, if --gcs-bucket is given]"
_BUCKET = (
    _own_flag("gcs_bucket", str, "Output", "Store the dataset in this bucket, instead of --output."),
    _own_flag("gcs_prefix", str, "Output", f"The folder in that bucket. [default: {GCS_PREFIX}]"),
    _own_flag("upload_to_gcs", bool, "Output", _UPLOAD),
)
_SCRIPT = "guide_script", Annotated[str | None, Parameter(show=False)], field(default=None)
"""The script of the guides that the command line named; :func:`spile.cli.aliases.translate` adds it."""
_COPY = "The same as --output; with a bucket, the same as --local-copy."


def _make_flags(name: str, command: CommandName, *own_flags: _Field) -> type[RunFlags]:
    """Return the dataclass with the flags of a command: its fields of the run spec, and the flags of the guides."""
    answers = command == "infer"
    fields_of_command = [each for each in spec_fields() if answers or each.option.group != "Answers"]
    flags = [_spec_flag(each, command) for each in fields_of_command if each.option.flag]
    made = make_dataclass(
        name,
        [*flags, *_STORED, *own_flags, *_BUCKET, _SCRIPT],
        bases=(RunFlags,),
        namespace={"answers": answers},
        frozen=True,
    )
    made.__module__ = __name__
    return Parameter(name="*")(made)


if TYPE_CHECKING:

    class ExtractFlags(RunFlags):
        """The flags of ``spile extract``."""

    class InferFlags(RunFlags):
        """The flags of ``spile infer``."""

else:
    ExtractFlags = _make_flags("ExtractFlags", "extract", _own_flag("output_dir", str, "Output", _COPY))
    InferFlags = _make_flags(
        "InferFlags",
        "infer",
        _own_flag("output_dir", str, "Answers", "The same as --answers-dir."),
        _own_flag("activations_dir", str, "Output", _COPY),
        _own_flag("n_tasks", int, "Data", "Stop after this many tasks, with all their variants."),
    )


@Parameter(name="*", group=Group("Pods (detected automatically if every host runs the same command)", sort_key=5))
@dataclass(frozen=True)
class PodFlags:
    """The place of this process in a pod."""

    topology: str | None = None
    """The expected slice, such as v5litepod-64, v5e:8x8 or v3-8. Fail if the hosts do not match it."""
    coordinator_address: str | None = None
    """The address of worker 0: HOST or HOST:PORT."""
    process_id: int | None = None
    """The number of this host."""
    num_processes: int | None = None
    """The number of hosts."""
    barrier_timeout: float | None = None
    """Seconds that hosts wait for each other."""
    heartbeat_timeout: float | None = None
    """Seconds after which a silent host counts as dead."""

    def identity(self) -> Identity:
        from spile.planning.machines import parse_machine
        from spile.run.pod.coordination import detect_cluster
        from spile.run.pod.identity import find_identity, gce_metadata

        return find_identity(
            os.environ,
            metadata=gce_metadata(os.environ),
            detect=detect_cluster,
            coordinator_address=self.coordinator_address,
            process_id=self.process_id,
            num_processes=self.num_processes,
            hosts=None if self.topology is None else parse_machine(self.topology).hosts,
        )

    @contextlib.contextmanager
    def join(self, identity: Identity | None = None) -> Iterator[WorkerGroup]:
        """Join the pod, if there is one, for the duration of the ``with`` block."""
        from spile.run.pod.pod import PodTimes, join
        from spile.run.signals import before_exit, handle_signals

        times = PodTimes.of(self.barrier_timeout, self.heartbeat_timeout)
        with (
            handle_signals(
                signal.default_int_handler, signal.SIGINT, signal.SIGTERM
            ),  # Nothing is to be committed yet.
            join(identity or self.identity(), times, log) as hosts,
            before_exit(lambda: hosts.notify_end(KeyboardInterrupt())),
        ):
            yield hosts


ENGINE = Parameter(name="*", group=Group("Many workers at once", sort_key=6))
"""For the options of an engine."""
_WHICH = Group("Which hosts", sort_key=2)


@Parameter(name="*", group=Group("How to log in", sort_key=3))
@dataclass(frozen=True)
class HostFlags:
    """The hosts, and how to log in."""

    tpu_prefix: Annotated[str | None, Parameter(group=_WHICH)] = None
    """The TPU VM with this name, or all slices PREFIX-0, PREFIX-1, …"""
    hosts: Annotated[list[str] | None, Parameter(group=_WHICH)] = None
    """Hosts by address instead: user@address:port,… Each --hosts is one slice."""
    project: Annotated[str | None, Parameter(group=_WHICH)] = None
    """The Google Cloud project. [default: gcloud's]"""
    zone: Annotated[str | None, Parameter(group=_WHICH)] = None
    """The zone of the machines. [default: all]"""
    internal_ip: Annotated[bool, NEGATABLE] = False
    """Use internal addresses, from a machine in the same network."""
    user: str | None = None
    """The user name on the hosts. [default: yours]"""
    ssh_key: Path | None = None
    """The private ssh key. [default, for TPU VMs: gcloud's]"""
    ssh_option: list[str] | None = None
    """An option for ssh, such as ProxyJump=bastion."""

    @property
    def given(self) -> bool:
        """Whether hosts are named."""
        return bool(self.hosts or self.tpu_prefix)

    def access(self) -> Access:
        from spile.hosts.hosts import Access

        return Access(user=self.user, key=self.ssh_key, options=tuple(self.ssh_option or ()))

    def find(self) -> list[Host]:
        """Return the hosts that the prefix names in the cloud, or those named by address."""
        from spile.fleet.manage import find_hosts
        from spile.hosts.hosts import parse_hosts

        if bool(self.tpu_prefix) == bool(self.hosts):
            problem = "hosts named twice" if self.hosts else "no hosts"
            raise SpecError(problem, expected="either --tpu-prefix or --hosts")
        if self.hosts:
            return parse_hosts(self.hosts)
        return find_hosts(self.tpu_prefix or "", project=self.project, zone=self.zone, internal_ip=self.internal_ip)


@Parameter(name="*", group=Group("Where", sort_key=1))
@dataclass(frozen=True)
class PlaceFlags:
    """The fleet, its project and its zones."""

    zones: str | None = None
    """us-central1-a,us-central1-b [default: gcloud's compute/zone]"""
    fleet: str = "default"
    """The name of the fleet. Its machines have it as a label."""
    project: str | None = None
    """The Google Cloud project. [default: gcloud's]"""
    name_prefix: str = "tpu"
    """Machines are named PREFIX-ZONE-N."""

    def client(self) -> CloudTpu:
        from spile.fleet.cloud_tpu import CloudTpu, read_settings

        return CloudTpu(read_settings(self.project))

    def zone_list(self) -> tuple[str, ...]:
        from spile.fleet.cloud_tpu import gcloud_value

        text = self.zones or gcloud_value("compute", "zone")
        if not text:
            raise SpecError("no zone", fix="pass --zones us-central1-a,us-central1-b")
        zones = tuple(text.replace(",", " ").split())
        if len(set(zones)) != len(zones):
            raise SpecError("--zones", expected="each zone once", found=text)
        return zones


_TIERS = ("spot", "reserved", "best_effort")
"""Ways to pay for machines, which exclude each other."""
_REQUESTED = ("spot", "reservation", "network", "subnetwork", "external_ips", "service_account")
"""The flags whose values are part of a request for a machine."""


@Parameter(name="*", group=Group("Which machines", sort_key=2))
@dataclass(frozen=True)
class MachineFlags:
    """The type, number and payment of machines."""

    workers_per_zone: int | None = None
    """Machines in each zone. [default: 1]"""
    tpu_type: str | None = None
    """The machine type: v3-8, v5litepod-8, v5e:2x4, … A slice of several hosts is one worker.
    [default: the first of v5litepod-8, v6e-8, v4-8 and v3-8 that every zone offers]"""
    preemptible: Annotated[bool | None, NEGATABLE] = None
    """Cheaper machines that can be preempted at any time and live at most 24 hours. [default: yes; with --queued on
    demand, as in gcloud]"""
    spot: bool = False
    """Like --preemptible, but without the limit of 24 hours."""
    reserved: bool = False
    """Use a reservation of the project."""
    reservation: str | None = None
    """With --queued: use the reservation of this name. [default: with --reserved, any of the project]"""
    best_effort: bool = False
    """With --queued: use preemptible capacity."""
    queued: bool = False
    """Create the machines as queued resources."""
    runtime_version: str | None = None
    """The software version of the VM. [default: the type's]"""
    network: str | None = None
    """The VPC network."""
    subnetwork: str | None = None
    """The VPC subnetwork."""
    external_ips: Annotated[bool, NEGATABLE] = True
    """Give machines public addresses."""
    service_account: str | None = None
    """The service account of the machines."""

    def _tiers(self) -> list[str]:
        """Return the flag that says how the machines are paid for, or none. Raise if flags exclude each other."""
        if self.best_effort and not self.queued:
            raise SpecError("--best-effort", expected="--queued as well", found="--best-effort alone")
        if self.reservation is not None and not self.queued:
            raise SpecError("--reservation", expected="--queued as well", found="--reservation alone")
        tiers = [f"--{name.replace('_', '-')}" for name in _TIERS if getattr(self, name)]
        tiers += ["--reservation"] if self.reservation is not None and not self.reserved else []
        if len(tiers) > 1:
            raise SpecError(
                "more than one way to pay for machines", expected=f"one of {', '.join(tiers)}", found="all of them"
            )
        return tiers

    def with_type(self, client: CloudTpu | None, place: PlaceFlags, before: str = "") -> tuple[MachineFlags, str]:
        """Return the flags with a machine type, and a line about it; no line if the type was given.

        Args:
            client: The cloud that knows what the zones offer; None if it cannot be asked.
            place: The zones.
            before: The type of the earlier deployment. It counts only if it is one of the default types.
        """
        from spile.fleet.cloud_tpu import DEFAULT_TYPES, default_type
        from spile.planning.machines import list_prices, parse_machine

        self._tiers()  # A mistake in the flags is reported before the cloud is asked.
        if self.tpu_type is not None:
            return self, ""
        zones = ", ".join(place.zone_list())
        if before in DEFAULT_TYPES:
            name, why = before, "as before"
        elif client is None:
            name, why = DEFAULT_TYPES[0], f"not checked in {zones}"
        else:
            name = default_type(client, place.zone_list())
            why = f"the first of {', '.join(DEFAULT_TYPES)} that is in {zones}"
        prices = list_prices()
        price = parse_machine(name, prices).price
        line = (
            f"machine type: {name}, {why}; ${price.on_demand:,.2f} an hour on demand, ${price.preemptible:,.2f} "
            f"preemptible ({prices.source}, {prices.as_of}). --tpu-type chooses another"
        )
        return replace(self, tpu_type=name), line

    def fleet(self, place: PlaceFlags, project: str, policy: Policy | None = None) -> FleetSpec:
        from spile.fleet.cloud_tpu import DEFAULT_TYPES
        from spile.fleet.provider import NodeRequest
        from spile.fleet.spec import FleetSpec, default_runtime, plan_workers
        from spile.fleet.spec import Policy as DefaultPolicy
        from spile.planning.machines import parse_machine

        tiers = self._tiers()
        machine = parse_machine(self.tpu_type or DEFAULT_TYPES[0])
        if not machine.tpu_api:
            raise SpecError(
                f"--tpu-type {self.tpu_type}: the Cloud TPU API has no {machine.generation}",
                expected="v2 to v6e",
                fix=f"create it on GKE, and use: spile k8s job --topology {machine.name}",
            )
        zones = place.zone_list()
        per_zone = 1 if self.workers_per_zone is None else self.workers_per_zone
        request = NodeRequest(
            accelerator_type=machine.name,
            runtime_version=self.runtime_version or default_runtime(machine),
            preemptible=not tiers and (not self.queued if self.preemptible is None else self.preemptible),
            reserved=self.reserved or self.reservation is not None,
            metadata=_ssh_keys(),
            **{name: getattr(self, name) for name in _REQUESTED},
        )
        return FleetSpec(
            name=place.fleet,
            project=project,
            zones=zones,
            workers=plan_workers(zones, per_zone, prefix=place.name_prefix),
            machine=request,
            queued=self.queued,
            best_effort=self.best_effort,
            name_prefix=place.name_prefix,
            policy=policy or DefaultPolicy(),
        )


def _ssh_keys() -> dict[str, str]:
    """Return the metadata with the key that gcloud logs in with; create the key if there is none, as gcloud does.

    ``spile run`` needs it. A machine that is created with it need not be changed later. Without ssh no key is needed.
    """
    import getpass
    import shutil

    from spile.hosts.hosts import GCLOUD_KEY, ensure_key

    if shutil.which("ssh-keygen") is None and not GCLOUD_KEY.expanduser().is_file():
        return {}
    return {"ssh-keys": f"{getpass.getuser()}:{ensure_key()}"}


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation of an action that cannot be undone; raise if it is not given."""
    if yes:
        return
    console = output()
    if not console.is_terminal:
        raise UserError(question, expected="an answer at a terminal, or --yes", found="neither")
    if console.input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("not confirmed", fix="nothing was changed")


def plain_table(*columns: str, left: Collection[str] | None = None) -> Table:
    """Return a table without borders; ``left`` are the columns that are not aligned to the right, by default all."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if left is None or column in left else "right", no_wrap=True)
    return table


def print_result(result: NodeResult) -> None:
    detail = f": {result.detail}" if result.detail else ""
    line = f"{result.name} in {result.zone}: {result.outcome}{detail}"
    output(soft_wrap=True).print(line, style="red" if result.failed else None)


def print_results(results: Sequence[NodeResult]) -> int:
    """Print one line per machine, failures last; return 1 if there is a failure, else 0."""
    for result in sorted(results, key=lambda result: (result.failed, result.zone, result.name)):
        print_result(result)
    return int(any(result.failed for result in results))
