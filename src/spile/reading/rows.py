"""Rows of a tap: their context, which of them are selected, reading them in order, and sources of rows."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import UserError
from spile.objects.machine import local_cores

if TYPE_CHECKING:
    from spile.reading.shuffle import ShufflePlan
    from spile.store.shard_reader import ShardReader

ROW_BITS = 32
"""The lower bits of the key of a row: its place in its sample. The others are the number of the sample."""
_READ_BYTES = 4 << 20  # bytes that one call of a shuffled reader reads and checks, approximately
_BUCKET_THREADS = 16
_DISK_THREADS = 4

_Array = npt.NDArray[Any]
_Mask = npt.NDArray[np.bool_]
_Numbers = npt.NDArray[np.int64]


class InputStream(Protocol):
    """What readers know of the stream of a shard."""

    number: int

    def place(self, index: Any) -> Any:
        """Return the number in the input of a sample, or the numbers of several."""


@dataclass(frozen=True)
class SampleRef:
    """A sample in a listing: where it is stored, and a short description."""

    stream: int
    index: int
    task_id: str
    length: int
    """Rows at every tap: the number of tokens, unless the run stored only some of them."""
    preview: str
    augmentation: dict[str, Any] | None = None
    truncated: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the sample's input row that ``--keep`` named."""
    place: int = 0
    """The number in the input, which counts skipped samples too; in a prepared stream, the index."""


