"""Show the status of a fleet as the table of the guides, or as plain lines without a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.text import Text

from spile.fleet.monitor import FleetStatus, WorkerStatus
from spile.fleet.provider import Stage
from spile.spec.amounts import amount, counted
from spile.store.snapshot import Snapshot, StreamView
from spile.view import table
from spile.view.table import (
    COUNTS,
    Column,
    Dashboard,
    ago,
    counts_line,
    health_line,
    progress_parts,
    totals_line,
)

_STYLE = {
    Stage.RUNNING: "green",
    Stage.STARTING: "cyan",
    Stage.ENDING: "yellow",
    Stage.DEAD: "red",
    Stage.ABSENT: "red",
}


def render(status: FleetStatus, interval: float | None = None, height: int | None = None) -> RenderableType:
    """Return the dashboard. With ``height``, texts are truncated and healthy workers omitted so that it fits."""
    status = _report_quota_once(status)
    zones = len(status.fleet.zones)
    head = [
        "ACTIVATION EXTRACTION - LIVE MONITORING",
        f"Bucket: {status.fleet.root}    Fleet: {status.fleet.name}",
        f"Total workers: {len(status.workers)} across {zones} zone{'s' * (zones != 1)}",
    ]
    if interval is not None:
        head.append(f"Check interval: {interval:g} s")
    dashboard = Dashboard(
        head=head,
        columns=_COLUMNS,
        optional=_OPTIONAL_COLUMNS,
        rows=status.workers,
        rank=lambda each: (not each.past.gave_up, not each.needs_recovery, each.healthy),
        status=status,
        messages=_messages(status),
        omitted_hint="all are in the fleet's log",
    )
    return dashboard.render(interval, height)


def _report_quota_once(status: FleetStatus) -> FleetStatus:
    """Report the long quota message of a zone once, in a line of its own, instead of in every row and action."""
    blocks = {zone: block.why.strip() for zone, block in status.history.blocks.items() if block.why.strip()}
    blocked = [each for each in status.workers if _waits_for_quota(each) and each.past.zone in blocks]
    counts = Counter(each.past.zone for each in blocked)
    workers = tuple(
        replace(each, note=f"no quota in {each.past.zone}") if each in blocked else each for each in status.workers
    )
    shown_reasons = [blocks[zone] for zone in counts]
    actions = tuple(line for line in status.actions if not any(why in line for why in shown_reasons))
    lines = (f"no quota in {zone} for {counted(count, 'worker')}: {blocks[zone]}" for zone, count in counts.items())
    return replace(status, workers=workers, problems=(*lines, *status.problems), actions=actions)


def _waits_for_quota(each: WorkerStatus) -> bool:
    return each.machine.stage is Stage.ABSENT and not each.past.gave_up and not each.past.finished


def _of_view(column: Column[StreamView, Snapshot]) -> Column[WorkerStatus, FleetStatus]:
    """Return a column of the stream table as a column of the fleet table."""
    return Column(
        column.title,
        lambda each: column.cell(each.view),
        lambda status: column.total(status.snapshot),
        column.justify,
    )


_COLUMNS: tuple[Column[WorkerStatus, FleetStatus], ...] = (
    Column("NAME", lambda each: each.worker.name, lambda _: "TOTALS", "left"),
    Column(
        "MACHINE",
        lambda each: Text(_status_word(each), style="green" if each.past.finished else _STYLE[each.machine.stage]),
        justify="left",
    ),
    *(_of_view(column) for column in COUNTS if column.title != "HEARD"),
    Column(
        "WORKER",
        lambda each: Text(_details(each), "red" if each.past.gave_up else "dim", no_wrap=True, overflow="ellipsis"),
        justify="left",
        cut=True,
    ),
)
_OPTIONAL_COLUMNS = ("SIZE", "SHARDS", "COMMITTED", "TOKENS/S")


def _status_word(each: WorkerStatus) -> str:
    if each.past.finished and each.machine.stage is Stage.ABSENT:
        return "DONE"
    return "GIVEN UP" if each.past.gave_up else each.machine.value


def _details(each: WorkerStatus) -> str:
    """Return the worker's phase, its zone if it moved, its preemptions and crashes, and the note about its machine.

    If the worker does not run, the note is the most important part: the column may be cut.
    """
    note = "" if each.past.finished else each.note.partition("\n")[0]
    parts = []
    if each.past.finished:
        parts.append("finished")
    elif note and each.machine.stage is Stage.RUNNING and not each.healthy:
        parts.append(note)
    elif each.view.phase and each.machine.stage is Stage.RUNNING:
        age = "" if each.view.age is None else f" ({ago(each.view.age)})"
        parts.append(f"{each.view.phase}{age}")
    if each.zone != each.worker.zone:
        parts.append(f"moved to {each.zone}")
    for count, word in ((each.past.preemptions, "preempted"), (each.past.crashes, "crashed")):
        if count:
            parts.append(f"{word} {count}×")
    return ", ".join([*parts, *([note] if note and note not in parts else [])])


def _messages(status: FleetStatus) -> list[Text]:
    """Return the lines below the table; those that need action come first."""
    lines = [Text(_summary(status))]
    if status.history.stopped:
        lines.append(Text(f"Stopped: {status.history.stopped}", style="red"))
    if status.holder is not None:
        lines.append(Text(_watched_by(status), style="yellow"))
    lines += [Text(f"{names}: {reason}", style="red") for reason, names in _given_up(status)]
    lines += [Text(line, style="yellow") for line in status.snapshot.notes]
    return lines + [Text(line, style="yellow") for line in (*status.problems, *status.actions)]


def _given_up(status: FleetStatus) -> Iterator[tuple[str, str]]:
    """Yield each reason once, with the names of the workers that were given up for it."""
    reasons: dict[str, list[str]] = {}
    for each in status.workers:
        if each.past.gave_up:
            reasons.setdefault(each.past.gave_up, []).append(each.worker.name)
    for reason, names in reasons.items():
        yield reason, names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _watched_by(status: FleetStatus) -> str:
    holder = "" if status.holder is None else status.holder.owner
    return f"{holder} monitors this fleet; this one only watches"


def _summary(status: FleetStatus) -> str:
    parts = [f"{amount(status.snapshot.total('tokens_per_second'))} tokens/s"]
    parts += progress_parts(status.percent, status.snapshot.seconds_left)
    return ", ".join([*parts, _spent(status)])


def _spent(status: FleetStatus) -> str:
    budget = status.fleet.policy.budget
    return f"${status.history.dollars:.2f} so far" + (f" of ${budget:.2f}" if budget is not None else "")


def plain_lines(status: FleetStatus) -> list[str]:
    """Return one line per worker and one for the total, for a log."""
    status = _report_quota_once(status)
    lines = [
        f"{each.worker.name} {_status_word(each)}: {counts_line(each.view)}"
        + (f"; {_details(each)}" if _details(each) else "")
        for each in status.workers
    ]
    parts = [
        f"total: {totals_line(status.snapshot)}; {health_line(status)}",
        *progress_parts(status.percent, status.snapshot.seconds_left),
        _spent(status),
    ]
    lines.append(", ".join(parts))
    if status.holder is not None:
        lines.append(_watched_by(status))
    return [*lines, *status.snapshot.notes, *status.problems, *status.actions]


def watch(
    read: Callable[[], FleetStatus],
    console: Console,
    *,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> FleetStatus:
    """Show a fleet until its work is over, then print the result and the next command."""
    status = table.watch(read, render, plain_lines, lambda status: status.over, console, interval=interval, sleep=sleep)
    ended = "the work is finished"  # This also holds if the budget was reached meanwhile: nothing was left to stop.
    if status.failed:
        ended = status.history.stopped or "some workers were given up"
    following = f"spile verify {status.fleet.root}"
    if status.failed and status.history.stopped:
        following = "spile deploy continues the run"
        if not status.fleet.policy.stop:
            following += "; spile monitor … --budget DOLLARS raises the budget"
    console.print(f"{ended}; ${status.history.dollars:.2f} spent; next: {following}", markup=False, soft_wrap=True)
    return status
