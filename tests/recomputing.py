"""A model of a few lines in place of a real one, for ``verify(recompute=…)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.recomputation import Recompute, StoredRows, distances

Rows = Callable[[np.ndarray, tuple[str, ...]], Sequence[np.ndarray]]
"""From all tokens of a sample and the names of taps to the rows of each tap, before they are rounded."""


def recompute_with(reference: Rows, fresh: Rows | None = None) -> Recompute:
    """Return a recomputation whose reference rows, and rows in the run's dtype, come from these functions."""

    def recompute(
        samples: Sequence[Sample], taps: Sequence[TapRows], stored: StoredRows, variant: int = 0
    ) -> Iterator[tuple[int, Any]]:
        names = tuple(tap.name for tap in taps)
        for sample in samples:
            rows = [
                [sample.of_rows(np.asarray(each)) for each in function(sample.tokens, names)]
                for function in (reference, fresh or reference)
            ]
            both = zip(*rows, stored(sample), taps, strict=True)
            yield sample.index, np.stack([distances(*each) for each in both])

    return recompute
