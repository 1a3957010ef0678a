"""The final check of every kill and fault suite: the dataset is verified and its rows equal an uninterrupted run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spile.objects.folder import Folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.spec.sample import Sample
from spile.spec.taps import Tap


def assert_rows(
    folder: Folder, wanted: Sequence[Sample], taps: Sequence[Tap | str], rows_of: Callable[[Sample, int], np.ndarray]
) -> None:
    report = verify(folder)
    assert report.ok, [problem.line() for problem in report.all_problems]
    dataset = open_dataset(folder)
    assert len(dataset.samples) == len(wanted)
    for number, tap in enumerate(taps):
        batches = list(dataset.batches(tap))
        place, position, rows, tokens = (
            np.concatenate([getattr(batch, name) for batch in batches])
            for name in ("samples", "positions", "rows", "tokens")
        )
        order = np.lexsort((position, place))
        assert np.array_equal(place[order], np.concatenate([np.full(len(s), s.index) for s in wanted]))
        assert np.array_equal(tokens[order], np.concatenate([s.tokens for s in wanted]))
        assert np.array_equal(rows[order], np.concatenate([rows_of(s, number) for s in wanted]))
