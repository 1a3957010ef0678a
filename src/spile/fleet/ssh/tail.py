"""A worker's log: from its machine while there is one, else the last lines that its heartbeat carried away."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spile.errors import UserError
from spile.fleet.cloud.provider import Node
from spile.fleet.cloud.states import NodeState
from spile.fleet.spec import owns, worker_of
from spile.fleet.ssh.hosts import Host, hosts_of
from spile.objects import Folder
from spile.spec.heartbeat import Beat
from spile.status.heartbeat import read_beat
from spile.store.layout import PROGRESS

__all__ = ["LOG_FILES", "NO_LOG", "UNIT", "LogMachine", "find_machine", "last_words", "tail_command"]

UNIT = "spile-worker"
"""The worker's systemd unit."""
LOG_FILES = ("~/spile-worker.log", "~/unit.log", "/opt/spile/startup.log")
"""Where a machine keeps its log that has no unit: without systemd, or not that far yet."""
NO_LOG = 66
"""What the machine's shell answers when it has none."""


@dataclass(frozen=True)
class LogMachine:
    """A worker's machine, as far as there is one."""

    host: Host | None
    worker: int | None
    story: str
    """Why there is no host to ask."""


def tail_command(lines: int, follow: bool, unit: str = UNIT, files: Sequence[str] = LOG_FILES) -> str:
    """For the machine's shell: its journal's last lines, or a file's."""
    tilde = [f'"$HOME"/{shlex.quote(name[2:])}' if name.startswith("~/") else shlex.quote(name) for name in files]
    journal = f"journalctl --no-pager --quiet -o cat -u {shlex.quote(unit)} -n {lines}" + (" -f" if follow else "")
    return (
        f"if systemctl cat {shlex.quote(unit)} >/dev/null 2>&1 && command -v journalctl >/dev/null; then "
        f"if sudo -n true 2>/dev/null; then exec sudo -n {journal}; else exec {journal}; fi; fi; "
        f"for file in {' '.join(tilde)}; do "
        f'if [ -f "$file" ]; then exec tail -n {lines}{" -F" if follow else ""} "$file"; fi; done; '
        f"exit {NO_LOG}"
    )


def find_machine(nodes: Iterable[Node], worker: str, *, fleet: str | None, host: int, internal_ip: bool) -> LogMachine:
    """The machine that a person means by ``5`` or by ``tpu-us-central1-a-0``."""
    number = int(worker) if worker.isdigit() else None
    mine = [node for node in nodes if fleet is None or owns(fleet, node)]
    found = [node for node in mine if (node.name == worker if number is None else worker_of(node) == number)]
    if len(found) > 1:
        names = ", ".join(f"{node.name} in {node.zone}" for node in found)
        raise UserError(f"several machines are worker {worker}", found=names, fix="name one, with --zone or --fleet")
    if not found:
        return LogMachine(None, number, "it has no machine")
    node = found[0]
    number = worker_of(node) if number is None else number
    if node.state != NodeState.READY:
        return LogMachine(None, number, f"{node.name} is {node.state}")
    hosts = hosts_of([node], node.name, internal_ip=internal_ip)
    if not 0 <= host < len(hosts):
        raise UserError(f"{node.name} has no host {host}", expected=f"0 to {len(hosts) - 1}")
    return LogMachine(hosts[host], number, "")


def last_words(root: Folder, worker: str, number: int | None) -> Beat:
    """The worker's heartbeat, which has its log's last lines; a machine's name is looked up in all of them."""
    for folder in [f"tpu_{number}"] if number is not None else _streams(root):
        beat = read_beat(root.child(folder))
        if beat is not None and (number is not None or beat.host.split(".")[0] == worker):
            return beat
    fix = "check --output" if number is not None else "name the worker by its number"
    raise UserError(f"no heartbeat of worker {worker} in {root.url}", expected="one in tpu_N/progress.json", fix=fix)


def _streams(root: Folder) -> list[str]:
    keys = [info.key.split("/") for info in root.list("tpu_")]
    return [parts[0] for parts in keys if len(parts) == 2 and parts[1] == PROGRESS]
