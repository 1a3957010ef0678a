"""Where commands print: a terminal's width counts, a pipe or a file has none; brackets in a name are no markup."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

__all__ = ["Lasting", "output"]

_NO_WIDTH = 10_000
"""For what is no terminal: no table is cut short there, and no line is broken."""


def output(**more: Any) -> Console:
    """Standard output, as it is now."""
    console = Console(highlight=False, markup=False, **more)
    if not console.is_terminal:
        console.width = _NO_WIDTH
    return console


class Lasting(Console):
    """Outlives its reader: Ctrl+C in ``spile extract | tee log`` ends tee first, and work and exit code still count."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, **more})

    def on_broken_pipe(self) -> None:
        """Be quiet from now on, the interpreter's last flush too."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
