"""Sources of rows: JSONL, Parquet, ARC folders, challenge files and datasets of the Hugging Face hub (streamed)."""

from __future__ import annotations

import codecs
import csv
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import orjson

from spile.data.arc.grids import passes_fast_check
from spile.data.lines import StreamFile, embedded_tasks, fetched
from spile.data.rows import MASK, SAMPLE_FIELDS, TOKENS, elements, plain_value, rejected_line, scalar_fields
from spile.errors import DataError, SpecError, SpileError, StoreError
from spile.objects.opening import is_remote
from spile.objects.retry import RequestFailure, Retry, from_status, retry_while_unavailable
from spile.spec.run import EMBEDDED, EVERY_FIELD, BadRows, DataSpec

Result = TypeVar("Result")


@dataclass(frozen=True)
class Hub:
    """One split of a dataset on the hub, or of a local folder in the same layout."""

    name: str
    split: str
    config_name: str | None
    columns: frozenset[str] = field(default_factory=frozenset)
    location: str | None = None
    """The local folder that the user named, if any."""
    keep: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, object]:
        """The dataset's name, split and configuration."""
        return {"dataset": self.location or self.name, "split": self.split, "config_name": self.config_name}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield rows from ``start``; the library skips earlier rows, by whole shards if it can.

        If the hub becomes unreachable, retry from the first row that was not received.
        """
        rows, number = _between(self._open(), start, stop), start
        while True:
            try:
                data = next(rows)
            except StopIteration:
                return
            except Exception as error:
                trouble = self._classify(error)
                if self.location is not None or not isinstance(trouble, RequestFailure):
                    raise self._failed(error) from error
                rows = self._rows_from(number, stop)
            else:
                yield SourceRow(number, data, f"row {number}")
                number += 1

    def _rows_from(self, number: int, stop: int | None) -> Iterator[Any]:
        """Return the rows from ``number`` on, retrying until the hub gives the first of them."""
        from datasets import load_dataset

        def attempt() -> Iterator[Any]:
            rows = _between(self._open_once(load_dataset), number, stop)
            try:
                return chain([next(rows)], rows)
            except StopIteration:
                return iter(())
            except Exception as error:
                raise self._classify(error) from error

        return self._retry(attempt)

    def _retry(self, attempt: Callable[[], Result]) -> Result:
        try:
            return retry_while_unavailable(self.name, attempt, Retry.from_environment())
        except RequestFailure as outage:
            raise _unreachable(self.name, outage.cause) from outage

    def _classify(self, error: Exception) -> Exception:
        """Return a :class:`RequestFailure` if the hub is temporarily unavailable, else the permanent error."""
        failure = self._failed(error)
        failure.__cause__ = error
        out = isinstance(failure, StoreError) and _is_transient(failure)
        return RequestFailure(str(failure.found), transient=True) if out else failure

    def _open(self) -> Any:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise DataError(
                "datasets of the hub need the datasets library", fix="run: pip install 'spile[data]'"
            ) from error
        if self.location is not None:
            return self._load(load_dataset)
        return self._retry(lambda: self._open_once(load_dataset))

    def _open_once(self, load: Callable[..., Any]) -> Any:
        """Try once to open the dataset; raise :class:`RequestFailure` if the hub is temporarily unavailable."""
        try:
            _reach(self.name)
            return self._load(load)
        except StoreError as error:
            if not _is_transient(error):
                raise
            raise RequestFailure(str(error.found), transient=True) from error

    def _load(self, load: Callable[..., Any]) -> Any:
        try:
            dataset = load(self.name, self.config_name, split=self.split, streaming=True)
            if dataset.column_names is not None:
                dataset = dataset.select_columns(
                    check_columns(dataset.column_names, self.columns, self.keep, self.name)
                )
        except SpileError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        return dataset

    def _failed(self, error: Exception) -> SpileError:
        """Translate an exception of the library to one of ours, with a way to fix it."""
        from datasets.exceptions import DatasetNotFoundError

        name, message = self.location or self.name, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if _no_network(error):
            return _unreachable(name, message)
        if isinstance(error, DatasetNotFoundError):
            return DataError(
                f"no dataset {name} on the hub, or no access to it",
                found=message,
                fix="check its name, and for a private or gated one set HF_TOKEN",
            )
        if isinstance(error, ValueError):
            return DataError(f"{name} cannot be opened", found=message, fix="check --split and --config-name")
        return StoreError(f"{name} cannot be read", found=message)


def _between(dataset: Any, start: int, stop: int | None) -> Iterator[Any]:
    dataset = dataset.skip(start) if start else dataset
    return iter(dataset if stop is None else dataset.take(stop - start))


def _unreachable(name: str, message: str) -> StoreError:
    return StoreError(
        f"the hub cannot be reached for {name}",
        found=message,
        fix="check the network, or download it elsewhere and name the folder or file: --dataset DIR",
    )


def _reach(name: str) -> None:
    """Fail at once without a network; the library would retry by itself and print each attempt."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection(
            (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), timeout=10
        ).close()
    except OSError as error:
        trouble = ConnectionError(str(error))  # the error of a failed name resolution is not a ConnectionError
        raise _unreachable(name, f"{constants.ENDPOINT}: {error.strerror or error}") from trouble


