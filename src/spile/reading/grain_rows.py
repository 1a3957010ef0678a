"""Shuffled batches for Grain, with Grain's checkpoints.

This module is imported only by ``dataset.grain(…)``, so that reading does not need Grain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import grain

if TYPE_CHECKING:
    from spile.reading.readers import ShuffledReaders


class GrainRows(grain.IterDataset[Any]):  # type: ignore[misc]
    """``dataset.shuffled(…)`` as a ``grain.IterDataset`` whose elements are batches."""

    def __init__(self, dataset: ShuffledReaders, tap: Any, **how: Any) -> None:
        super().__init__()
        self._dataset, self._tap, self._how = dataset, tap, how
        self._dataset.shuffled(tap, **how).close()  # wrong arguments are reported here

    def __iter__(self) -> GrainBatches:
        return GrainBatches(self._dataset, self._tap, self._how)

    def __str__(self) -> str:
        return f"GrainRows({self._dataset.place}, {self._tap})"


class GrainBatches(grain.DatasetIterator[Any]):  # type: ignore[misc]
    """The iterator that Grain saves and restores."""

    def __init__(self, dataset: ShuffledReaders, tap: Any, how: Mapping[str, Any]) -> None:
        super().__init__()
        self._dataset, self._tap, self._how = dataset, tap, dict(how)
        self._reader = dataset.shuffled(tap, **self._how)

    def __next__(self) -> Any:
        return next(self._reader)

    def get_state(self) -> dict[str, Any]:
        return self._reader.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._reader.close()
        self._reader = self._dataset.shuffled(self._tap, **{**self._how, "state": state})

    def __str__(self) -> str:
        return f"GrainBatches({self._tap})"
