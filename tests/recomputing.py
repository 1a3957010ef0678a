"""A model of a few lines in place of a real one, for ``verify(recompute=…)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spile.proof.comparison import Recompute, RowsBySample
from spile.spec.sample import Sample
from spile.spec.taps import TapRows

Rows = Callable[[np.ndarray, tuple[str, ...]], Sequence[np.ndarray]]
"""From all tokens of a sample and the names of taps to the rows of each tap, before they are rounded."""


def recompute_with(reference: Rows, fresh: Rows | None = None) -> Recompute:
    """Return a recomputation whose reference rows, and rows in the run's dtype, come from these functions."""

    def rows(function: Rows, sample: Sample, taps: Sequence[TapRows]) -> RowsBySample:
        found = function(sample.tokens, tuple(tap.name for tap in taps))
        return {sample.index: [sample.of_rows(np.asarray(each)) for each in found]}

    def recompute(
        samples: Sequence[Sample], taps: Sequence[TapRows], variant: int = 0
    ) -> Iterator[tuple[RowsBySample, RowsBySample]]:
        for sample in samples:
            yield rows(reference, sample, taps), rows(fresh or reference, sample, taps)

    return recompute
