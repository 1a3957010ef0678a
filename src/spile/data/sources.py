"""Sources of rows: JSONL, CSV, text and JSON files, Parquet, ARC folders, and datasets of the Hugging Face hub."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from spile.data.lines import LineSource, embedded_tasks, first_bytes
from spile.data.rows import MASK, PAIRS, SAMPLE_FIELDS, TOKENS, elements, plain_value, rejected_line, scalar_fields
from spile.data.tables import Columns, Hub, Parquet, RowSource, SourceRow
from spile.errors import DataError, RunMismatch, SpecError, StoreError
from spile.objects.local import refuse_links
from spile.spec.amounts import counted
from spile.spec.identity import StreamIdentity
from spile.spec.run import EMBEDDED, EVERY_FIELD, BadRows, DataSpec

_MAX_DOCUMENT_BYTES = 256 << 20
"""Bytes of a JSON document, or characters of a line or a cell."""
_WITH_FIELDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".tab")
"""Files whose rows are read with all their fields. Columns of other tables are read only if ``--keep`` names them."""
_SUFFIXES = (*_WITH_FIELDS, ".parquet", ".txt")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)
_ESTIMATED_FROM = 4 << 20
"""Bytes of a file that are read to estimate its number of rows."""
_SLICE = re.compile(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", re.ASCII)


@dataclass(frozen=True)
class FileSource(RowSource):
    """A file of rows, local or in a bucket."""

    location: str

    def count(self) -> int:
        beginning, total = first_bytes(self.location, _ESTIMATED_FROM)
        return max(1, round(self._rows_in(beginning) * total / max(1, len(beginning))))

    def _rows_in(self, beginning: bytes) -> int:
        return beginning.count(b"\n")


class Jsonl(FileSource):
    """A file with one JSON object per line."""

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        for line in LineSource(self.location).lines(start):
            place = f"line {line.number}"
            try:
                yield SourceRow(line.index, orjson.loads(line.raw), place, line.raw)
            except orjson.JSONDecodeError:
                yield SourceRow(line.index, None, place, problem="a line that is not JSON")


@dataclass(frozen=True)
class JsonFile(FileSource):
    """One JSON document: a list of rows, or ARC tasks by id as in ``arc_format_train.json``. It is read into memory.

    A file with this suffix that holds one JSON object per line is read as such.
    """

    column: str

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        content = bytearray()
        for chunk in LineSource(self.location).chunks():
            content += chunk
            if len(content) > _MAX_DOCUMENT_BYTES:
                limit = f"at most {_MAX_DOCUMENT_BYTES >> 20} MiB"
                raise DataError(
                    self.location, expected=limit, found="a larger JSON document", fix="convert it to JSONL"
                )
        try:
            document = orjson.loads(bytes(content).removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError:
            yield from Jsonl(self.location).rows(start)
            return
        if isinstance(document, list):
            for number, element in enumerate(document[start:], start):
                yield _row_from(number, element, self.column)
            return
        if not isinstance(document, dict):
            raise DataError(
                self.location, expected="a list of rows or an object of tasks by id", found="a single value"
            )
        if "train" in document and "test" in document:
            document = {Path(self.location).stem: document}
        elif not all(isinstance(task, dict) and "train" in task for task in document.values()):
            yield SourceRow(0, document, "row 0")
            return
        for number, (name, task) in enumerate(islice(document.items(), start, None), start):
            yield _named_task(number, task, name, f"task {name}")


@dataclass(frozen=True)
class Csv(FileSource):
    """A CSV or TSV file with a header. Values are strings."""

    columns: Columns

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        records = self._records()
        _, header = next(records, (0, []))
        if not header:
            return
        names = self.columns.choose(header, self.location)
        if repeated := [name for name in names if header.count(name) > 1]:
            fix = "rename one of the columns"
            raise DataError(f"{self.location} has two columns named {repeated[0]!r}", fix=fix)
        for number, (line, cells) in islice(enumerate(records), start, None):
            if len(cells) == len(header):
                row = dict(zip(header, cells, strict=True))
                yield SourceRow(number, {name: row[name] for name in names}, f"line {line}")
            else:
                problem = f"{counted(len(cells), 'cell')}, but the header has {len(header)}"
                yield SourceRow(number, None, f"line {line}", problem=problem)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the cells of each record, and the line on which it begins."""
        csv.field_size_limit(_MAX_DOCUMENT_BYTES)
        ended = False

        def lines() -> Iterator[str]:
            nonlocal ended
            yield from _text_lines(self.location)
            ended = True

        reader = csv.reader(lines(), delimiter=self._delimiter)
        first = 1
        try:
            for cells in reader:
                if ended:  # The reader asked for another line in the middle of a record.
                    fix = 'close it, or write each quote inside a cell as ""'
                    raise DataError(f"{self.location} line {first}: a quote is never closed", fix=fix)
                if cells:
                    yield first, cells
                first = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{self.location} line {first}", expected="CSV", found=str(error)) from error

    @property
    def _delimiter(self) -> str:
        return "," if self.location.endswith(".csv") else "\t"

    def _rows_in(self, beginning: bytes) -> int:
        """Count records: a quoted cell may hold line ends."""
        text = beginning.decode("utf-8", "replace").splitlines(keepends=True)
        return sum(1 for _ in csv.reader(text, delimiter=self._delimiter)) - 1


