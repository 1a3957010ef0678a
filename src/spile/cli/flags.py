"""Flags and small helpers that several commands share. The flags of a run derive from the fields of the run spec."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from spile.cli.program import COMMON_FLAGS
from spile.errors import SpecError, UserError, printable
from spile.objects import is_remote
from spile.spec.options import CommandName
from spile.spec.run import BackfillSpec, RunSpec, SpecField, make_spec, parse_mesh_shape, spec_fields
from spile.spec.taps import parse_taps

if TYPE_CHECKING:
    from spile.fleet.cloud_tpu import CloudTpu
    from spile.fleet.manage import NodeResult
    from spile.fleet.spec import FleetSpec, Policy
    from spile.hosts.hosts import Access, Host
    from spile.launch.engines import EngineRequest
    from spile.worker.pod.identity import Identity
    from spile.worker.pod.pod import WorkerGroup


def flag(group: Group, text: str, **more: Any) -> Parameter:
    """Return the parameter of a flag; ``more`` goes to cyclopts."""
    return Parameter(group=group, help=text, **more)


def log(line: str) -> None:
    """Print a line to stdout at once, without characters that its encoding does not have."""
    encoding = sys.stdout.encoding or "ascii"
    line = printable(line)
    print(line.encode(encoding, "ignore").decode(encoding), flush=True)


def parse_numbers(flag: str, text: str) -> set[int]:
    """Parse numbers and ranges: ``5-9,12`` → {5, 6, 7, 8, 9, 12}."""
    chosen: set[int] = set()
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SpecError(flag, expected="numbers and ranges such as 5-9,12", found=repr(text))
        chosen.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not chosen:
        raise SpecError(flag, expected="numbers and ranges such as 5-9,12", found=repr(text))
    return chosen


def pairs(flag: str, words: Sequence[str] | None, expected: str = "NAME=value") -> dict[str, str]:
    """Parse ``NAME=value`` pairs; neither part may be empty."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise SpecError(flag, expected=expected, found=repr(word))
        found[name] = value
    return found


def variables(words: Sequence[str] | None) -> dict[str, str]:
    """Parse the variables of ``--env``; values may be empty. Errors never quote a value, which may be a secret."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise SpecError("--env", expected="NAME=value", found=repr(name))
        found[name] = value
    return found


# Annotations are not deferred, because cyclopts reads them as the types of flags.


GCS_PREFIX = "activations"
"""The folder of the dataset in a bucket that is given without a folder."""

GROUPS = ("Model", "Data", "Taps", "Prompts", "Answers", "Output", "Batching (does not change the numbers)")
_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(GROUPS, 1)}
_COMMON = Group(COMMON_FLAGS, sort_key=0)


@dataclass(frozen=True)
class RunFlags:
    """The flags of a run. Each is None if it was not given; the run spec has the defaults."""

    if TYPE_CHECKING:

        def __init__(self, **flags: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def given(self) -> dict[str, Any]:
        """Return the flags that were given, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def values(self) -> dict[str, Any]:
        """Return the fields of the run spec that the flags ask for, by name.

        Raises:
            SpecError: If two flags exclude each other.
        """
        if self.dataset_dir is not None and self.dataset is not None:
            raise SpecError("two datasets", expected="--dataset or --dataset-dir", found="both")
        known = {each.name for each in spec_fields()}
        values = {name: value for name, value in self.given().items() if name in known}
        output, local_copy = self._places()
        if output is not None:
            values["output"] = output
        if local_copy is not None:
            values["local_copy"] = local_copy
        return values

    def spec(self) -> RunSpec:
        """Return the run spec that the flags ask for."""
        return make_spec(self.values(), source="flags")

    def stored_in(self, root: str) -> Self:
        """Return the flags of the same run with its output in ``root``."""
        return self.replaced(output=root, output_dir=None, local_copy=None, gcs_bucket=None, upload_to_gcs=None)

    def replaced(self, **changes: Any) -> Self:
        """Return these flags with some of them changed."""
        return replace(self, **changes)

    def _places(self) -> tuple[str | None, str | None]:
        return self._output_and_copy("--output-dir", self.output_dir)

    def _output_and_copy(self, flag: str, folder: str | None) -> tuple[str | None, str | None]:
        """Return the output, and the folder of the local copy if the output is a bucket.

        ``folder``, the value of ``flag``, is the output if no other is given; otherwise it is the local copy.
        """
        bucket = self._bucket()
        if bucket and self.output is not None:
            found = f"{self.output}, {bucket}"
            raise SpecError("--output and --gcs-bucket both given", expected="one of them", found=found)
        output = bucket or self.output
        if output is None:
            return folder, self.local_copy
        if folder is not None and not is_remote(output):
            raise SpecError(f"{flag} with --output", expected="a bucket, of which it is the local copy", found=output)
        return output, folder or self.local_copy

    def _bucket(self) -> str | None:
        """Return the folder that ``--gcs-bucket`` and ``--gcs-prefix`` name."""
        if self.upload_to_gcs and not self.gcs_bucket:
            raise SpecError("--upload-to-gcs", expected="--gcs-bucket as well", found="no bucket")
        if not self.gcs_bucket or self.upload_to_gcs is False:
            return None
        bucket = self.gcs_bucket.removeprefix("gs://").strip("/")
        prefix = self.gcs_prefix if self.gcs_prefix is not None else "" if "/" in bucket else GCS_PREFIX
        return "gs://" + "/".join(part for part in (bucket, prefix.strip("/")) if part)


