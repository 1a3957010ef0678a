"""The guides' spellings: one table from every old flag and variable to ours."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["modern"]


def modern(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """The command line as we spell it."""
    return words
