"""Shuffled batches for Grain, with Grain's checkpoints.

This module is imported only by ``dataset.grain(…)``, so that reading does not need Grain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grain

if TYPE_CHECKING:
    from spile.reading.readers import ShuffledReaders
    from spile.reading.shuffle import Shuffled


class GrainRows(grain.IterDataset[Any]):  # type: ignore[misc]
    """``dataset.shuffled(…)`` as a ``grain.IterDataset`` whose elements are batches."""

    def __init__(self, dataset: ShuffledReaders, tap: Any, **options: Any) -> None:
        super().__init__()
        self._place, self._tap = dataset.place, tap
        self._open = partial(dataset.shuffled, tap, **options)
        self._open().close()  # wrong arguments are reported here

    def __iter__(self) -> GrainBatches:
        return GrainBatches(self._open)

    def __str__(self) -> str:
        return f"GrainRows({self._place}, {self._tap})"


class GrainBatches(grain.DatasetIterator[Any]):  # type: ignore[misc]
    """The iterator that Grain saves and restores."""

    def __init__(self, open_reader: Callable[..., Shuffled]) -> None:
        super().__init__()
        self._open, self._reader = open_reader, open_reader()

    def __next__(self) -> Any:
        return next(self._reader)

    def get_state(self) -> dict[str, Any]:
        return self._reader.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._reader.close()
        self._reader = self._open(state=state)

    def __str__(self) -> str:
        return "GrainBatches"
