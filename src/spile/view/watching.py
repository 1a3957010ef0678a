"""The refresh loop, the footer and the live display that streams and fleets share."""

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

Seen = TypeVar("Seen")


class HealthCounts(Protocol):
    """The counts in the footer."""

    @property
    def healthy(self) -> int:
        """Streams or workers that are done, working or starting."""

    @property
    def working(self) -> int:
        """Those with a recent heartbeat."""

    @property
    def needs_recovery(self) -> int:
        """Those that are unfinished and have no worker."""


def footer(health: HealthCounts, taken: float, interval: float | None, news: Sequence[Text] = ()) -> list[Text]:
    """Return the lines below every table, with ``news`` between the counts and the time."""
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
        lines.append(Text("Press Ctrl+C to stop monitoring; the workers continue", style="dim"))
    return lines


def health_line(health: HealthCounts) -> str:
    """Return the same counts as one line of text."""
    return f"healthy {health.healthy}, working {health.working}, needs recovery {health.needs_recovery}"


@contextmanager
def showing(
    console: Console, render: Callable[[Seen], RenderableType], lines: Callable[[Seen], Sequence[str]]
) -> Iterator[Callable[[Seen], None]]:
    """Yield a function that shows a state: in place in a terminal, as appended lines elsewhere."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda seen: live.update(render(seen), refresh=True)
        return

    def print_lines(seen: Seen) -> None:
        moment = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        for line in lines(seen):
            console.print(f"{moment} {line}", soft_wrap=True, markup=False, highlight=False)

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
    """Look and show until ``over``; return the last state.

    An error at the first look is raised. A later one is reported and the look is repeated.
    """
    seen = look()
    show(seen)
    while not over(seen):
        sleep(interval)
        try:
            seen = look()
        except SpileError as error:
            notice = Text(f"Could not refresh, retrying in {interval:g} s: {error}", style="yellow")
            console.print(notice, soft_wrap=True)
        else:
            show(seen)
    return seen