class _AnswerFlags(RunFlags):
    """The flags of a run that generates answers."""

    def spec(self) -> RunSpec:
        return make_spec(self.values(), infer=True, source="flags")

    def values(self) -> dict[str, Any]:
        values = super().values()
        if self.output_dir is not None:
            values["answers_dir"] = self.output_dir
        if self.n_tasks is None:
            return values
        if self.max_samples is not None:
            raise SpecError("two limits", expected="--n-tasks or --max-samples", found="both")
        if self.n_tasks < 1:
            raise SpecError("--n-tasks", expected="at least 1", found=self.n_tasks)
        return {**values, "max_samples": self.n_tasks * (self.predictions_per_task or 1)}

    def _places(self) -> tuple[str | None, str | None]:
        return self._output_and_copy("--activations-dir", self.activations_dir)


def _flag(each: SpecField, command: CommandName) -> tuple[str, Any, Any]:
    """Return the dataclass field of a flag: its name, its annotated type, and None as its default.

    A common flag of the command is also in the group that its short ``--help`` shows.
    """
    option, hint = each.option, _plain(each.hint)
    many = get_origin(hint) is tuple and each.name != "mesh_shape"
    kind = list[str] if many else str if option.parse is not None else hint
    more: dict[str, Any] = {"consume_multiple": True, "negative": ""} if many else {}
    if hint is bool and each.default is False:
        more["negative"] = ""
    text = option.help + (f" [default: {default}]" if (default := _default_text(each)) else "")
    group = _GROUPS[option.group]
    parameter = Parameter(group=(group, _COMMON) if command in option.common else group, help=text, **more)
    return each.name, Annotated[kind | None, parameter], field(default=None)


def _default_text(each: SpecField) -> str:
    if each.option.default:
        return each.option.default
    if each.default in (None, False, (), ""):
        return ""
    return "yes" if each.default is True else str(each.default)


