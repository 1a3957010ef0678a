"""A flag: its group in ``--help``, and its line there."""

from __future__ import annotations

from typing import Any

from cyclopts import Group, Parameter

__all__ = ["flag"]


def flag(group: Group, text: str, **more: Any) -> Parameter:
    """One flag; ``more`` is cyclopts' own."""
    return Parameter(group=group, help=text, **more)
