"""An answer in the making: what the generator fills and the shelf stores. No jax here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.spec.prediction import StopReason
from spile.spec.run import Capture
from spile.spec.sample import Sample

__all__ = ["Answer", "AnswerRows", "tokens_kept"]


def tokens_kept(capture: Capture, prompt: int, answer: int) -> int:
    """Of so many tokens, those whose activations are kept."""
    return prompt * (capture in ("prompt", "both")) + answer * (capture in ("answer", "both"))


class AnswerRows:
    """A sample's activations: one array per tap, as long as they may become. Untouched memory costs nothing.

    In one piece, because each piece would be a call of its own to the writer, and its threads wait for one another.
    """

    def __init__(self, taps: int, room: int) -> None:
        self._room, self._filled = room, 0
        self._taps: list[npt.NDArray[Any] | None] = [None] * taps

    @property
    def taps(self) -> int:
        """How many there are."""
        return len(self._taps)

    def __len__(self) -> int:
        return self._filled

    def extend(self, count: int) -> int:
        """Make ``count`` rows more part of it, at every tap; returns the number of the first."""
        self._filled += count
        return self._filled - count

    def put(self, tap: int, first: int, rows: npt.NDArray[Any]) -> None:
        """Copy rows to their place. Several taps may be filled at once."""
        own = self._taps[tap]
        if own is None:
            own = self._taps[tap] = np.empty((self._room, math.prod(rows.shape[1:])), rows.dtype)
        own[first : first + len(rows)] = rows.reshape(len(rows), own.shape[1])

    def taken(self, tap: int) -> npt.NDArray[Any] | None:
        """``[rows, width]``, not held any longer; None: nothing was kept."""
        own, self._taps[tap] = self._taps[tap], None
        return None if own is None else own[: self._filled]


@dataclass(eq=False)
class Answer:
    """A sample, what the model said to it, and the activations of its tokens where this process has them."""

    sample: Sample
    rows: AnswerRows
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: StopReason | None = None
    """None while it is being made."""
    owned: bool = True
    read: int = 0
    """Prompt tokens sent to the devices."""
    fed: int = 0
    """Tokens of the answer whose step has been looked at."""
