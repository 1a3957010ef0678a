"""``NAME=value`` words as a table."""

from __future__ import annotations

from collections.abc import Sequence

from spile.errors import SpecError

__all__ = ["pairs", "variables"]


def pairs(flag: str, words: Sequence[str] | None, expected: str = "NAME=value") -> dict[str, str]:
    """Names and what they are to be; neither may be empty."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise SpecError(flag, expected=expected, found=repr(word))
        found[name] = value
    return found


def variables(words: Sequence[str] | None) -> dict[str, str]:
    """``--env``: variables, which may be empty. A value, which may be a secret, is in no message."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise SpecError("--env", expected="NAME=value", found=repr(name))
        found[name] = value
    return found
