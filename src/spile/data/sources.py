"""Sources of rows: JSONL, Parquet, ARC folders, challenge files and datasets of the Hugging Face hub (streamed)."""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import orjson

from spile.data.arc.grids import passes_fast_check
from spile.data.lines import StreamFile, embedded_tasks, fetched
from spile.data.rows import MASK, TOKENS
from spile.errors import DataError, SpecError, SpileError, StoreError
from spile.objects.opening import is_remote
from spile.objects.retry import RequestFailure, Retry, from_status, retry_while_unavailable
from spile.spec.run import EMBEDDED, DataSpec

__all__ = [
    "ArcFolder",
    "ArcJson",
    "Hub",
    "Jsonl",
    "Parquet",
    "RowRange",
    "RowSource",
    "SourceRow",
    "is_hub_name",
    "open_input",
    "open_source",
]


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
                trouble = self._passing(error)
                if self.location is not None or not isinstance(trouble, RequestFailure):
                    raise self._failed(error) from error
                rows = self._again(number, stop)
            else:
                yield SourceRow(number, data, f"row {number}")
                number += 1

    def _again(self, number: int, stop: int | None) -> Iterator[Any]:
        """Return the rows from ``number`` on, retrying until the hub gives the first of them."""
        from datasets import load_dataset

        def attempt() -> Iterator[Any]:
            rows = _between(self._reached(load_dataset), number, stop)
            try:
                return chain([next(rows)], rows)
            except StopIteration:
                return iter(())
            except Exception as error:
                raise self._passing(error) from error

        return self._while_out(attempt)

    def _while_out(self, attempt: Callable[[], Result]) -> Result:
        try:
            return retry_while_unavailable(self.name, attempt, Retry.from_environment())
        except RequestFailure as outage:
            raise _unreachable(self.name, outage.cause) from outage

    def _passing(self, error: Exception) -> Exception:
        """Return a :class:`RequestFailure` if the hub is temporarily unavailable, else the permanent error."""
        failure = self._failed(error)
        failure.__cause__ = error
        out = isinstance(failure, StoreError) and _may_pass(failure)
        return RequestFailure(str(failure.found), transient=True) if out else failure

    def _open(self) -> Any:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise DataError("datasets of the hub need the datasets library", fix="pip install 'spile[data]'") from error
        if self.location is not None:
            return self._load(load_dataset)
        return self._while_out(lambda: self._reached(load_dataset))

    def _reached(self, load: Callable[..., Any]) -> Any:
        """Try once to open the dataset; raise :class:`RequestFailure` if the hub is temporarily unavailable."""
        try:
            _reach(self.name)
            return self._load(load)
        except StoreError as error:
            if not _may_pass(error):
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

        name, said = self.location or self.name, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if _no_network(error):
            return _unreachable(name, said)
        if isinstance(error, DatasetNotFoundError):
            return DataError(
                f"no dataset {name} on the hub, or no access to it",
                found=said,
                fix="check its name, and for a private or gated one set HF_TOKEN",
            )
        if isinstance(error, ValueError):
            return DataError(f"{name} cannot be opened", found=said, fix="check --split and --config-name")
        return StoreError(f"{name} cannot be read", found=said)


def _between(dataset: Any, start: int, stop: int | None) -> Iterator[Any]:
    dataset = dataset.skip(start) if start else dataset
    return iter(dataset if stop is None else dataset.take(stop - start))


