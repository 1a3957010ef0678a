"""Shuffled rows as a torch ``IterableDataset``. Workers of a ``DataLoader`` and ranks of DDP read disjoint rows.

This module is imported only by ``dataset.torch(…)``, so that reading does not need torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from spile.reading.rows import RowBatch
from spile.reading.shuffle import Shuffled

if TYPE_CHECKING:
    from spile.reading.readers import ShuffledReaders


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of an array."""
    if array.dtype.isbuiltin != 2:
        return torch.from_numpy(array)
    # torch has the dtypes of ml_dtypes under the same names.
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def _tensors(batch: Any) -> Any:
    if isinstance(batch, RowBatch):
        return {name: _tensors(value) for name, value in vars(batch).items() if value is not None}
    if isinstance(batch, Mapping):
        return {name: rows if rows.dtype == object else tensor_of(rows) for name, rows in batch.items()}
    return tensor_of(batch)


class TorchRows(IterableDataset[Any]):  # type: ignore[misc]
    """Batches of tensors, for ``DataLoader(…, batch_size=None)`` or for direct iteration.

    Rank and world size come from ``torch.distributed`` if it is initialised, unless they are given. torchdata's
    ``StatefulDataLoader`` saves and restores the state of each worker's copy.
    """

    def __init__(
        self,
        dataset: ShuffledReaders,
        tap: Any,
        *,
        rank: int | None = None,
        world: int | None = None,
        after: int = 0,
        **options: Any,
    ) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
        self._world = world if world is not None else torch.distributed.get_world_size() if distributed else 1
        self._dataset, self._tap, self._after, self._options = dataset, tap, after, options
        self._state: Mapping[str, Any] | None = None
        self._reader: Shuffled | None = None
        self._open(0, 1).close()  # wrong arguments are reported here, not in a worker

    def __iter__(self) -> Iterator[Any]:
        """Read the part of this worker of a loader.

        A loader takes batches from its workers in turn, starting with the first. So the number of earlier batches
        determines how many each worker gave and which worker is next; the first worker continues with its part.
        """
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        part = (worker + self._after) % workers
        self._reader = self._open(part, workers, max(0, -(-(self._after - part) // workers)))
        return map(_tensors, self._reader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch of this process; each worker of a loader has its own state."""
        return dict(self._state or {}) if self._reader is None else self._reader.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iterator continue from a state."""
        self._state, self._reader = state or None, None

    def _open(self, worker: int, workers: int, after: int = 0) -> Shuffled:
        part = (self._rank * workers + worker, self._world * workers)
        return self._dataset.shuffled(self._tap, part=part, state=self._state, after=after, **self._options)
