"""Pages that a command writes for a browser."""

from __future__ import annotations

from pathlib import Path

from spile.errors import UserError

__all__ = ["write_page"]


def write_page(page: str, html: Path) -> None:
    """Write it where ``--html`` says."""
    try:
        html.expanduser().write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {html}", expected="a file that can be written", found=error.strerror) from error
