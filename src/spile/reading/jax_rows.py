"""Shuffled rows on the device: the next batches are on their way while one is used.

Imported only when ``dataset.jax(…)`` is called: reading needs no jax.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from spile.reading.rows import RowBatch
from spile.reading.shuffle import Shuffled

__all__ = ["DeviceBatches", "process_part"]


def process_part() -> tuple[int, int]:
    """The part of the rows that is this process's, where jax runs on several hosts."""
    return jax.process_index(), jax.process_count()


class DeviceBatches(Iterator[Any]):
    """Batches as jax arrays. ``state()`` is that of the last batch given, whatever is on its way."""

    def __init__(self, reader: Shuffled, sharding: Any, ahead: int) -> None:
        self._reader, self._ahead = reader, max(1, ahead)
        self._put = _putter(sharding)
        self._coming: deque[tuple[Any, Mapping[str, Any]]] = deque()
        self._state: Mapping[str, Any] = reader.state()

    def __next__(self) -> Any:
        # A copy to the device returns before it is done: it goes on under the caller's step.
        while len(self._coming) <= self._ahead and (batch := next(self._reader, None)) is not None:
            self._coming.append((self._placed(batch), self._reader.state()))
        if not self._coming:
            raise StopIteration
        batch, self._state = self._coming.popleft()
        return batch

    def state(self) -> dict[str, Any]:
        """What to give to ``dataset.jax(…, state=…)`` to go on after the last batch given."""
        return dict(self._state)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()

    def _placed(self, batch: Any) -> Any:
        if isinstance(batch, RowBatch):
            batch = {name: value for name, value in vars(batch).items() if value is not None}
        return jax.tree.map(lambda part: part if part.dtype == object else self._put(part), batch)


def _putter(sharding: Any) -> Callable[[Any], Any]:
    """Onto the default device, or as each process's part of one array over all of them."""
    if sharding is None:
        return jax.device_put
    return lambda rows: jax.make_array_from_process_local_data(sharding, rows)
