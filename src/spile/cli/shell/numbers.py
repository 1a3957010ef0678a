"""Numbers and ranges as a user types them."""

from __future__ import annotations

import re

from spile.errors import SpecError

__all__ = ["parse_numbers"]


def parse_numbers(flag: str, text: str) -> set[int]:
    """``5-9,12`` → {5, 6, 7, 8, 9, 12}."""
    chosen: set[int] = set()
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SpecError(flag, expected="numbers and ranges such as 5-9,12", found=repr(text))
        chosen.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not chosen:
        raise SpecError(flag, expected="numbers and ranges such as 5-9,12", found=repr(text))
    return chosen
