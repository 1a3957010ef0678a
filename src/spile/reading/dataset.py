"""``spile.open(root)``: a dataset of activations, of which only the requested parts are read.

Readers see committed shards only. All bytes are verified against the commit: a damaged object raises
:class:`~spile.errors.Damaged`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from spile.errors import SpileError, UserError, printable
from spile.objects import Folder, open_folder
from spile.reading.blocks import StoredBlocks
from spile.reading.rows import RowBatch, SampleRef, iterate, ref_of, selection_of
from spile.reading.samples import RowChoice, SampleList, StoredSample, Where, no_tap, sample_labels, sample_matrix
from spile.reading.shuffle import Shuffled
from spile.reading.shuffle_order import MEMORY, ShuffleOrder, ShufflePlan, ShuffleSpec
from spile.spec.amounts import counted, size
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.taps import Tap
from spile.store.layout import RUN
from spile.store.ledger import ShardRecord
from spile.store.shard_reader import ShardReader
from spile.store.stream import read_run
from spile.store.streams import Stream, open_streams, read_ledgers

if TYPE_CHECKING:
    from spile.data.tokens import Tokenizer
    from spile.reading.grain_rows import GrainRows
    from spile.reading.jax_rows import DeviceBatches
    from spile.reading.torch_rows import TorchRows
    from spile.store.statistics import TapStatistics

_OPEN_SHARDS = 64


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
    seed: int
    epochs: int | None
    memory: int
    buffer_rows: int | None
    scratch: str | None
    piece: int | None
    part: tuple[int, int]
    drop_last: bool
    dtype: npt.DTypeLike | None
    context: bool
    streams: Iterable[int] | None
    state: Mapping[str, Any] | None
    after: int
    page_cache: bool | None


class TorchOptions(ShuffleOptions, total=False):
    """The arguments of :meth:`Dataset.torch`."""

    rank: int | None
    world: int | None


class Dataset(Sequence[StoredSample]):
    """An open dataset: a sequence of samples in the order of the data, and readers of activation rows.

    Ledgers are read once; open the dataset again to see later commits.
    """

    def __init__(self, root: Folder, run: RunIdentity, streams: Sequence[Stream], model: str | None = None) -> None:
        self.root, self.run, self._model = root, run, model
        self.streams = tuple(streams)
        self._opened: OrderedDict[tuple[int, str], ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[str, str | None]]:
        """Pickle the address only: the worker process of a data loader opens the dataset again."""
        return open, (self.root.url, self._model)

    def __len__(self) -> int:
        return len(self.samples)

    def __bool__(self) -> bool:
        return True  # also without samples

    @overload
    def __getitem__(self, which: int | str) -> StoredSample: ...
    @overload
    def __getitem__(self, which: slice) -> list[StoredSample]: ...
    def __getitem__(self, which: int | str | slice) -> StoredSample | list[StoredSample]:
        """Return the sample at a place in the data, or with a task id (of several variants, the first); or a list."""
        if isinstance(which, slice):
            return [self[place] for place in range(*which.indices(len(self)))]
        if isinstance(which, str):
            return self.sample(*self._by_task_id(which))
        return self.sample(*self.samples.address(which))

    @cached_property
    def _task_ids(self) -> dict[str, tuple[int, int]]:
        """The stream and index of the first sample with each task id; reads the headers of all shards."""
        found: dict[str, tuple[int, int]] = {}
        for stream, record in self._shards(self.streams):
            for note in self.shard(stream, record).notes:
                place = (stream.number, int(note["index"]))
                found[note["task_id"]] = min(found.get(note["task_id"], place), place)
        return found

    def _by_task_id(self, task_id: str) -> tuple[int, int]:
        if task_id not in self._task_ids:
            near = difflib.get_close_matches(task_id, self._task_ids, n=1)
            raise UserError(
                f"no sample {task_id!r} in {self.root.url}", fix=f"did you mean {near[0]}?" if near else None
            )
        return self._task_ids[task_id]

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """Taps of all streams; streams may have different taps."""
        return tuple(dict.fromkeys(tap for stream in self.streams for tap in stream.taps))

    @cached_property
    def samples(self) -> SampleList:
        """References of all samples, stream by stream in the order of the data. Indexing reads one shard's header."""
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
            place = shard.place_of(index)
            ref = ref_of(source.number, shard, place)
            return StoredSample(shard, place, ref, source.taps, lambda: self.tokenizer)
        why = "it was skipped" if index in source.skipped else "it is not stored"
        raise UserError(f"no sample {index} in stream {stream} of {self.root.url}", found=why)

    def numpy(
        self,
        tap: str | Tap,
        *,
        positions: Where = "last",
        include: int | None = None,
        exclude: int | None = None,
    ) -> npt.NDArray[Any]:
        """Return one row per sample ``[samples, d]`` as float32, in the order of the data and of :meth:`labels`.

        Args:
            tap: The tap.
            positions: The row of each sample: ``last``, ``first``, the ``mean`` of its rows, or the number of a row.
                ``all`` returns all rows, sample after sample.
            include: Take only rows with any of these :class:`~spile.spec.sample.Role` bits.
            exclude: Leave out rows with any of these bits.
        """
        return sample_matrix(self, str(tap), RowChoice(positions, include, exclude))

    def labels(
        self, name: str, *, positions: Where = "last", include: int | None = None, exclude: int | None = None
    ) -> npt.NDArray[Any]:
        """Return a field of the data that was kept with each sample, aligned with :meth:`numpy`.

        Args:
            name: The field.
            positions: As for :meth:`numpy`: with ``all``, the value of each row's sample.
            include: As for :meth:`numpy`.
            exclude: As for :meth:`numpy`.
        """
        return sample_labels(self, name, RowChoice(positions, include, exclude))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that was run, from the hub's cache or from the model's folder."""
        from spile.data.tokens import load_tokenizer
        from spile.models import model_files

        name, revision = (self.run.model, self.run.revision) if self._model is None else (self._model, None)
        try:
            files = model_files.find(name, revision, weights=False, read=_no_config)
            found = load_tokenizer(files.tokenizer_folder)
            wrong = files.tokenizer_hash() != self.run.tokenizer
        except SpileError as error:
            raise UserError(
                f"no tokenizer for {self.root.url}",
                expected=f"the model {name}",
                found=str(error),
                fix='name the model of this run: spile.open(root, model="…")',
            ) from error
        if wrong:
            raise UserError(
                f"{name} has another tokenizer than the run",
                expected=f"hash {self.run.tokenizer}",
                fix='name the model of this run: spile.open(root, model="…")',
            )
        return found

    def decode(self, tokens: int | Iterable[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self.tokenizer.decode([tokens] if isinstance(tokens, int | np.integer) else [*map(int, tokens)])

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
        **wanted: Unpack[SelectionOptions],
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

    def torch(self, tap: str | Tap | Sequence[str | Tap], **how: Unpack[TorchOptions]) -> TorchRows:
        """Return :meth:`shuffled` as a torch ``IterableDataset``, for ``DataLoader(…, batch_size=None)`` and DDP.

        Args:
            tap: A tap, or a sequence of taps.
            how: Arguments of :meth:`shuffled`; ``rank`` and ``world``, unless torch.distributed is initialised;
                ``after``, the number of batches that the loader of this process gave before, over all its workers.
        """
        from spile.reading.torch_rows import TorchRows

        return TorchRows(self, tap, **how)

    def jax(
        self,
        tap: str | Tap | Sequence[str | Tap],
        *,
        sharding: Any = None,
        ahead: int = 2,
        **how: Unpack[ShuffleOptions],
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

        how.setdefault("part", process_part())
        return DeviceBatches(self.shuffled(tap, **how), sharding, ahead)

    def grain(self, tap: str | Tap | Sequence[str | Tap], **how: Unpack[ShuffleOptions]) -> GrainRows:
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
                raise no_tap(tap, self.taps)
        having = [stream for stream in wanted if set(taps) <= set(stream.taps)]
        if wanted and not having:
            raise no_tap(" with ".join(taps), self.taps)
        return having

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
        samples = sum(stream.samples for stream in self.streams)
        taps = ", ".join(self.taps[:3]) + (f" and {len(self.taps) - 3} more" if len(self.taps) > 3 else "")
        model = printable(self.run.model)
        return f"<dataset {self.root.url}: {counted(samples, 'sample')} of {model}, {taps or 'no taps'}>"

    def _repr_html_(self) -> str:
        tokens = sum(stream.tokens for stream in self.streams)
        stored = sum(file.size for stream in self.streams for file in stream.files)
        facts = {
            "dataset": self.root.url,
            "model": self.run.model,
            "samples": f"{len(self):,}",
            "tokens": f"{tokens:,}",
            "stored": f"{size(stored)} as {self.run.store_dtype}",
            "taps": ", ".join(self.taps[:12]) + (" …" if len(self.taps) > 12 else ""),
        }
        cells = "".join(
            f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
            for name, value in facts.items()
        )
        return f"<table>{cells}</table>{self[0]._repr_html_() if len(self) else ''}"


def open(root: str | os.PathLike[str] | Folder, model: str | None = None) -> Dataset:  # noqa: A001
    """Open the dataset at a path, or at ``gs://…``, ``s3://…`` or ``az://…``.

    Args:
        root: Where the dataset is.
        model: Where the model is now, if it moved: its tokenizer is needed for the texts of tokens.
    """
    folder = open_folder(str(root)) if isinstance(root, str | os.PathLike) else root
    run = read_run(folder)
    if run is None:
        raise UserError(
            f"no dataset at {folder.url}",
            expected=f"a folder with {RUN}, as spile extract writes it",
            found="none",
        )
    return Dataset(folder, run, open_streams(folder, run), model)


def _no_config(_raw: Mapping[str, Any]) -> Any:
    """Accept any config.json without reading it: only the tokenizer is needed."""
