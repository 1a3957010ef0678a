"""A stream: the samples of one file, in order, tokenized ahead of the reader in constant memory."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spile.data.arc.encoders import parse_encoder
from spile.data.arc.grids import passes_fast_check
from spile.data.lines import BlockHashes, StreamFile
from spile.data.manifest import MANIFEST, check_stream, stream_name
from spile.data.prompts import Document, Draft, Drafter, pack
from spile.data.rows import parse_row, resolve
from spile.data.sources import RowSource, open_input
from spile.data.tokens import Encoded, Tokenizer
from spile.errors import DataError, SpileError
from spile.objects.ahead import iterate_ahead
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample, Skip

_CHARACTERS, _SAMPLES, _AHEAD = 1 << 18, 2048, 16
"""The size of a chunk, which is tokenized in parallel, and the number of chunks in the queue: about two million tokens,
made while the model is being loaded, so that a device faster than the tokenizer has a reserve."""
_PREVIEW = 96
_MOST_REASON = 300


class SampleReader:
    """One pass over a stream, tokenized ahead of the consumer."""

    def __init__(self, chunks: Iterator[list[Sample | Skip]], counted: list[int], total: int | None) -> None:
        self._total, self._end = total, list[int]()
        self._items = _read_ahead(chunks, counted, self._end)
        self._seen: deque[Sample | Skip | SpileError] = deque()
        """Items that were peeked at and not yet returned."""

    @property
    def total(self) -> int | None:
        """The number of samples of the stream; None for packed documents until this pass has ended."""
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

    def look(self) -> Iterator[Sample | Skip]:
        """Peek at the next items, which are still returned later. Stop before an error, which is raised on reading."""
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


def _read_ahead(
    chunks: Iterator[list[Sample | Skip]], counted: list[int], end: list[int]
) -> Generator[Sample | Skip, None, None]:
    for chunk in iterate_ahead(chunks, _AHEAD):
        yield from chunk
    end.extend(counted)  # only here: the thread may reach the end although the consumer stops earlier


@dataclass(frozen=True, eq=False)
class SampleStream:
    """The identity of a stream and its samples."""

    location: str
    sha256: str
    """The hash of the file."""
    lines: int
    prompt: PromptSpec
    """The prompt options, with the kind resolved."""
    streams: int | None
    """The number of streams of the split; None if no ``streams.json`` lists this stream under its number."""
    split: str | None
    """The digest of that split."""
    _spec: DataSpec
    _tokenizer: Tokenizer
    _file: StreamFile
    _hashes: BlockHashes

    @property
    def samples(self) -> int | None:
        """The number of samples regardless of ``max_samples``; None for packed documents, which must be read first."""
        return None if self.prompt.pack else self.lines * self.prompt.predictions_per_task

    def read(self, done: Ranges) -> SampleReader:
        """Read the samples that are not done, in index order. A sample does not depend on which others are done."""
        counted: list[int] = []
        return SampleReader(self._chunks(done, counted), counted, self.samples)

    def task_id(self, index: int) -> str:
        """Return the id of a sample without tokenizing it; its number if only the tokens would tell."""
        if not self.prompt.pack:
            others = Ranges([(0, index), (index + 1, (self.samples or 0) + 1)])
            drafter = Drafter.of(self.prompt, self._spec, self._tokenizer)
            for draft in self._drafts(others, index + 1, drafter):
                return draft.task_id
        return f"sample-{index}"

    def _chunks(self, done: Ranges, counted: list[int]) -> Iterator[list[Sample | Skip]]:
        drafter = Drafter.of(self.prompt, self._spec, self._tokenizer)
        if self.prompt.pack:
            yield from self._windows(done, drafter, counted)
            return
        for drafts in _chunked(self._drafts(done, self._spec.max_samples, drafter)):
            encoded = iter(_encode([draft for draft in drafts if isinstance(draft, Draft)], self._tokenizer))
            yield [draft if isinstance(draft, Skip) else self._finished(draft, next(encoded)) for draft in drafts]

    def _drafts(self, done: Ranges, limit: int | None, drafter: Drafter) -> Iterator[Draft | Skip]:
        count = self.prompt.predictions_per_task

        def wanted(index: int) -> bool:
            return (limit is None or index < limit) and index not in done

        for line in self._file.lines(self._hashes.again()):
            first = line.index * count
            if limit is not None and first >= limit:
                return
            if any(map(wanted, range(first, first + count))):
                place = f"{self.location} {self._file.unit} {line.number}"
                try:
                    drafts = list(drafter.drafts(parse_row(line.raw, place), line.index, place, wanted))
                except DataError as error:
                    if self._spec.bad_rows == "error":
                        raise
                    reason: dict[str, object] = {"error": str(error)[:_MOST_REASON]}
                    yield from (
                        Skip(index, f"{self._file.unit}-{line.number}", "bad row", reason)
                        for index in range(first, first + count)
                        if wanted(index)
                    )
                else:
                    yield from drafts

    def _windows(self, done: Ranges, drafter: Drafter, counted: list[int]) -> Iterator[list[Sample | Skip]]:
        limit, count = self._spec.max_samples, 0
        documents = self._documents(drafter)
        for window in pack(documents, self._spec.max_seq_length, self._tokenizer):
            if limit is not None and window.index >= limit:
                return
            if window.index not in done:
                roles = self._tokenizer.roles(window.tokens)
                yield [
                    Sample(
                        window.index,
                        window.name,
                        window.tokens,
                        roles,
                        _preview(self._tokenizer, window.tokens)[:_PREVIEW],
                    )
                ]
            count = window.index + 1
        counted.append(count)

    def _documents(self, drafter: Drafter) -> Iterator[Document]:
        """Yield all documents from the first: the start of a packed sequence depends on all tokens before it."""
        for items in _chunked(self._drafts(Ranges(), None, drafter)):
            drafts = [item for item in items if isinstance(item, Draft)]
            texts = [draft.text for draft in drafts]
            for draft, encoded in zip(drafts, self._tokenizer.encode(texts, add_special=False), strict=True):
                yield Document(draft.task_id, encoded.tokens)

    def _finished(self, draft: Draft, encoded: Encoded) -> Sample | Skip:
        return _finished(draft, encoded, self._spec, self._tokenizer)


def _preview(tokenizer: Tokenizer, tokens: npt.NDArray[np.int32]) -> str:
    return tokenizer.decode(tokens[: _PREVIEW // 2].tolist())


def _finished(draft: Draft, encoded: Encoded, spec: DataSpec, tokenizer: Tokenizer) -> Sample | Skip:
    count, most = len(encoded.tokens), spec.max_seq_length
    if count == 0 or (draft.tokens is None and not draft.text.strip()):
        return Skip(draft.index, draft.task_id, "empty")
    if count > most and spec.long == "skip":
        return Skip(draft.index, draft.task_id, "too long", {"tokens": count, "max_seq_length": most})
    return Sample(
        index=draft.index,
        task_id=draft.task_id,
        tokens=encoded.tokens if count <= most else encoded.tokens[:most],
        roles=encoded.roles if count <= most else encoded.roles[:most],
        preview=(draft.text if draft.tokens is None else _preview(tokenizer, draft.tokens))[:_PREVIEW],
        augmentation=draft.augmentation,
        truncated=max(0, count - most),
        kept=draft.kept,
    )


def make_samples(
    source: RowSource, location: str, spec: DataSpec, tokenizer: Tokenizer, vocabulary: int
) -> tuple[PromptSpec, list[Sample | Skip]]:
    """Return the prompt options, with the kind resolved, and all samples of a small source, in order and in memory."""
    drafts: list[Draft] = []
    drafter: Drafter | None = None
    for row in source.rows(0, None):
        place = f"{location} {row.place}"
        if row.problem is not None:
            raise DataError(place, expected="a usable row", found=row.problem)
        data = row.data if row.data is not None else parse_row(row.raw or b"", place)
        if drafter is None:
            drafter = Drafter.of(resolve(spec.prompt, data, place), spec, tokenizer, vocabulary)
        drafts += drafter.drafts(data, row.number, place, lambda _index: True)
    if drafter is None:
        raise DataError(f"{location} is empty", expected="at least one row", found="none")
    encoded = _encode(drafts, tokenizer)
    return drafter.prompt, [_finished(*each, spec, tokenizer) for each in zip(drafts, encoded, strict=True)]


def open_stream(spec: DataSpec, tokenizer: Tokenizer, vocabulary: int | None = None) -> SampleStream:
    """Read a stream once to hash, count and check its rows before any sample is made.

    ``vocabulary``: the size of the model's vocabulary, to check rows of token ids.
    """
    parse_encoder(spec.prompt.encoder)
    file = open_input(spec)
    hashes = BlockHashes(file.location)
    lines, drafter, last = 0, None, None
    for line in file.lines(hashes):
        lines += 1
        if last is not None and line.index >= last:
            continue
        fast = drafter is not None and drafter.prompt.kind == "arc" and not spec.keep
        if fast and passes_fast_check(line.raw) is not None:
            continue
        place = f"{file.location} {file.unit} {line.number}"
        try:
            row = parse_row(line.raw, place)
            checked = drafter or Drafter.of(resolve(spec.prompt, row, place), spec, tokenizer, vocabulary)
            checked.check(row, place)
        except DataError:
            if spec.bad_rows == "error":
                raise
            continue
        if drafter is None:
            drafter, last = checked, lines_needed(spec, checked.prompt)
    if drafter is None:
        found = f"{lines} rows that cannot be used" if lines else "no row"
        raise DataError(f"{file.location} is empty", expected="at least one usable row", found=found)
    split = check_stream(file.name, file.read_sibling(MANIFEST), hashes.hexdigest, file.location, spec.expect_split)
    if file.name != stream_name(spec.worker_id):
        split = None  # the file is used under another number, so the split's other streams are unknown
    prompt = drafter.prompt
    return SampleStream(
        location=file.location,
        sha256=hashes.hexdigest,
        lines=lines,
        prompt=prompt,
        streams=None if split is None else len(split.streams),
        split=None if split is None else split.digest(),
        _spec=spec,
        _tokenizer=tokenizer,
        _file=file,
        _hashes=hashes,
    )


def lines_needed(spec: DataSpec, prompt: PromptSpec) -> int | None:
    """Return the number of lines that ``max_samples`` needs, or None if all are needed."""
    if spec.max_samples is None or prompt.pack:
        return None
    return -(-spec.max_samples // prompt.predictions_per_task)


def _chunked(drafts: Iterator[Draft | Skip]) -> Iterator[list[Draft | Skip]]:
    """Group drafts into lists of bounded size."""
    chunk: list[Draft | Skip] = []
    size = 0
    for draft in drafts:
        chunk.append(draft)
        if isinstance(draft, Draft):
            size += len(draft.text if draft.tokens is None else draft.tokens)
        if size >= _CHARACTERS or len(chunk) >= _SAMPLES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(drafts: list[Draft], tokenizer: Tokenizer) -> list[Encoded]:
    """Tokenize a chunk; all drafts of a stream are of the same kind."""
    given = [draft.tokens for draft in drafts if draft.tokens is not None]
    if given:
        return [Encoded(tokens, tokenizer.roles(tokens)) for tokens in given]
    texts, spans = [draft.text for draft in drafts], [draft.spans or () for draft in drafts]
    if not drafts:
        return []
    has_parts = any(draft.spans is not None for draft in drafts)
    return tokenizer.encode(texts, add_special=not drafts[0].rendered, spans=spans if has_parts else None)
