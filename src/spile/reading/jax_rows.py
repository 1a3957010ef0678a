"""Shuffled rows as JAX arrays: the next batches are copied to the device while one is used.

This module is imported only by ``dataset.jax(…)``, so that reading does not need JAX.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from spile.reading.rows import RowBatch
from spile.reading.shuffle import Shuffled


def process_part() -> tuple[int, int]:
    """Return (k, n): this process is number k of the n processes of JAX."""
    return jax.process_index(), jax.process_count()


class DeviceBatches(Iterator[Any]):
    """Batches as JAX arrays. ``state()`` is the state after the last batch given, not after the last one copied."""

    def __init__(self, reader: Shuffled, sharding: Any, ahead: int) -> None:
        self._reader, self._ahead = reader, max(1, ahead)
        self._put = _putter(sharding)
        self._coming: deque[tuple[Any, Mapping[str, Any]]] = deque()
        self._state: Mapping[str, Any] = self._reader.state()

    def __next__(self) -> Any:
        # A copy to the device returns before it is complete and continues during the caller's step.
        while len(self._coming) <= self._ahead and (batch := next(self._reader, None)) is not None:
            self._coming.append((self._placed(batch), self._reader.state()))
        if not self._coming:
            raise StopIteration
        batch, self._state = self._coming.popleft()
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state after the last batch, for ``dataset.jax(…, state=…)``."""
        return dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch, as torch and torchdata name it."""
        return self.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._reader.load_state_dict(state)
        self._coming.clear()
        self._state = self._reader.state()

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()

    def _placed(self, batch: Any) -> Any:
        if isinstance(batch, RowBatch):
            batch = {name: value for name, value in vars(batch).items() if value is not None}
        return jax.tree.map(lambda part: part if part.dtype == object else self._put(part), batch)


def _putter(sharding: Any) -> Callable[[Any], Any]:
    """Return a function that copies to the default device, or makes this process's part of a global array."""
    if sharding is None:
        return jax.device_put
    return lambda rows: jax.make_array_from_process_local_data(sharding, rows)
