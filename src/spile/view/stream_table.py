"""The table of streams in ``spile monitor``, drawn from a :class:`Snapshot`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, RenderableType
from rich.text import Text

from spile.spec.amounts import duration
from spile.store.snapshot import Snapshot, State, StreamView
from spile.view import table
from spile.view.table import COUNTS, Column, Dashboard, counts_line, health_line, progress_parts, totals_line

_STYLE = {
    State.FAILED: "red",
    State.DAMAGED: "red",
    State.SILENT: "yellow",
    State.STOPPED: "yellow",
    State.WAITING: "dim",
    State.WORKING: "cyan",
    State.DONE: "green",
}
"""The colour of each state. A terminal with few lines omits the rows of the last states first."""
_COLUMNS: tuple[Column[StreamView, Snapshot], ...] = (
    Column("NAME", lambda stream: stream.name, lambda _: "TOTALS", "left"),
    Column("STATUS", lambda stream: Text(stream.status, style=_STYLE[stream.state]), justify="left"),
    *COUNTS,
)
_OPTIONAL_COLUMNS = ("COMMITTED", "SIZE", "SHARDS", "HEARD", "TOKENS/S")


def render(snapshot: Snapshot, interval: float | None = None, height: int | None = None) -> RenderableType:
    """Return the dashboard. With ``height``, texts are truncated and healthy streams omitted so that it fits."""
    started, never = len(snapshot.streams), snapshot.never_begun
    parts = [f"Total workers: {started}" + (f" of {started + never}; {never} not begun" if never else "")]
    if interval is not None:
        parts.append(f"check interval: {interval:g} s")
    parts += progress_parts(snapshot.percent, snapshot.seconds_left)
    errors = [
        Text(f"{stream.name}: {stream.last_error}", style="red")
        for stream in snapshot.streams
        if stream.last_error and stream.state is not State.DONE
    ]
    dashboard = Dashboard(
        head=["ACTIVATION EXTRACTION", snapshot.root, " · ".join(parts)],
        columns=_COLUMNS,
        optional=_OPTIONAL_COLUMNS,
        rows=snapshot.streams,
        rank=lambda stream: list(_STYLE).index(stream.state),
        status=snapshot,
        messages=errors + [Text(line, style="yellow") for line in snapshot.notes],
        omitted_hint="spile monitor --once shows all",
    )
    return dashboard.render(interval, height)


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
    return [*lines, total + never + left, *snapshot.notes]


def watch(
    read: Callable[[], Snapshot],
    console: Console,
    *,
    interval: float,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show snapshots until all streams are done. Ctrl+C stops only the display."""
    if once:
        console.print(render(read()))
        return
    with suppress(KeyboardInterrupt):
        table.watch(read, render, plain_lines, lambda snapshot: snapshot.done, console, interval=interval, sleep=sleep)