def _is_transient(error: StoreError) -> bool:
    """Return whether the cause is a missing network or a transient status such as 503 or 429."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:  # the user's own setting
        return False
    seen = error.__cause__
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if isinstance(status, int):
            return from_status(status).transient
        seen = seen.__cause__ or seen.__context__
    return error.__cause__ is not None and _no_network(error.__cause__)


def _no_network(error: BaseException) -> bool:
    """Return whether the cause is a missing network."""
    seen: BaseException | None = error
    words = ("Connect", "Timeout", "Offline", "NameResolution", "Resolve", "LocalEntryNotFound")
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError) or any(word in type(seen).__name__ for word in words):
            return True
        seen = seen.__cause__ or seen.__context__
    return "Couldn't reach" in str(error) or "offline" in str(error).lower()


_LARGEST_DOCUMENT = 256 << 20
"""Bytes of a JSON document, or characters of a line or a cell."""
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".csv", ".tsv", ".tab", ".txt", ".json")
_SLICE = re.compile(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source."""

    number: int
    """Its row number in the source, from 0."""
    data: Any
    """The parsed row; None if there is a ``problem``."""
    place: str
    """Its location for error messages, such as ``line 12``."""
    raw: bytes | None = None
    """The line of JSON it was parsed from, if any."""
    problem: str | None = None
    proven: str | None = None
    """The id of a task that passed the fast check and was not parsed: ``data`` is None, the content is in ``raw``."""


class RowSource(Protocol):
    """A source of rows that can be read repeatedly, always in the same order."""

    @property
    def origin(self) -> dict[str, object]:
        """The description of the source in ``streams.json``."""

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield rows from number ``start`` up to, but not including, ``stop``."""


class _Located:
    """A source that is described by its location alone."""

    location: str

    @property
    def origin(self) -> dict[str, object]:
        """The location of the dataset."""
        return {"dataset": self.location}


@dataclass(frozen=True)
class Jsonl(_Located):
    """A file with one JSON object per line, local or in a bucket."""

    location: str

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per line; a line that is not JSON becomes a row with a problem."""
        file = StreamFile(self.location)
        for line in islice(file.lines(), start, stop):
            place, proven = f"line {line.number}", passes_fast_check(line.raw)
            try:
                data = None if proven is not None else orjson.loads(line.raw)
                yield SourceRow(line.index, data, place, line.raw, proven=proven)
            except orjson.JSONDecodeError:
                yield SourceRow(line.index, None, place, problem="a line that is not JSON")