def _plain(hint: Any) -> Any:
    """Return a type without ``| None``."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(each for each in get_args(hint) if each is not type(None))
    return hint


def _guide(name: str, kind: Any, group: str, text: str, **more: Any) -> tuple[str, Any, Any]:
    return name, Annotated[kind | None, Parameter(group=_GROUPS[group], help=text, **more)], field(default=None)


_BUCKET = (
    _guide("gcs_bucket", str, "Output", "Store the dataset in this bucket, instead of --output."),
    _guide("gcs_prefix", str, "Output", f"The folder in that bucket. [default: {GCS_PREFIX}]"),
    _guide(
        "upload_to_gcs",
        bool,
        "Output",
        "Store the dataset in that bucket; =False: do not. [default: yes, if --gcs-bucket is given]",
        negative="",
    ),
)
"""Flags of the old guides, which :meth:`RunFlags.values` translates to ``output`` and ``local_copy``."""
_COPY = "The same as --output; with a bucket, the same as --local-copy."


def _make(name: str, base: type[RunFlags], command: CommandName, *guides: tuple[str, Any, Any]) -> type[RunFlags]:
    ours = [each for each in spec_fields() if command == "infer" or each.option.group != "Answers"]
    own = [_flag(each, command) for each in ours if each.option.flag]
    made = make_dataclass(name, [*own, *guides, *_BUCKET], bases=(base,), frozen=True)
    made.__module__ = __name__
    return Parameter(name="*")(made)


if TYPE_CHECKING:

    class ExtractFlags(RunFlags):
        """The flags of ``spile extract``."""

    class InferFlags(RunFlags):
        """The flags of ``spile infer``."""

else:
    ExtractFlags = _make("ExtractFlags", RunFlags, "extract", _guide("output_dir", str, "Output", _COPY))
    InferFlags = _make(
        "InferFlags",
        _AnswerFlags,
        "infer",
        _guide("output_dir", str, "Answers", "The same as --answers-dir."),
        _guide("activations_dir", str, "Output", _COPY),
        _guide("n_tasks", int, "Data", "Stop after this many tasks, with all their variants."),
    )


_PODS = Group("Pods (detected automatically if every host runs the same command)", sort_key=5)


@Parameter(name="*")
@dataclass(frozen=True)
class PodFlags:
    """The place of this process in a pod."""

    topology: Annotated[
        str | None,
        flag(
            _PODS,
            "The expected slice, such as v5litepod-64, v5e:8x8 or v3-8. Fail if the hosts do not match it.",
        ),
    ] = None
    coordinator_address: Annotated[str | None, flag(_PODS, "The address of worker 0: HOST or HOST:PORT.")] = None
    process_id: Annotated[int | None, flag(_PODS, "The number of this host.")] = None
    num_processes: Annotated[int | None, flag(_PODS, "The number of hosts.")] = None
    barrier_timeout: Annotated[float | None, flag(_PODS, "Seconds that hosts wait for each other.")] = None
    heartbeat_timeout: Annotated[float | None, flag(_PODS, "Seconds after which a silent host counts as dead.")] = None

    def identity(self) -> Identity:
        """Return this process's place in the pod."""
        from spile.planning.machines import parse_machine
        from spile.worker.pod.identity import this_process

        return this_process(
            coordinator_address=self.coordinator_address,
            process_id=self.process_id,
            num_processes=self.num_processes,
            hosts=None if self.topology is None else parse_machine(self.topology).hosts,
        )

    @contextlib.contextmanager
    def joined(self, identity: Identity | None = None) -> Iterator[WorkerGroup]:
        """Join the pod, if there is one, for the duration of the ``with`` block."""
        from spile.worker.pod.pod import PodTimes, joined_group
        from spile.worker.signals import before_exit, handled

        times = PodTimes.of(self.barrier_timeout, self.heartbeat_timeout)
        with (
            handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM),  # nothing is to be committed yet
            joined_group(identity or self.identity(), times, log) as hosts,
            before_exit(lambda: hosts.notify_end(KeyboardInterrupt())),
        ):
            yield hosts


_ENGINE = Group("Many workers at once", sort_key=6)


