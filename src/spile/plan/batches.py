"""Batches: samples sorted by length within a bounded window, under a token budget, in few shapes.

A batch is a rectangle of ``groups × rows`` sequences of one padded length. A group is what one device
(or one model-parallel set of devices) computes: a single device has one group, eight data-parallel ones eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spile.spec.sample import Sample

__all__ = ["Batch", "BatchPlan", "batches", "bucket"]

_SMALLEST = 64
_STEPS_AN_OCTAVE = 8
_WINDOW_BATCHES = 64
"""How many batches a window holds: its last one is partly filled, so more of them waste less."""
_WINDOW_SAMPLES = 8192
"""No window holds more, however short its samples: memory stays bounded."""


def bucket(length: int, longest: int) -> int:
    """The padded length for a sample: at most an eighth over it, and never over ``longest``.

    Multiples of 64 up to 1024, of 128 up to 2048, of 256 up to 4096 …: some 24 shapes up to 2048,
    against hundreds of distinct lengths.
    """
    octave = 1 << max(length - 1, 1).bit_length() - 1
    step = max(_SMALLEST, octave // _STEPS_AN_OCTAVE)
    return min(-(-length // step) * step, max(longest, length))


@dataclass(frozen=True)
class BatchPlan:
    """What bounds a batch. None of it changes a number that is stored."""

    batch_tokens: int
    """Computed tokens a group, padding included."""
    batch_size: int | None
    """Samples a group at most."""
    longest: int
    """The longest a sample can be."""
    groups: int = 1

    def rows(self, length: int) -> int:
        """Sequences a group at this padded length, but for a window's last batch: so shapes stay few."""
        rows = max(1, self.batch_tokens // length)
        return rows if self.batch_size is None else min(rows, self.batch_size)

    @property
    def window_tokens(self) -> int:
        """How many real tokens are looked at before the first batch of them is formed."""
        return _WINDOW_BATCHES * self.batch_tokens * self.groups


@dataclass(frozen=True)
class Batch:
    """Samples that are computed together."""

    groups: tuple[tuple[Sample, ...], ...]
    """One tuple a group, each of at most ``rows`` samples; a group may be empty in a window's last batch."""
    rows: int
    length: int

    @property
    def samples(self) -> list[Sample]:
        """All of them, group after group: the order of their rows in a shard."""
        return [sample for group in self.groups for sample in group]

    @property
    def real_tokens(self) -> int:
        """Tokens that will be stored."""
        return sum(len(sample) for group in self.groups for sample in group)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return len(self.groups) * self.rows * self.length

    def halves(self) -> tuple[Batch, Batch]:
        """The same samples as two batches of half the rows, when the device has no room for the whole."""
        rows = -(-self.rows // 2)
        first = tuple(group[:rows] for group in self.groups)
        rest = tuple(group[rows:] for group in self.groups)
        return Batch(first, rows, self.length), Batch(rest, rows, self.length)


def batches(samples: Iterable[Sample], plan: BatchPlan) -> Iterator[Batch]:
    """Batches of a window's samples, longest first, window after window. The same samples give the same batches."""
    for window in _windows(samples, plan):
        window.sort(key=lambda sample: (-len(sample), sample.index))
        yield from _window_batches(window, plan)


def _windows(samples: Iterable[Sample], plan: BatchPlan) -> Iterator[list[Sample]]:
    window: list[Sample] = []
    tokens = 0
    for sample in samples:
        window.append(sample)
        tokens += len(sample)
        if tokens >= plan.window_tokens or len(window) >= _WINDOW_SAMPLES:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def _window_batches(window: Sequence[Sample], plan: BatchPlan) -> Iterator[Batch]:
    start = 0
    while start < len(window):
        length = bucket(len(window[start]), plan.longest)
        left = -(-(len(window) - start) // plan.groups)
        # A window's last batch may need few rows: a power of two of them, so that there are few such shapes.
        rows = min(plan.rows(length), 1 << (left - 1).bit_length())
        taken = window[start : start + rows * plan.groups]
        groups = tuple(tuple(taken[g * rows : (g + 1) * rows]) for g in range(plan.groups))
        yield Batch(groups, rows, length)
        start += len(taken)
