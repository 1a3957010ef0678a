"""Samples, which the data package creates, the model reads and the store keeps."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Role(enum.IntFlag):
    """The role of a token, stored as one byte per token in ``roles``, so that readers can filter by it.

    Padding is never stored, so it has no role.
    """

    SPECIAL = 1
    """A special token of the tokenizer, including BOS."""
    BOS = 2
    SYSTEM = 4
    USER = 8
    ASSISTANT = 16
    FIRST = 32
    """Position 0 of its sample, with any token: attention sinks are usually there."""
    ANSWER = 64
    """A token that the model generated in this run; all others belong to the prompt."""


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """One tokenized prompt, whose activation rows are stored."""

    index: int
    """The number in the stream: line × predictions-per-task + variant; with ``--pack``, the number of the sequence."""
    task_id: str
    tokens: npt.NDArray[np.int32]
    roles: npt.NDArray[np.uint8]
    preview: str = ""
    """The first characters of the text, for display."""
    augmentation: dict[str, object] | None = None
    """The augmentation of a variant, so that its prediction can be mapped back."""
    truncated: int = 0
    """The number of tokens that were cut off to fit the maximum length."""
    kept: dict[str, object] | None = None
    """The fields of the dataset row that the run stores; None if it stores none."""
    positions: npt.NDArray[np.int32] | None = None
    """The sorted positions of the tokens whose rows are stored; None stores all."""
    place: int | None = None
    """The number in the input, if other streams share it. What is drawn for a sample depends on it."""

    @property
    def number(self) -> int:
        """The number in the input, which does not depend on the number of streams."""
        return self.index if self.place is None else self.place

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """The number of stored rows."""
        return len(self.tokens) if self.positions is None else len(self.positions)

    def of_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Select the values of the tokens whose rows are stored, from one value per token."""
        return values if self.positions is None else values[self.positions]


QUARANTINED = "quarantined"
"""The reason of a skipped sample that ended the workers that computed it."""
TOO_LONG = "too long"
"""The reason of a skipped sample that is longer than ``--max-seq-length``."""
BAD_ROW = "bad row"
"""The reason of a sample that ``--bad-rows skip`` leaves out."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A sample that was skipped, with the reason: ``too long``, ``empty``, ``quarantined`` …"""

    index: int
    task_id: str
    reason: str
    detail: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task_id} ({self.detail.get('cause') or self.reason})"


def prompt_length(item: Sample | Skip) -> int | None:
    """Return the length of a prompt before it was cut or skipped; None if it is not known."""
    if isinstance(item, Sample):
        return len(item) + item.truncated
    tokens = item.detail.get("tokens")
    return tokens if item.reason == TOO_LONG and isinstance(tokens, int) else None


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a dataset, and the hash of their content."""

    first: int
    rows: int
    hash: str
    """The BLAKE2b hash, 16 bytes, of the rows as lines of JSON, each with a line feed."""

    @property
    def stop(self) -> int:
        """The number of the first row after it."""
        return self.first + self.rows


StopReason = Literal["stop", "length"]
"""``stop``: the model ended its answer. ``length``: the answer reached the limit of new tokens."""


@dataclass(frozen=True)
class Prediction:
    """The answer to one sample."""

    sample: int
    task_id: str
    text: str
    """The text without the token that ended it."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The model's log-probability of each token, at temperature 1."""
    stop_reason: StopReason
    augmentation: dict[str, Any] | None = None
    """The augmentation of the variant that was answered; None for the task itself."""

    def line(self, stream: int | None = None) -> bytes:
        """Return the prediction as a line of JSON, which begins with the number of its stream if that is given."""
        record = {
            **({} if stream is None else {"stream": stream}),
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
        """Parse what :meth:`line` returned; raise ValueError, KeyError or TypeError if it is malformed."""
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
