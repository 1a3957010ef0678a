"""Which rows: by role, position, token, norm and sample. What a shard's tail tells is decided before rows are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import UserError
from spile.store.shard_reader import ShardReader

__all__ = ["SampleRef", "Selection", "kept_fields", "positions_of", "ref_of", "selection_of"]

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SampleRef:
    """What a listing knows of a sample."""

    stream: int
    index: int
    task_id: str
    length: int
    """Rows at every tap: its tokens, unless the run stored some of them only."""
    preview: str
    augmentation: dict[str, Any] | None = None
    truncated: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The fields of its row that ``--keep`` named."""


def ref_of(stream: int, shard: ShardReader, place: int) -> SampleRef:
    """The sample at this place of a shard."""
    note = shard.notes[place]
    offsets = shard.whole("offsets")
    return SampleRef(
        stream=stream,
        index=int(shard.whole("sample_index")[place]),
        task_id=note["task_id"],
        length=int(offsets[place + 1] - offsets[place]),
        preview=note["preview"],
        augmentation=note.get("augmentation"),
        truncated=note.get("truncated", 0),
        kept=note.get("kept", {}),
    )


def kept_fields(shard: ShardReader, first: int, last: int) -> dict[str, npt.NDArray[Any]]:
    """Each field that ``--keep`` named, of a shard's samples from the ``first`` to before the ``last``."""
    kept = [note.get("kept", {}) for note in shard.notes[first:last]]
    return {name: _column([each[name] for each in kept]) for name in kept[0]} if kept else {}


def _column(values: list[Any]) -> npt.NDArray[Any]:
    """Numbers, where all are; else objects, so that no text is cut and no list becomes a row."""
    if {type(value) for value in values} in ({bool}, {int}, {float}, {int, float}):
        return np.array(values)
    column = np.empty(len(values), object)
    for place, value in enumerate(values):
        column[place] = value
    return column


def positions_of(shard: ShardReader, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Each row's place in its sample, from 0."""
    return shard.positions(start, stop)


@dataclass(frozen=True)
class Selection:
    """Rows that meet every condition given; a field that is None sets none."""

    include: int | None = None
    """Rows with any of these :class:`~spile.spec.sample.Role` bits."""
    exclude: int | None = None
    """Not rows with any of those."""
    positions: tuple[int, int | None] | None = None
    """Places in the sample, from the first to before the second."""
    tokens: frozenset[int] | None = None
    """Rows of these token ids."""
    without_tokens: frozenset[int] | None = None
    """Not rows of those."""
    min_norm: float | None = None
    max_norm: float | None = None
    """Of the first tap's rows. Attention sinks have norms far above all others: ``dataset.stats(tap).sink_norm``."""
    samples: Callable[[SampleRef], bool] | None = None
    """Rows of the samples for which this is true."""

    @property
    def by_norm(self) -> bool:
        """Whether rows must be read before it is known which are wanted."""
        return self.min_norm is not None or self.max_norm is not None

    @property
    def by_tail(self) -> bool:
        """Whether anything but norms is asked for."""
        return any(value is not None for name, value in vars(self).items() if not name.endswith("_norm"))

    def mask(self, stream: int, shard: ShardReader, start: int, stop: int) -> _Mask:
        """Of rows ``start`` to ``stop`` of a shard, those that are wanted as far as its tail tells."""
        wanted = np.ones(stop - start, np.bool_)
        if self.include is not None or self.exclude is not None:
            roles = shard.whole("roles")[start:stop]
            if self.include is not None:
                wanted &= (roles & self.include) != 0
            if self.exclude is not None:
                wanted &= (roles & self.exclude) == 0
        if self.tokens is not None:
            wanted &= np.isin(shard.whole("tokens")[start:stop], list(self.tokens))
        if self.without_tokens is not None:
            wanted &= ~np.isin(shard.whole("tokens")[start:stop], list(self.without_tokens))
        if self.positions is not None:
            first, last = self.positions
            place = positions_of(shard, start, stop)
            wanted &= (place >= first) & (place < (last if last is not None else np.iinfo(np.int64).max))
        if self.samples is not None:
            wanted &= self._of_samples(stream, shard, start, stop)
        return wanted

    def _of_samples(self, stream: int, shard: ShardReader, start: int, stop: int) -> _Mask:
        assert self.samples is not None  # noqa: S101  for the type checker
        offsets = shard.whole("offsets")
        place = np.searchsorted(offsets, np.arange(start, stop), side="right") - 1
        first, last = int(place[0]), int(place[-1])
        chosen = [bool(self.samples(ref_of(stream, shard, number))) for number in range(first, last + 1)]
        return np.array(chosen, np.bool_)[place - first]

    def of_norm(self, norms: npt.NDArray[np.float32]) -> _Mask:
        """Those within the bounds."""
        return np.asarray(
            (norms >= (-np.inf if self.min_norm is None else self.min_norm))
            & (norms <= (np.inf if self.max_norm is None else self.max_norm))
        )

    def describe(self) -> dict[str, Any]:
        """As a reader's state keeps it; a predicate by its name."""
        plain = {name: value for name, value in asdict(self).items() if value is not None and name != "samples"}
        found = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in plain.items()}
        if self.samples is not None:
            found["samples"] = getattr(self.samples, "__qualname__", type(self.samples).__name__)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def selection_of(
    include: int | None = None,
    exclude: int | None = None,
    positions: tuple[int, int | None] | range | None = None,
    tokens: Iterable[int] | None = None,
    without_tokens: Iterable[int] | None = None,
    min_norm: float | None = None,
    max_norm: float | None = None,
    samples: Callable[[SampleRef], bool] | None = None,
) -> Selection:
    """From what a caller finds convenient to write."""
    if isinstance(positions, range):
        if positions.step != 1:
            raise UserError("positions", expected="a range without a step", found=positions)
        positions = (positions.start, positions.stop)
    return Selection(
        include=None if include is None else int(include),
        exclude=None if exclude is None else int(exclude),
        positions=positions,
        tokens=None if tokens is None else frozenset(map(int, tokens)),
        without_tokens=None if without_tokens is None else frozenset(map(int, without_tokens)),
        min_norm=min_norm,
        max_norm=max_norm,
        samples=samples,
    )