@dataclass(frozen=True)
class TextFile(FileSource):
    """A text file with one prompt per line."""

    column: str

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        for line in LineSource(self.location).lines(start):
            place = f"line {line.number}"
            try:
                yield SourceRow(line.index, {self.column: line.raw.decode().strip()}, place)
            except UnicodeDecodeError:
                yield SourceRow(line.index, None, place, problem="a line that is not UTF-8 text")


@dataclass(frozen=True)
class FileFolder(RowSource):
    """A folder with one row per file: a text, or an ARC task in JSON as in ARC-AGI. The file's name is the row's id."""

    folder: Path
    files: tuple[Path, ...]
    location: str
    column: str

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        for number, path in enumerate(self.files[start:], start):
            name = path.relative_to(self.folder).as_posix()
            try:
                content = path.read_bytes()
                if path.suffix == ".json":
                    yield _named_task(number, orjson.loads(content), path.stem, name)
                else:
                    yield SourceRow(number, {"id": name, self.column: content.decode("utf-8-sig")}, name)
            except (orjson.JSONDecodeError, UnicodeDecodeError):
                kind = "JSON" if path.suffix == ".json" else "UTF-8 text"
                yield SourceRow(number, None, name, problem=f"a file that is not {kind}")
            except OSError as error:
                raise StoreError(f"{path} cannot be read", found=error.strerror or str(error)) from error

    def count(self) -> int:
        return len(self.files)


def with_rows(spec: DataSpec, data: Any, *, once: bool = False) -> DataSpec:
    """Return a spec with rows that are given in Python. ``once``: for one pass in memory, so an iterator will do.

    Raises:
        SpecError: The object has no rows.

    """
    rows = hasattr(data, "__iter__") and (once or not hasattr(data, "__next__"))
    if isinstance(data, bytes | Mapping) or not (rows or hasattr(data, "to_batches")):
        fix = "pass list(data)" if hasattr(data, "__next__") else None
        raise SpecError(
            "data",
            expected="a name, a list of strings or dicts, a datasets.Dataset, or a frame of pandas, polars or pyarrow",
            found=type(data).__name__,
            fix="pass a list of dicts, one per row" if isinstance(data, Mapping) else fix,
        )
    found = list(data) if hasattr(data, "__next__") else data
    return replace(spec, rows=found, dataset=f"Python {type(data).__name__}", worker_id=0)