@dataclass(frozen=True)
class JsonFile(_Located):
    """One JSON document: a list of rows, or ARC tasks by id as in ``arc_format_train.json``. It is read into memory.

    A file with this suffix that holds one JSON object per line is read as such.
    """

    location: str
    column: str

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per element, in the file's order."""
        content = bytearray()
        for chunk in StreamFile(self.location).chunks():
            content += chunk
            if len(content) > _LARGEST_DOCUMENT:
                limit = f"at most {_LARGEST_DOCUMENT >> 20} MiB"
                raise DataError(
                    self.location, expected=limit, found="a larger JSON document", fix="convert it to JSONL"
                )
        try:
            document = orjson.loads(bytes(content).removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError:
            yield from Jsonl(self.location).rows(start, stop)
            return
        if isinstance(document, list):
            for number, element in enumerate(document[start:stop], start):
                yield _element(number, element, self.column)
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
        for number, (name, task) in enumerate(islice(document.items(), start, stop), start):
            yield _named(number, task, name, f"task {name}")


@dataclass(frozen=True)
class Csv(_Located):
    """A CSV or TSV file with a header, local or in a bucket. Values are strings."""

    location: str
    columns: frozenset[str] = field(default_factory=frozenset)
    keep: tuple[str, ...] = ()

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per record; a record with missing or additional cells becomes a row with a problem."""
        delimiter = "\t" if self.location.endswith((".tsv", ".tab")) else ","
        csv.field_size_limit(_LARGEST_DOCUMENT)
        reader = csv.reader(_text_lines(self.location), delimiter=delimiter)
        try:
            header = next(reader, [])
            names = check_columns(header, self.columns, self.keep, self.location)
            for number, cells in islice(enumerate(record for record in reader if record), start, stop):
                place = f"line {reader.line_num}"
                if len(cells) == len(header):
                    row = dict(zip(header, cells, strict=True))
                    yield SourceRow(number, {name: row[name] for name in names}, place)
                else:
                    yield SourceRow(
                        number, None, place, problem="a record with another number of cells than the header"
                    )
        except csv.Error as error:
            raise DataError(f"{self.location} line {reader.line_num}", expected="CSV", found=str(error)) from error


@dataclass(frozen=True)
class TextFile(_Located):
    """A text file with one prompt per line, local or in a bucket."""

    location: str
    column: str

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per non-blank line."""
        lines = ((number, line.strip()) for number, line in enumerate(_text_lines(self.location), 1))
        for index, (number, text) in islice(enumerate(line for line in lines if line[1]), start, stop):
            yield SourceRow(index, {self.column: text}, f"line {number}")


@dataclass(frozen=True)
class TextFolder(_Located):
    """A folder of text files, one prompt per file, whose id is its path within the folder."""

    folder: Path
    location: str
    column: str

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per file, sorted by path."""
        for number, path in enumerate(text_files(self.folder)[start:stop], start):
            name = path.relative_to(self.folder).as_posix()
            try:
                yield SourceRow(number, {"id": name, self.column: path.read_text(encoding="utf-8-sig")}, name)
            except UnicodeDecodeError:
                yield SourceRow(number, None, name, problem="a file that is not UTF-8 text")
            except OSError as error:
                raise StoreError(f"{path} cannot be read", found=error.strerror or str(error)) from error


@dataclass(frozen=True, eq=False)
class PythonRows:
    """Rows that a caller gives in Python: strings, dicts, chats or lists of token ids, or the rows of a table."""

    data: Any
    column: str
    keep: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, object]:
        """The type of the data."""
        return {"dataset": f"Python {type(self.data).__name__}"}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per element, with the fields of the sample and those to keep."""
        for number, element in islice(enumerate(elements(self.data)), start, stop):
            row = _element(number, plain_value(element), self.column)
            yield row if row.data is None else replace(row, data=self._used(row.data))

    def _used(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {str(name): plain_value(value) for name, value in row.items()}
        names = {self.column, "text", *SAMPLE_FIELDS, *self.keep}
        kept = scalar_fields(row, self.column) if self.keep == (EVERY_FIELD,) else {}
        return {name: value for name, value in row.items() if name in names or name in kept}


def text_files(folder: Path) -> list[Path]:
    """Return the text files below a folder, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file())


def _element(number: int, element: object, column: str) -> SourceRow:
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
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, number = "", 1
    try:
        for chunk in chain(StreamFile(location).chunks(), [None]):
            text = rest + (decoder.decode(chunk) if chunk is not None else decoder.decode(b"", final=True))
            lines = text.splitlines(keepends=True) if chunk is None else text.split("\n")
            if chunk is not None:
                rest = lines.pop()
                lines = [f"{line}\n" for line in lines]
                if len(rest) > _LARGEST_DOCUMENT:
                    raise DataError(
                        f"{location} line {number}", expected=f"at most {_LARGEST_DOCUMENT >> 20} MiB a line"
                    )
            number += len(lines)
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{location} near line {number}", expected="UTF-8 text", found=str(error.reason)) from error


@dataclass(frozen=True)
class ArcFolder(_Located):
    """A folder with one JSON file per task, named by the task's id, as in ARC-AGI."""

    files: tuple[Path, ...]
    location: str

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per file, sorted by name."""
        for number, path in enumerate(self.files[start:stop], start):
            try:
                yield _named(number, orjson.loads(path.read_bytes()), path.stem, path.name)
            except orjson.JSONDecodeError:
                yield SourceRow(number, None, path.name, problem="a file that is not JSON")
            except OSError as error:
                raise StoreError(f"{path} cannot be read", found=error.strerror or str(error)) from error


@dataclass(frozen=True)
class Parquet(_Located):
    """A Parquet file, read in batches of rows and only the columns that are needed."""

    path: Path | None
    """None for an object in a bucket, which is fetched first."""
    location: str
    columns: frozenset[str] = field(default_factory=frozenset)
    keep: tuple[str, ...] = ()

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per row of the table."""
        return (SourceRow(n, data, f"row {n}") for n, data in islice(enumerate(self._records()), start, stop))

    def _records(self) -> Iterator[dict[str, Any]]:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError("Parquet needs pyarrow", fix="run: pip install 'spile[data]'") from error
        from pyarrow import ArrowException

        try:
            with self._opened() as content, parquet.ParquetFile(content) as file:
                names = check_columns(list(file.schema_arrow.names), self.columns, self.keep, self.location)
                for batch in file.iter_batches(batch_size=256, columns=names):
                    yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            raise DataError(f"{self.location} is not a Parquet file", found=str(error)) from error

    def _opened(self) -> IO[bytes]:
        if self.path is not None:
            return self.path.open("rb")
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile())
            for chunk in fetched(self.location):
                file.write(chunk)
            file.seek(0)
            stack.pop_all()  # the caller closes the file
            return file


def check_columns(names: list[str], wanted: frozenset[str], keep: tuple[str, ...], location: str) -> list[str]:
    """Return the columns to read; raise an error if none is usable or one of ``keep`` is missing."""
    keep = tuple(names) if keep == (EVERY_FIELD,) else keep
    chosen = [name for name in names if name in wanted]
    missing = [name for name in keep if name not in names]
    if missing:
        found = f"no {', '.join(missing)}, but {', '.join(names)}"
        raise DataError(location, expected=f"the columns of --keep: {', '.join(keep)}", found=found)
    if not {"task_id", "id", MASK}.issuperset(chosen):
        return [*chosen, *(name for name in keep if name not in chosen)]
    raise DataError(
        f"{location} has no column that could be used",
        expected=f"one of {', '.join(sorted(wanted - {'task_id', 'id', MASK}))}",
        found=", ".join(names),
        fix="name it with --column",
    )


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


def is_hub_name(dataset: str) -> bool:
    """Return whether this can be the name of a dataset on the hub."""
    known = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset, re.ASCII)
    return known is not None and not dataset.endswith((*_LINES, *_TABLES))


