"""Samples as readers see them: tokens, their texts, activation rows by tap, and a heat map for notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt

from spile.errors import SpileError, UserError
from spile.objects.folder import read_ahead
from spile.reading.blocks import SampleTable
from spile.reading.rows import SampleRef, column, role_mask
from spile.spec.amounts import counted
from spile.spec.positions import counted_choice, last_content
from spile.spec.sample import Role
from spile.spec.taps import Tap
from spile.store.ledger import ShardRecord
from spile.store.shard_reader import ShardReader

if TYPE_CHECKING:
    from spile.data.tokens import Tokenizer
    from spile.reading.dataset import Dataset
    from spile.store.stored_stream import Stream

_PARALLEL = 16
_SHARDS_AT_ONCE = 4
_PIECE = 8 << 20  # bytes of one read, approximately
_SHOWN = 400  # tokens of a sample that a heat map shows
_NEWLINE = "↵\n"

_Array = npt.NDArray[Any]
_Found = TypeVar("_Found")


def no_tap(tap: str, known: Sequence[str]) -> UserError:
    """Return the error for a tap that is not there."""
    return UserError(f"no tap {tap} in this dataset", expected=f"one of {', '.join(known)}")


def as_float32(rows: _Array) -> _Array:
    """Return rows as float32; rows of integers, such as token ids, stay as they are."""
    return rows if rows.dtype.kind in "iu" else rows.astype(np.float32, copy=False)


class SampleRows(ABC):
    """One sample: its tokens and their texts, and one activation row per token at each tap."""

    ref: SampleRef
    """The sample's stream, index, task id, length, preview and kept fields."""
    taps: tuple[str, ...]
    _tokenizer: Callable[[], Tokenizer]
    """Returns the tokenizer of the model."""

    tokens: npt.NDArray[np.int32]
    """Token ids of the rows."""
    positions: npt.NDArray[np.int64]
    """Position of each row in the sample, from 0. It differs from the row number if not all tokens have rows."""
    context: npt.NDArray[np.int32]
    """Ids of all tokens that the model read, including tokens without rows."""
    roles: npt.NDArray[np.uint8]
    """The :class:`~spile.spec.sample.Role` bits of each row's token."""

    @abstractmethod
    def rows(self, tap: str | Tap) -> _Array:
        """Return the rows ``[length, d]`` at one tap."""

    def __getitem__(self, tap: str | Tap) -> _Array:
        """Return the rows ``[length, d]`` at one tap as float32."""
        return as_float32(self.rows(tap))

    def __len__(self) -> int:
        return self.ref.length

    @property
    def task_id(self) -> str:
        """The id of the sample's row in the data, or ``line-N``."""
        return self.ref.task_id

    @property
    def labels(self) -> dict[str, Any]:
        """The fields of the sample's row that were kept."""
        return dict(self.ref.kept)

    @cached_property
    def text(self) -> str:
        """The text of all tokens that the model read, including special tokens."""
        return self._tokenizer().decode(self.context.tolist())

    @cached_property
    def token_texts(self) -> list[str]:
        """The text of each row's token. A character of several tokens belongs to the last of them."""
        pieces = self._tokenizer().pieces(self.context.tolist())
        return [pieces[place] for place in self.positions]

    def heat_map(self, tap: str | Tap | None = None, *, values: Sequence[float] | _Array | None = None) -> TokenMap:
        """Return the tokens, coloured by one number for each: for a notebook, or as HTML with ``str()``.

        Args:
            tap: Colour by the norms of the rows at this tap; None takes one in the middle.
            values: Colour by these numbers, such as the activations of a feature, one for each row.
        """
        if values is None:
            chosen = str(tap) if tap is not None else self.taps[len(self.taps) // 2]
            numbers: _Array = np.linalg.norm(self[chosen].astype(np.float64), axis=1)
            return TokenMap(self.shown_texts(), numbers, self.roles, f"norm at {chosen}")
        numbers = np.asarray(values, np.float64)
        if numbers.shape != (len(self),):
            raise UserError("values", expected=f"{len(self)} numbers, one for each row", found=f"shape {numbers.shape}")
        return TokenMap(self.shown_texts(), numbers, self.roles, "value" if tap is None else str(tap))

    def attention(self, layer: int) -> _Array:
        """Return the stored attention weights of a layer, ``[heads, rows, tokens]``; those not stored are 0."""
        taps = [Tap.parse(name) for name in self.taps]
        found = next((tap for tap in taps if (tap.kind, tap.layer) == ("pattern", layer)), None)
        if found is None:
            raise no_tap(f"pattern.{layer}", self.taps)
        shape = (len(self), -1, found.top or 1)
        weights, ids = (self[each].reshape(shape) for each in (found, replace(found, kind="pattern_ids")))
        matrix = np.zeros((*weights.shape[:2], len(self.context) + 1), np.float32)  # The last column takes the padding.
        np.put_along_axis(matrix, ids.astype(np.int64), weights, axis=2)
        return matrix[..., :-1].transpose(1, 0, 2)

    def shown_texts(self) -> list[str]:
        """Return the texts of the tokens, or their ids if the tokenizer is not available."""
        try:
            return self.token_texts
        except SpileError:
            return [f" {token}" for token in self.tokens.tolist()]

    def __repr__(self) -> str:
        preview = self.ref.preview if len(self.ref.preview) <= 40 else f"{self.ref.preview[:40]}…"
        return (
            f"<sample {self.task_id!r}: {counted(len(self), 'row')} at {counted(len(self.taps), 'tap')}, {preview!r}>"
        )

    def _repr_html_(self) -> str:
        title = f"<b>{escape(self.task_id)}</b> · {counted(len(self), 'row')}"
        kept = ", ".join(f"{name}: {value}" for name, value in self.labels.items())
        title += f" · {escape(kept)}" if kept else ""
        return f"<div>{title}</div>" + (str(self.heat_map()) if self.taps and len(self) else "")


class TokenMap:
    """Tokens coloured by one number each. A notebook shows it; ``str()`` returns the HTML."""

    def __init__(self, texts: Sequence[str], values: _Array, roles: _Array, name: str) -> None:
        self._texts, self._values, self._roles, self._name = list(texts), values, roles, name

    def _shares(self) -> _Array:
        """Return the strength of each colour, from -1 to 1. The first token, often an attention sink, is ignored."""
        values = np.nan_to_num(self._values)
        later = (self._roles & Role.FIRST) == 0
        usual = np.abs(values[later] if later.any() else values)
        low = 0.9 * float(usual.min()) if values.min() >= 0 else 0.0
        high = max(float(np.quantile(usual, 0.98)), low + 1e-12)
        size = np.clip((np.abs(values) - low) / (high - low), 0, 1)
        return np.asarray(np.sign(values) * size)

    def __str__(self) -> str:
        spans = []
        for text, value, share in zip(self._texts[:_SHOWN], self._values, self._shares(), strict=False):
            colour = "232,119,34" if share >= 0 else "40,100,199"
            shown = escape(text).replace("\n", _NEWLINE)
            spans.append(
                f'<span title="{escape(repr(text))}: {value:.4g}" '
                f'style="background:rgba({colour},{0.85 * abs(share):.2f})">{shown}</span>'
            )
        more = len(self._texts) - _SHOWN
        tail = f" … and {counted(more, 'more token')}" if more > 0 else ""
        style = "white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.7 ui-monospace,monospace;max-width:60rem"
        about = f'<div style="opacity:.65;font-size:12px">{escape(self._name)}</div>'
        return f'{about}<div style="{style}">{"".join(spans)}{tail}</div>'

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<heat map of {counted(len(self._texts), 'token')}: {self._name}>"


class StoredSample(SampleRows):
    """A sample of a dataset, whose rows are read on request."""

    def __init__(
        self, shard: ShardReader, place: int, ref: SampleRef, taps: Sequence[str], tokenizer: Callable[[], Tokenizer]
    ) -> None:
        self._shard, self._place = shard, place
        self._start, self._stop = shard.bounds(place)
        self.ref, self.taps = ref, tuple(taps)
        self._tokenizer = tokenizer

    @cached_property
    def tokens(self) -> npt.NDArray[np.int32]:  # type: ignore[override]  # read on request
        return self._shard.rows("tokens", self._start, self._stop)

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:  # type: ignore[override]
        return self._shard.positions(self._start, self._stop)

    @cached_property
    def context(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        return self._shard.context(self._place)

    @cached_property
    def roles(self) -> npt.NDArray[np.uint8]:  # type: ignore[override]
        return self._shard.rows("roles", self._start, self._stop)

    def rows(self, tap: str | Tap, first: int = 0, count: int | None = None) -> _Array:
        """Return the rows ``[length, d]`` at one tap in the stored dtype, with one range read.

        Args:
            tap: The tap.
            first: The number of the first row.
            count: The largest number of rows; None takes all.
        """
        if str(tap) not in self.taps:
            raise no_tap(str(tap), self.taps)
        start = min(self._start + first, self._stop)
        return self._shard.rows(str(tap), start, self._stop if count is None else min(start + count, self._stop))

    def all_rows(
        self, taps: Iterable[str | Tap] | None = None, *, first: int = 0, count: int | None = None
    ) -> dict[str, _Array]:
        """Return the rows ``[length, d]`` at all taps, or at the given ones, read in parallel; see :meth:`rows`."""
        names = self.taps if taps is None else tuple(str(tap) for tap in taps)
        calls = (partial(self.rows, name, first, count) for name in names)
        return dict(zip(names, read_ahead(calls, _PARALLEL), strict=True))


class SampleList(Sequence[SampleRef]):
    """The references of all samples in the order of the data. Headers are read on demand."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, shards = dataset, dataset._shards()
        self._table = SampleTable.of(shards)
        self._streams = np.array([stream.number for stream, _ in shards], np.int64)

    def __len__(self) -> int:
        return int(self._table.start[-1])

    @overload
    def __getitem__(self, place: int) -> SampleRef: ...
    @overload
    def __getitem__(self, place: slice) -> list[SampleRef]: ...
    def __getitem__(self, place: int | slice) -> SampleRef | list[SampleRef]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return self._dataset.sample(*self.address(place)).ref

    def address(self, place: int) -> tuple[int, int]:
        """Return the stream and the index of the sample at this place."""
        number = place + len(self) if place < 0 else place
        if not 0 <= number < len(self):
            raise IndexError(f"sample {place} of {len(self)}")
        return self.addresses(np.array([number]))[0]

    def addresses(self, places: npt.NDArray[np.int64] | None = None) -> list[tuple[int, int]]:
        """Return the stream and the index of the samples at these places, or of all samples."""
        shard, index = self._table.find(np.arange(len(self)) if places is None else places)
        return list(zip(self._streams[shard].tolist(), index.tolist(), strict=True))

    @cached_property
    def by_key(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Stream and index of each sample, in order, by a key that two datasets of the same input share."""
        streams = {stream.number: stream for stream in self._dataset.streams}
        return {streams[number].key(index): (number, index) for number, index in self.addresses()}

    def __repr__(self) -> str:
        return f"<{counted(len(self), 'sample')} of {self._dataset.root.url}>"


# -- one row per sample -----------------------------------------------------------------------------------------------

Pool = Callable[[npt.NDArray[np.float32]], npt.ArrayLike]
"""A function of the rows ``[n, d]`` of a sample that returns one row ``[d]``."""
RowPositions = Literal["last", "last-content", "first", "mean", "all"] | str | int | Pool
"""Which rows of a sample are taken: one of them, their mean, all, ``first:8``, the row with this number, or a function
of the rows."""


@dataclass(frozen=True)
class RowChoice:
    """Which rows of each sample are taken, of those whose roles are selected."""

    positions: RowPositions = "last"
    include: int | None = None
    exclude: int | None = None

    def __post_init__(self) -> None:
        names = get_args(get_args(RowPositions)[0])
        known = isinstance(self.positions, str) and (self.positions in names or self._first)
        if not known and type(self.positions) is not int and not callable(self.positions):
            expected = "last, last-content, first, first:8, mean, all, the number of a row, or a function of the rows"
            raise UserError("positions", expected=expected, found=repr(self.positions))

    @property
    def _first(self) -> int:
        """The number of rows of ``first:8``, otherwise 0."""
        kind, count = (counted_choice(self.positions) if isinstance(self.positions, str) else None) or ("", 0)
        return count if kind == "first" else 0

    @property
    def many(self) -> bool:
        """Whether a sample may have several rows, or none."""
        return self.positions == "all" or self._first > 0

    def pick(self, roles: _Array, name: str) -> _Array:
        """Return the numbers of the chosen rows of a sample whose rows have these roles."""
        rows = np.flatnonzero(role_mask(roles, self.include, self.exclude))
        if self.many:
            return rows[: self._first or None]
        if self.positions == "last-content":
            rows = rows[last_content(roles[rows])]
        number = self.positions if isinstance(self.positions, int) else -1 if self.positions == "last" else 0
        if not -len(rows) <= number < len(rows):
            raise UserError(
                f"sample {name} has no row for positions={self.positions!r}",
                found=f"{counted(len(rows), 'row')} after include and exclude",
            )
        return rows if self.positions == "mean" or callable(self.positions) else rows[[number]]

    def reduce(self, rows: _Array) -> _Array:
        """Return the chosen rows of a sample; with ``mean`` or a function, one row made of them."""
        if self.positions == "mean":
            return np.asarray(rows.mean(axis=0, keepdims=True), np.float32)
        if not callable(self.positions):
            return rows
        pooled = np.asarray(self.positions(rows), np.float32)
        if pooled.ndim != 1:
            expected = "a function that returns one row [d]"
            raise UserError("positions", expected=expected, found=f"shape {pooled.shape}")
        return pooled[None]


def sample_matrix(dataset: Dataset, tap: str, choice: RowChoice) -> _Array:
    """Return the chosen rows of every sample at one tap, as float32 and in the order of the data."""

    def read(shard: ShardReader) -> list[_Array]:
        chosen = _chosen_rows(shard, choice)
        rows = _gathered(shard, tap, np.concatenate(chosen))
        ends = np.cumsum([len(numbers) for numbers in chosen])[:-1]
        return [choice.reduce(each) for each in np.split(rows, ends)]

    found = _of_samples(dataset, dataset._shards((tap,)), read)
    return np.concatenate(found) if found else np.zeros((0, 0), np.float32)


def sample_labels(dataset: Dataset, name: str, choice: RowChoice) -> _Array:
    """Return a kept field of every sample, in the order of the data; of every chosen row if all rows are chosen."""
    known: set[str] = set()

    def read(shard: ShardReader) -> list[list[Any]]:
        kept = [note.get("kept", {}) for note in shard.notes]
        known.update(*kept)
        counts = map(len, _chosen_rows(shard, choice)) if choice.many else [1] * len(kept)
        return [[each.get(name)] * count for each, count in zip(kept, counts, strict=True)]

    found = _of_samples(dataset, dataset._shards(), read)
    if found and name not in known:
        raise UserError(
            f"no field {name} is stored with the samples of {dataset.root.url}",
            expected=f"one of {', '.join(sorted(known))}" if known else "fields that were kept",
            found="none" if not known else None,
            fix=f"extract with keep=[{name!r}], or --keep {name}",
        )
    return column([value for values in found for value in values]) if found else np.zeros(0)


def _of_samples(
    dataset: Dataset,
    shards: Sequence[tuple[Stream, ShardRecord]],
    read: Callable[[ShardReader], Sequence[_Found]],
) -> list[_Found]:
    """Return what ``read`` returns for each sample of each shard, in the order of the data."""
    table = SampleTable.of(shards)
    groups = table.by_shard(np.arange(table.start[-1]))
    found: dict[int, _Found] = {}

    def of_shard(shard: ShardReader, indices: _Array) -> list[_Found]:
        values = read(shard)
        return [values[place] for place in shard.places_of(indices).tolist()]

    calls = (partial(of_shard, dataset._open_shard(*shards[shard]), indices) for shard, _, indices in groups)
    for (_, numbers, _), values in zip(groups, read_ahead(calls, _SHARDS_AT_ONCE), strict=True):
        found.update(zip(numbers.tolist(), values, strict=True))
    return [found[number] for number in range(len(found))]


def _chosen_rows(shard: ShardReader, choice: RowChoice) -> list[_Array]:
    """Return the numbers of the chosen rows of each sample."""
    offsets, roles, notes = shard.read_tensor("offsets"), shard.read_tensor("roles"), shard.notes
    return [
        start + choice.pick(roles[start:stop], notes[place]["task_id"])
        for place, (start, stop) in enumerate(pairwise(offsets.tolist()))
    ]


def _gathered(shard: ShardReader, tap: str, numbers: _Array) -> _Array:
    """Read rows by their numbers, piece by piece, so that only the chosen rows are held."""
    dtype, width = shard.row_type(tap)
    step = max(1, _PIECE // max(1, dtype.itemsize * width))
    parts = []
    for first in range(0, shard.record.tokens, step):
        low, high = np.searchsorted(numbers, [first, first + step])
        if low < high:
            start, stop = int(numbers[low]), int(numbers[high - 1]) + 1
            parts.append(as_float32(shard.rows(tap, start, stop)[numbers[low:high] - start]))
    return np.concatenate(parts) if parts else np.zeros((0, width), np.float32)