@Parameter(name="*")
@dataclass(frozen=True)
class WorkerFlags:
    """The engine, the number of workers, and the resources of each."""

    engine: Annotated[
        str | None,
        flag(_ENGINE, "Where workers run: local, as processes of this machine, or ray, on a cluster. [default: none]"),
    ] = None
    num_workers: Annotated[
        int | None,
        flag(_ENGINE, "The number of workers at once. Without --engine it implies --engine local."),
    ] = None
    resources: Annotated[
        list[str] | None,
        flag(_ENGINE, "What each worker needs: GPU=1, TPU=4, CPU=8, or a resource of the cluster.", negative=""),
    ] = None
    ray_address: Annotated[
        str | None,
        flag(_ENGINE, "The cluster: HOST:6379, or ray://HOST:10001. [default: RAY_ADDRESS, else this machine's]"),
    ] = None

    @property
    def asked(self) -> bool:
        """Whether this is a run with several workers."""
        return self.engine is not None or self.num_workers is not None

    @property
    def name(self) -> str:
        """The name of the engine."""
        return self.engine or "local"

    def needs(self) -> dict[str, float]:
        """Parse ``--resources`` into numbers by name."""
        found: dict[str, float] = {}
        for word in " ".join(self.resources or ()).replace(",", " ").split():
            name, equals, text = word.partition("=")
            try:
                amount = float(text)
            except ValueError:
                amount = 0.0
            if not name or not equals or amount <= 0:
                raise SpecError("--resources", expected="NAME=number such as GPU=1", found=repr(word))
            found[name] = amount
        return found

    def check(self) -> None:
        """Raise for invalid values before anything is read."""
        self._check_counts(("--num-workers", self.num_workers))
        self.needs()

    def _check_counts(self, *counts: tuple[str, int | None]) -> None:
        for name, value in counts:
            if value is not None and not 1 <= value <= 10_000:
                raise SpecError(name, expected="1 to 10,000", found=f"{value:,}")

    def request(self, output: str) -> EngineRequest:
        """Return the request to the engine."""
        from spile.launch.engines import EngineRequest

        return EngineRequest(self.num_workers, self.needs(), self.ray_address, output=output)


@Parameter(name="*")
@dataclass(frozen=True)
class EngineFlags(WorkerFlags):
    """The engine of a run, and how its data is split into streams."""

    num_streams: Annotated[
        int | None,
        flag(
            _ENGINE,
            "The number of streams that --dataset is split into. [default: up to 4 for each worker; 1 of large data]",
        ),
    ] = None
    hosts_per_worker: Annotated[
        int, flag(_ENGINE, "With ray: the number of hosts that act as one worker, such as the hosts of a slice.")
    ] = 1
    log_dir: Annotated[Path | None, flag(_ENGINE, "With local: a folder for the log of each stream.")] = None

    def check(self) -> None:
        super().check()
        self._check_counts(("--num-streams", self.num_streams), ("--hosts-per-worker", self.hosts_per_worker))

    def request(self, output: str) -> EngineRequest:
        return replace(super().request(output), hosts_per_worker=self.hosts_per_worker, log_dir=self.log_dir)


_ADD = Group("Add to a finished dataset", sort_key=7)
_TAKEN = frozenset(
    {"model", "revision", "worker_id", "dtype", "store_dtype", "positions", "max_samples", "statistics",
     "batch_size", "batch_tokens", "mesh_shape", "device"}
)  # fmt: skip
"""The flags of extract that can be used with --add-taps; the dataset determines all others."""


@Parameter(name="*")
@dataclass(frozen=True)
class BackfillFlags:
    """The taps to add, and the dataset to add them to."""

    add_taps: Annotated[
        list[str] | None,
        Parameter(
            group=_ADD,
            help="Compute these taps for every stored row of --to and add them to that dataset: mlp.12 residual.0",
            consume_multiple=True,
            negative="",
        ),
    ] = None
    to: Annotated[
        str | None, Parameter(group=_ADD, help="The finished dataset: a folder, gs://…, s3://… or az://…")
    ] = None

    @property
    def asked(self) -> bool:
        """Whether taps are to be added."""
        return self.add_taps is not None or self.to is not None

    def spec(self, flags: ExtractFlags) -> BackfillSpec:
        """Return the spec from these flags and those of extract."""
        if self.to is None or self.add_taps is None:
            found = "one of them"
            raise SpecError("--add-taps and --to", expected="both: the taps, and the finished dataset", found=found)
        given = flags.given()
        for name, value in given.items():
            if name not in _TAKEN:
                raise SpecError(
                    f"--{name.replace('_', '-')} cannot be used with --add-taps",
                    expected="the value that the dataset was created with",
                    found=value,
                    fix="leave it out",
                )
        if "mesh_shape" in given:
            given["mesh_shape"] = parse_mesh_shape(given["mesh_shape"])
        return BackfillSpec(root=self.to, taps=parse_taps(self.add_taps), **given)


