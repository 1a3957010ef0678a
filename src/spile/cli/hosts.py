"""``spile run``, ``install``, ``logs`` and ``collect``: commands and files on many hosts."""

from __future__ import annotations

import json
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import NEGATABLE, AsJson, HostFlags, log
from spile.errors import Failure, SpecError, UserError
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.home import FleetHome
from spile.fleet.install import install_on
from spile.fleet.logs import LOG_FILES, NO_LOG, UNIT, find_machine, last_heartbeat, read_log, tail_command
from spile.fleet.manage import hosts_of
from spile.fleet.provider import Node, NodeState
from spile.hosts.files import assemble, collect_from, copy_to, files_to_copy
from spile.hosts.hosts import Access, Host
from spile.hosts.run import Job, jobs_for
from spile.hosts.run import run as run_jobs
from spile.objects import open_folder
from spile.spec.options import check_number, parse_pairs
from spile.view.hosts import Logs, results_folder, run_on_all
from spile.view.table import output as output_console

_COPY = Group("What to copy, where to", sort_key=4)


@Parameter(name="*", group=Group("What to run", sort_key=1))
@dataclass(frozen=True)
class HostCommandFlags:
    """The flags of ``spile run`` itself."""

    command: str | None = None
    """The command as one line for the hosts' shell, instead of words after --."""
    env: list[str] | None = None
    """An environment variable for the command, NAME=value."""
    install: bool = False
    """Install spile on the hosts first, as spile install does."""
    quiet: bool = False
    """Write the output of the hosts to the log files only."""
    logs: Annotated[Path | None, Parameter(group=_COPY)] = None
    """The folder for the logs. [default: spile-run-TIME]"""
    folder: Annotated[str | None, Parameter(group=_COPY)] = None
    """The folder on the hosts. [default: ~/spile-run/THIS-DIRECTORY]"""
    copy: Annotated[bool, NEGATABLE, Parameter(group=_COPY)] = True
    """Copy the directory first, or use an earlier copy."""
    copy_limit_gb: Annotated[float, Parameter(group=_COPY)] = 2.0
    """Fail if the directory is larger than this."""

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
    flags: HostCommandFlags = HostCommandFlags(),
    where: HostFlags = HostFlags(),
) -> int:
    """Copy this directory to every host of the slices, run a command on all of them, and fetch logs and exit codes.

    ``spile run --tpu-prefix my-tpu -- python3 train.py``. The first host that fails, or Ctrl+C, ends the command on all
    hosts and leaves no process behind. The exit code is the worst one of the hosts.
    """
    line, given, results = flags.line(words), parse_pairs("--env", flags.env), results_folder(flags.logs)
    here, access = Path.cwd(), where.access()
    target = flags.folder or f"~/spile-run/{here.name or 'root'}"
    files = files_to_copy(here, int(flags.copy_limit_gb * 1e9)) if flags.copy else None
    hosts = where.find()
    if flags.install:
        _install_on_hosts(hosts, access)
    if files is not None:
        sent = copy_to(hosts, files, target, access)
        size = f"{files.size / 1e6:.1f} MB, {sent / 1e6:.1f} MB sent"
        log(f"copied {len(files.names)} files ({size}) to {target} on {len(hosts)} hosts")
    return run_on_all(jobs_for(hosts, Job(line, target, given)), access, results, quiet=flags.quiet)


def install(*, where: HostFlags = HostFlags(), force: bool = False) -> int:
    """Install this version of spile on every host, together with a recent Python, and put it on PATH.

    It is installed in ~/.spile, with support for the TPUs or GPUs of the host. A host with this version is not changed.

    Args:
        force: Install again, even if the host has this version.
    """
    _install_on_hosts(where.find(), where.access(), force=force)
    return 0


