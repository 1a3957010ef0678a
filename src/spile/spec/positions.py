"""Which of a sample's tokens are stored: ``all``, ``last``, ``answer`` or ``random:32``."""

from __future__ import annotations

import re

from spile.errors import SpecError

__all__ = ["ALL", "ANSWER", "LAST", "check_positions", "random_count"]

ALL, LAST, ANSWER = "all", "last", "answer"
_RANDOM = re.compile(r"random:([1-9]\d{0,6})")


def random_count(text: str) -> int | None:
    """The 32 of ``random:32``; None for what is not random."""
    match = _RANDOM.fullmatch(text)
    return int(match[1]) if match else None


def check_positions(text: str) -> None:
    """Refuse what names no positions."""
    if text not in (ALL, LAST, ANSWER) and random_count(text) is None:
        raise SpecError("--positions", expected="all, last, answer, or random:N such as random:32", found=repr(text))
