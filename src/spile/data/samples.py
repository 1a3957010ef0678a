"""A stream: the samples of one file, in order, tokenized ahead of the reader in constant memory."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from spile.data.arc.encoders import parse_encoder
from spile.data.lines import Line, LineSource, PartReader, head_hash
from spile.data.manifest import MANIFEST, StreamsManifest, check_stream
from spile.data.prompts import Prompt, PromptBuilder, pack
from spile.data.rows import parse_row, resolve
from spile.data.sources import RowRange, open_input
from spile.data.tokens import Encoded, Tokenizer
from spile.errors import DataError, SpecError, SpileError
from spile.objects.folder import iterate_ahead
from spile.spec.identity import IN_TURN, StreamIdentity
from spile.spec.lengths import PromptLengths
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec, stream_file
from spile.spec.sample import BAD_ROW, TOO_LONG, Part, Sample, Skip, prompt_length

_CHARACTERS, _SAMPLES, _AHEAD = 1 << 18, 2048, 16
"""The size of a chunk, which is tokenized in parallel, and the number of chunks in the queue: about two million tokens,
made while the model is being loaded, so that a device faster than the tokenizer has a reserve."""
HEAD_BYTES, HEAD_ROWS = 16 << 20, 50_000
"""Bytes and rows that are read and checked before a run. A dataset that is not larger is read as a whole."""
MAX_INDEX = 1 << 53
"""Larger than the number of any sample."""
_ONE_HOST = "continue the run on one host, or start it again with another --output"
_PREVIEW = 96
_MEASURED, _QUICK = 256, 0.25
"""The number of prompts whose lengths are measured before a run: a quarter of them if these take longer than this."""
_MAX_REASON = 300


class SampleReader:
    """One pass over a stream, tokenized ahead of the consumer."""

    def __init__(
        self, chunks: Iterator[list[Sample | Skip] | int], total: int | None, parts: Sequence[Part] = ()
    ) -> None:
        self._total, self._end, self.parts = total, list[int](), parts
        """``parts``: the rows of a streamed dataset that were read so far. It grows during the pass."""
        self._items = _read_ahead(chunks, self._end)
        self._seen: deque[Sample | Skip | SpileError] = deque()
        """Items that were peeked at and not yet returned."""

    @property
    def total(self) -> int | None:
        """The number of samples of the stream; None until the end of this pass if it is not known before."""
        return self._end[0] if self._end else self._total

    def __iter__(self) -> Iterator[Sample | Skip]:
        return self

    def __next__(self) -> Sample | Skip:
        if not self._seen:
            return next(self._items)
        item = self._seen.popleft()
        if isinstance(item, SpileError):
            raise item
        return item

    def peek(self) -> Iterator[Sample | Skip]:
        """Yield the next items without removing them. Stop before an error, which is raised on reading."""
        seen = list(self._seen)
        yield from (item for item in seen if not isinstance(item, SpileError))
        if seen and isinstance(seen[-1], SpileError):
            return
        try:
            for item in self._items:
                self._seen.append(item)
                yield item
        except SpileError as error:
            self._seen.append(error)

    def close(self) -> None:
        """Stop reading."""
        if inspect.getgeneratorstate(self._items) != inspect.GEN_RUNNING:  # a running generator cannot be closed
            self._items.close()


def _read_ahead(chunks: Iterator[list[Sample | Skip] | int], end: list[int]) -> Generator[Sample | Skip, None, None]:
    """Yield the items of chunks. ``end`` gets the number of all samples once the consumer has reached it."""
    for chunk in iterate_ahead(chunks, _AHEAD):
        if isinstance(chunk, int):
            end.append(chunk)
        else:
            yield from chunk


@dataclass(frozen=True, eq=False)
class SampleStream:
    """The identity of a stream and its samples."""

    identity: StreamIdentity
    """Without the taps, which the data does not determine."""
    _spec: DataSpec
    _tokenizer: Tokenizer
    _builder: PromptBuilder
    _file: LineSource
    _parts: Sequence[Part] | None
    """All rows; None for a streamed dataset, which is read during the run."""
    _first_row: int = 0
    """The number in the source of the first row of the input."""

    def _place(self, index: int) -> int:
        """Return the number of a sample in the input."""
        return int(self.identity.place(self._spec.worker_id, index))

    def _name(self, line: int) -> str:
        """Return the id of a row without one: the number of the row in the source, however many streams there are."""
        turn = self.identity.turn or 1
        return f"line-{self._first_row + self._place(line * turn) // turn}"

    @property
    def prompt(self) -> PromptSpec:
        """The prompt options, with the kind resolved."""
        return self._builder.spec

    @property
    def long(self) -> Literal["truncate", "skip"]:
        """Whether samples that are too long are cut or skipped."""
        return self._spec.long_policy(self.prompt.kind)

    def with_spec(self, spec: DataSpec) -> SampleStream:
        """Return the same stream with another limit of length."""
        return replace(self, _spec=spec)

    def measure(self) -> PromptLengths | None:
        """Return the lengths of some prompts without a limit, within about a second; None for packed sequences.

        They are spread over a dataset that was read as a whole, and at the beginning of a larger one.
        """
        if self.prompt.pack:
            return None
        known, each = self.identity.samples, self.prompt.predictions_per_task
        total = min(MAX_INDEX if known is None else known, self._limit)
        count = min(total, _MEASURED if known is not None else (self.identity.head or 0) * each, _MEASURED)
        places = range(count) if known is None else [place * total // count for place in range(count)]
        began, lengths = time.monotonic(), self._lengths(places[::4])
        if time.monotonic() - began < _QUICK:
            lengths += self._lengths(sorted({*places} - {*places[::4]}))
        return PromptLengths(lengths, self._spec.longest, self.long == "skip", exact=len(lengths) == total)

    def _lengths(self, places: Sequence[int]) -> list[int]:
        reader = self.read(Ranges([(0, MAX_INDEX)]) - Ranges.of(places))
        try:
            return [length for item in reader if (length := prompt_length(item)) is not None]
        except SpileError:  # The run reports it, after it has committed the samples before.
            return []
        finally:
            reader.close()

    def read(self, done: Ranges, parts: Sequence[Part] = (), end: int | None = None) -> SampleReader:
        """Read the samples that are not done, in index order. A sample does not depend on which others are done.

        Args:
            done: The samples to leave out.
            parts: The rows that earlier runs read, if the dataset is streamed.
            end: The number of samples, if an earlier run read a streamed dataset to its end.

        """
        reader = self._open_reader(partial(self._needed, done), parts, end)
        chunks = self._chunks(done, reader)
        if self._parts is not None:
            return SampleReader(chunks, self.identity.samples)
        return SampleReader(chunks, end, reader.parts)

    def _open_reader(self, needed: Callable[[Part], bool], parts: Sequence[Part], end: int | None) -> PartReader:
        if self._parts is not None:
            return PartReader(self._file, self._parts, complete=True, needed=needed)
        head = (self.identity.head or 0, self.identity.sha256)
        return PartReader(self._file, parts, head=head, complete=end is not None, needed=needed)

    def find_task_id(
        self, index: int, parts: Sequence[Part] = (), end: int | None = None
    ) -> tuple[str, Sequence[Part]]:
        """Return the id of a sample without tokenizing it, and the rows that were read to find it.

        Packed sequences are named by their tokens, so the id of one is made from its number.
        """
        others = Ranges([(0, index), (index + 1, MAX_INDEX)])
        reader = self._open_reader(partial(self._needed, others), parts, end)
        prompts = iter(()) if self.prompt.pack else self._prompts(others, index + 1, reader)
        found = next((prompt.task_id for prompt in prompts), f"sample-{index}")
        return found, reader.parts if self._parts is None else ()

    def check_unchanged(self, parts: Sequence[Part], end: int | None) -> None:
        """Raise an error if the rows that earlier runs read have changed. A pinned dataset cannot change."""
        if self._parts is None and self._file.revision is None:
            next(self._open_reader(lambda _: False, parts, end).lines(), None)  # the first line after the known parts

    def _needed(self, done: Ranges, part: Part) -> bool:
        """Return whether a part has samples to make. A packed sequence depends on all documents before it."""
        count = self.prompt.predictions_per_task
        return self.prompt.pack or bool(len(Ranges([(part.first * count, part.stop * count)]) - done))

    @property
    def _limit(self) -> int:
        limit = self._spec.sample_limit
        return MAX_INDEX if limit is None else limit

    def _chunks(self, done: Ranges, reader: PartReader) -> Iterator[list[Sample | Skip] | int]:
        """Yield samples in chunks and, if all rows were read, the number of all samples."""
        if self.prompt.pack:
            yield from self._packed_sequences(done, reader)
            return
        limit = min(self._limit, _end_of_wanted(done))
        for items in _chunked(self._prompts(done, limit, reader)):
            encoded = iter(_encode([item for item in items if isinstance(item, Prompt)], self._tokenizer))
            yield [item if isinstance(item, Skip) else self._to_sample(item, next(encoded)) for item in items]
        samples = sum(part.rows for part in reader.parts) * self.prompt.predictions_per_task
        if samples <= limit:
            yield samples

    def _prompts(self, done: Ranges, limit: int, reader: PartReader) -> Iterator[Prompt | Skip]:
        count = self.prompt.predictions_per_task
        for line in reader.lines():
            first = line.index * count
            if first >= limit:
                return
            wanted = [index for index in range(first, min(first + count, limit)) if index not in done]
            if not wanted:
                continue
            place, name = f"{self._file.location} {self._file.number(line)}", self._name(line.index)
            try:
                row = parse_row(line.raw, place)
                prompts = list(self._builder.build(row, wanted, place, name))
            except DataError as error:
                if self._spec.bad_rows == "error":
                    raise
                error.fix = None  # The row is skipped, so advice on how to skip it is of no use.
                reason: dict[str, object] = {"error": error.line()[:_MAX_REASON]}
                yield from (Skip(index, name, BAD_ROW, reason) for index in wanted)
            else:
                yield from prompts

    def _packed_sequences(self, done: Ranges, reader: PartReader) -> Iterator[list[Sample | Skip] | int]:
        """Yield packed sequences and, if all rows were read, their number."""
        limit, index = self._limit, 0
        for name, tokens in pack(self._documents(reader), self._spec.longest, self._tokenizer):
            if index >= limit:
                return
            if index not in done:
                roles, preview = self._tokenizer.roles(tokens), _preview(self._tokenizer, tokens)
                yield [Sample(index, name, tokens, roles, preview, place=self._place(index))]
            index += 1
        yield index

    def _documents(self, reader: PartReader) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
        """Yield all documents from the first: the start of a packed sequence depends on all tokens before it."""
        for items in _chunked(self._prompts(Ranges(), MAX_INDEX, reader)):
            prompts = [item for item in items if isinstance(item, Prompt)]
            texts = [prompt.text for prompt in prompts]
            for prompt, encoded in zip(prompts, self._tokenizer.encode(texts, add_special=False), strict=True):
                yield prompt.task_id, encoded.tokens

    def _to_sample(self, prompt: Prompt, encoded: Encoded) -> Sample | Skip:
        count, most = len(encoded.tokens), self._spec.longest
        if count == 0 or (prompt.tokens is None and not prompt.text.strip()):
            return Skip(prompt.index, prompt.task_id, "empty")
        if count > most and self.long == "skip":
            return Skip(prompt.index, prompt.task_id, TOO_LONG, {"tokens": count, "max_seq_length": most})
        return Sample(
            index=prompt.index,
            task_id=prompt.task_id,
            tokens=encoded.tokens if count <= most else encoded.tokens[:most].copy(),  # a view would keep all tokens
            roles=encoded.roles if count <= most else encoded.roles[:most].copy(),
            preview=prompt.text[:_PREVIEW] if prompt.tokens is None else _preview(self._tokenizer, prompt.tokens),
            augmentation=prompt.augmentation,
            truncated=max(0, count - most),
            kept=prompt.kept,
            place=self._place(prompt.index),
        )


def _preview(tokenizer: Tokenizer, tokens: npt.NDArray[np.int32]) -> str:
    return tokenizer.decode(tokens[: _PREVIEW // 2].tolist())[:_PREVIEW]


def open_stream(
    spec: DataSpec,
    tokenizer: Tokenizer,
    vocabulary: int | None = None,
    *,
    stored: StreamIdentity | None = None,
    read_all: bool | None = None,
    pod: bool = False,
) -> SampleStream:
    """Read the first rows of a stream to hash and check them before any sample is made.

    A dataset that ends within these rows is known as a whole. A larger one is streamed: it is read during the run, and
    its rows are hashed as they are read.

    Args:
        spec: The data.
        tokenizer: The tokenizer of the model.
        vocabulary: The size of the model's vocabulary, to check rows of token ids.
        stored: The identity of the stream in the output, if it exists. It states how much was read before that run.
        read_all: True reads the whole dataset in any case, False only its first rows; None decides by the size.
        pod: Whether several hosts read it. They compare its hash, so a dataset that can change is read as a whole.

    """
    parse_encoder(spec.prompt.encoder)
    file = open_input(spec, stored)
    if pod and file.revision is None:
        if stored is not None and stored.head is not None:
            raise SpecError(file.location, expected="one host, as when the run began", found="a pod", fix=_ONE_HOST)
        read_all = True
    manifest = file.read_sibling(MANIFEST)
    if read_all is None:
        known = stored is not None and stored.head is None
        read_all = known or manifest is not None or spec.expect_split is not None
    limits = (HEAD_BYTES // file.streams, HEAD_ROWS // file.streams)
    if stored is not None and stored.head is not None:
        limits = (MAX_INDEX, stored.head)
    digest, reader = hashlib.sha256(), PartReader(file)
    make = partial(PromptBuilder.for_tokenizer, data=spec, tokenizer=tokenizer, vocabulary=vocabulary)
    rows, head, builder = _read_first(file, reader.lines(digest), spec, make, None if read_all else limits)
    if builder is None:
        found = f"{rows} rows that cannot be used" if rows else "no row"
        raise DataError(f"{file.location} is empty", expected="at least one usable row", found=found)
    whole, prompt = head is None, builder.spec
    streams, split, in_turn, first_row = _split_of(file, spec, manifest, digest.hexdigest() if whole else None)
    identity = StreamIdentity(
        data=file.location,
        sha256=digest.hexdigest() if head is None else head,
        lines=rows if whole else None,
        samples=rows * prompt.predictions_per_task if whole and not prompt.pack else None,
        taps=(),
        streams=streams,
        split=split,
        head=None if whole else rows,
        revision=file.revision,
        turn=(1 if prompt.pack else prompt.predictions_per_task) if in_turn else None,
    )
    return SampleStream(identity, spec, tokenizer, builder, file, reader.parts if whole else None, first_row)


def _split_of(
    file: LineSource, spec: DataSpec, manifest: bytes | None, sha256: str | None
) -> tuple[int | None, str | None, bool, int]:
    """Return the number of streams of the split and its name, if they are known; whether the streams have the rows of
    the input in turn; and the number of the input's first row. ``sha256``: of a file read whole.
    """
    split: StreamsManifest | None = None
    first = RowRange.parse(spec.split).start
    if sha256 is not None:
        split = check_stream(file.name, manifest, sha256, file.location, spec.expect_split)
    if spec.of_streams is not None:
        return spec.of_streams, IN_TURN if file.revision is None else f"{IN_TURN} of {file.revision}", True, first
    if split is None or file.name != stream_file(spec.worker_id):
        return None, None, False, first  # a file under another number: the split's other streams are unknown
    if split.seed is not None:
        return len(split.streams), split.digest(), False, 0
    return len(split.streams), split.digest(), True, int(str(split.source.get("start_index") or 0))


def is_large(file: LineSource, prompt: PromptSpec, least: int) -> bool:
    """Return whether the dataset is larger than what is read before a run, and has at least ``least`` rows.

    Raises:
        DataError: The first row cannot be used.

    """
    size = 0
    for rows, line in enumerate(file.lines(), 1):
        if rows == 1:
            resolve(prompt, parse_row(line.raw, file.location), file.location)
        size += len(line.raw)
        if rows >= least and (size >= HEAD_BYTES or rows >= HEAD_ROWS):
            return True
    return False


def _read_first(
    file: LineSource,
    lines: Iterator[Line],
    spec: DataSpec,
    make: Callable[[PromptSpec], PromptBuilder],
    limits: tuple[int, int] | None,
) -> tuple[int, str | None, PromptBuilder | None]:
    """Read and check the first rows, up to this many bytes or rows, or all rows if it is None.

    Returns:
        The number of rows; their hash if more rows follow; the prompt builder for the kind of the first usable row.

    """
    rows = size = 0
    builder, last = None, None
    first: list[Line] = []
    for line in lines:
        rows += 1
        if last is None or line.index < last:
            place = f"{file.location} {file.number(line)}"
            try:
                row = parse_row(line.raw, place)
                checked = builder or make(resolve(spec.prompt, row, place))
                checked.check(row, place)
                builder, last = checked, lines_needed(spec, checked.spec)
            except DataError:
                if spec.bad_rows == "error":
                    raise
        if limits is not None:
            first.append(line)
            size += len(line.raw)
            if size >= limits[0] or rows >= limits[1]:
                return rows, head_hash(first), builder
    return rows, None, builder


def _end_of_wanted(done: Ranges) -> int:
    """Return the number after the last sample that is not done. A part of a stream has all others marked as done."""
    last = done.pairs()[-1:]
    return last[0][0] if last and last[0][1] >= MAX_INDEX else MAX_INDEX


def lines_needed(spec: DataSpec, prompt: PromptSpec) -> int | None:
    """Return the number of lines that the limit of the samples needs, or None if all are needed."""
    if spec.sample_limit is None or prompt.pack:
        return None
    return -(-spec.sample_limit // prompt.predictions_per_task)


def _chunked(items: Iterator[Prompt | Skip]) -> Iterator[list[Prompt | Skip]]:
    """Group prompts and skipped samples into lists of bounded size."""
    chunk: list[Prompt | Skip] = []
    size = 0
    for item in items:
        chunk.append(item)
        if isinstance(item, Prompt):
            size += len(item.text if item.tokens is None else item.tokens)
        if size >= _CHARACTERS or len(chunk) >= _SAMPLES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(prompts: list[Prompt], tokenizer: Tokenizer) -> list[Encoded]:
    """Tokenize a chunk; all prompts of a stream are of the same kind."""
    if not prompts:
        return []
    if prompts[0].tokens is not None:
        return [_encode_ids(prompt.tokens, prompt.roles, tokenizer) for prompt in prompts if prompt.tokens is not None]
    texts = [prompt.text for prompt in prompts]
    spans = None if prompts[0].spans is None else [prompt.spans or () for prompt in prompts]
    return tokenizer.encode(texts, add_special=not prompts[0].rendered, spans=spans)


def _encode_ids(tokens: npt.NDArray[np.int32], given: npt.NDArray[np.int64] | None, tokenizer: Tokenizer) -> Encoded:
    """Return token ids with the roles of the row or, if it has none, those that follow from the tokens alone."""
    own = tokenizer.roles(tokens)
    return Encoded(tokens, own if given is None else np.where(given < 0, own, given).astype(np.uint8))
