"""``spile run``, ``install``, ``logs`` and ``collect``: commands and files on many hosts."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from rich.console import Console

from spile.cli.flags import HostFlags, flag, log, variables
from spile.errors import Failure, SpecError, UserError
from spile.fleet.agent import LOG_FILES, NO_LOG, UNIT, LogMachine, find_machine, last_words, tail_command
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.home import FleetHome, read_log
from spile.fleet.install import install_on
from spile.hosts import run as fanout
from spile.hosts.files import assemble, collect_from, copy_to, load
from spile.hosts.hosts import Host
from spile.hosts.run import Job
from spile.objects import open_folder
from spile.spec.options import at_least
from spile.view.hosts import Logs, Output, print_outcomes, results_folder
from spile.view.table import output as output_console

_WHAT = Group("What to run", sort_key=1)
_COPY = Group("What to copy, where to", sort_key=4)


@Parameter(name="*")
@dataclass(frozen=True)
class HostCommandFlags:
    """The flags of ``spile run`` itself."""

    command: Annotated[
        str | None, flag(_WHAT, "The command as one line for the hosts' shell, instead of words after --.")
    ] = None
    env: Annotated[
        list[str] | None, flag(_WHAT, "An environment variable for the command, NAME=value.", negative="")
    ] = None
    install: Annotated[bool, flag(_WHAT, "Install spile on the hosts first, as spile install does.", negative="")] = (
        False
    )
    quiet: Annotated[bool, flag(_WHAT, "Write the output of the hosts to the log files only.", negative="")] = False
    logs: Annotated[Path | None, flag(_COPY, "The folder for the logs. [default: spile-run-TIME]")] = None
    folder: Annotated[str | None, flag(_COPY, "The folder on the hosts. [default: ~/spile-run/THIS-DIRECTORY]")] = None
    copy: Annotated[bool, flag(_COPY, "Copy the directory first, or use an earlier copy.")] = True
    copy_limit_gb: Annotated[float, flag(_COPY, "Fail if the directory is larger than this.")] = 2.0

    def line(self, words: tuple[str, ...]) -> str:
        """Return the command as one line; a single word is taken as a line already."""
        if words and words[0].startswith("-"):
            flag = words[0].partition("=")[0]
            raise SpecError(f"no flag {flag}", fix="put the flags of the command itself after --; see spile run --help")
        if bool(words) == bool(self.command):
            raise SpecError("two commands" if words else "no command", expected="one, after -- or with --command")
        return self.command or (words[0] if len(words) == 1 else shlex.join(words))


def run(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    flags: HostCommandFlags = HostCommandFlags(),  # noqa: B008  (frozen)
    where: HostFlags = HostFlags(),  # noqa: B008
) -> int:
    """Copy this directory to every host of the slices, run a command on all of them, and fetch logs and exit codes.

    ``spile run --tpu-prefix my-tpu -- python3 train.py``. The first host that fails, or Ctrl+C, ends the command on all
    hosts and leaves no process behind. The exit code is the worst one of the hosts.
    """
    line, given, results = flags.line(words), variables(flags.env), results_folder(flags.logs)
    console = Output(highlight=False)
    here, access = Path.cwd(), where.access()
    target = flags.folder or f"~/spile-run/{here.name or 'root'}"
    files = load(here, int(flags.copy_limit_gb * 1e9)) if flags.copy else None
    hosts = where.find()
    if flags.install:
        put_on(hosts, where)
    if files is not None:
        sent = copy_to(hosts, files, target, access)
        size = f"{files.size / 1e6:.1f} MB, {sent / 1e6:.1f} MB sent"
        console.print(f"copied {len(files.names)} files ({size}) to {target} on {len(hosts)} hosts", markup=False)
    with Logs(hosts, results, None if flags.quiet else console) as logs:
        outcomes = fanout.run(hosts, Job(line, target, given), access=access, output=logs.write)
        logs.open()
    print_outcomes(outcomes, logs, console)
    return fanout.worst(outcomes)


def install(
    *,
    where: HostFlags = HostFlags(),  # noqa: B008  (frozen)
    force: Annotated[bool, Parameter(negative="", help="Install again, even if the host has this version.")] = False,
) -> int:
    """Install this version of spile on every host, together with a recent Python, and put it on PATH.

    It is installed in ~/.spile, with support for the TPUs or GPUs of the host. A host with this version is not changed.
    """
    put_on(where.find(), where, force=force)
    return 0


def put_on(hosts: Sequence[Host], where: HostFlags, *, force: bool = False) -> None:
    """Install spile on all hosts; raise with the last line of each host that failed."""
    name, done = install_on(hosts, where.access(), force=force)
    bad = [each for each in done if each.error is not None]
    if bad:
        errors = "; ".join(str(each.error) for each in bad[:4])
        raise Failure(
            f"not installed on {len(bad)} of {len(hosts)} hosts",
            found=errors,
            fix="see ~/.spile/startup.log on those hosts",
        )
    log(f"{name} is on {len(hosts)} hosts, as spile on PATH")


def logs(
    worker: Annotated[str, Parameter(help="The worker's number, or the name of its machine.")],
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Print new lines until Ctrl+C.", negative="")
    ] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="The number of last lines to print.")] = 100,
    output: Annotated[
        str | None, Parameter(help="The dataset, for a machine that is gone: its heartbeat has the end.")
    ] = None,
    home: Annotated[
        str | None, Parameter(help="The fleet's gs://bucket/fleet/NAME: print the log that is stored in the bucket.")
    ] = None,
    grep: Annotated[str | None, Parameter(help="With --home: only lines that match this regular expression.")] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="With --home: print one JSON object per line of the log.")
    ] = False,
    fleet: Annotated[str | None, Parameter(help="Only machines of this fleet.")] = None,
    host: Annotated[int, Parameter(help="The host of a pod.")] = 0,
    where: HostFlags = HostFlags(),  # noqa: B008  (frozen)
) -> int:
    """Print a worker's log: from its machine over ssh, or its last lines from the bucket if the machine is gone."""
    at_least("-n", lines, 0)
    console = output_console()
    if as_json and home is None:
        raise SpecError("--json", expected="--home gs://bucket/fleet/NAME", found="--json alone")
    if grep is not None and home is None:
        raise SpecError("--grep", expected="--home gs://bucket/fleet/NAME as well", found="--grep alone")
    if home is not None:
        return _print_stored_log(worker, home, lines, grep, host, console, as_json)
    machine = _machine(worker, fleet, host, where)
    if machine.host is None:
        return _print_last_lines(worker, machine, output, lines, console)
    job = Job(tail_command(lines, follow))
    try:
        with Logs([machine.host], None, console, bare=True) as shown:
            (outcome,) = fanout.run([machine.host], job, access=where.access(), output=shown.write)
    except Failure as error:
        if output is None:
            raise
        return _print_last_lines(worker, replace(machine, story=str(error)), output, lines, console)
    if outcome.code == NO_LOG:
        raise UserError(f"no log on {machine.host.label}", expected=f"the unit {UNIT}, or {', '.join(LOG_FILES)}")
    if outcome.cause not in ("ended", "stopped"):
        raise Failure(f"{machine.host.label}: {outcome.cause}")
    return 0 if outcome.stopped else outcome.code


