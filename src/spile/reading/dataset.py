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
from dataclasses import replace
from functools import cached_property
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from spile.errors import ModelError, SpecError, SpileError, UserError, printable
from spile.objects import Folder, open_folder
from spile.reading.blocks import JointBlocks, SampleTable, StoredBlocks
from spile.reading.readers import ShuffledReaders
from spile.reading.rows import BlockOptions, RowBatch, Selection, rebatch, ref_of
from spile.reading.samples import (
    RowChoice,
    RowPositions,
    SampleList,
    StoredSample,
    no_tap,
    sample_labels,
    sample_matrix,
)
from spile.spec.amounts import counted, size
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import AUTO, STORED, DataSpec
from spile.spec.taps import Tap
from spile.store.layout import RUN
from spile.store.ledger import ShardRecord
from spile.store.run import read_run
from spile.store.shard_reader import ShardReader
from spile.store.stored_stream import Stream, open_streams, read_ledgers

if TYPE_CHECKING:
    from spile.data.tokens import Tokenizer
    from spile.store.statistics import TapStatistics

_OPEN_SHARDS = 64
_NO_ROWS = RowBatch(np.zeros((0, 0), np.float32))


class Dataset(Sequence[StoredSample], ShuffledReaders):
    """An open dataset: a sequence of samples in the order of the data, and readers of activation rows.

    The order of the data is that of the input, whatever the number of streams, workers and machines; the streams of a
    prepared folder (``--dataset-dir``) follow one another. Everything that enumerates samples or rows follows it.

    Ledgers are read once; open the dataset again to see later commits.
    """

    def __init__(self, root: Folder, run: RunIdentity, streams: Sequence[Stream], model: str | None = None) -> None:
        self.root, self.run, self._model = root, run, model
        self.streams = tuple(streams)
        self._opened: OrderedDict[tuple[int, str], ShardReader] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | UserError | None = None

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
        """Return the sample at this place of the data, or the first one with this task id; a slice gives a list."""
        if isinstance(which, slice):
            return [self[place] for place in range(*which.indices(len(self)))]
        if isinstance(which, str):
            which = self._by_task_id(which)
        return self.sample(*self.samples.address(which))

    @cached_property
    def _task_ids(self) -> dict[str, int]:
        """The number of the first sample with each task id; reads the headers of all shards."""
        shards, found = self._shards(), dict[str, int]()
        for shard, numbers, indices in SampleTable.of(shards).by_shard(np.arange(len(self))):
            number_of = dict(zip(indices.tolist(), numbers.tolist(), strict=True))
            for note in self._open_shard(*shards[shard]).notes:
                number = number_of[int(note["index"])]
                found[note["task_id"]] = min(found.get(note["task_id"], number), number)
        return found

    def _by_task_id(self, task_id: str) -> int:
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
        """References of all samples in the order of the data. Indexing reads one shard's header."""
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
            shard = self._open_shard(source, record)
            place = shard.place_of(index)
            ref = ref_of(source, shard, place)
            return StoredSample(shard, place, ref, source.taps, lambda: self.tokenizer)
        why = "it was skipped" if index in source.skipped else "it is not stored"
        raise UserError(f"no sample {index} in stream {stream} of {self.root.url}", found=why)

    def numpy(
        self,
        tap: str | Tap,
        *,
        positions: RowPositions = "last",
        include: int | None = None,
        exclude: int | None = None,
    ) -> npt.NDArray[Any]:
        """Return one row per sample ``[samples, d]`` as float32, in the order of the data and of :meth:`labels`.

        Args:
            tap: The tap.
            positions: The row of each sample: ``last``, ``last-content`` (the last token before the end of a chat
                template), ``first``, the ``mean`` of its rows, the number of a row, or a function that gets the rows
                ``[n, d]`` and returns one row. ``all`` and ``first:8`` return several rows, sample after sample.
            include: Take only rows with any of these :class:`~spile.spec.sample.Role` bits.
            exclude: Leave out rows with any of these bits.
        """
        return sample_matrix(self, str(tap), RowChoice(positions, include, exclude))

    def labels(
        self, name: str, *, positions: RowPositions = "last", include: int | None = None, exclude: int | None = None
    ) -> npt.NDArray[Any]:
        """Return a field of the data that was kept with each sample, aligned with :meth:`numpy` of the same arguments.

        If a sample has several rows there, the value is repeated.
        """
        return sample_labels(self, name, RowChoice(positions, include, exclude))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that was run, from the hub's cache or from the model's folder.

        An error is kept, too: open the dataset again to try again.
        """
        found = self._find_tokenizer()
        if isinstance(found, UserError):
            raise found
        return found

    def _find_tokenizer(self) -> Tokenizer | UserError:
        """Return the tokenizer, or the error of the first attempt: an unavailable hub is contacted only once."""
        if self._tokenizer is None:
            try:
                self._tokenizer = run_tokenizer(self.run, self._model)
            except SpileError as error:
                fix = 'name the model of this run: spile.open(root, model="…")'
                self._tokenizer = UserError(f"no tokenizer for {self.root.url}", found=str(error), fix=fix)
        return self._tokenizer

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
        """Yield the rows of a tap in the order of the data, ``[batch_rows, d]`` at a time.

        The last batch may be shorter. Only the bytes of this tap are read.

        Args:
            tap: The tap.
            batch_rows: Rows of a batch.
            include: Keep only rows with any of these :class:`~spile.spec.sample.Role` bits.
            exclude: Leave out rows with any of these bits.
            streams: Read only these streams.
            part: (k, n) reads the k-th of n parts of the samples, counted from 0.
        """
        options: dict[str, Any] = {"include": include, "exclude": exclude, "streams": streams, "part": part}
        return (batch.rows for batch in self.batches(tap, batch_rows, **options, context=False))

    def batches(
        self,
        tap: str | Tap,
        batch_rows: int = 65_536,
        *,
        include: int | None = None,
        exclude: int | None = None,
        streams: Iterable[int] | None = None,
        part: tuple[int, int] | None = None,
        context: bool = True,
    ) -> Iterator[RowBatch]:
        """Yield the same rows as :meth:`rows`, each with its token, role, stream, sample, position and place.

        ``context=False`` leaves these out.
        """
        if batch_rows < 1:
            raise UserError("batch_rows", expected="at least 1", found=batch_rows)
        first, step = part or (0, 1)
        if not 0 <= first < step:
            raise UserError("part", expected="(k, n) with k from 0 to n - 1", found=part)
        options = BlockOptions(Selection(include, exclude), context, 1, streams)
        source = self._source((str(tap),), options)
        bounds = (source.samples * number // step for number in (first, first + 1))
        chunks = (rows.chunk for rows in source.in_order(*bounds) if rows.chunk is not None)
        parts = (replace(chunk.context or _NO_ROWS, rows=chunk.rows[str(tap)][0]) for chunk in chunks)
        return rebatch(parts, batch_rows)

    @property
    def place(self) -> str:
        """The address of the dataset."""
        return self.root.url

    def _source(self, taps: tuple[str, ...], options: BlockOptions) -> StoredBlocks:
        shards = self._shards(taps, options.streams)
        identity = self._hash_samples(dict.fromkeys(stream for stream, _ in shards))
        return StoredBlocks(taps, shards, options, identity, remote=self.root.local_path is None)

    def _hash_samples(self, streams: Iterable[Stream]) -> str:
        """Return a hash of the run and of the samples of some streams, however they are divided into shards."""
        samples = [
            (stream.number, stream.tokens, Ranges(pair for shard in stream.shards for pair in shard.samples.pairs()))
            for stream in streams
        ]
        text = "\n".join(f"{number} {tokens} {ranges.pairs()}" for number, tokens, ranges in samples)
        return hashlib.sha256(f"{self.run.fingerprint()}\n{text}".encode()).hexdigest()[:16]

    def stats(self, tap: str | Tap, streams: Iterable[int] | None = None) -> TapStatistics:
        """Return count, mean, variance, norm quantiles and sinks of a tap, from the commits or from its rows."""
        from spile.reading.inspection import tap_statistics

        return tap_statistics(self, str(tap), streams)

    def _shards(
        self, taps: Sequence[str] = (), streams: Iterable[int] | None = None
    ) -> list[tuple[Stream, ShardRecord]]:
        """Read the ledgers of the streams that have all of these taps, and return their committed shards."""
        chosen = self._streams_with(taps, streams)
        read_ledgers(chosen)
        return [(stream, record) for stream in chosen for record in stream.shards]

    def _streams_with(self, taps: Sequence[str], streams: Iterable[int] | None) -> list[Stream]:
        wanted = self.streams if streams is None else tuple(self.stream(number) for number in streams)
        for tap in taps:
            if self.streams and tap not in self.taps:
                raise no_tap(tap, self.taps)
        found = [stream for stream in wanted if set(taps) <= set(stream.taps)]
        if wanted and not found:
            raise no_tap(" with ".join(taps), self.taps)
        return found

    def _open_shard(self, stream: Stream, record: ShardRecord) -> ShardReader:
        """Return an open shard; the most recently used ones stay open."""
        key = (stream.number, record.name)
        with self._lock:
            found = self._opened.pop(key, None) or stream.open(record)
            self._opened[key] = found
            if len(self._opened) > max(_OPEN_SHARDS, 2 * len(self.streams)):  # Neighbours may be in all streams.
                self._opened.popitem(last=False)
            return found

    def __repr__(self) -> str:
        samples = sum(stream.samples for stream in self.streams)
        taps = ", ".join(self.taps[:3]) + (f" and {len(self.taps) - 3} more" if len(self.taps) > 3 else "")
        model = printable(self.run.model)
        return f"<dataset {self.root.url}: {counted(samples, 'sample')} of {model}, {taps or 'no taps'}>"

    def summary(self) -> dict[str, Any]:
        """Return the model, the dtype, and how much is stored."""
        files = [file for stream in self.streams for file in stream.files]
        return {
            "root": self.root.url,
            "model": self.run.model,
            "store_dtype": self.run.store_dtype,
            "streams": len(self.streams),
            "samples": sum(stream.samples for stream in self.streams),
            "skipped": sum(len(stream.skipped) for stream in self.streams),
            "tokens": sum(stream.tokens for stream in self.streams),
            "shards": len(files),
            "bytes": sum(file.size for file in files),
        }

    def _repr_html_(self) -> str:
        known = self.summary()
        facts = {
            "dataset": known["root"],
            "model": known["model"],
            "samples": f"{known['samples']:,}",
            "tokens": f"{known['tokens']:,}",
            "stored": f"{size(known['bytes'])} as {known['store_dtype']}",
            "taps": ", ".join(self.taps[:12]) + (" …" if len(self.taps) > 12 else ""),
        }
        cells = "".join(
            f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
            for name, value in facts.items()
        )
        return f"<table>{cells}</table>{self[0]._repr_html_() if len(self) else ''}"


class JointDataset(ShuffledReaders):
    """Several datasets of the same tokens, for crosscoders and for comparing models.

    A tap of one dataset is ``name/tap``; a plain ``tap`` is that tap of every dataset.
    """

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        if not datasets or any(not name or "/" in name for name in datasets):
            raise UserError("spile.open", expected="datasets with names without a slash", found=[*datasets])
        self.datasets = dict(datasets)
        """The datasets by name; those of a list are named ``0``, ``1`` and so on."""
        _check_same_tokens(self.datasets)

    def __len__(self) -> int:
        return len(next(iter(self.datasets.values())))

    def __repr__(self) -> str:
        return f"<{len(self.datasets)} datasets of {counted(len(self), 'sample')}: {self.place}>"

    @property
    def place(self) -> str:
        """The addresses of the datasets."""
        return ", ".join(dataset.root.url for dataset in self.datasets.values())

    @property
    def taps(self) -> tuple[str, ...]:
        """The taps of all datasets, as ``name/tap``."""
        return tuple(f"{name}/{tap}" for name, dataset in self.datasets.items() for tap in dataset.taps)

    def stats(self, tap: str) -> TapStatistics:
        """Return the statistics of one dataset's tap, ``name/tap``."""
        ((name, (inner,)),) = self._by_dataset((tap,)).items()
        return self.datasets[name].stats(inner)

    def _by_dataset(self, taps: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Return the requested taps of each dataset that has any."""
        found: dict[str, dict[str, None]] = {name: {} for name in self.datasets}
        for tap in taps:
            name, _, inner = tap.rpartition("/")
            if name not in ("", *self.datasets):
                raise no_tap(tap, self.taps)
            for each in (name,) if name else self.datasets:
                found[each][inner] = None
        return {name: tuple(inner) for name, inner in found.items() if inner}

    def _source(self, taps: tuple[str, ...], options: BlockOptions) -> JointBlocks:
        if options.streams is not None:
            raise UserError("streams", expected="all streams if several datasets are read", found=options.streams)
        # The first dataset that is read decides which rows are selected.
        all_rows = options._replace(selection=Selection(), context=False)
        sources = {
            name: self.datasets[name]._source(own_taps, all_rows if number else options)
            for number, (name, own_taps) in enumerate(self._by_dataset(taps).items())
        }
        identity = " ".join(dataset._hash_samples(dataset.streams) for dataset in self.datasets.values())
        return JointBlocks(sources, identity)


def _check_same_tokens(datasets: Mapping[str, Dataset]) -> None:
    """Raise an error that names the first difference, unless all datasets have the same tokens in the same order."""
    first, *others = datasets.values()
    options = BlockOptions(Selection(), context=False, window=1, streams=None)
    wanted = first._source((), options).digests() if others else np.zeros(0, np.uint64)
    for other in others:
        found = other._source((), options).digests()
        common = min(len(wanted), len(found))
        different = np.flatnonzero(wanted[:common] != found[:common])
        if len(different):
            raise _different_tokens(first, other, int(different[0]))
        if len(wanted) != len(found):
            raise UserError(
                f"{first.root.url} and {other.root.url} have different samples",
                expected=counted(len(wanted), "sample"),
                found=counted(len(found), "sample"),
                fix=f"extract the second dataset with --dataset spile:{first.root.url}",
            )


def _different_tokens(first: Dataset, other: Dataset, number: int) -> UserError:
    a, b = first[number], other[number]
    pairs = enumerate(zip_longest(a.context.tolist(), b.context.tolist()))
    place, tokens = next(((place, pair) for place, pair in pairs if pair[0] != pair[1]), (None, ()))
    if place is None:
        return UserError(
            f"sample {a.ref.task_id} has rows of different tokens in {first.root.url} and {other.root.url}",
            expected=f"positions {_shown(a.positions)}",
            found=_shown(b.positions),
            fix="extract both with the same --positions",
        )
    texts = ["none: the sample ends before" if token is None else str(token) for token in tokens]
    return UserError(
        f"{first.root.url} and {other.root.url} have different tokens at position {place} of sample {number} "
        f"({a.ref.task_id})",
        expected=f"token {texts[0]}",
        found=f"token {texts[1]}, sample {b.ref.task_id}",
        fix=f"extract the second dataset with --dataset spile:{first.root.url}",
    )


def _shown(numbers: npt.NDArray[Any]) -> str:
    return ", ".join(map(str, numbers[:8].tolist())) + (" …" if len(numbers) > 8 else "")


_Root = str | os.PathLike[str] | Folder


@overload
def open(root: _Root, model: str | None = None) -> Dataset: ...  # type: ignore[overload-overlap]  # noqa: A001
@overload
def open(root: Sequence[_Root] | Mapping[str, _Root], model: str | None = None) -> JointDataset: ...  # noqa: A001
def open(  # noqa: A001
    root: _Root | Sequence[_Root] | Mapping[str, _Root], model: str | None = None
) -> Dataset | JointDataset:
    """Open the dataset at a path, or at ``gs://…``, ``s3://…`` or ``az://…``; or several datasets as one.

    Args:
        root: Where the dataset is. A list, or a dict with a name for each, opens several datasets of the same tokens:
            their readers give the rows of the same token side by side.
        model: Where the model is now, if it moved: its tokenizer is needed for the texts of tokens.
    """
    if isinstance(root, Mapping):
        return JointDataset({name: _open(each, model) for name, each in root.items()})
    if isinstance(root, Sequence) and not isinstance(root, str):
        return JointDataset({str(place): _open(each, model) for place, each in enumerate(root)})
    return _open(root, model)


def _open(root: _Root, model: str | None) -> Dataset:
    folder = open_folder(str(root)) if isinstance(root, str | os.PathLike) else root
    run = read_run(folder)
    if run is None:
        raise UserError(
            f"no dataset at {folder.url}",
            expected=f"a folder with {RUN}, as spile extract writes it",
            found="none",
        )
    return Dataset(folder, run, open_streams(folder, run), model)


class TokenRows:
    """The samples of a stored dataset as rows of data for another model: tokens, roles, ids and kept fields."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in self._dataset:
            roles = np.full(len(sample.context), -1)
            roles[sample.positions] = sample.roles
            yield {
                **sample.ref.kept,
                "task_id": sample.ref.task_id,
                "input_ids": sample.context.tolist(),
                "token_roles": roles.tolist(),
            }


def stored_tokens(data: DataSpec) -> DataSpec:
    """Return the data with the rows of the stored dataset that ``--dataset spile:ROOT`` names, if it names one."""
    if data.rows is not None or not data.dataset.startswith(STORED):
        return data
    dataset = _open(data.dataset.removeprefix(STORED), None)
    if data.prompt.kind not in ("auto", "tokens"):
        raise SpecError(f"--dataset {data.dataset}", expected="--prompt tokens", found=f"--prompt {data.prompt.kind}")
    answer = 0 if dataset.run.generation is None else dataset.run.generation.max_new_tokens
    return replace(
        data,
        rows=TokenRows(dataset),
        prompt=replace(data.prompt, kind="tokens", column="input_ids"),
        keep=data.keep or dataset.run.keep,
        max_seq_length=max(
            0 if data.max_seq_length == AUTO else data.max_seq_length, dataset.run.max_seq_length + answer
        ),
    )


def run_tokenizer(run: RunIdentity, model: str | None = None) -> Tokenizer:
    """Return the tokenizer of a run; ``model`` is where its model is now, if it moved.

    Raises:
        SpileError: If there is no tokenizer, or it is not the one that the run used.
    """
    from spile.data.tokens import load_tokenizer
    from spile.models.model_files import find

    name, revision = (run.model, run.revision) if model is None else (model, None)
    files = find(name, revision, weights=False, read=no_config)
    tokenizer = load_tokenizer(files.tokenizer_folder)
    if files.tokenizer_hash() != run.tokenizer:
        raise ModelError(f"the tokenizer of {name} is not the one of the run", expected=f"hash {run.tokenizer}")
    return tokenizer


def no_config(_raw: Mapping[str, Any]) -> Any:
    """Accept any config.json without reading it: only the tokenizer is needed."""