def _unreachable(name: str, said: str) -> StoreError:
    return StoreError(
        f"the hub cannot be reached for {name}",
        found=said,
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


def _may_pass(error: StoreError) -> bool:
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


@dataclass(frozen=True)
class Jsonl:
    """A file with one JSON object per line, local or in a bucket."""

    location: str

    @property
    def origin(self) -> dict[str, object]:
        """The location of the dataset."""
        return {"dataset": self.location}

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
class ArcJson:
    """Tasks by id in one JSON file, such as ``arc_format_train.json``. The file is read into memory."""

    path: Path
    location: str

    @property
    def origin(self) -> dict[str, object]:
        """The location of the dataset."""
        return {"dataset": self.location}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per task, in the file's order."""
        tasks = _json(self.path)
        if not isinstance(tasks, dict):
            raise DataError(self.location, expected="an object of tasks by id", found=type(tasks).__name__)
        if "train" in tasks and "test" in tasks:
            tasks = {self.path.stem: tasks}
        for number, (name, task) in enumerate(islice(tasks.items(), start, stop), start):
            yield _named(number, task, name, f"task {name}")


@dataclass(frozen=True)
class ArcFolder:
    """A folder with one JSON file per task, named by the task's id, as in ARC-AGI."""

    files: tuple[Path, ...]
    location: str

    @property
    def origin(self) -> dict[str, object]:
        """The location of the dataset."""
        return {"dataset": self.location}

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
class Parquet:
    """A Parquet file, read in batches of rows and only the columns that are needed."""

    path: Path | None
    """None for an object in a bucket, which is fetched first."""
    location: str
    columns: frozenset[str] = field(default_factory=frozenset)
    keep: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, object]:
        """The location of the dataset."""
        return {"dataset": self.location}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Yield one row per row of the table."""
        return (SourceRow(n, data, f"row {n}") for n, data in islice(enumerate(self._records()), start, stop))

    def _records(self) -> Iterator[dict[str, Any]]:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError("Parquet needs pyarrow", fix="pip install 'spile[data]'") from error
        from pyarrow import ArrowException

        try:
            with self._opened() as content, parquet.ParquetFile(content) as file:
                names = check_columns(list(file.schema_arrow.names), self.columns, self.keep, self.location)
                for batch in file.iter_batches(batch_size=256, columns=names):
                    yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            raise DataError(f"{self.location} is no Parquet file", found=str(error)) from error

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
    return known is not None and not dataset.endswith((".jsonl", ".ndjson", ".json", ".parquet"))


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
    if "://" in dataset:
        return Parquet(None, dataset, columns, keep) if dataset.endswith(".parquet") else Jsonl(dataset)
    path = Path(dataset).expanduser()
    if path.is_dir():
        return _open_folder(path, dataset, columns, keep, split, config_name)
    if path.is_file():
        return _open_file(path, dataset, columns, keep)
    if not is_hub_name(dataset):
        raise DataError(f"no such dataset: {dataset}", expected="a file, a folder, or owner/name on the hub")
    from spile.data.sources import Hub

    return Hub(dataset, split or "train", config_name, columns, keep=keep)


def _open_file(path: Path, dataset: str, columns: frozenset[str], keep: tuple[str, ...]) -> RowSource:
    if path.suffix == ".parquet":
        return Parquet(path, dataset, columns, keep)
    if path.suffix == ".json":
        return ArcJson(path, dataset)
    if path.suffix in (".jsonl", ".ndjson"):
        return Jsonl(dataset)
    raise DataError(
        f"{dataset} is of no known kind", expected=".jsonl, .json or .parquet", found=path.suffix or "no suffix"
    )


def _open_folder(
    path: Path,
    dataset: str,
    columns: frozenset[str],
    keep: tuple[str, ...],
    split: str | None,
    config_name: str | None,
) -> RowSource:
    """Open a folder of ARC files (``--split`` may name a subfolder), else a dataset in the layout of the hub."""
    data = next((file for kind in ("parquet", "jsonl") for file in path.rglob(f"*.{kind}")), None)
    if data is not None:
        from spile.data.sources import Hub

        return Hub(str(path), split or "train", config_name, columns, location=dataset, keep=keep)
    within = path if split is None else path / split
    files = sorted(within.glob("*.json")) or (sorted(path.glob("*/*.json")) if split is None else [])
    if not files:
        raise DataError(f"{within} holds no dataset", expected="*.json tasks, *.jsonl or *.parquet", found="none")
    return ArcFolder(tuple(files), dataset if split is None else f"{dataset.rstrip('/')}/{split}")


def _named(number: int, data: Any, name: str, place: str) -> SourceRow:
    if not isinstance(data, dict):
        return SourceRow(number, None, place, problem="a task that is no object")
    return SourceRow(number, {"task_id": name, **data}, place)


def _json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is no JSON", found=str(error), fix="JSON lines end in .jsonl") from error


_BLOCK = 1 << 20
"""Bytes of lines that are hashed at once."""


def open_input(spec: DataSpec) -> StreamFile:
    """Open the data of a stream as lines."""
    if spec.dataset_dir is not None or not _is_table(spec.dataset):
        if spec.split is not None or spec.config_name is not None:
            flag = "--split" if spec.split is not None else "--config-name"
            raise SpecError(flag, expected="a dataset of the hub, or a folder of one", found=spec.location)
        return StreamFile(spec.location)
    part = RowRange.parse(spec.split)
    source = open_source(
        spec.dataset, column=spec.prompt.column, split=part.split, config_name=spec.config_name, keep=spec.keep
    )
    if isinstance(source, Parquet) and part.split not in (None, "train"):
        raise SpecError("--split", expected="train, all that one file is", found=spec.split)
    named = spec.dataset if spec.split is None else f"{spec.dataset}:{spec.split}"
    return StreamFile(named, partial(_json_lines, source, part, spec.dataset))


def _is_table(dataset: str) -> bool:
    """Return whether the dataset is a table: a Parquet file, a folder of them, or a dataset of the hub."""
    if dataset == EMBEDDED:
        return False
    if is_remote(dataset) or dataset.startswith("file://"):
        return is_remote(dataset) and dataset.endswith(".parquet")
    path = Path(dataset).expanduser()
    if path.is_dir():
        return next(path.rglob("*.parquet"), None) is not None
    if path.exists():
        return path.suffix == ".parquet"
    # A name inside an existing local folder is a mistyped file, not a dataset of the hub.
    return is_hub_name(dataset) and (path.parent == Path() or not path.parent.is_dir())


def _json_lines(source: RowSource, part: RowRange, location: str) -> Iterator[bytes]:
    block = bytearray()
    for row in source.rows(part.start, part.stop):
        block += _line(row, location)
        if len(block) >= _BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _line(row: SourceRow, location: str) -> bytes:
    try:
        return orjson.dumps(row.data, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        wrong = {name: type(value).__name__ for name, value in row.data.items() if not _is_json(value)}
        said = ", ".join(f"{name} ({kind})" for name, kind in wrong.items())
        raise DataError(f"{location} {row.place}", expected="columns that JSON can hold", found=said) from error


def _is_json(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True
