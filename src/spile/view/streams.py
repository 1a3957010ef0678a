"""The table of streams in ``spile monitor``, drawn from a :class:`Snapshot`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spile.spec.amounts import duration
from spile.store.snapshot import Snapshot, State, StreamView
from spile.view import table
from spile.view.table import (
    COUNTS,
    Column,
    Fitting,
    counts_line,
    draw,
    footer,
    headline,
    health_line,
    keep_rows,
    one_line_each,
    share_height,
    totals_line,
)

_STYLE = {
    State.DONE: "green",
    State.WORKING: "cyan",
    State.WAITING: "dim",
    State.SILENT: "yellow",
    State.STOPPED: "yellow",
    State.FAILED: "red",
    State.DAMAGED: "red",
}

_COLUMNS: tuple[Column[StreamView, Snapshot], ...] = (
    Column("NAME", lambda stream: stream.name, lambda _: "TOTALS", "left"),
    Column("MACHINE", lambda stream: stream.machine or "", justify="left"),
    Column("STATUS", lambda stream: Text(stream.status, style=_STYLE[stream.state]), justify="left"),
    *COUNTS,
)
_SPARE = ("COMMITTED", "SIZE", "SHARDS", "HEARD", "TOKENS/S", "MACHINE")
"""Columns to omit first in a narrow terminal."""


_RANK = (State.FAILED, State.DAMAGED, State.SILENT, State.STOPPED, State.WAITING, State.WORKING, State.DONE)
"""The order in which rows are kept in a short terminal: streams that need attention first."""


def render(snapshot: Snapshot, *, interval: float | None = None, height: int | None = None) -> RenderableType:
    """Return the whole display. With ``height``, truncate texts and omit healthy streams so that it fits."""
    parts = [_workers(snapshot)]
    if interval is not None:
        parts.append(f"check interval: {interval:g} s")
    parts += headline(snapshot.percent, snapshot.seconds_left)
    head = [Text("ACTIVATION EXTRACTION", style="bold"), Text(snapshot.root), Text(" · ".join(parts))]
    errors, foot, room = _errors(snapshot), footer(snapshot, snapshot.taken, interval), None
    if height is not None:
        fixed, once = len(head) + len(foot), "spile monitor --once shows all"
        errors, room = share_height(height, fixed, errors, len(snapshot.streams), once)
        one_line_each([*head, *errors, *foot])
    table = Fitting(partial(_table, snapshot, room), _SPARE)
    return Group(*head, Text(""), table, Text(""), *errors, *foot)


def _workers(snapshot: Snapshot) -> str:
    begun, never = len(snapshot.streams), snapshot.never_begun
    return f"Total workers: {begun}" + (f" of {begun + never}; {never} not begun" if never else "")


def _table(snapshot: Snapshot, room: int | None, without: Collection[str] = ()) -> Table:
    if all(stream.machine is None for stream in snapshot.streams):
        without = {*without, "MACHINE"}
    shown, more = keep_rows(snapshot.streams, room, lambda stream: _RANK.index(stream.state))
    table = draw([column for column in _COLUMNS if column.title not in without], shown, snapshot)
    if more:
        table.add_row(f"… and {more} more")
    return table


def _errors(snapshot: Snapshot) -> list[Text]:
    return [
        Text(f"{stream.name}: {stream.last_error}", style="red")
        for stream in snapshot.streams
        if stream.last_error and stream.state is not State.DONE
    ] + [Text(line, style="yellow") for line in snapshot.quarantined]


def plain_lines(snapshot: Snapshot) -> list[str]:
    """Return one line per stream and one for the total, for output that is not a terminal."""
    lines = [
        f"{stream.name} {stream.status}: {counts_line(stream)}"
        + (f", last error: {stream.last_error}" if stream.last_error else "")
        for stream in snapshot.streams
    ]
    total = f"total: {totals_line(snapshot)}; {health_line(snapshot)}"
    never = f", not begun {snapshot.never_begun}" if snapshot.never_begun else ""
    left = f", about {duration(snapshot.seconds_left)} left" if snapshot.seconds_left else ""
    return [*lines, total + never + left, *snapshot.quarantined]


def watch(
    take: Callable[[], Snapshot],
    console: Console,
    *,
    interval: float,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show snapshots until all streams are done. Ctrl+C stops only the display."""
    if once:
        console.print(render(take()))
        return

    def draws(snapshot: Snapshot) -> RenderableType:
        return render(snapshot, interval=interval, height=console.height)  # the terminal may have been resized

    with suppress(KeyboardInterrupt), table.showing(console, draws, plain_lines) as show:
        table.watch(take, show, lambda snapshot: snapshot.done, console, interval=interval, sleep=sleep)
