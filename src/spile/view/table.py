"""Consoles, tables and the dashboard that terminal displays share: names of columns, formats of numbers, fitting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from spile.errors import SpileError, printable
from spile.spec.amounts import amount, counted, duration, size

if TYPE_CHECKING:
    from spile.fleet.monitor import FleetStatus
    from spile.store.snapshot import Snapshot, StreamView

NO_WIDTH = 10_000
"""The width for pipes and files: tables are not truncated and lines are not wrapped there."""


class SafeConsole(Console):
    """A console that prints text from outside literally: no markup, and control characters as ``\\x1b``.

    Task ids, file names, records in a bucket and messages of a cloud may contain sequences that command a terminal.
    Rich's own sequences are control segments or styles, not text.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, **more})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render, with control characters in texts escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def output(**more: Any) -> SafeConsole:
    """Return a console on the current standard output."""
    console = SafeConsole(**more)
    if not console.is_terminal:
        console.width = NO_WIDTH
    return console


class PipeSafeConsole(SafeConsole):
    """A console that survives a broken pipe.

    Ctrl+C in ``spile extract | tee log`` ends tee first; the work and the exit code still count.
    """

    def on_broken_pipe(self) -> None:
        """Discard all further output, including the interpreter's final flush."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and texts: as a table in a terminal, elsewhere as lines that are not wrapped."""
    if not console.is_terminal:
        for name, text in facts:
            console.print(f"{name:<11}  {text}", markup=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    for name, text in facts:
        table.add_row(Text(name, style="bold"), Text(text))
    console.print(table)


def print_event(console: Console, text: str) -> None:
    """Print an event of a run above its display, or as a line of the log."""
    console.print(Text.assemble(("· ", "dim"), text), soft_wrap=True)


@contextmanager
def progress_bar(verb: str, unit: str, *, quiet: bool = False) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on standard error if it is a terminal; yield a function that takes what is done, and the total."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = SafeConsole(stderr=True)
    counts: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn(unit)]
    if unit == "bytes":
        counts = [DownloadColumn(), TransferSpeedColumn()]
    columns = (TextColumn(verb), BarColumn(), *counts, TimeRemainingColumn())
    shown = console.is_terminal and not quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


_CUT = 24  # the minimum width of a column whose cells may be truncated