def open_source(
    dataset: str,
    *,
    column: str,
    split: str | None = None,
    config_name: str | None = None,
    keep: tuple[str, ...] = (),
) -> RowSource:
    """Open a source by name: ``embedded``, a file, a folder, an object in a bucket, or a dataset of the hub.

    ``keep``: columns that a table must have in addition to those of the samples.
    """
    columns = frozenset({column, "train", "test", "messages", "text", "task_id", "id", TOKENS, MASK})
    if dataset == EMBEDDED:
        return Jsonl(str(embedded_tasks()))
    path = Path(dataset).expanduser()
    if "://" not in dataset and path.is_dir():
        return _open_folder(path, dataset, column, columns, keep, split, config_name)
    if "://" in dataset or path.is_file():
        return _open_file(dataset, column, columns, keep)
    if not is_hub_name(dataset):
        raise DataError(f"no such dataset: {dataset}", expected="a file, a folder, or owner/name on the hub")
    return Hub(dataset, split or "train", config_name, columns, keep=keep)


def _open_file(dataset: str, column: str, columns: frozenset[str], keep: tuple[str, ...]) -> RowSource:
    match Path(dataset).suffix:
        case ".parquet":
            return Parquet(None if "://" in dataset else Path(dataset).expanduser(), dataset, columns, keep)
        case ".json":
            return JsonFile(dataset, column)
        case ".csv" | ".tsv" | ".tab":
            return Csv(dataset, columns, keep)
        case ".txt":
            return TextFile(dataset, column)
        case ".jsonl" | ".ndjson":
            return Jsonl(dataset)
        case suffix if "://" in dataset:
            return Jsonl(dataset)
        case suffix:
            raise DataError(
                f"{dataset} has an unknown suffix",
                expected=", ".join((*_LINES, *_TABLES)),
                found=suffix or "no suffix",
                fix="rename the file",
            )