_WHICH = Group("Which hosts", sort_key=2)
_LOGIN = Group("How to log in", sort_key=3)


@Parameter(name="*")
@dataclass(frozen=True)
class HostFlags:
    """The hosts, and how to log in."""

    tpu_prefix: Annotated[
        str | None, flag(_WHICH, "The TPU VM with this name, or all slices PREFIX-0, PREFIX-1, …")
    ] = None
    hosts: Annotated[
        list[str] | None,
        flag(_WHICH, "Hosts by address instead: user@address:port,… Each --hosts is one slice.", negative=""),
    ] = None
    project: Annotated[str | None, flag(_WHICH, "The Google Cloud project. [default: gcloud's]")] = None
    zone: Annotated[str | None, flag(_WHICH, "The zone of the machines. [default: all]")] = None
    internal_ip: Annotated[bool, flag(_LOGIN, "Use internal addresses, from a machine in the same network.")] = False
    user: Annotated[str | None, flag(_LOGIN, "The user name on the hosts. [default: yours]")] = None
    ssh_key: Annotated[Path | None, flag(_LOGIN, "The private ssh key. [default, for TPU VMs: gcloud's]")] = None
    ssh_option: Annotated[
        list[str] | None, flag(_LOGIN, "An option for ssh, such as ProxyJump=bastion.", negative="")
    ] = None

    def access(self) -> Access:
        """Return how to log in."""
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


_PLACE = Group("Where", sort_key=1)
_MACHINE = Group("Which machines", sort_key=2)


@Parameter(name="*")
@dataclass(frozen=True)
class PlaceFlags:
    """The fleet, its project and its zones."""

    zones: Annotated[str | None, flag(_PLACE, "us-central1-a,us-central1-b [default: gcloud's compute/zone]")] = None
    fleet: Annotated[str, flag(_PLACE, "The name of the fleet. Its machines have it as a label.")] = "default"
    project: Annotated[str | None, flag(_PLACE, "The Google Cloud project. [default: gcloud's]")] = None
    name_prefix: Annotated[str, flag(_PLACE, "Machines are named PREFIX-ZONE-N.")] = "tpu"

    def client(self) -> CloudTpu:
        """Return the client of the cloud."""
        from spile.fleet.cloud_tpu import CloudTpu, read_settings

        return CloudTpu(read_settings(os.environ, project=self.project))

    def zone_list(self) -> tuple[str, ...]:
        """Return the given zones."""
        from spile.fleet.cloud_tpu import gcloud_value

        text = self.zones or gcloud_value("compute", "zone", os.environ)
        if not text:
            raise SpecError("no zone", fix="pass --zones us-central1-a,us-central1-b")
        zones = tuple(word for word in text.replace(",", " ").split() if word)
        if len(set(zones)) != len(zones):
            raise SpecError("--zones", expected="each zone once", found=text)
        return zones


_MODELS = ("spot", "reserved", "best_effort")
"""Ways to pay for machines, which exclude each other."""
_REQUESTED = ("spot", "reserved", "network", "subnetwork", "external_ips", "service_account")
"""The flags whose values are part of a request for a machine."""


