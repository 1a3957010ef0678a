"""What makes rows: the seam between the worker's loop and a model on devices.

The loop plans batches, starts them, and drains what comes back, in the same order. It never sees jax: the crash
tests drive the very same loop with a producer that is a few lines of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import Failure, ModelError, SpecError
from spile.spec.positions import ALL, ANSWER, choose_positions
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample, Skip
from spile.worker.batches import Batch

__all__ = [
    "OutOfDeviceMemory",
    "Packed",
    "Producer",
    "RowBlock",
    "check_tokens",
    "pack",
    "refuse_no_answers",
    "with_positions",
]


class OutOfDeviceMemory(Failure):
    """A batch does not fit on the device; a smaller one may."""


class RowBlock(NamedTuple):
    """The rows of one group at one tap: its samples' stored rows one after another, then rows of no meaning."""

    group: int
    rows: npt.NDArray[np.generic]


@dataclass(frozen=True)
class Packed:
    """A batch as two arrays."""

    rows: npt.NDArray[np.int32]
    """``[groups × rows, 3, length]``: tokens, positions within their own sample, and which sample of its row each is
    of, from 1; zeros for padding. One array, because sending one costs less than sending three."""
    places: npt.NDArray[np.int32]
    """``[groups, block]``: where a group's tokens lie in it whose rows are stored, one after another; then zeros."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """``[groups × rows, length]``."""
        return self.rows[:, 0]


class Producer(Protocol):
    """Turns batches of tokens into rows of activations."""

    @property
    def groups(self) -> int:
        """How many groups a batch has: the data-parallel width over all hosts."""

    @property
    def owned(self) -> Sequence[int]:
        """The groups whose rows this process stores, in order."""

    def prepare(self, shape: tuple[int, int]) -> None:
        """A batch of this shape will come: compile for it in the background. Never blocks."""

    def await_program(self, batch: Batch, given_up: Callable[[], bool]) -> None:
        """Wait until a batch of this shape can start at once, unless the wait is given up: it may be minutes."""

    def start(self, batch: Batch) -> object:
        """Begin computing; returns at once. Raises :class:`OutOfDeviceMemory` before anything was kept."""

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """Wait for a started batch: for each tap, in order, a block for each owned group."""

    def describe(self) -> str:
        """For people: ``8 × NVIDIA H200, bfloat16, cudnn attention``."""


def pack(batch: Batch, block: int | None = None) -> Packed:
    """A batch in a rectangle, and where its real tokens lie, so that padding is dropped before rows leave a device."""
    groups, rows, length = len(batch.groups), batch.rows, batch.length
    packed = np.zeros((groups, rows, 3, length), np.int32)
    places = np.zeros((groups, block or rows * length), np.int32)
    counting = np.arange(length, dtype=np.int32)
    for g, group in enumerate(batch.groups):
        filled = 0
        for r, row in enumerate(group):
            start = 0
            for number, sample in enumerate(row, 1):
                stop = start + len(sample)
                packed[g, r, 0, start:stop] = sample.tokens
                packed[g, r, 1, start:stop] = counting[: len(sample)]
                packed[g, r, 2, start:stop] = number
                kept = sample.of_rows(counting[: len(sample)])
                places[g, filled : filled + len(kept)] = kept + np.int32(r * length + start)
                filled += len(kept)
                start = stop
    return Packed(packed.reshape(groups * rows, 3, length), places)


def check_tokens(samples: Iterable[Sample], vocabulary: int) -> None:
    """Refuse tokens that the model has no row for: a device would silently take another row."""
    for sample in samples:
        highest = int(sample.tokens.max(initial=0))
        if highest >= vocabulary:
            raise ModelError(
                f"the tokenizer is not this model's: sample {sample.index} ({sample.task_id})",
                expected=f"tokens below the model's vocabulary of {vocabulary:,}",
                found=highest,
                fix="give the model its own tokenizer files",
            )


def with_positions(items: Iterable[Sample | Skip], spec: ExtractSpec) -> Iterable[Sample | Skip]:
    """The same samples, each with its positions where not all are stored."""
    return items if spec.positions == ALL else _chosen(items, spec)


def _chosen(items: Iterable[Sample | Skip], spec: ExtractSpec) -> Iterator[Sample | Skip]:
    for item in items:
        if isinstance(item, Skip):
            yield item
        else:
            chosen = choose_positions(spec.positions, spec.data.seed, item.index, item.roles)
            yield replace(item, positions=chosen)


def refuse_no_answers(spec: ExtractSpec, kind: str) -> None:
    """Prompts alone have no answers; of chats the assistant's words are."""
    if spec.positions == ANSWER and spec.generation is None and kind != "chat":
        raise SpecError(
            "--positions answer",
            expected="chats, whose assistant's words are kept",
            found=f"--prompt {kind}",
            fix="use spile infer, which makes answers, or --positions last",
        )
