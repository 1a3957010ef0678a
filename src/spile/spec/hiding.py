"""Find the secrets of an environment, and remove them from texts that go to a bucket or a log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REFERENCE = "secret:"
"""The prefix of a value that refers to a secret instead of containing it."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|PRIVATE|_KEY$|^KEY", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values are not removed: replacing every ``0`` would make a log unreadable."""


def secret_values(environment: Mapping[str, str], given: Mapping[str, str]) -> frozenset[str]:
    """Return the secret values in ``given``: those whose names suggest it, and those that ``environment`` refers to."""
    named = {value for name, value in given.items() if _SECRET.search(name)}
    brought = {given[name] for name, value in environment.items() if value.startswith(REFERENCE) and name in given}
    return frozenset(value for value in named | brought if len(value) >= _SHORTEST)


def hide_values(text: str, values: Iterable[str]) -> str:
    """Return the text with these values replaced by ``***``."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text