def ref_of(stream: InputStream, shard: ShardReader, place: int) -> SampleRef:
    """Return the reference of the sample at this place of a shard."""
    note = shard.notes[place]
    offsets = shard.read_tensor("offsets")
    index = int(shard.read_tensor("sample_index")[place])
    return SampleRef(
        stream=stream.number,
        index=index,
        task_id=note["task_id"],
        length=int(offsets[place + 1] - offsets[place]),
        preview=note["preview"],
        augmentation=note.get("augmentation"),
        truncated=note.get("truncated", 0),
        kept=note.get("kept", {}),
        place=int(stream.place(index)),
    )


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows of one tap. The other fields are None unless they were requested."""

    rows: _Array
    tokens: _Array | None = None
    roles: _Array | None = None
    streams: _Array | None = None
    samples: _Array | None = None
    """Index of each row's sample in its stream."""
    positions: _Array | None = None
    """Position of each row in its sample, from 0."""
    places: _Array | None = None
    """Number of each row's sample in the input, which counts skipped samples too; in a prepared stream, its index."""
    kept: Mapping[str, _Array] | None = None
    """The fields that ``--keep`` named, of each row's sample: numbers if all values are numbers, otherwise objects."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Any) -> RowBatch:
        """Return these rows with their context."""
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return RowBatch(**{name: _each(lambda part: part[which], part) for name, part in parts if part is not None})

    @staticmethod
    def join(parts: list[RowBatch]) -> RowBatch:
        """Concatenate batches; a single one is not copied."""
        if len(parts) == 1:
            return parts[0]
        known = [field.name for field in fields(RowBatch) if field.name not in ("rows", "kept")]
        names = ["rows", *(name for name in known if getattr(parts[0], name) is not None)]
        joined = {name: _concatenate([getattr(part, name) for part in parts]) for name in names}
        return RowBatch(**joined, kept=_joined_fields(parts))


def _each(change: Callable[[_Array], _Array], part: Any) -> Any:
    return {name: change(array) for name, array in part.items()} if isinstance(part, Mapping) else change(part)


def _concatenate(parts: list[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def _joined_fields(parts: list[RowBatch]) -> dict[str, _Array] | None:
    """Concatenate the kept fields of batches; a field that a batch does not have is None in its rows."""
    names = dict.fromkeys(name for part in parts for name in part.kept or ())
    empty = {id(part): np.full(len(part), None) for part in parts}
    found = {name: np.concatenate([(part.kept or {}).get(name, empty[id(part)]) for part in parts]) for name in names}
    return found or None


def context_of(stream: InputStream, shard: ShardReader, first: int, last: int) -> RowBatch:
    """Return the context of rows ``first`` to before ``last`` of a shard, without the rows themselves."""
    numbers = np.arange(first, last)
    sample = np.searchsorted(shard.read_tensor("offsets"), numbers, side="right") - 1
    begin, end = (int(sample[0]), int(sample[-1]) + 1) if len(sample) else (0, 0)
    indices = shard.read_tensor("sample_index")[sample]
    return RowBatch(
        rows=np.empty((len(numbers), 0), np.float32),
        tokens=shard.read_tensor("tokens")[first:last],
        roles=shard.read_tensor("roles")[first:last],
        streams=np.full(len(numbers), stream.number),
        samples=indices,
        positions=shard.positions(first, last),
        places=np.asarray(stream.place(indices)),
        kept={name: values[sample - begin] for name, values in _kept_fields(shard, begin, end).items()} or None,
    )


def _kept_fields(shard: ShardReader, first: int, last: int) -> dict[str, _Array]:
    """Return each field that ``--keep`` named, of the samples from ``first`` to before ``last`` of a shard."""
    kept = [note.get("kept", {}) for note in shard.notes[first:last]]
    names = dict.fromkeys(name for each in kept for name in each)  # A row may not have a field that others have.
    return {name: column([each.get(name) for each in kept]) for name in names}


def column(values: list[Any]) -> _Array:
    """Return numbers as an array of numbers, anything else as objects, so that no text is cut to a common length."""
    if {type(value) for value in values} in ({bool}, {int}, {float}, {int, float}):
        return np.array(values)
    objects = np.empty(len(values), object)
    for place, value in enumerate(values):
        objects[place] = value
    return objects


def role_mask(roles: _Array, include: int | None, exclude: int | None) -> _Mask:
    """Return which rows have any of the role bits ``include`` and none of ``exclude``; None is no condition."""
    mask = np.ones(len(roles), np.bool_)
    if include is not None:
        mask &= (roles & int(include)) != 0
    if exclude is not None:
        mask &= (roles & int(exclude)) == 0
    return mask


@dataclass(frozen=True)
class Selection:
    """Rows that meet every given condition; a field that is None is no condition."""

    include: int | None = None
    """Rows with any of these :class:`~spile.spec.sample.Role` bits."""
    exclude: int | None = None
    """Rows with none of these bits."""
    positions: tuple[int, int | None] | range | None = None
    """Positions in the sample, from the first to before the second."""
    tokens: Iterable[int] | None = None
    """Rows of these token ids."""
    without_tokens: Iterable[int] | None = None
    """Rows of any other token id."""
    min_norm: float | None = None
    max_norm: float | None = None
    """Norms of the first tap's rows. Attention sinks have very large norms: ``dataset.stats(tap).sink_norm``."""
    samples: Callable[[SampleRef], bool] | None = None
    """Rows of the samples for which this function returns True."""

    def __post_init__(self) -> None:
        if isinstance(self.positions, range):
            if self.positions.step != 1:
                raise UserError("positions", expected="a range without a step", found=self.positions)
            object.__setattr__(self, "positions", (self.positions.start, self.positions.stop))
        for name in ("include", "exclude"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("tokens", "without_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, frozenset(map(int, getattr(self, name))))

    @property
    def by_norm(self) -> bool:
        """Whether rows must be read to decide which are selected."""
        return self.min_norm is not None or self.max_norm is not None

    @property
    def by_metadata(self) -> bool:
        """Whether there is a condition other than norms, which is decided without reading rows."""
        return any(value is not None for name, value in vars(self).items() if not name.endswith("_norm"))

    def mask(self, stream: InputStream, shard: ShardReader, start: int, stop: int) -> _Mask:
        """Return which of the rows ``start`` to ``stop`` of a shard meet all conditions but those on norms."""
        wanted = np.ones(stop - start, np.bool_)
        if self.include is not None or self.exclude is not None:
            wanted &= role_mask(shard.read_tensor("roles")[start:stop], self.include, self.exclude)
        if self.tokens is not None:
            wanted &= np.isin(shard.read_tensor("tokens")[start:stop], list(self.tokens))
        if self.without_tokens is not None:
            wanted &= ~np.isin(shard.read_tensor("tokens")[start:stop], list(self.without_tokens))
        if self.positions is not None:
            first, last = self.positions
            position = shard.positions(start, stop)
            wanted &= (position >= first) & (position < (last if last is not None else np.iinfo(np.int64).max))
        if self.samples is not None:
            wanted &= self._sample_mask(stream, shard, start, stop)
        return wanted

    def _sample_mask(self, stream: InputStream, shard: ShardReader, start: int, stop: int) -> _Mask:
        assert self.samples is not None  # noqa: S101  for the type checker
        if start == stop:
            return np.zeros(0, np.bool_)
        place = np.searchsorted(shard.read_tensor("offsets"), np.arange(start, stop), side="right") - 1
        first, last = int(place[0]), int(place[-1])
        chosen = [bool(self.samples(ref_of(stream, shard, number))) for number in range(first, last + 1)]
        return np.array(chosen, np.bool_)[place - first]

    def norm_mask(self, norms: npt.NDArray[np.float32]) -> _Mask:
        return np.asarray(
            (norms >= (-np.inf if self.min_norm is None else self.min_norm))
            & (norms <= (np.inf if self.max_norm is None else self.max_norm))
        )

    def describe(self) -> dict[str, Any]:
        """Return the conditions as plain JSON, for a reader's state; a function by its name and content."""
        plain = {name: value for name, value in asdict(self).items() if value is not None and name != "samples"}
        found = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in plain.items()}
        if self.samples is not None:
            name = getattr(self.samples, "__qualname__", type(self.samples).__qualname__)
            found["samples"] = f"{name} {hashlib.sha256(_content(self.samples).encode()).hexdigest()[:16]}"
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _content(value: Any, depth: int = 8) -> str:
    """Return text that differs for functions with different code, or with different plain values in their closures.

    The name of a function does not identify it: all lambdas in one function share a name. ``depth`` bounds how far
    functions that contain each other are followed.
    """
    if not depth:
        return ""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        value = [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    elif isinstance(value, types.CodeType):
        value = [value.co_code, value.co_names, value.co_consts]
    elif isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    elif isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, set | frozenset):
        return f"set{sorted(_content(each, depth - 1) for each in value)}"
    if isinstance(value, list | tuple):
        return f"list{[_content(each, depth - 1) for each in value]}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str | bytes) else type(value).__name__


def rebatch(parts: Iterable[RowBatch], batch_rows: int) -> Iterator[RowBatch]:
    """Yield the rows of all parts in batches of ``batch_rows``; the last batch may be shorter."""
    waiting: list[RowBatch] = []
    held = 0
    for part in parts:
        if not len(part):
            continue
        waiting.append(part)
        held += len(part)
        while held >= batch_rows:
            joined = RowBatch.join(waiting)
            # Many batches may be in one part: slice it, copy nothing.
            yield joined.take(slice(0, batch_rows))
            rest = joined.take(slice(batch_rows, None))
            waiting, held = ([rest], len(rest)) if len(rest) else ([], 0)
    if waiting:
        yield RowBatch.join(waiting)


class ReaderClosed(Exception):
    """The reader was closed while a group was loading."""


class RowChunk(NamedTuple):
    """Selected rows of some samples."""

    keys: _Numbers
    """Numbers that order rows by sample and by their place in it."""
    rows: Mapping[str, Sequence[_Array]]
    """Tap → rows, in one or several arrays."""
    context: RowBatch | None
    """Tokens, roles, streams, samples and positions of the rows, if they were requested."""


Read = Callable[[], RowChunk | None]
"""Reads rows; None: no row is selected. Several may run at the same time, in threads."""


class OrderedRows(NamedTuple):
    """Rows of consecutive samples in the order of the data, or of a part of one sample."""

    samples: _Numbers
    """The numbers of the samples, counted from 0 in the order of the data."""
    part: int
    """The number of the part; 0 unless the sample was divided."""
    last: bool
    """Whether the samples have no rows after these."""
    chunk: RowChunk | None

    @property
    def sample_of_row(self) -> _Numbers:
        """The place in ``samples`` of each row's sample."""
        keys = np.zeros(0, np.int64) if self.chunk is None else self.chunk.keys
        return np.searchsorted(self.samples, keys >> ROW_BITS)


class RowGroup(NamedTuple):
    """Samples whose rows are loaded together."""

    first: int
    """In the order of the data: the number of its first sample, from which a reader can continue."""
    last: bool
    """Whether no group follows in this epoch."""
    reads: Iterator[Read]


class BlockOptions(NamedTuple):
    """Which rows a source of shuffle blocks gives, and in which form."""

    selection: Selection
    context: bool
    window: int
    streams: Iterable[int] | None


class BlockSource:
    """Rows of some taps, read in blocks: from stored shards, or from a running model.

    Samples are numbered in the order of the data. A source that has its own :meth:`groups` needs
    neither :meth:`reads` nor :meth:`counts` nor :meth:`data_order`: it has the order of the data only.
    """

    selection: Selection
    identity: str = ""
    """A hash of the run and its samples, for the state of a reader."""
    window: int = 1
    """Tokens of a row. With 2, a row is the rows of a token's predecessor and of the token itself."""
    samples: int = 0
    rows: int = 0
    """Rows of all samples, before the selection."""
    remote: bool = False
    """Whether the rows are in a bucket."""

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return the dtype and the number of columns of each tap; a row has the columns of all tokens of a window."""
        raise NotImplementedError

    def reads(self, samples: _Numbers, part: _Numbers, parts: int) -> Iterator[Read]:
        """Yield calls that read the selected rows of part ``part[i]`` of ``parts`` of each ``samples[i]``.

        Part p of n of a sample with r rows is the rows from ``r * p // n`` to ``r * (p + 1) // n``.
        """
        raise NotImplementedError

    def counts(self, parts: int) -> _Numbers:
        """Return the number of selected rows ``[samples, parts]``, without reading rows."""
        raise NotImplementedError

    def data_order(self) -> tuple[_Numbers, _Numbers]:
        """Return the number in the input and the number of rows, before the selection, of each sample."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * columns for dtype, columns in self.types().values())

    @property
    def threads(self) -> int:
        """Reads that should run at the same time."""
        return _BUCKET_THREADS if self.remote else min(_DISK_THREADS, max(2, len(local_cores())))

    def samples_per_read(self, parts: int) -> int:
        """Return the number of samples of which one call should read a part."""
        mean = self.rows * self.row_bytes // max(1, self.samples * parts)
        return max(1, _READ_BYTES // max(1, mean))

    def groups(self, plan: ShufflePlan, first: int) -> Iterator[RowGroup]:
        """Yield the groups of samples in the order of the data, from the one that begins with sample ``first`` on."""
        index, lengths = self.data_order()
        samples = np.flatnonzero(index % plan.parts == plan.part)
        samples = samples[samples >= first]
        ends, begin = np.cumsum(lengths[samples]), 0
        while begin < len(samples):
            # A group ends with the sample that makes it large enough.
            end = int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + plan.group_rows)) + 1
            group = samples[begin:end]
            yield RowGroup(int(group[0]), end >= len(samples), self.reads(group, np.zeros_like(group), 1))
            begin = end

    def cancel(self) -> None:
        """Make calls that wait for rows raise :class:`ReaderClosed`; reads of stored rows end soon by themselves."""
