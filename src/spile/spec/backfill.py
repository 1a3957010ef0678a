"""Taps to add to a finished dataset: what a user asks for, as one frozen noun."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from spile.errors import SpecError
from spile.spec.run import ComputeDtype, StoreDtype
from spile.spec.taps import Tap

__all__ = ["BackfillSpec", "parse_taps"]


def parse_taps(words: Iterable[str]) -> tuple[Tap, ...]:
    """``mlp.12 z.3.0-3,7`` → taps, each once, in an order of their own, so that the same taps are the same addition.

    Those with a dtype of their own, which has four bytes, come first: every tensor of a shard is aligned.
    """
    texts = [text for word in words for text in re.split(r"\s+|,(?=[a-z])", word) if text]
    taps = {Tap.parse(text) for text in texts}
    if not taps:
        raise SpecError("--add-taps", expected="taps such as mlp.12", found="none")
    own = {tap: tap.spec is not None and tap.spec.dtype is not None for tap in taps}
    return tuple(sorted(taps, key=lambda tap: (not own[tap], -1 if tap.layer is None else tap.layer, str(tap))))


@dataclass(frozen=True)
class BackfillSpec:
    """Taps added to a dataset that is there. What is None is as the dataset has it; else it must be the same."""

    root: str
    taps: tuple[Tap, ...]
    model: str | None = None
    """Where the dataset's model is now, if not where ``run.json`` says."""
    revision: str | None = None
    worker_id: int | None = None
    """One stream; None: all of them."""
    dtype: ComputeDtype = "auto"
    store_dtype: StoreDtype | None = None
    positions: str | None = None
    max_samples: int | None = None
    """The bound that the dataset was made with, if it was."""
    statistics: bool | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    mesh_shape: tuple[int, int] | None = None