def _print_stored_log(
    worker: str, home: str, lines: int, grep: str | None, host: int, console: Console, as_json: bool
) -> int:
    """Print the log that a worker's agent stored in the bucket; the machine need not exist."""
    from collections import deque

    opened = FleetHome.open(home)
    named = {str(each.id): each.name for each in opened.read_fleet().workers}
    name = named.get(worker, worker)
    if name not in named.values():
        raise UserError(f"no worker {worker} in {home}", expected=f"a number or one of {', '.join(named.values())}")
    name = name if host == 0 else f"{name}-h{host}"
    found = deque(read_log(opened.folder, name, grep), maxlen=lines)
    if as_json:
        for line in found:
            print(json.dumps({"worker": name, "line": line}))
        return 0
    for line in found:
        console.print(line, markup=False, soft_wrap=True)
    if not found:
        console.print(f"no log of {name} is stored" + (f" with {grep}" if grep else " yet"), markup=False, style="dim")
    return 0


def _machine(worker: str, fleet: str | None, host: int, where: HostFlags) -> LogMachine:
    number = int(worker) if worker.isdigit() else None
    if where.hosts:
        named = where.find()
        if not 0 <= host < len(named):
            raise SpecError("--host", expected=f"0 to {len(named) - 1}", found=host)
        return LogMachine(named[host], number, "")

    provider = CloudTpu(read_settings(os.environ, project=where.project))
    nodes = provider.nodes(where.zone or "-")
    return find_machine(nodes, worker, fleet=fleet, host=host, internal_ip=where.internal_ip)


def _print_last_lines(worker: str, machine: LogMachine, output: str | None, lines: int, console: Console) -> int:
    """Print the last lines of the log from the worker's heartbeat."""
    if output is None:
        raise UserError(
            f"no log of worker {worker}",
            found=machine.story,
            fix="pass --home gs://bucket/fleet/NAME, where its log is kept, or --output gs://… for the last lines",
        )
    beat = last_words(open_folder(output), worker, machine)
    line = f"{machine.story}; the heartbeat of {beat.updated} ({beat.phase}, on {beat.host}) has the log's end:"
    console.print(line, markup=False, style="dim", soft_wrap=True)
    for line in beat.log_tail[max(0, len(beat.log_tail) - lines) :]:
        console.print(line, markup=False, soft_wrap=True)
    if beat.last_error:
        console.print(f"last error: {beat.last_error}", markup=False, soft_wrap=True)
    return 0


REMOTE = "/tmp/activations"  # noqa: S108  (where the guides' containers write)


def collect(
    path: Annotated[str, Parameter(help="The folder on the hosts.")] = REMOTE,
    *,
    into: Annotated[Path, Parameter(help="The local folder. It gets worker_0, worker_1, …")] = Path(
        "collected_activations"
    ),
    where: HostFlags = HostFlags(),  # noqa: B008  (frozen)
) -> int:
    """Fetch a folder from every host, into one folder per worker. For runs that did not use a bucket.

    If the folders are parts of one dataset, as on the disks of a pod's hosts, they are merged into one dataset. The
    checksum of each file is checked. After an interruption, run it again: files that are complete are not sent again.
    """
    console = output_console(soft_wrap=True)
    hosts = where.find()
    collected = collect_from(hosts, path, into, where.access())
    for host, (folder, got) in zip(hosts, collected.items(), strict=True):
        sent = f"{got.size / 1e6:.1f} MB, {got.sent / 1e6:.1f} MB sent"
        console.print(f"{host.label}: {got.files} files ({sent}) → {folder}", markup=False)
    if assemble(into, list(collected)):
        console.print(f"together they are one dataset; next: spile verify {into}", markup=False)
    return 0
