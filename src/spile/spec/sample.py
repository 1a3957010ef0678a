"""Samples: what the data room makes, the model reads and the store keeps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Role", "Sample", "Skip"]


class Role(enum.IntFlag):
    """What a token is. One byte a token, stored as ``roles``, so that a reader can filter on it.

    A row of padding is never stored, so there is no role for it.
    """

    SPECIAL = 1
    """A token that the tokenizer calls special, BOS included."""
    BOS = 2
    SYSTEM = 4
    USER = 8
    ASSISTANT = 16
    FIRST = 32
    """Position 0 of its sample, whatever token stands there: where attention sinks live."""


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """One prompt, tokenized: what becomes rows."""

    index: int
    """Its number in the stream: line × predictions-per-task + variant, or the window's number when packed."""
    task_id: str
    tokens: npt.NDArray[np.int32]
    roles: npt.NDArray[np.uint8]
    preview: str = ""
    """The text's first characters, for people."""
    augmentation: dict[str, object] | None = None
    """How a variant was made, so that a prediction can be mapped back."""
    truncated: int = 0
    """How many tokens were cut off to fit the maximum length."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Skip:
    """A sample that is done without rows, and why: ``too long``, ``empty`` …"""

    index: int
    task_id: str
    reason: str
    detail: dict[str, object] = field(default_factory=dict)
