"""``spile logs``: a worker's log."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spile.cli.shell.host_flags import HostFlags
from spile.errors import Failure, SpecError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from spile.fleet.worker_logs import LogMachine

__all__ = ["logs"]


def logs(
    worker: Annotated[str, Parameter(help="Its number, or its machine's name.")],
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Go on as it grows, until Ctrl+C.", negative="")
    ] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="How many of its last lines.")] = 100,
    output: Annotated[
        str | None, Parameter(help="The dataset, for a machine that is gone: its heartbeat has the end.")
    ] = None,
    home: Annotated[
        str | None, Parameter(help="Its fleet's gs://bucket/fleet/NAME: the log as the bucket keeps it.")
    ] = None,
    grep: Annotated[str | None, Parameter(help="With --home: only lines that this regular expression is in.")] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="With --home: one JSON object per line of the log.")
    ] = False,
    fleet: Annotated[str | None, Parameter(help="Only machines of this fleet.")] = None,
    host: Annotated[int, Parameter(help="Which host of a pod.")] = 0,
    where: HostFlags = HostFlags(),  # noqa: B008  (frozen)
) -> int:
    """A worker's log: from its machine, over ssh; or its last lines from the bucket, when the machine is gone."""
    from spile.fleet.worker_logs import LOG_FILES, NO_LOG, UNIT, tail_command
    from spile.hosts import run as fanout
    from spile.hosts.run import Job
    from spile.view.hosts import Logs
    from spile.view.table import output as output_console

    if lines < 0:
        raise SpecError("-n", expected="0 or more", found=lines)
    console = output_console()
    if as_json and home is None:
        raise SpecError("--json", expected="--home gs://bucket/fleet/NAME", found="--json alone")
    if grep is not None and home is None:
        raise SpecError("--grep", expected="--home gs://bucket/fleet/NAME beside it", found="--grep alone")
    if home is not None:
        return _kept(worker, home, lines, grep, host, console, as_json)
    machine = _machine(worker, fleet, host, where)
    if machine.host is None:
        return _last_words(worker, machine, output, lines, console)
    job = Job(tail_command(lines, follow))
    try:
        with Logs([machine.host], None, console, bare=True) as shown:
            (outcome,) = fanout.run([machine.host], job, access=where.access(), output=shown.write)
    except Failure as error:
        if output is None:
            raise
        return _last_words(worker, replace(machine, story=str(error)), output, lines, console)
    if outcome.code == NO_LOG:
        raise UserError(f"no log on {machine.host.label}", expected=f"the unit {UNIT}, or {', '.join(LOG_FILES)}")
    if outcome.cause not in ("ended", "stopped"):
        raise Failure(f"{machine.host.label}: {outcome.cause}")
    return 0 if outcome.stopped else outcome.code


def _kept(worker: str, home: str, lines: int, grep: str | None, host: int, console: Console, as_json: bool) -> int:
    """The log that a worker's agent kept in the bucket, whether its machine is there or gone."""
    from collections import deque

    from spile.fleet.home import FleetHome
    from spile.fleet.worker_logs import read_log

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
        console.print(f"nothing is kept of {name}" + (f" with {grep}" if grep else " yet"), markup=False, style="dim")
    return 0


def _machine(worker: str, fleet: str | None, host: int, where: HostFlags) -> LogMachine:
    from spile.fleet.worker_logs import LogMachine, find_machine

    number = int(worker) if worker.isdigit() else None
    if where.hosts:
        named = where.find()
        if not 0 <= host < len(named):
            raise SpecError("--host", expected=f"0 to {len(named) - 1}", found=host)
        return LogMachine(named[host], number, "")
    from spile.fleet.cloud_tpu import CloudTpu, read_settings

    provider = CloudTpu(read_settings(os.environ, project=where.project))
    nodes = provider.nodes(where.zone or "-")
    return find_machine(nodes, worker, fleet=fleet, host=host, internal_ip=where.internal_ip)


def _last_words(worker: str, machine: LogMachine, output: str | None, lines: int, console: Console) -> int:
    """What the heartbeat kept."""
    from spile.fleet.worker_logs import last_words
    from spile.objects import open_folder

    if output is None:
        raise UserError(
            f"no log of worker {worker}",
            found=machine.story,
            fix="pass --home gs://bucket/fleet/NAME, where its log is kept, or --output gs://… for the last lines",
        )
    beat = last_words(open_folder(output), worker, machine.worker)
    told = f"{machine.story}; the heartbeat of {beat.updated} ({beat.phase}, on {beat.host}) has the log's end:"
    console.print(told, markup=False, style="dim", soft_wrap=True)
    for line in beat.log_tail[max(0, len(beat.log_tail) - lines) :]:
        console.print(line, markup=False, soft_wrap=True)
    if beat.last_error:
        console.print(f"last error: {beat.last_error}", markup=False, soft_wrap=True)
    return 0
