"""``spile.open(root)``: a dataset of activations, of which only the requested parts are read.

Readers see committed shards only. All bytes are verified against the commit: a damaged object raises
:class:`~spile.errors.Damaged`.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from spile.errors import UserError
from spile.objects import Folder, open_folder
from spile.objects.ahead import read_ahead
from spile.reading.blocks import StoredBlocks
from spile.reading.rows import RowBatch, SampleRef, iterate, ref_of, selection_of
from spile.reading.shuffle import Shuffled
from spile.reading.shuffle_order import MEMORY, ShuffleOrder, ShufflePlan, ShuffleSpec
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.taps import Tap
from spile.store.layout import RUN
from spile.store.ledger import ShardRecord
from spile.store.shard_reader import ShardReader
from spile.store.stream import read_run
from spile.store.streams import Stream, open_streams, read_ledgers

if TYPE_CHECKING:
    from spile.reading.grain_rows import GrainRows
    from spile.reading.jax_rows import DeviceBatches
    from spile.reading.torch_rows import TorchRows
    from spile.store.statistics import TapStatistics

_OPEN_SHARDS = 64
_PARALLEL = 16


class StoredSample:
    """One sample: its reference, its tokens and roles, and its rows at any tap, which are read on request."""

    def __init__(self, shard: ShardReader, place: int, ref: SampleRef, taps: Sequence[str]) -> None:
        self._shard, self._place = shard, place
        self._start, self._stop = shard.bounds(place)
        self.ref, self.taps = ref, tuple(taps)

    @cached_property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Token ids of the rows."""
        return self._shard.rows("tokens", self._start, self._stop)

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each row in the sample, from 0. It differs from the row number if not all tokens have rows."""
        return self._shard.positions(self._start, self._stop)

    @cached_property
    def context(self) -> npt.NDArray[np.int32]:
        """Ids of all tokens that the model read, including tokens without rows."""
        return self._shard.context(self._place)

    @cached_property
    def roles(self) -> npt.NDArray[np.uint8]:
        """The :class:`~spile.spec.sample.Role` bits of each row's token."""
        return self._shard.rows("roles", self._start, self._stop)

    def rows(self, tap: str | Tap) -> npt.NDArray[Any]:
        """Return the rows ``[length, d]`` at one tap, with one range read."""
        if str(tap) not in self.taps:
            raise _no_tap(str(tap), self.taps)
        return self._shard.rows(str(tap), self._start, self._stop)

    def all_rows(self, taps: Iterable[str | Tap] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return the rows ``[length, d]`` at all taps, or at the given ones, read in parallel."""
        names = self.taps if taps is None else tuple(str(tap) for tap in taps)
        calls = (partial(self.rows, name) for name in names)
        return dict(zip(names, read_ahead(calls, _PARALLEL), strict=True))


class Dataset:
    """An open dataset. Ledgers are read once; open the dataset again to see later commits."""

    def __init__(self, root: Folder, run: RunIdentity, streams: Sequence[Stream]) -> None:
        self.root, self.run = root, run
        self.streams = tuple(streams)
        self._opened: OrderedDict[tuple[int, str], ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[str], Dataset], tuple[str]]:
        """Pickle the address only: the worker process of a data loader opens the dataset again."""
        return open, (self.root.url,)

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """Taps of all streams; streams may have different taps."""
        return tuple(dict.fromkeys(tap for stream in self.streams for tap in stream.taps))

    @cached_property
    def samples(self) -> SampleList:
        """All stored samples, in the order of streams and commits. Indexing reads the header of one shard."""
        return SampleList(self)

    def stream(self, number: int) -> Stream:
        """Return the stream with this number."""
        for stream in self.streams:
            if stream.number == number:
                return stream
        numbers = ", ".join(str(stream.number) for stream in self.streams) or "none"
        raise UserError(f"no stream {number} in {self.root.url}", expected=f"one of {numbers}")

    def sample(self, stream: int, index: int) -> StoredSample:
        """Return the sample with this index in its stream."""
        source = self.stream(stream)
        record = source.shard_with(index)
        if record is not None:
            shard = self.shard(source, record)
            place = int(np.flatnonzero(shard.read_tensor("sample_index") == index)[0])
            return StoredSample(shard, place, ref_of(source.number, shard, place), source.taps)
        why = "it was skipped" if index in source.skipped else "it is not stored"
        raise UserError(f"no sample {index} in stream {stream} of {self.root.url}", found=why)

    def rows(
        self,
        tap: str | Tap,
        batch_rows: int = 65_536,
        *,
        include: int | None = None,
        exclude: int | None = None,
        streams: Iterable[int] | None = None,
        part: tuple[int, int] | None = None,
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows of a tap in the order they are stored, ``[batch_rows, d]`` at a time.

        The last batch may be shorter. Only the bytes of this tap are read.

        Args:
            tap: The tap.
            batch_rows: Rows of a batch.
            include: Keep only rows with any of these :class:`~spile.spec.sample.Role` bits.
            exclude: Leave out rows with any of these bits.
            streams: Read only these streams.
            part: (k, n) reads every n-th shard, starting with shard k.
        """
        found = self._iterate(tap, batch_rows, include, exclude, streams, part, context=False)
        return (batch.rows for batch in found)

    def batches(
        self,
        tap: str | Tap,
        batch_rows: int = 65_536,
        *,
        include: int | None = None,
        exclude: int | None = None,
        streams: Iterable[int] | None = None,
        part: tuple[int, int] | None = None,
    ) -> Iterator[RowBatch]:
        """Yield the same rows as :meth:`rows`, each with its token, role, stream, sample and position."""
        return self._iterate(tap, batch_rows, include, exclude, streams, part, context=True)

    def _iterate(
        self,
        tap: str | Tap,
        batch_rows: int,
        include: int | None,
        exclude: int | None,
        streams: Iterable[int] | None,
        part: tuple[int, int] | None,
        *,
        context: bool,
    ) -> Iterator[RowBatch]:
        if batch_rows < 1:
            raise UserError("batch_rows", expected="at least 1", found=batch_rows)
        first, step = part or (0, 1)
        if not 0 <= first < step:
            raise UserError("part", expected="(k, n) with k from 0 to n - 1", found=part)
        chosen = self.streams_with((str(tap),), streams)
        read_ledgers(chosen)
        records = ((stream, record) for stream in chosen for record in stream.shards)
        mine = islice(records, first, None, step)
        shards = ((stream.number, self._fresh(stream, record)) for stream, record in mine)
        return iterate(shards, str(tap), batch_rows, include=include, exclude=exclude, context=context)

    def shuffled(
        self,
        tap: str | Tap | Sequence[str | Tap],
        batch_rows: int = 4096,
        *,
        seed: int = 0,
        epochs: int | None = 1,
        memory: int = MEMORY,
        buffer_rows: int | None = None,
        scratch: str | None = None,
        piece: int | None = None,
        part: tuple[int, int] = (0, 1),
        drop_last: bool = False,
        dtype: npt.DTypeLike | None = None,
        context: bool = False,
        streams: Iterable[int] | None = None,
        state: Mapping[str, Any] | None = None,
        after: int = 0,
        page_cache: bool | None = None,
        **wanted: Any,
    ) -> Shuffled:
        """Return the rows of a tap, or the rows of several taps that belong together, in random order.

        Each epoch gives every selected row once. If all rows fit in the shuffle buffer, the order is a full
        permutation; otherwise it is a two-level shuffle, see :mod:`spile.reading.shuffle_order`.

        Args:
            tap: A tap, or a sequence of taps.
            batch_rows: Rows of a batch.
            seed: Chooses the order.
            epochs: Passes over the rows. None: no end, and all batches are full.
            memory: Size of the shuffle buffer in bytes.
            buffer_rows: Size of the shuffle buffer in rows, instead of ``memory``. Two datasets of the same samples
                then have the same order, even if the width or the dtype of their rows differs.
            scratch: A folder on a local disk for rows that do not fit in memory: a full permutation of any number.
            piece: Size of a shuffle block in bytes. None: derived from the buffer and the length of the samples.
            part: (k, n) makes this reader number k of n readers, whose rows are disjoint and together complete.
            drop_last: Leave out rows that do not fill a batch; each of n readers gives the same number of batches.
            dtype: Convert batches to this dtype.
            context: Give each batch as a :class:`~spile.reading.rows.RowBatch` with tokens, roles and positions.
            streams: Read only these streams.
            state: Continue where this result of ``state()`` was taken.
            after: Continue after this many batches.
            page_cache: False: drop what was read from the page cache of a local disk.
            wanted: Fields of :class:`~spile.reading.rows.Selection`: ``include``, ``exclude``, ``positions``,
                ``tokens``, ``without_tokens``, ``min_norm``, ``max_norm`` and ``samples``.
        """
        names = (str(tap),) if isinstance(tap, str | Tap) else tuple(map(str, tap))
        shards = self._shards(self.streams_with(names, streams))
        cached = page_cache is not False
        source = StoredBlocks(names, shards, selection_of(**wanted), context=context, keep_cached=cached)
        sizes = {"memory": memory, "buffer_rows": buffer_rows, "piece": piece}
        spec = {"batch_rows": batch_rows, "seed": seed, "drop_last": drop_last, "permute_all": scratch is not None}
        order = self._order(source, part, sizes, spec)
        start = order.position(state, epochs) if state is not None else order.after(after, endless=epochs is None)
        single = isinstance(tap, str | Tap)
        return Shuffled(order, epochs=epochs, dtype=dtype, single=single, start=start, scratch=scratch)

    def _shards(self, streams: Sequence[Stream]) -> list[tuple[Stream, ShardRecord]]:
        read_ledgers(streams)
        return [(stream, record) for stream in streams for record in stream.shards]

    def _order(
        self, source: StoredBlocks, part: tuple[int, int], sizes: dict[str, int | None], spec: dict[str, Any]
    ) -> ShuffleOrder:
        """Convert sizes in bytes to rows and return the order of a shuffled reader."""
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise UserError(name, expected="at least 1", found=value)
        if spec["drop_last"] and part[1] > 1 and source.selection.by_norm:
            raise UserError(
                "drop_last with a bound on norms",
                expected="one reader, because the rows of each of several readers are counted only by reading",
                found=f"{part[1]} readers",
                fix="use epochs=None, whose batches are all full, and count steps",
            )
        width, piece = max(1, source.row_bytes), sizes["piece"]
        plan = ShufflePlan(
            ShuffleSpec(
                buffer_rows=sizes["buffer_rows"] or max(1, (sizes["memory"] or MEMORY) // width),
                block_rows=None if piece is None else max(1, piece // width),
                part=part[0],
                parts=part[1],
                **spec,
            ),
            source.samples,
            source.rows,
            source.remote,
        )
        identity = {
            "dataset": self._identity(source.streams),
            "taps": list(source.taps),
            "selection": source.selection.describe(),
        }
        return ShuffleOrder(plan, source, identity, source.selection.by_norm)

    def _identity(self, streams: Iterable[Stream]) -> str:
        """Return a hash of the run and of the samples of some streams, however they are divided into shards."""
        samples = [
            (stream.number, stream.tokens, Ranges(pair for shard in stream.shards for pair in shard.samples.pairs()))
            for stream in streams
        ]
        text = "\n".join(f"{number} {tokens} {ranges.pairs()}" for number, tokens, ranges in samples)
        return hashlib.sha256(f"{self.run.fingerprint()}\n{text}".encode()).hexdigest()[:16]

    def torch(self, tap: str | Tap | Sequence[str | Tap], **how: Any) -> TorchRows:
        """Return :meth:`shuffled` as a torch ``IterableDataset``, for ``DataLoader(…, batch_size=None)`` and DDP.

        Args:
            tap: A tap, or a sequence of taps.
            how: Arguments of :meth:`shuffled`; ``rank`` and ``world``, unless torch.distributed is initialised;
                ``after``, the number of batches that the loader of this process gave before, over all its workers.
        """
        from spile.reading.torch_rows import TorchRows

        return TorchRows(self, tap, **how)

    def jax(
        self, tap: str | Tap | Sequence[str | Tap], *, sharding: Any = None, ahead: int = 2, **how: Any
    ) -> DeviceBatches:
        """Return :meth:`shuffled` as JAX arrays that are copied to the device before they are needed.

        If JAX runs in several processes, each reads its own part of the rows.

        Args:
            tap: A tap, or a sequence of taps.
            sharding: Makes the batches of all processes parts of one global array.
            ahead: Batches that are copied ahead.
            how: Arguments of :meth:`shuffled`.
        """
        from spile.reading.jax_rows import DeviceBatches, process_part

        return DeviceBatches(self.shuffled(tap, **{"part": process_part(), **how}), sharding, ahead)

    def grain(self, tap: str | Tap | Sequence[str | Tap], **how: Any) -> GrainRows:
        """Return :meth:`shuffled` as a ``grain.IterDataset`` of batches, which Grain can checkpoint."""
        from spile.reading.grain_rows import GrainRows

        return GrainRows(self, tap, **how)

    def stats(self, tap: str | Tap, streams: Iterable[int] | None = None) -> TapStatistics:
        """Return count, mean, variance, norm quantiles and sinks of a tap, from the commits or from its rows."""
        from spile.reading.inspection import tap_statistics

        return tap_statistics(self, str(tap), streams)

    def streams_with(self, taps: Sequence[str], streams: Iterable[int] | None) -> list[Stream]:
        """Return the streams that have all of these taps."""
        wanted = self.streams if streams is None else tuple(self.stream(number) for number in streams)
        for tap in taps:
            if self.streams and tap not in self.taps:
                raise _no_tap(tap, self.taps)
        chosen = [stream for stream in wanted if set(taps) <= set(stream.taps)]
        if wanted and not chosen:
            raise _no_tap(" with ".join(taps), self.taps)
        return chosen

    def _fresh(self, stream: Stream, record: ShardRecord) -> ShardReader:
        # Not cached: a pass over the dataset must not evict the shards that lookups use.
        return stream.open(record)

    def shard(self, stream: Stream, record: ShardRecord) -> ShardReader:
        """Return an open shard; the most recently used ones stay open."""
        key = (stream.number, record.name)
        with self._lock:
            found = self._opened.pop(key, None) or stream.open(record)
            self._opened[key] = found
            if len(self._opened) > _OPEN_SHARDS:
                self._opened.popitem(last=False)
            return found

    def __repr__(self) -> str:
        return f"Dataset({self.root.url!r}, {len(self.streams)} streams, {len(self.taps)} taps)"


class SampleList(Sequence[SampleRef]):
    """The samples of a dataset, as a sequence that reads headers on demand."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        read_ledgers(dataset.streams)
        self._shards = [(stream, record) for stream in dataset.streams for record in stream.shards]
        self._ends = list(accumulate(record.count for _, record in self._shards))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> SampleRef: ...
    @overload
    def __getitem__(self, place: slice) -> list[SampleRef]: ...
    def __getitem__(self, place: int | slice) -> SampleRef | list[SampleRef]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = place + len(self) if place < 0 else place
        if not 0 <= number < len(self):
            raise IndexError(f"sample {place} of {len(self)}")
        which = bisect_right(self._ends, number)
        stream, record = self._shards[which]
        first = self._ends[which] - record.count
        return ref_of(stream.number, self._dataset.shard(stream, record), number - first)


def open(root: str | Folder) -> Dataset:  # noqa: A001
    """Open the dataset at a path, or at ``gs://…``, ``s3://…`` or ``az://…``."""
    folder = open_folder(root) if isinstance(root, str) else root
    run = read_run(folder)
    if run is None:
        raise UserError(
            f"no dataset at {folder.url}",
            expected=f"a folder with {RUN}, as spile extract writes it",
            found="none",
        )
    return Dataset(folder, run, open_streams(folder, run))


def _no_tap(tap: str, known: Sequence[str]) -> UserError:
    return UserError(f"no tap {tap} in this dataset", expected=f"one of {', '.join(known)}")
