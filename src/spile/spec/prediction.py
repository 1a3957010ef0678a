"""Predictions: what a model said to a sample, as ``predictions.jsonl`` has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Prediction", "StopReason"]

StopReason = Literal["stop", "length"]
"""It ended its turn; it came to the limit of new tokens."""


@dataclass(frozen=True)
class Prediction:
    """One sample's answer."""

    sample: int
    task_id: str
    text: str
    """Without the token that ended it."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The model's own of each token, at temperature 1."""
    stop_reason: StopReason
    augmentation: dict[str, Any] | None = None
    """How the variant was made that it answers; None: the task itself."""

    def line(self) -> bytes:
        """As a line of JSON."""
        record = {
            "sample": self.sample,
            "task_id": self.task_id,
            "augmentation": self.augmentation,
            "text": self.text,
            "tokens": list(self.tokens),
            "logprobs": [round(each, 6) for each in self.logprobs],
            "stop_reason": self.stop_reason,
        }
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Prediction:
        """The inverse of :meth:`line`; ValueError, KeyError or TypeError where it is none."""
        fields: Mapping[str, Any] = json.loads(line)
        made = cls(
            sample=int(fields["sample"]),
            task_id=str(fields["task_id"]),
            text=str(fields["text"]),
            tokens=tuple(int(token) for token in fields["tokens"]),
            logprobs=tuple(float(each) for each in fields["logprobs"]),
            stop_reason=fields["stop_reason"],
            augmentation=fields["augmentation"],
        )
        if len(made.tokens) != len(made.logprobs) or made.stop_reason not in ("stop", "length"):
            raise ValueError(f"sample {made.sample} has {len(made.tokens)} tokens and ended by {made.stop_reason!r}")
        return made
