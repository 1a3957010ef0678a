"""An answer in the making: what the generator fills and the shelf stores. No jax here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spile.spec.prediction import StopReason
from spile.spec.sample import Sample

__all__ = ["Answer", "Rows"]

Rows = list[npt.NDArray[np.generic]]


@dataclass(eq=False)
class Answer:
    """A sample, what the model said to it, and the activations of its tokens where this process has them."""

    sample: Sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: StopReason | None = None
    """None while it is being made."""
    rows: list[Rows] = field(default_factory=list)
    """For each tap, pieces that follow one another."""
    owned: bool = True
    read: int = 0
    """Prompt tokens sent to the devices."""
    fed: int = 0
    """Tokens of the answer whose step has been looked at."""
