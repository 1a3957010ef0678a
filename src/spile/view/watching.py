"""Looking again and again: one loop, one footer, one way to show what was seen, for streams and for fleets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from spile.errors import SpileError

__all__ = ["HealthCounts", "footer", "health_line", "showing", "watch"]

Seen = TypeVar("Seen")


class HealthCounts(Protocol):
    """What the footer counts."""

    @property
    def healthy(self) -> int:
        """Done, working, or about to."""

    @property
    def working(self) -> int:
        """With a recent heartbeat."""

    @property
    def needs_recovery(self) -> int:
        """Unfinished with nobody at work."""


def footer(health: HealthCounts, taken: float, interval: float | None, news: Sequence[Text] = ()) -> list[Text]:
    """What stands below every table; ``news`` between the counts and the time."""
    needs = health.needs_recovery
    lines = [
        Text("Status summary:"),
        Text(f"  ✓ Healthy: {health.healthy}", style="green"),
        Text(f"  ⟳ Working: {health.working}", style="cyan"),
        Text(f"  ✗ Needs recovery: {needs}", style="red" if needs else ""),
        *news,
        Text(f"Last update: {datetime.fromtimestamp(taken, UTC):%Y-%m-%d %H:%M:%S} UTC", style="dim"),
    ]
    if interval is not None:
        lines.append(Text("Press Ctrl+C to stop monitoring; everything goes on without it", style="dim"))
    return lines


def health_line(health: HealthCounts) -> str:
    """The same counts where there is no table."""
    return f"healthy {health.healthy}, working {health.working}, needs recovery {health.needs_recovery}"


@contextmanager
def showing(
    console: Console, render: Callable[[Seen], RenderableType], lines: Callable[[Seen], Sequence[str]]
) -> Iterator[Callable[[Seen], None]]:
    """How what is seen is shown: drawn over the last look in a terminal, as lines elsewhere."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda seen: live.update(render(seen), refresh=True)
        return

    def print_lines(seen: Seen) -> None:
        for line in lines(seen):
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    yield print_lines


def watch(
    look: Callable[[], Seen],
    show: Callable[[Seen], None],
    over: Callable[[Seen], bool],
    console: Console,
    *,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Seen:
    """Look and show until it is over; gives the last look. Only the first may fail: later ones may be hiccups."""
    seen = look()
    show(seen)
    while not over(seen):
        sleep(interval)
        try:
            seen = look()
        except SpileError as error:  # what was seen stays, and is looked at again
            notice = Text(f"not seen: {error}; looking again in {interval:g} s", style="yellow")
            console.print(notice, soft_wrap=True)
        else:
            show(seen)
    return seen
