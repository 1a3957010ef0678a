"""The choice of the rows that are stored: of ``all`` tokens, ``last``, ``first:8``, ``answer`` …, or their ``mean``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from spile.errors import SpecError
from spile.spec.sample import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from spile.spec.taps import Tap

ALL, LAST, LAST_CONTENT, ANSWER, MEAN = "all", "last", "last-content", "answer", "mean"
_COUNTED = re.compile(r"(first|random):([1-9]\d{0,6})")


def counted_choice(text: str) -> tuple[str, int] | None:
    """Return ("random", 32) for ``random:32``, ("first", 8) for ``first:8``, and None for a choice without a number."""
    match = _COUNTED.fullmatch(text)
    return (match[1], int(match[2])) if match else None


def check_positions(text: str) -> None:
    """Raise :class:`SpecError` if the text is not a valid choice of positions."""
    if text not in (ALL, LAST, LAST_CONTENT, ANSWER, MEAN) and counted_choice(text) is None:
        expected = "all, last, last-content, mean, answer, first:N or random:N, such as random:32"
        raise SpecError("--positions", expected=expected, found=repr(text))


def refuse_mean_of_ids(text: str, taps: Iterable[Tap]) -> None:
    """Raise :class:`SpecError` if the choice is a mean and the rows of a tap are ids."""
    ids = [str(tap) for tap in taps if tap.stored_as("float32", 1) == "int32"]
    if text == MEAN and ids:
        found = f"{', '.join(ids[:3])}, whose rows are ids"
        raise SpecError("--positions mean", expected="taps of numbers", found=found, fix="leave these taps out")


_ANSWERS = Role.ANSWER | Role.ASSISTANT
_CONTENT = Role.SYSTEM | Role.USER | _ANSWERS


def last_content(roles: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return the number of the last token that is content, in an array of at most one.

    In a chat, content is what a message says: not the special tokens, and not the text that the template adds. In other
    samples it is every token that is not special. A sample of special tokens alone has its last token.
    """
    import numpy as np

    plain = (roles & Role.SPECIAL) == 0
    for mask in (plain & ((roles & _CONTENT) != 0), plain):
        if mask.any():
            return np.flatnonzero(mask)[-1:]
    return np.arange(len(roles))[-1:]


def choose_positions(
    text: str, seed: int, index: int, roles: npt.NDArray[np.uint8], first: int = 0, stop: int | None = None
) -> npt.NDArray[np.int32] | None:
    """Return the sorted positions of a sample that are stored, or None for all. A mean is at the last token.

    ``index`` is its number in the input. Only positions from ``first`` to ``stop`` have rows. The choice depends
    only on the seed, this number and the sample's length, so a sample that is computed again has the same positions.
    """
    if text == ALL:
        return None
    import numpy as np

    available = np.arange(first, len(roles) if stop is None else stop, dtype=np.int32)
    if text in (LAST, MEAN):
        return available[-1:]
    if text == LAST_CONTENT:
        return available[last_content(roles[available])]
    if text == ANSWER:
        return np.asarray(available[(roles[available] & _ANSWERS) != 0])
    kind, count = counted_choice(text) or ("first", 0)
    if kind == "first":
        return available[:count]
    chosen = np.argsort(_ranks(seed, index, available), kind="stable")[:count]
    return available[np.sort(chosen)]


def _ranks(seed: int, index: int, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Return a pseudo-random number for each position with splitmix64, as ``docs/format.md`` describes."""
    import numpy as np

    key = _splitmix64(_splitmix64(np.uint64(seed)) ^ np.uint64(index))
    return np.asarray(_splitmix64(positions.astype(np.uint64) ^ key), np.uint64)


def _splitmix64(value: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
