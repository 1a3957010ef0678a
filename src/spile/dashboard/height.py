"""A dashboard that is never taller than the terminal: what is in trouble stays, what is well is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.text import Text

__all__ = ["first_lines", "keep_rows", "one_line_each", "share_height"]

Row = TypeVar("Row")
_AROUND = 5
"""Lines beside rows and texts: two empty ones, the table's titles and totals, and the cursor's."""
_ROWS = 6
"""Rows of the table that news leave room for."""


def share_height(height: int, fixed: int, news: list[Text], rows: int, elsewhere: str) -> tuple[list[Text], int]:
    """The news that there is room for beside ``fixed`` lines, and how many rows the table may have."""
    free = height - fixed - _AROUND
    news = first_lines(news, max(1, free - min(rows, _ROWS)), elsewhere)
    return news, max(2, free - len(news))


def first_lines(lines: list[Text], room: int, elsewhere: str) -> list[Text]:
    """The first lines, the last of them saying how many more there are, and ``elsewhere`` where all are."""
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], Text(f"… and {len(lines) - room + 1} more; {elsewhere}", style="yellow")]


def keep_rows(rows: Sequence[Row], room: int | None, rank: Callable[[Row], Any]) -> tuple[list[Row], int]:
    """The rows that there is room for, in their order, those of the lowest rank; and how many are left out."""
    if room is None or len(rows) <= room:
        return list(rows), 0
    kept = set(sorted(range(len(rows)), key=lambda place: rank(rows[place]))[: room - 1])
    return [row for place, row in enumerate(rows) if place in kept], len(rows) - len(kept)


def one_line_each(lines: Iterable[Text]) -> None:
    """Texts that would wrap are cut to the terminal's width."""
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
