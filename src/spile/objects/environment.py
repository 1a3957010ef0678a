"""Numbers from the environment: ``SPILE_…`` variables that bound waiting and memory, and the processors there are."""

from __future__ import annotations

import math
import os

from spile.errors import SpecError

__all__ = ["positive_number", "this_machines_cores"]


def positive_number(name: str, default: float) -> float:
    """A variable's value, or the default where it is not set; an error that names it where it is no number above 0."""
    text = os.environ.get(name, "")
    if not text.strip():
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SpecError(name, expected="a number above 0", found=repr(text), fix=f"unset {name}, or correct it")
    return value


def this_machines_cores() -> tuple[int, ...]:
    """The cores that this process may use: a container's, not the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