@dataclass(frozen=True)
class FittingTable:
    """A table that omits columns of ``optional``, in order, until it fits the terminal's width."""

    build: Callable[[Collection[str]], Table]
    optional: Sequence[str]
    cut: Collection[str] = ()
    """Columns whose cells may be truncated so that fewer columns are omitted."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        for count in range(len(self.optional) + 1):
            table = self.build(self.optional[:count])
            if self._width(table, console, options) <= options.max_width:
                break
        yield table

    def _width(self, table: Table, console: Console, options: ConsoleOptions) -> int:
        """Return the width at which no cell is truncated, except in the columns of ``cut``."""
        cut = [column for column in table.columns if column.header in self.cut]
        for column in cut:
            column.max_width = _CUT
        width = Measurement.get(console, options.update_width(NO_WIDTH), table).maximum
        for column in cut:
            column.max_width = None
        return width


Row = TypeVar("Row")
Status = TypeVar("Status", bound="Snapshot | FleetStatus")
_AROUND = 5  # lines besides rows and texts: two empty lines, the table's header and footer, and the cursor's line
_ROWS = 6  # table rows for which the messages leave room


@dataclass(frozen=True)
class Column(Generic[Row, Status]):
    """One column: its title, the cell of a row, and the total below."""

    title: str
    cell: Callable[[Row], RenderableType]
    total: Callable[[Status], str] = lambda _: ""
    justify: Literal["left", "right"] = "right"
    cut: bool = False
    """Whether long cells are truncated to leave room for other columns."""


@dataclass(frozen=True)
class Dashboard(Generic[Row, Status]):
    """What ``spile monitor`` shows of streams or of a fleet: a head, a table, counts and messages."""

    head: Sequence[str]
    columns: Sequence[Column[Row, Status]]
    optional: Sequence[str]
    """The columns that a narrow terminal omits, in this order."""
    rows: Sequence[Row]
    rank: Callable[[Row], Any]
    """A terminal with few lines omits the rows of the highest rank."""
    status: Status
    messages: Sequence[Text]
    omitted_hint: str
    """Where to find the messages that a terminal with few lines omits."""

    def render(self, interval: float | None, height: int | None) -> RenderableType:
        """Return the display. With ``height``, it fits a terminal of that many lines."""
        head = [Text(self.head[0], style="bold"), *map(Text, self.head[1:])]
        counts, messages, end = self._counts(), list(self.messages), self._end(interval)
        room = None
        if height is not None:
            free = height - len(head) - len(counts) - len(end) - _AROUND
            messages = self._first(messages, max(1, free - min(len(self.rows), _ROWS)))
            room = max(2, free - len(messages))
            for line in (*head, *counts, *messages, *end):
                line.no_wrap, line.overflow = True, "ellipsis"
        cut = [column.title for column in self.columns if column.cut]
        table = FittingTable(partial(self._table, room), self.optional, cut)
        return Group(*head, Text(""), table, Text(""), *counts, *messages, *end)

    def _first(self, lines: list[Text], room: int) -> list[Text]:
        if len(lines) <= room:
            return lines
        return [*lines[: room - 1], Text(f"… and {len(lines) - room + 1} more; {self.omitted_hint}", style="yellow")]

    def _table(self, room: int | None, without: Collection[str]) -> Table:
        table = Table(box=None, show_footer=True, footer_style="bold", header_style="bold", padding=(0, 2, 0, 0))
        columns = [column for column in self.columns if column.title not in without]
        for column in columns:
            table.add_column(column.title, column.total(self.status), justify=column.justify, no_wrap=not column.cut)
        kept: Sequence[int] = range(len(self.rows))
        if room is not None and len(kept) > room:
            kept = sorted(sorted(kept, key=lambda place: self.rank(self.rows[place]))[: room - 1])
        for place in kept:
            table.add_row(*(column.cell(self.rows[place]) for column in columns))
        if len(kept) < len(self.rows):
            table.add_row(f"… and {len(self.rows) - len(kept)} more")
        return table

    def _counts(self) -> list[Text]:
        needs = self.status.needs_recovery
        return [
            Text("Status summary:"),
            Text(f"  ✓ Healthy: {self.status.healthy}", style="green"),
            Text(f"  ⟳ Working: {self.status.working}", style="cyan"),
            Text(f"  ✗ Needs recovery: {needs}", style="red" if needs else ""),
        ]

    def _end(self, interval: float | None) -> list[Text]:
        lines = [f"Last update: {datetime.fromtimestamp(self.status.taken, UTC):%Y-%m-%d %H:%M:%S} UTC"]
        lines += ["Press Ctrl+C to stop monitoring; the workers continue"] if interval is not None else []
        return [Text(line, style="dim") for line in lines]


def _samples(snapshot: Snapshot) -> str:
    return count_of(snapshot.total("samples"), None if snapshot.percent is None else snapshot.total("expected"))


def _rate(value: float) -> str:
    return amount(value) if value else ""


COUNTS: tuple[Column[StreamView, Snapshot], ...] = (
    Column("SAMPLES", lambda stream: count_of(stream.samples, stream.expected), _samples),
    Column("SHARDS", lambda stream: f"{stream.shards:,}", lambda status: f"{status.total('shards'):,.0f}"),
    Column("COMMITTED", lambda stream: f"{stream.committed:,}", lambda status: f"{status.total('committed'):,.0f}"),
    Column("SIZE", lambda stream: size(stream.bytes), lambda status: size(status.total("bytes"))),
    Column(
        "TOKENS/S",
        lambda stream: _rate(stream.tokens_per_second),
        lambda status: _rate(status.total("tokens_per_second")),
    ),
    Column("HEARD", lambda stream: ago(stream.age)),
)
"""The counts of a stream, with the same column names in every display."""


def count_of(count: float, expected: float | None) -> str:
    """Format a count and its total: ``1,250/2,000``."""
    return f"{count:,.0f}/{'?' if expected is None else f'{expected:,.0f}'}"


def ago(age: float | None) -> str:
    """Format an age in one unit: ``5 s ago``, ``3 h ago``."""
    if age is None:
        return "never"
    for seconds, unit in ((172_800, "d"), (7200, "h"), (120, "min")):
        if age >= seconds:
            return f"{age / (seconds / 2):.0f} {unit} ago"
    return f"{age:.0f} s ago"


def counts_line(stream: StreamView) -> str:
    """Return a stream's counts as one line of text."""
    return (
        f"{count_of(stream.samples, stream.expected)} samples, {counted(stream.shards, 'shard')}, "
        f"{stream.committed:,} committed, {size(stream.bytes)}"
        + (f", {amount(stream.tokens_per_second)} tokens/s" if stream.tokens_per_second else "")
    )


def totals_line(snapshot: Snapshot) -> str:
    """Return the counts of all streams as one line of text."""
    rate = snapshot.total("tokens_per_second")
    committed = counted(round(snapshot.total("committed")), "shard")
    skipped = round(snapshot.total("skipped"))
    samples = counted(round(snapshot.total("samples")) - skipped, "sample")
    samples += f" ({skipped:,} skipped)" if skipped else ""
    line = f"{samples}, {committed} committed, {size(snapshot.total('bytes'))}"
    return f"{line}, {amount(rate)} tokens/s" if rate else line


def progress_parts(percent: float | None, seconds_left: float | None) -> list[str]:
    """Return the percentage done and the remaining time as texts, as far as they are known."""
    parts = [] if percent is None else [f"{percent:.1f} % done"]
    return [*parts, f"about {duration(seconds_left)} left"] if seconds_left else parts


def how_to_resume(*, cleared: bool) -> str:
    """Return what continues a run; ``cleared``: its command removed what was stored before."""
    return f"the same command {'without --no-checkpointing --overwrite' if cleared else 'again'} resumes"


def health_line(health: Snapshot | FleetStatus) -> str:
    """Return the counts of the status summary as one line of text."""
    return f"healthy {health.healthy}, working {health.working}, needs recovery {health.needs_recovery}"


State = TypeVar("State")


def watch(
    read: Callable[[], State],
    render: Callable[[State, float, int], RenderableType],
    lines: Callable[[State], Sequence[str]],
    is_over: Callable[[State], bool],
    console: Console,
    *,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> State:
    """Read a state and show it until ``is_over``: in place in a terminal, as appended lines elsewhere.

    An error of the first read is raised. A later one is reported and the read is repeated. Returns the last state.
    """
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:

        def show(state: State) -> None:
            if live is not None:
                live.update(render(state, interval, console.height), refresh=True)
                return
            for line in lines(state):
                console.print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {line}", soft_wrap=True, markup=False)

        state = read()
        show(state)
        while not is_over(state):
            sleep(interval)
            try:
                state = read()
            except SpileError as error:
                notice = Text(f"Could not refresh, retrying in {interval:g} s: {error}", style="yellow")
                console.print(notice, soft_wrap=True)
            else:
                show(state)
        return state
