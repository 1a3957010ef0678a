"""Which values of an environment are secrets, and a text without them: for all that goes to a bucket or a log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["REFERENCE", "secret_values", "struck_out"]

REFERENCE = "secret:"
"""What a value begins with that names a secret and is none."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|PRIVATE|_KEY$|^KEY", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values are left alone: to strike out every ``0`` of a log says nothing and hides everything."""


def secret_values(environment: Mapping[str, str], given: Mapping[str, str]) -> frozenset[str]:
    """The values that nobody else shall read: those that came by reference, and those whose name says so."""
    named = {value for name, value in given.items() if _SECRET.search(name)}
    brought = {given[name] for name, value in environment.items() if value.startswith(REFERENCE) and name in given}
    return frozenset(value for value in named | brought if len(value) >= _SHORTEST)


def struck_out(text: str, values: Iterable[str]) -> str:
    """The text without these values."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text
