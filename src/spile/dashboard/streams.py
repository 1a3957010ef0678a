"""Snapshot → terminal: the table that the guides show, drawn from a :class:`Snapshot` alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spile.dashboard.fitting import Fitting
from spile.errors import Failure
from spile.plan.amounts import amount, counted, duration, size
from spile.status.snapshot import Snapshot, State, StreamView

__all__ = ["plain_lines", "render", "watch"]

_STYLE = {
    State.DONE: "green",
    State.WORKING: "cyan",
    State.WAITING: "dim",
    State.SILENT: "yellow",
    State.STOPPED: "yellow",
    State.FAILED: "red",
    State.DAMAGED: "red",
}


def render(snapshot: Snapshot, *, interval: float | None = None) -> RenderableType:
    """The whole dashboard."""
    head = [Text("ACTIVATION EXTRACTION", style="bold"), Text(snapshot.root), Text(_headline(snapshot, interval))]
    blank, table = Text(""), Fitting(partial(_table, snapshot), _SPARE)
    return Group(*head, blank, table, blank, *_errors(snapshot), *_foot(snapshot, interval))


def _headline(snapshot: Snapshot, interval: float | None) -> str:
    parts = [_workers(snapshot)]
    if interval is not None:
        parts.append(f"check interval: {interval:g} s")
    if snapshot.percent is not None:
        parts.append(f"{snapshot.percent:.1f} % done")
    if snapshot.seconds_left:
        parts.append(f"about {duration(snapshot.seconds_left)} left")
    return " · ".join(parts)


def _workers(snapshot: Snapshot) -> str:
    begun, never = len(snapshot.streams), snapshot.never_begun
    return f"Total workers: {begun}" + (f" of {begun + never}; {never} not begun" if never else "")


def _table(snapshot: Snapshot, without: Collection[str] = ()) -> Table:
    table = Table(box=None, show_footer=True, footer_style="bold", header_style="bold", padding=(0, 2, 0, 0))
    shown = [column for column in _COLUMNS if column.title not in without]
    if all(stream.machine is None for stream in snapshot.streams):
        shown = [column for column in shown if column.title != "MACHINE"]
    for column in shown:
        table.add_column(column.title, column.total(snapshot), justify=column.justify, no_wrap=True)
    for stream in snapshot.streams:
        table.add_row(*(column.cell(stream) for column in shown))
    return table


class _Column(NamedTuple):
    title: str
    cell: Callable[[StreamView], RenderableType]
    total: Callable[[Snapshot], str] = lambda _: ""
    justify: Literal["left", "right"] = "right"


_COLUMNS = (
    _Column("NAME", lambda stream: stream.name, lambda _: "TOTALS", "left"),
    _Column("MACHINE", lambda stream: stream.machine or "", justify="left"),
    _Column("STATUS", lambda stream: Text(stream.status, style=_STYLE[stream.state]), justify="left"),
    _Column("SAMPLES", lambda stream: _of(stream.samples, stream.expected), lambda all_: _of(*_samples(all_))),
    _Column("SHARDS", lambda stream: f"{stream.shards:,}", lambda all_: f"{all_.total('shards'):,.0f}"),
    _Column("COMMITTED", lambda stream: f"{stream.committed:,}", lambda all_: f"{all_.total('committed'):,.0f}"),
    _Column("SIZE", lambda stream: size(stream.bytes), lambda all_: size(all_.total("bytes"))),
    _Column("TOKENS/S", lambda stream: _rate(stream.tokens_per_second), lambda all_: _rate(all_.total(_RATE))),
    _Column("HEARD", lambda stream: _ago(stream.age)),
)
_SPARE = ("COMMITTED", "SIZE", "SHARDS", "HEARD", "TOKENS/S", "MACHINE")
"""What goes first where the terminal is narrow."""
_RATE = "tokens_per_second"


def _samples(snapshot: Snapshot) -> tuple[float, float | None]:
    return snapshot.total("samples"), None if snapshot.percent is None else snapshot.total("expected")


def _rate(value: float) -> str:
    return amount(value) if value else ""


def _ago(age: float | None) -> str:
    """One unit is enough to tell a heartbeat from a silence."""
    if age is None:
        return "never"
    for seconds, unit in ((172_800, "d"), (7200, "h"), (120, "min")):
        if age >= seconds:
            return f"{age / (seconds / 2):.0f} {unit} ago"
    return f"{age:.0f} s ago"


def _of(count: float, expected: float | None) -> str:
    return f"{count:,.0f}/{'?' if expected is None else f'{expected:,.0f}'}"


def _errors(snapshot: Snapshot) -> list[Text]:
    return [
        Text(f"{stream.name}: {stream.last_error}", style="red")
        for stream in snapshot.streams
        if stream.last_error and stream.state is not State.DONE
    ]


def _foot(snapshot: Snapshot, interval: float | None) -> list[Text]:
    lines = [
        Text("Status summary:"),
        Text(f"  ✓ Healthy: {snapshot.healthy}", style="green"),
        Text(f"  ⟳ Working: {snapshot.working}", style="cyan"),
        Text(f"  ✗ Needs recovery: {snapshot.needs_recovery}", style="red" if snapshot.needs_recovery else ""),
        Text(f"Last update: {datetime.fromtimestamp(snapshot.taken, UTC):%Y-%m-%d %H:%M:%S} UTC", style="dim"),
    ]
    if interval is not None:
        lines.append(Text("Press Ctrl+C to stop monitoring; everything goes on without it", style="dim"))
    return lines


def plain_lines(snapshot: Snapshot) -> list[str]:
    """One line a stream and one for all: for a log, where there is no terminal."""
    lines = [
        f"{stream.name} {stream.status}: {_of(stream.samples, stream.expected)} samples, "
        f"{counted(stream.shards, 'shard')}, {stream.committed:,} committed, {size(stream.bytes)}, "
        f"{amount(stream.tokens_per_second)} tokens/s"
        + (f", last error: {stream.last_error}" if stream.last_error else "")
        for stream in snapshot.streams
    ]
    committed = counted(round(snapshot.total("committed")), "shard")
    total = (
        f"total: {snapshot.total('samples'):,.0f} samples, {committed} committed, "
        f"{size(snapshot.total('bytes'))}, {amount(snapshot.total('tokens_per_second'))} tokens/s; "
        f"healthy {snapshot.healthy}, working {snapshot.working}, needs recovery {snapshot.needs_recovery}"
        + (f", not begun {snapshot.never_begun}" if snapshot.never_begun else "")
    )
    left = f", about {duration(snapshot.seconds_left)} left" if snapshot.seconds_left else ""
    return [*lines, total + left]


def watch(
    take: Callable[[], Snapshot],
    console: Console,
    *,
    interval: float,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Snapshot:
    """Show snapshots until all is done, or Ctrl+C, which stops the view and nothing else. Gives the last one.

    Only the first look may fail.
    """
    snapshot = take()
    if once:
        console.print(render(snapshot))
        return snapshot
    with ExitStack() as stack:
        stack.enter_context(suppress(KeyboardInterrupt))  # wherever in the loop it lands
        show = _shower(console, interval, stack)
        show(snapshot)
        while not snapshot.done:
            sleep(interval)
            try:
                snapshot = take()
            except Failure as error:  # the store has hiccups: what was seen stays, and it is looked at again
                console.print(
                    Text(f"not seen: {error}; looking again in {interval:g} s", style="yellow"), soft_wrap=True
                )
            else:
                show(snapshot)
    return snapshot


def _shower(console: Console, interval: float, stack: ExitStack) -> Callable[[Snapshot], None]:
    """How a snapshot is shown: drawn over the last one in a terminal, as lines elsewhere."""
    if console.is_terminal:
        live = stack.enter_context(Live(console=console, auto_refresh=False))
        return lambda snapshot: live.update(render(snapshot, interval=interval), refresh=True)

    def lines(snapshot: Snapshot) -> None:
        for line in plain_lines(snapshot):
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    return lines