@dataclass(frozen=True, eq=False)
class PythonRows(RowSource):
    """Rows that a caller gives in Python: strings, dicts, chats or lists of token ids, or the rows of a table."""

    data: Any
    location: str
    column: str
    keep: tuple[str, ...] = ()

    def count(self) -> int | None:
        return len(self.data) if hasattr(self.data, "__len__") else None

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        for number, element in islice(enumerate(elements(self.data)), start, None):
            row = _row_from(number, plain_value(element), self.column)
            yield row if row.data is None else replace(row, data=self._used(row.data))

    def _used(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {str(name): plain_value(value) for name, value in row.items()}
        names = {self.column, "text", *SAMPLE_FIELDS, *self.keep}
        kept = scalar_fields(row, self.column) if self.keep == (EVERY_FIELD,) else {}
        return {name: value for name, value in row.items() if name in names or name in kept}


def _row_from(number: int, element: object, column: str) -> SourceRow:
    """Return an element of a list as a row: an object, a string as its text, a list of messages or of token ids."""
    place = f"row {number}"
    match element:
        case str():
            return SourceRow(number, {column: element}, place)
        case dict():
            return SourceRow(number, element, place)
        case [dict(), *_]:
            return SourceRow(number, {"messages": element}, place)
        case [int(), *_]:
            return SourceRow(number, {TOKENS: element}, place)
    return SourceRow(number, None, place, problem="an element that is neither an object nor a string")


def _text_lines(location: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends."""
    rest, number = "", 1
    try:
        for text in codecs.iterdecode(LineSource(location).chunks(), "utf-8-sig"):
            *lines, rest = (rest + text).split("\n")
            if len(rest) > _MAX_DOCUMENT_BYTES:
                raise DataError(f"{location} line {number}", expected=f"at most {_MAX_DOCUMENT_BYTES >> 20} MiB a line")
            number += len(lines)
            yield from (f"{line}\n" for line in lines)
        yield from io.StringIO(rest, newline="")
    except UnicodeDecodeError as error:
        raise DataError(f"{location} near line {number}", expected="UTF-8 text", found=str(error.reason)) from error


@dataclass(frozen=True)
class RowRange:
    """A split and a range of its rows."""

    split: str | None
    start: int = 0
    stop: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> RowRange:
        """Parse ``train``, ``train[:1000]`` or ``train[500:1000]``."""
        if text is None:
            return cls(None)
        found = _SLICE.fullmatch(text)
        if found is None:
            raise SpecError("--split", expected="a split, or rows of one: train, train[:1000]", found=repr(text))
        return cls(found[1], int(found[2] or 0), int(found[3]) if found[3] else None)

    def rows(self, source: RowSource, first: int = 0) -> Iterator[SourceRow]:
        """Return the rows of the range, from its row ``first`` on."""
        start = self.start + first
        return islice(source.rows(start), None if self.stop is None else max(0, self.stop - start))


def default_keep(dataset: str) -> tuple[str, ...]:
    """Return the fields of each row that are kept without ``--keep``."""
    return (EVERY_FIELD,) if dataset.endswith(_WITH_FIELDS) else ()


def open_source(
    dataset: str,
    *,
    column: str,
    split: str | None = None,
    config_name: str | None = None,
    keep: tuple[str, ...] = (),
    revision: str | None = None,
) -> RowSource:
    """Open a source by name: ``embedded``, a file, a folder, an object in a bucket, or a dataset of the hub.

    ``column`` is the field with the text, or with the pairs of a task; ``keep`` are columns that a table must have in
    addition. ``split``, ``config_name`` and ``revision`` (a branch, tag or commit) belong to a dataset of the hub.
    """
    samples = frozenset({column, "train", "test", "messages", "text", "task_id", "id", TOKENS, MASK})
    columns = Columns(samples, keep)
    text = "text" if column == PAIRS else column
    if dataset == EMBEDDED:
        return Jsonl(str(embedded_tasks()))
    path = Path(dataset).expanduser()
    if "://" not in dataset and path.is_dir():
        return _open_folder(path, dataset, text, columns, split, config_name)
    if "://" in dataset or path.is_file():
        return _open_file(dataset, text, columns)
    # A name inside an existing local folder is a mistyped file, not a dataset of the hub.
    mistyped = dataset.endswith(_SUFFIXES) or (path.parent != Path() and path.parent.is_dir())
    if mistyped or not _HUB_NAME.fullmatch(dataset):
        raise DataError(
            f"no such dataset: {dataset}", fix="check --dataset, which is a file, a folder, or owner/name on the hub"
        )
    hub = Hub(dataset, split or "train", config_name, columns)
    return hub if revision is None else hub.pinned(revision)


def _open_file(dataset: str, column: str, columns: Columns) -> RowSource:
    match Path(dataset).suffix:
        case ".parquet":
            return Parquet(dataset, columns)
        case ".json":
            return JsonFile(dataset, column)
        case ".csv" | ".tsv" | ".tab":
            return Csv(dataset, columns)
        case ".txt":
            return TextFile(dataset, column)
        case ".jsonl" | ".ndjson" | "":
            return Jsonl(dataset)
        case suffix if "://" in dataset:
            return Jsonl(dataset)
        case suffix:
            expected = ", ".join(_SUFFIXES)
            raise DataError(f"{dataset} has an unknown suffix", expected=expected, found=suffix, fix="rename the file")


def _open_folder(
    path: Path, dataset: str, column: str, columns: Columns, split: str | None, config_name: str | None
) -> RowSource:
    """Open a folder: a dataset in the hub's layout, ARC files (``--split`` may name a subfolder), or text files."""
    data = next((file for kind in ("parquet", "jsonl") for file in path.rglob(f"*.{kind}")), None)
    if data is not None:  # The library of the hub chooses among all files that are not hidden, and follows links.
        refuse_links(path, (file for file in path.rglob("*") if file.is_symlink() and not _is_hidden(file, path)))
        return Hub(str(path), split or "train", config_name, columns, folder=dataset)
    within = path if split is None else path / split
    tasks = sorted(within.glob("*.json")) or (sorted(path.glob("*/*.json")) if split is None else [])
    if tasks:
        refuse_links(path, tasks)
        location = dataset if split is None else f"{dataset.rstrip('/')}/{split}"
        return FileFolder(within, tuple(tasks), location, column)
    texts = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    if not texts:
        expected = "*.json tasks, *.jsonl, *.parquet or *.txt files"
        raise DataError(f"{within} contains no dataset", expected=expected, found="none")
    refuse_links(path, texts)
    return FileFolder(path, tuple(texts), dataset, column)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _named_task(number: int, data: Any, name: str, place: str) -> SourceRow:
    if not isinstance(data, dict):
        return SourceRow(number, None, place, problem="a task that is not an object")
    return SourceRow(number, {"task_id": name, **data}, place)


_BLOCK = 1 << 20
"""Bytes of lines that are hashed at once."""


def _source_of(spec: DataSpec) -> RowSource:
    """Return the source of the data that a spec names."""
    if spec.rows is not None:
        return PythonRows(spec.rows, spec.dataset, spec.prompt.column, spec.keep)
    if spec.dataset_dir is not None:
        return Jsonl(spec.location)
    split = RowRange.parse(spec.split).split
    return open_source(
        spec.dataset, column=spec.prompt.column, split=split, config_name=spec.config_name, keep=spec.keep
    )


def open_input(spec: DataSpec, stored: StreamIdentity | None = None) -> LineSource:
    """Open the data of a stream as lines. A run that is continued reads the commit of the hub that it started with."""
    source, part = _source_of(spec), RowRange.parse(spec.split)
    stream, streams = (0, 1) if spec.of_streams is None else (spec.worker_id, spec.of_streams)
    if isinstance(source, Jsonl) and (spec.split is not None or spec.config_name is not None):
        flag = "--split" if spec.split is not None else "--config-name"
        raise SpecError(flag, expected="a dataset of the hub, or a folder of one", found=spec.location)
    if not isinstance(source, Hub | FileFolder) and part.split not in (None, "train"):
        raise SpecError("--split", expected="train, the only split of a file", found=spec.split)
    revision = None
    if isinstance(source, Hub) and source.folder is None:
        source = _at_commit(source, spec.dataset_revision, stored)
        revision = source.revision
    elif spec.dataset_revision is not None:
        raise SpecError("--dataset-revision", expected="a dataset of the hub", found=spec.location)
    if isinstance(source, Jsonl):
        return LineSource(spec.location, stream=stream, streams=streams)
    named = spec.dataset if spec.split is None else f"{spec.dataset}:{spec.split}"
    lines = partial(_json_lines, source, part, spec.dataset, spec.bad_rows)
    return LineSource(named, lines, revision, stream=stream, streams=streams, from_hub=isinstance(source, Hub))


def _at_commit(source: Hub, asked: str | None, stored: StreamIdentity | None) -> Hub:
    """Return the dataset at the commit that the run started with; for a new run, at the requested one."""
    if stored is None:
        return source.pinned(asked)
    if asked is not None and asked != stored.revision:
        found = source.pinned(asked).revision
        if found != stored.revision:
            raise RunMismatch(
                f"the run started with another commit of {source.name}",
                expected=f"--dataset-revision {stored.revision}",
                found=f"{asked}, which is {found}" if asked != found else found,
                fix="leave out --dataset-revision, or use another --output",
            )
    return replace(source, revision=stored.revision)


def estimate_rows(spec: DataSpec) -> int | None:
    """Return about how many rows the data has, from its size and its beginning, or None if that is unknown."""
    part, total = RowRange.parse(spec.split), _source_of(spec).count()
    if part.stop is not None:
        total = part.stop if total is None else min(total, part.stop)
    return None if total is None else max(1, total - part.start)


def _json_lines(source: RowSource, part: RowRange, location: str, bad_rows: BadRows, first: int = 0) -> Iterator[bytes]:
    """Yield the rows of ``part`` from its row ``first`` on, as lines of JSON in blocks."""
    block = bytearray()
    for row in part.rows(source, first):
        if row.problem is not None and bad_rows == "error":
            fix = "correct or leave out the row, or extract with --bad-rows skip"
            raise DataError(f"{location} {row.place}", expected="a usable row", found=row.problem, fix=fix)
        block += _line(row, location)
        if len(block) >= _BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _line(row: SourceRow, location: str) -> bytes:
    if row.problem is not None:
        return rejected_line(f"{row.place}: {row.problem}") + b"\n"
    if row.raw is not None:
        return row.raw + b"\n"
    try:
        return orjson.dumps(row.data, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        wrong = {name: type(value).__name__ for name, value in row.data.items() if not _is_json(value)}
        message = ", ".join(f"{name} ({kind})" for name, kind in wrong.items())
        raise DataError(f"{location} {row.place}", expected="columns that JSON can hold", found=message) from error


def _is_json(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True