def _open_folder(
    path: Path,
    dataset: str,
    column: str,
    columns: frozenset[str],
    keep: tuple[str, ...],
    split: str | None,
    config_name: str | None,
) -> RowSource:
    """Open a folder: a dataset in the hub's layout, ARC files (``--split`` may name a subfolder), or text files."""
    data = next((file for kind in ("parquet", "jsonl") for file in path.rglob(f"*.{kind}")), None)
    if data is not None:
        return Hub(str(path), split or "train", config_name, columns, location=dataset, keep=keep)
    within = path if split is None else path / split
    files = sorted(within.glob("*.json")) or (sorted(path.glob("*/*.json")) if split is None else [])
    if not files and text_files(path):
        return TextFolder(path, dataset, column)
    if not files:
        expected = "*.json tasks, *.jsonl, *.parquet or *.txt files"
        raise DataError(f"{within} contains no dataset", expected=expected, found="none")
    return ArcFolder(tuple(files), dataset if split is None else f"{dataset.rstrip('/')}/{split}")


def _named(number: int, data: Any, name: str, place: str) -> SourceRow:
    if not isinstance(data, dict):
        return SourceRow(number, None, place, problem="a task that is not an object")
    return SourceRow(number, {"task_id": name, **data}, place)


_BLOCK = 1 << 20
"""Bytes of lines that are hashed at once."""


def open_input(spec: DataSpec) -> StreamFile:
    """Open the data of a stream as lines."""
    if spec.rows is not None:
        source: RowSource = PythonRows(spec.rows, spec.prompt.column, spec.keep)
        return StreamFile(spec.dataset, partial(_json_lines, source, RowRange(None), spec.dataset, spec.bad_rows))
    if spec.dataset_dir is not None or not _is_table(spec.dataset):
        if spec.split is not None or spec.config_name is not None:
            flag = "--split" if spec.split is not None else "--config-name"
            raise SpecError(flag, expected="a dataset of the hub, or a folder of one", found=spec.location)
        return StreamFile(spec.location)
    part = RowRange.parse(spec.split)
    source = open_source(
        spec.dataset, column=spec.prompt.column, split=part.split, config_name=spec.config_name, keep=spec.keep
    )
    if not isinstance(source, Hub | ArcFolder) and part.split not in (None, "train"):
        raise SpecError("--split", expected="train, the only split of a file", found=spec.split)
    named = spec.dataset if spec.split is None else f"{spec.dataset}:{spec.split}"
    return StreamFile(named, partial(_json_lines, source, part, spec.dataset, spec.bad_rows))


def _is_table(dataset: str) -> bool:
    """Return whether the dataset is not a file of JSON lines: another format, a folder, or a dataset of the hub."""
    if dataset == EMBEDDED:
        return False
    if is_remote(dataset) or dataset.startswith("file://"):
        return dataset.endswith(_TABLES)
    path = Path(dataset).expanduser()
    if path.exists():
        return path.is_dir() or path.suffix in _TABLES
    # A name inside an existing local folder is a mistyped file, not a dataset of the hub.
    return is_hub_name(dataset) and (path.parent == Path() or not path.parent.is_dir())


def _json_lines(source: RowSource, part: RowRange, location: str, bad_rows: BadRows) -> Iterator[bytes]:
    block = bytearray()
    for row in source.rows(part.start, part.stop):
        if row.problem is not None and bad_rows == "error":
            raise DataError(f"{location} {row.place}", expected="a usable row", found=row.problem)
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