def _install_on_hosts(hosts: Sequence[Host], access: Access, *, force: bool = False) -> None:
    """Install spile on all hosts; raise with the last line of each host that failed."""
    name, done = install_on(hosts, access, force=force)
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
    worker: str,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"])] = 100,
    output: str | None = None,
    home: str | None = None,
    grep: str | None = None,
    as_json: AsJson = False,
    fleet: str | None = None,
    host: int = 0,
    where: HostFlags = HostFlags(),
) -> int:
    """Print a worker's log: from its machine over ssh, or its last lines from the bucket if the machine is gone.

    Args:
        worker: The worker's number, or the name of its machine.
        follow: Print new lines until Ctrl+C.
        lines: The number of last lines to print.
        output: The dataset, for a machine that is gone: its heartbeat has the last lines.
        home: The fleet's gs://bucket/fleet/NAME: print the log that is stored in the bucket.
        grep: With --home: only lines that match this regular expression.
        as_json: With --home: print one JSON object per line of the log.
        fleet: Only machines of this fleet.
        host: The host of a pod.
    """
    check_number("-n", lines, 0)
    for flag, given in (("--json", as_json), ("--grep", grep is not None)):
        if given and home is None:
            raise SpecError(flag, expected="--home gs://bucket/fleet/NAME as well", found=f"{flag} alone")
    if home is not None:
        return _print_stored_log(worker, home, lines, grep, host, as_json)
    node, found, reason = _find_host(worker, fleet, host, where)
    if found is None:
        return _print_last_lines(worker, node, reason, output, lines)
    job = Job(tail_command(lines, follow))
    try:
        with Logs([found], None, output_console(), bare=True) as shown:
            (outcome,) = run_jobs({found: job}, access=where.access(), output=shown.write)
    except Failure as error:
        if output is None:
            raise
        return _print_last_lines(worker, node, str(error), output, lines)
    if outcome.code == NO_LOG:
        raise UserError(f"no log on {found.label}", expected=f"the unit {UNIT}, or {', '.join(LOG_FILES)}")
    if outcome.cause not in ("ended", "stopped"):
        raise Failure(f"{found.label}: {outcome.cause}")
    return 0 if outcome.stopped else outcome.code


def _print_stored_log(worker: str, home: str, lines: int, grep: str | None, host: int, as_json: bool) -> int:
    """Print the log that a worker's agent stored in the bucket; the machine need not exist."""
    opened = FleetHome.open(home)
    named = {str(each.id): each.name for each in opened.read_fleet().workers}
    name = named.get(worker, worker)
    if name not in named.values():
        raise UserError(f"no worker {worker} in {home}", expected=f"a number or one of {', '.join(named.values())}")
    name = name if host == 0 else f"{name}-h{host}"
    found = deque(read_log(opened.folder, name, grep), maxlen=lines)
    for line in found:
        log(json.dumps({"worker": name, "line": line}) if as_json else line)
    if not found and not as_json:
        log(f"no log of {name} is stored" + (f" with {grep}" if grep else " yet"))
    return 0


def _find_host(worker: str, fleet: str | None, host: int, where: HostFlags) -> tuple[Node | None, Host | None, str]:
    """Return the worker's machine and its host, or why there is none."""
    if where.hosts:
        return None, _host_at(where.find(), host, "the hosts"), ""
    nodes = CloudTpu(read_settings(where.project)).nodes(where.zone or "-")
    node = find_machine(nodes, worker, fleet)
    if node is None or node.state is not NodeState.READY:
        return node, None, f"{node.name} is {node.state}" if node is not None else "it has no machine"
    return node, _host_at(hosts_of([node], node.name, internal_ip=where.internal_ip), host, node.name), ""


def _host_at(hosts: Sequence[Host], host: int, what: str) -> Host:
    if not 0 <= host < len(hosts):
        raise SpecError("--host", expected=f"0 to {len(hosts) - 1}, a host of {what}", found=host)
    return hosts[host]


def _print_last_lines(worker: str, node: Node | None, reason: str, output: str | None, lines: int) -> int:
    """Print the last lines of the log from the worker's heartbeat."""
    if output is None:
        raise UserError(
            f"no log of worker {worker}",
            found=reason,
            fix="pass --home gs://bucket/fleet/NAME, where its log is kept, or --output gs://… for the last lines",
        )
    beat = last_heartbeat(open_folder(output), worker, node)
    log(f"{reason}; the heartbeat of {beat.updated} ({beat.phase}, on {beat.host}) has the last lines:")
    for line in beat.log_tail[max(0, len(beat.log_tail) - lines) :]:
        log(line)
    if beat.last_error:
        log(f"last error: {beat.last_error}")
    return 0


_GUIDE_OUTPUT = "/tmp/activations"  # noqa: S108  (where the guides' containers write)


def collect(
    path: str = _GUIDE_OUTPUT, *, into: Path = Path("collected_activations"), where: HostFlags = HostFlags()
) -> int:
    """Fetch a folder from every host, into one folder per worker. For runs that did not use a bucket.

    If the folders are parts of one dataset, as on the disks of a pod's hosts, they are merged into one dataset. The
    checksum of each file is checked. After an interruption, run it again: files that are complete are not sent again.

    Args:
        path: The folder on the hosts.
        into: The local folder. It gets worker_0, worker_1, …
    """
    hosts = where.find()
    collected = collect_from(hosts, path, into, where.access())
    for host, (folder, got) in zip(hosts, collected.items(), strict=True):
        sent = f"{got.size / 1e6:.1f} MB, {got.sent / 1e6:.1f} MB sent"
        log(f"{host.label}: {got.files} files ({sent}) → {folder}")
    if assemble(into, list(collected)):
        log(f"together they are one dataset; next: spile verify {into}")
    return 0
