"""Shuffled rows as a torch ``IterableDataset``: under a ``DataLoader``'s workers and under DDP each row goes to one.

Imported only when ``dataset.torch(…)`` is called: reading needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from spile.reading.rows import RowBatch
from spile.reading.shuffle import Shuffled

if TYPE_CHECKING:
    from spile.reading.dataset import Dataset

__all__ = ["TorchRows", "tensor_of"]

# What torch knows and NumPy alone does not: an integer of the same size, and what its bits are.
_BITS: dict[np.dtype[Any], tuple[Any, torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
}


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The same memory as a tensor: nothing is copied."""
    kind, dtype = _BITS.get(array.dtype, (None, None))
    return torch.from_numpy(array) if kind is None else torch.from_numpy(array.view(kind)).view(dtype)


def _tensors(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: rows if rows.dtype == object else tensor_of(rows) for name, rows in batch.items()}
    if isinstance(batch, RowBatch):
        known = {name: value for name, value in vars(batch).items() if value is not None}
        return {name: _tensors(value) if isinstance(value, dict) else tensor_of(value) for name, value in known.items()}
    return tensor_of(batch)


class TorchRows(IterableDataset[Any]):  # type: ignore[misc]
    """Batches of tensors. Give it to ``DataLoader(…, batch_size=None)``, or iterate over it as it is.

    The process's rank and number are those of ``torch.distributed`` where it is initialised, unless told.
    """

    def __init__(
        self,
        dataset: Dataset,
        tap: Any,
        *,
        rank: int | None = None,
        world: int | None = None,
        after: int = 0,
        **how: Any,
    ) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
        self._world = world if world is not None else torch.distributed.get_world_size() if distributed else 1
        self._dataset, self._tap, self._after, self._how = dataset, tap, after, how
        self._state: Mapping[str, Any] | None = None
        self._given: TensorBatches | None = None
        self._reader(0, 1).close()  # a mistake is told here, not in a worker

    def __iter__(self) -> TensorBatches:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._given = TensorBatches(self, worker, workers, self._state)
        return self._given

    def state_dict(self) -> dict[str, Any]:
        """After the last batch given in this process; a loader's worker has a state of its own."""
        return dict(self._state or {}) if self._given is None else self._given.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: the next iterator does."""
        self._state, self._given = state, None

    def reader(self, worker: int, workers: int, state: Mapping[str, Any] | None) -> Shuffled:
        """What one of a loader's workers reads.

        A loader takes batches from its workers in turn, from the first on. So ``after`` batches tell how many each
        gave, and whose turn it was: that one's part is the first worker's now.
        """
        part = (worker + self._after) % workers
        return self._reader(part, workers, state, max(0, -(-(self._after - part) // workers)))

    def _reader(self, worker: int, workers: int, state: Mapping[str, Any] | None = None, after: int = 0) -> Shuffled:
        part = (self._rank * workers + worker, self._world * workers)
        return self._dataset.shuffled(self._tap, part=part, state=state, after=after, **self._how)


class TensorBatches(Iterator[Any]):
    """One worker's iterator; torchdata's ``StatefulDataLoader`` saves and restores it."""

    def __init__(self, source: TorchRows, worker: int, workers: int, state: Mapping[str, Any] | None) -> None:
        self._source, self._worker, self._workers = source, worker, workers
        self._reader = source.reader(worker, workers, state or None)

    def __next__(self) -> Any:
        return _tensors(next(self._reader))

    def state_dict(self) -> dict[str, Any]:
        """After the last batch given."""
        return self._reader.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        self._reader.close()
        self._reader = self._source.reader(self._worker, self._workers, state)
