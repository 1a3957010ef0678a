"""Readers of shuffled activation rows, the same for stored and for streamed rows: NumPy, torch, JAX and Grain."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy.typing as npt

from spile.errors import UserError
from spile.reading.blocks import JointBlocks
from spile.reading.rows import BlockOptions, BlockSource, RowBatch, SampleRef, Selection
from spile.reading.shuffle import MEMORY, RowOrder, Shuffled, ShufflePlan
from spile.spec.taps import Tap

if TYPE_CHECKING:
    from spile.reading.grain_rows import GrainRows
    from spile.reading.torch_rows import TorchRows


class SelectionOptions(TypedDict, total=False):
    """Conditions on rows, as in :class:`~spile.reading.rows.Selection`."""

    include: int | None
    exclude: int | None
    positions: tuple[int, int | None] | range | None
    tokens: Iterable[int] | None
    without_tokens: Iterable[int] | None
    min_norm: float | None
    max_norm: float | None
    samples: Callable[[SampleRef], bool] | None


class ShuffleOptions(SelectionOptions, total=False):
    """The arguments of :meth:`Dataset.shuffled`, for the adapters of torch, JAX and Grain."""

    batch_rows: int
    order: RowOrder
    seed: int
    epochs: int | None
    memory: int
    buffer_rows: int | None
    part: tuple[int, int]
    drop_last: bool
    dtype: npt.DTypeLike | None
    context: bool | int
    streams: Iterable[int] | None
    state: Mapping[str, Any] | None
    after: int


class ShuffledReaders(ABC):
    """Readers of shuffled activation rows, for NumPy, torch, JAX and Grain."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the rows come from, for display."""

    @abstractmethod
    def _source(self, taps: tuple[str, ...], options: BlockOptions) -> BlockSource:
        """Return the rows of some taps as a source of shuffle blocks."""

    def shuffled(
        self,
        tap: str | Tap | Sequence[str | Tap],
        batch_rows: int = 4096,
        *,
        order: RowOrder = "random",
        seed: int = 0,
        epochs: int | None = 1,
        memory: int = MEMORY,
        buffer_rows: int | None = None,
        part: tuple[int, int] = (0, 1),
        drop_last: bool = False,
        dtype: npt.DTypeLike | None = None,
        context: bool | int = False,
        streams: Iterable[int] | None = None,
        state: Mapping[str, Any] | None = None,
        after: int = 0,
        **selection: Unpack[SelectionOptions],
    ) -> Shuffled:
        """Return the rows of a tap, or the rows of several taps that belong together, in random order.

        Each epoch gives every selected row once, in the order that :mod:`spile.reading.shuffle` describes.

        Args:
            tap: A tap, or a sequence of taps.
            batch_rows: Rows of a batch.
            order: ``random`` mixes all samples, ``data`` those next to each other, as :func:`spile.stream` does.
            seed: Chooses the order.
            epochs: Passes over the rows. None: no end, and all batches are full.
            memory: Size of the shuffle buffer in bytes.
            buffer_rows: Size of the shuffle buffer in rows, instead of ``memory``. Two datasets of the same samples
                then have the same order, even if the width or the dtype of their rows differs.
            part: (k, n) makes this reader number k of n readers, whose rows are disjoint and together complete.
            drop_last: Leave out rows that do not fill a batch; each of n readers gives the same number of batches.
            dtype: Convert batches to this dtype.
            context: True: give each batch as a :class:`~spile.reading.rows.RowBatch` with tokens, roles and positions.
                A number from 2: give each row after the rows of the tokens before it, ``[batch_rows, context, d]``.
                Tokens that have fewer selected predecessors in their sample are left out.
            streams: Read only these streams.
            state: Continue where this result of ``state()`` was taken.
            after: Continue after this many batches.
            selection: Fields of :class:`~spile.reading.rows.Selection`: ``include``, ``exclude``, ``positions``,
                ``tokens``, ``without_tokens``, ``min_norm``, ``max_norm`` and ``samples``.
        """
        if unknown := selection.keys() - SelectionOptions.__annotations__.keys():
            raise _unknown_argument(min(unknown))
        with_context, window = _parse_context(context)
        names = (str(tap),) if isinstance(tap, str | Tap) else tuple(map(str, tap))
        source = self._source(names, BlockOptions(Selection(**selection), with_context, window, streams))
        if memory < 1:
            raise UserError("memory", expected="at least 1", found=memory)
        rows = max(1, memory // max(1, source.row_bytes)) if buffer_rows is None else buffer_rows
        plan = ShufflePlan(
            rows, batch_rows, seed, *part, drop_last, order, source.samples, source.rows, source.remote, window > 1
        )
        single = isinstance(tap, str | Tap) and not isinstance(source, JointBlocks)
        return Shuffled(plan, source, names, epochs=epochs, dtype=dtype, single=single, state=state, after=after)

    def torch(
        self,
        tap: str | Tap | Sequence[str | Tap],
        *,
        rank: int | None = None,
        world: int | None = None,
        **options: Unpack[ShuffleOptions],
    ) -> TorchRows:
        """Return :meth:`shuffled` as a torch ``IterableDataset``, for ``DataLoader(…, batch_size=None)`` and DDP.

        Args:
            tap: A tap, or a sequence of taps.
            rank: The number of this process; None takes that of torch.distributed if it is initialised.
            world: The number of processes.
            options: Arguments of :meth:`shuffled`; ``after`` is the number of batches that the loader of this process
                gave before, over all its workers.
        """
        from spile.reading.torch_rows import TorchRows

        return TorchRows(self, tap, rank=rank, world=world, **options)

    def jax(
        self,
        tap: str | Tap | Sequence[str | Tap],
        *,
        sharding: Any = None,
        ahead: int = 2,
        **options: Unpack[ShuffleOptions],
    ) -> DeviceBatches:
        """Return :meth:`shuffled` as JAX arrays that are copied to the device before they are needed.

        If JAX runs in several processes, each reads its own part of the rows.

        Args:
            tap: A tap, or a sequence of taps.
            sharding: Makes the batches of all processes parts of one global array.
            ahead: Batches that are copied ahead.
            options: Arguments of :meth:`shuffled`.
        """
        import jax

        options.setdefault("part", (jax.process_index(), jax.process_count()))
        return DeviceBatches(self.shuffled(tap, **options), sharding, ahead)

    def grain(self, tap: str | Tap | Sequence[str | Tap], **options: Unpack[ShuffleOptions]) -> GrainRows:
        """Return :meth:`shuffled` as a ``grain.IterDataset`` of batches, which Grain can checkpoint."""
        from spile.reading.grain_rows import GrainRows

        return GrainRows(self, tap, **options)


def _unknown_argument(name: str) -> TypeError:
    near = difflib.get_close_matches(name, ShuffleOptions.__annotations__, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return TypeError(f"shuffled() got an unexpected keyword argument {name!r}{hint}")


def _parse_context(context: bool | int) -> tuple[bool, int]:
    """Return whether batches have tokens, roles and positions, and the number of rows that each token is given with."""
    if isinstance(context, bool) or context == 1:
        return bool(context), 1
    if context < 1:
        raise UserError("context", expected="True, False or a number of tokens from 2", found=context)
    return False, context


class DeviceBatches(Iterator[Any]):
    """Batches as JAX arrays. ``state()`` is the state after the last batch given, not after the last one copied."""

    def __init__(self, reader: Shuffled, sharding: Any, ahead: int) -> None:
        self._reader, self._sharding, self._ahead = reader, sharding, max(1, ahead)
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
        return self.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reader.load_state_dict(state)
        self._coming.clear()
        self._state = self._reader.state()

    def close(self) -> None:
        self._reader.close()

    def _placed(self, batch: Any) -> Any:
        import jax

        if isinstance(batch, RowBatch):
            batch = {name: value for name, value in vars(batch).items() if value is not None}
        return jax.tree.map(lambda part: part if part.dtype == object else self._put(part), batch)

    def _put(self, rows: Any) -> Any:
        """Copy to the default device, or make this process's part of a global array."""
        import jax

        if self._sharding is None:
            return jax.device_put(rows)
        return jax.make_array_from_process_local_data(self._sharding, rows)
