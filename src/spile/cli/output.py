"""Where commands print: a terminal's width counts, a pipe or a file has none."""

from __future__ import annotations

from typing import Any

from rich.console import Console

__all__ = ["output"]

_NO_WIDTH = 10_000
"""For what is no terminal: no table is cut short there, and no line is broken."""


def output(**more: Any) -> Console:
    """Standard output, as it is now."""
    console = Console(highlight=False, **more)
    if not console.is_terminal:
        console.width = _NO_WIDTH
    return console
