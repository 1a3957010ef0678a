"""Lines that a command prints while it works."""

from __future__ import annotations

import sys

__all__ = ["log"]


def log(line: str) -> None:
    """A line to stdout at once, without the characters that its encoding lacks."""
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "ignore").decode(encoding), flush=True)
