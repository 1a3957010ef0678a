"""A fleet's status as the guides' table, and as plain lines where there is no terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spile.fleet.cloud.states import Life
from spile.fleet.heal.monitor import FleetStatus, WorkerStatus
from spile.plan.amounts import amount, counted, duration

__all__ = ["plain_lines", "render"]

_NEWS = 6
_STYLE = {Life.ALIVE: "green", Life.COMING: "cyan", Life.LEAVING: "yellow", Life.DEAD: "red", Life.ABSENT: "red"}


def render(status: FleetStatus, *, interval: float | None = None, height: int | None = None) -> RenderableType:
    """The whole dashboard; where it would be taller than ``height``, the workers that are well are left out."""
    zones = len(status.fleet.zones)
    head = [
        Text("ACTIVATION EXTRACTION - LIVE MONITORING", style="bold"),
        Text(f"Bucket: {status.fleet.root}    Fleet: {status.fleet.name}"),
        Text(f"Total workers: {len(status.workers)} across {zones} zone{'s' * (zones != 1)}"),
    ]
    if interval is not None:
        head.append(Text(f"Check interval: {interval:g} s"))
    foot = _foot(status, interval)
    room = None if height is None else max(3, height - len(head) - len(foot) - 6)
    return Group(*head, Text(""), _table(status, room), Text(""), *foot)


def _shown(status: FleetStatus, room: int | None) -> tuple[list[WorkerStatus], int]:
    """The workers that there is room for, those in trouble before all others; and how many are left out."""
    workers = list(status.workers)
    if room is None or len(workers) <= room:
        return workers, 0
    ranked = sorted(workers, key=lambda each: (not each.past.gave_up, not each.needs_recovery, each.healthy))
    kept = {each.worker.id for each in ranked[: room - 1]}
    return [each for each in workers if each.worker.id in kept], len(workers) - len(kept)


def _table(status: FleetStatus, room: int | None) -> Table:
    total = status.snapshot.total
    table = Table(box=None, show_footer=True, footer_style="bold", header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("TPU NAME", "TOTALS", no_wrap=True)
    table.add_column("STATUS", no_wrap=True)
    table.add_column("SAMPLES", f"{total('samples'):,.0f}", justify="right", no_wrap=True)
    table.add_column("SHARDS", f"{total('shards'):,.0f}", justify="right", no_wrap=True)
    table.add_column("GCS", f"{total('committed'):,.0f}", justify="right", no_wrap=True)
    table.add_column("TOK/S", amount(total("tokens_per_second")), justify="right", no_wrap=True)
    table.add_column("WORKER", overflow="ellipsis")
    shown, more = _shown(status, room)
    for each in shown:
        table.add_row(*_cells(each))
    if more:
        table.add_row(f"… and {more} more")
    return table


def _cells(each: WorkerStatus) -> list[RenderableType]:
    view = each.view
    rate = view.tokens_per_second if view else 0.0
    return [
        each.worker.name,
        Text(_status_word(each), style="green" if each.past.finished else _STYLE[each.machine.life]),
        f"{view.samples if view else 0:,}",
        f"{view.shards if view else 0:,}",
        f"{view.committed if view else 0:,}",
        amount(rate) if rate else "",
        Text(_story(each), style="red" if each.past.gave_up else "dim"),
    ]


def _status_word(each: WorkerStatus) -> str:
    if each.past.finished and each.machine.life is Life.ABSENT:
        return "DONE"
    return "GIVEN UP" if each.past.gave_up else each.machine.value


def _story(each: WorkerStatus) -> str:
    """What it is at, where, and what it has been through."""
    parts = []
    if each.past.finished:
        parts.append("finished")
    elif each.view is not None and each.view.phase and each.machine.life is Life.ALIVE:
        age = "" if each.view.age is None else f" ({each.view.age:.0f} s ago)"
        parts.append(f"{each.view.phase}{age}")
    if each.zone != each.worker.zone:
        parts.append(f"moved to {each.zone}")
    for count, word in ((each.past.preemptions, "preempted"), (each.past.crashes, "crashed")):
        if count:
            parts.append(f"{word} {count}×")
    if each.note and not each.past.finished and each.machine.life is not Life.ALIVE:
        parts.append(each.note.partition("\n")[0])
    return ", ".join(parts)


def _foot(status: FleetStatus, interval: float | None) -> list[Text]:
    needs = status.count("needs_recovery")
    lines = [
        Text("Status summary:"),
        Text(f"  ✓ Healthy: {status.count('healthy')}", style="green"),
        Text(f"  ⟳ Working: {status.count('working')}", style="cyan"),
        Text(f"  ✗ Needs recovery: {needs}", style="red" if needs else ""),
        Text(_summary(status)),
    ]
    if status.holder is not None:
        lines.append(Text(f"{status.holder.who} monitors this fleet; this one only watches", style="yellow"))
    news = (*status.problems, *status.actions)
    lines += [Text(line, style="yellow") for line in news[:_NEWS]]
    if len(news) > _NEWS:
        lines.append(Text(f"… and {len(news) - _NEWS} more actions; all are in the fleet's log", style="yellow"))
    lines += [
        Text(f"{each.worker.name}: {each.past.gave_up}", style="red") for each in status.workers if each.past.gave_up
    ]
    if status.history.stopped:
        lines.append(Text(f"Stopped: {status.history.stopped}", style="red"))
    lines.append(Text(f"Last update: {datetime.fromtimestamp(status.taken, UTC):%Y-%m-%d %H:%M:%S} UTC", style="dim"))
    if interval is not None:
        lines.append(Text("Press Ctrl+C to stop monitoring; everything goes on without it", style="dim"))
    return lines


def _summary(status: FleetStatus) -> str:
    parts = [f"{amount(status.snapshot.total('tokens_per_second'))} tokens/s"]
    if status.percent is not None:
        parts.append(f"{status.percent:.1f} % done")
    if status.snapshot.seconds_left:
        parts.append(f"about {duration(status.snapshot.seconds_left)} left")
    budget = status.fleet.policy.budget
    parts.append(f"${status.history.dollars:.2f} so far" + (f" of ${budget:.2f}" if budget is not None else ""))
    return ", ".join(parts)


def plain_lines(status: FleetStatus) -> list[str]:
    """One line a worker and one for all: for a log."""
    lines = [
        f"{each.worker.name} {_status_word(each)}: {each.view.samples if each.view else 0:,} samples, "
        f"{counted(each.view.shards if each.view else 0, 'shard')}, "
        f"{each.view.committed if each.view else 0:,} committed" + (f"; {_story(each)}" if _story(each) else "")
        for each in status.workers
    ]
    counts = ", ".join(
        f"{word} {status.count(name)}"
        for word, name in (("healthy", "healthy"), ("working", "working"), ("needs recovery", "needs_recovery"))
    )
    total = status.snapshot.total
    lines.append(
        f"total: {total('samples'):,.0f} samples, {counted(round(total('committed')), 'shard')} committed; {counts}; "
        + _summary(status)
    )
    if status.holder is not None:
        lines.append(f"{status.holder.who} monitors this fleet; this one only watches")
    return [*lines, *status.problems, *status.actions]
