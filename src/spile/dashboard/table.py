"""What every table of workers shares: its columns' names, its numbers' spelling, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich.console import RenderableType
from rich.table import Table

from spile.planning.amounts import amount, counted, duration, size
from spile.status.snapshot import Snapshot, StreamView

__all__ = ["COUNTS", "Column", "ago", "counts_line", "draw", "headline", "of", "totals_line"]

Row = TypeVar("Row")
Whole = TypeVar("Whole")


@dataclass(frozen=True)
class Column(Generic[Row, Whole]):
    """One column: its title, a row's cell, and what the last row says of the whole."""

    title: str
    cell: Callable[[Row], RenderableType]
    total: Callable[[Whole], str] = lambda _: ""
    justify: Literal["left", "right"] = "right"
    cut: bool = False
    """Whether long cells are cut short, so that the others have room: texts that do not wrap."""


def draw(columns: Sequence[Column[Row, Whole]], rows: Iterable[Row], whole: Whole) -> Table:
    """The table, with totals below."""
    table = Table(box=None, show_footer=True, footer_style="bold", header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.title, column.total(whole), justify=column.justify, no_wrap=not column.cut)
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def _samples(snapshot: Snapshot) -> str:
    return of(snapshot.total("samples"), None if snapshot.percent is None else snapshot.total("expected"))


def _rate(value: float) -> str:
    return amount(value) if value else ""


COUNTS: tuple[Column[StreamView, Snapshot], ...] = (
    Column("SAMPLES", lambda stream: of(stream.samples, stream.expected), _samples),
    Column("SHARDS", lambda stream: f"{stream.shards:,}", lambda whole: f"{whole.total('shards'):,.0f}"),
    Column("COMMITTED", lambda stream: f"{stream.committed:,}", lambda whole: f"{whole.total('committed'):,.0f}"),
    Column("SIZE", lambda stream: size(stream.bytes), lambda whole: size(whole.total("bytes"))),
    Column(
        "TOKENS/S",
        lambda stream: _rate(stream.tokens_per_second),
        lambda whole: _rate(whole.total("tokens_per_second")),
    ),
    Column("HEARD", lambda stream: ago(stream.age)),
)
"""What is counted of a stream, under the same names wherever a stream is shown."""


def of(count: float, expected: float | None) -> str:
    """``1,250/2,000``."""
    return f"{count:,.0f}/{'?' if expected is None else f'{expected:,.0f}'}"


def ago(age: float | None) -> str:
    """One unit is enough to tell a heartbeat from a silence."""
    if age is None:
        return "never"
    for seconds, unit in ((172_800, "d"), (7200, "h"), (120, "min")):
        if age >= seconds:
            return f"{age / (seconds / 2):.0f} {unit} ago"
    return f"{age:.0f} s ago"


def counts_line(stream: StreamView) -> str:
    """A stream's counts where there is no table."""
    return (
        f"{of(stream.samples, stream.expected)} samples, {counted(stream.shards, 'shard')}, "
        f"{stream.committed:,} committed, {size(stream.bytes)}, {amount(stream.tokens_per_second)} tokens/s"
    )


def totals_line(snapshot: Snapshot) -> str:
    """All streams' counts."""
    rate = snapshot.total("tokens_per_second")
    committed = counted(round(snapshot.total("committed")), "shard")
    line = f"{snapshot.total('samples'):,.0f} samples, {committed} committed, {size(snapshot.total('bytes'))}"
    return f"{line}, {amount(rate)} tokens/s" if rate else line


def headline(percent: float | None, seconds_left: float | None) -> list[str]:
    """How far it is and how long it will take, as far as that is known."""
    parts = [] if percent is None else [f"{percent:.1f} % done"]
    return [*parts, f"about {duration(seconds_left)} left"] if seconds_left else parts