@Parameter(name="*")
@dataclass(frozen=True)
class MachineFlags:
    """The type, number and payment of machines."""

    workers_per_zone: Annotated[int | None, flag(_MACHINE, "Machines in each zone. [default: 1]")] = None
    tpu_type: Annotated[
        str | None,
        flag(
            _MACHINE,
            "The machine type: v3-8, v5litepod-8, v5e:2x4, … A slice of several hosts is one worker. [default: v3-8]",
        ),
    ] = None
    preemptible: Annotated[
        bool | None,
        flag(
            _MACHINE,
            "Cheaper machines that can be preempted at any time and live at most 24 hours. [default: yes; with "
            "--queued on demand, as in gcloud]",
        ),
    ] = None
    spot: Annotated[bool, flag(_MACHINE, "Like --preemptible, but without the limit of 24 hours.", negative="")] = False
    reserved: Annotated[bool, flag(_MACHINE, "Use the project's reservation.", negative="")] = False
    best_effort: Annotated[bool, flag(_MACHINE, "With --queued: use preemptible capacity.", negative="")] = False
    queued: Annotated[bool, flag(_MACHINE, "Create the machines as queued resources.", negative="")] = False
    runtime_version: Annotated[str | None, flag(_MACHINE, "The software version of the VM. [default: the type's]")] = (
        None
    )
    network: Annotated[str | None, flag(_MACHINE, "The VPC network.")] = None
    subnetwork: Annotated[str | None, flag(_MACHINE, "The VPC subnetwork.")] = None
    external_ips: Annotated[bool, flag(_MACHINE, "Give machines public addresses.")] = True
    service_account: Annotated[str | None, flag(_MACHINE, "The service account of the machines.")] = None

    def fleet(self, place: PlaceFlags, project: str, policy: Policy | None = None) -> FleetSpec:
        """Return the fleet that these flags describe."""
        from spile.fleet.provider import NodeRequest
        from spile.fleet.spec import FleetSpec, default_runtime, plan_workers
        from spile.fleet.spec import Policy as DefaultPolicy
        from spile.planning.machines import parse_machine

        if self.best_effort and not self.queued:
            raise SpecError("--best-effort", expected="--queued as well", found="--best-effort alone")
        chosen = [f"--{name.replace('_', '-')}" for name in _MODELS if getattr(self, name)]
        if len(chosen) > 1:
            raise SpecError(
                "more than one way to pay for machines", expected=f"one of {', '.join(chosen)}", found="all of them"
            )
        machine = parse_machine(self.tpu_type or "v3-8")
        zones = place.zone_list()
        plain = not (self.spot or self.reserved or self.best_effort)
        request = NodeRequest(
            accelerator_type=machine.name,
            runtime_version=self.runtime_version or default_runtime(machine),
            preemptible=plain and (not self.queued if self.preemptible is None else self.preemptible),
            metadata=_ssh_keys(),
            **{name: getattr(self, name) for name in _REQUESTED},
        )
        return FleetSpec(
            name=place.fleet,
            project=project,
            zones=zones,
            workers=plan_workers(
                zones, 1 if self.workers_per_zone is None else self.workers_per_zone, prefix=place.name_prefix
            ),
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


def confirm(question: str, *, yes: bool, console: Console) -> None:
    """Ask for confirmation of an action that cannot be undone; raise if it is not given."""
    if yes:
        return
    if not console.is_terminal:
        raise UserError(question, expected="an answer at a terminal, or --yes", found="neither")
    if console.input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("not confirmed", fix="nothing was changed")


def table_of(*columns: str) -> Table:
    """Return a table without borders."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column not in ("DETAIL",))
    return table


def print_result(console: Console, result: NodeResult) -> None:
    """Print one line for a machine."""
    detail = f": {result.detail}" if result.detail else ""
    style = "red" if result.bad else None
    console.print(f"{result.name} in {result.zone}: {result.what}{detail}", style=style, markup=False, soft_wrap=True)


def print_results(console: Console, results: Sequence[NodeResult]) -> int:
    """Print one line per machine, failures last; return 1 if there is a failure, else 0."""
    for result in sorted(results, key=lambda result: (result.bad, result.zone, result.name)):
        print_result(console, result)
    return int(any(result.bad for result in results))
