"""Where rows come from, behind one small seam: JSONL, Parquet, ARC folders, challenge files, the Hugging Face hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from spile.data.arc.fast_check import passes_fast_check
from spile.data.lines import StreamFile, embedded_tasks, fetched
from spile.data.rows import MASK, TOKENS
from spile.errors import DataError, SpecError, StoreError
from spile.spec.run import EMBEDDED

__all__ = [
    "ArcFolder",
    "ArcJson",
    "Jsonl",
    "Parquet",
    "RowRange",
    "RowSource",
    "SourceRow",
    "is_hub_name",
    "open_source",
]

_SLICE = re.compile(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source."""

    number: int
    """Its place in the source, from 0."""
    data: Any
    """What it holds; None with a ``problem``."""
    place: str
    """Where it stands, for people."""
    raw: bytes | None = None
    """The JSON it was parsed from, where it was one line."""
    problem: str | None = None
    proven: str | None = None
    """The id of a task proven sound without parsing it: ``data`` is None, all is in ``raw``."""


class RowSource(Protocol):
    """Rows, as often as asked for, always the same and in the same order."""

    @property
    def origin(self) -> dict[str, object]:
        """What ``streams.json`` says of it."""

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """Rows from number ``start`` up to, not including, ``stop``."""


@dataclass(frozen=True)
class Jsonl:
    """A JSON object per line, in a file or a bucket."""

    location: str

    @property
    def origin(self) -> dict[str, object]:
        """Its address."""
        return {"dataset": self.location}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """One per line; a line that is no JSON is a row with a problem."""
        file = StreamFile(self.location)
        for line in islice(file.lines(), start, stop):
            place, proven = f"line {line.number}", passes_fast_check(line.raw)
            try:
                data = None if proven is not None else orjson.loads(line.raw)
                yield SourceRow(line.index, data, place, line.raw, proven=proven)
            except orjson.JSONDecodeError:
                yield SourceRow(line.index, None, place, problem="a line that is no JSON")


@dataclass(frozen=True)
class ArcJson:
    """Tasks by id in one JSON file, as ``arc_format_train.json``. This one format is read whole."""

    path: Path
    location: str

    @property
    def origin(self) -> dict[str, object]:
        """Its address."""
        return {"dataset": self.location}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """One per task, in the file's order."""
        tasks = _json(self.path)
        if not isinstance(tasks, dict):
            raise DataError(self.location, expected="an object of tasks by id", found=type(tasks).__name__)
        if "train" in tasks and "test" in tasks:
            tasks = {self.path.stem: tasks}
        for number, (name, task) in enumerate(islice(tasks.items(), start, stop), start):
            yield _named(number, task, name, f"task {name}")


@dataclass(frozen=True)
class ArcFolder:
    """A folder of JSON files, one per task, whose name is its id: ARC-AGI's own layout."""

    files: tuple[Path, ...]
    location: str

    @property
    def origin(self) -> dict[str, object]:
        """Its address."""
        return {"dataset": self.location}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """One per file, sorted by name."""
        for number, path in enumerate(self.files[start:stop], start):
            try:
                yield _named(number, orjson.loads(path.read_bytes()), path.stem, path.name)
            except orjson.JSONDecodeError:
                yield SourceRow(number, None, path.name, problem="a file that is no JSON")
            except OSError as error:
                raise StoreError(f"{path} cannot be read", found=error.strerror or str(error)) from error


@dataclass(frozen=True)
class Parquet:
    """A Parquet file, a batch of rows at a time and only the columns that may be of use."""

    path: Path | None
    """None: a bucket's object, which is fetched whole."""
    location: str
    columns: frozenset[str] = field(default_factory=frozenset)
    keep: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, object]:
        """Its address."""
        return {"dataset": self.location}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """One per row."""
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
            stack.pop_all()  # whoever asked closes it
            return file


def check_columns(names: list[str], wanted: frozenset[str], keep: tuple[str, ...], location: str) -> list[str]:
    """Those of the columns that may be of use; none, or one to keep that is not there, is an error that lists them."""
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
    """A split, and which of its rows."""

    split: str | None
    start: int = 0
    stop: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> RowRange:
        """``train``, ``train[:1000]``, ``train[500:1000]``."""
        if text is None:
            return cls(None)
        found = _SLICE.fullmatch(text)
        if found is None:
            raise SpecError("--split", expected="a split, or rows of one: train, train[:1000]", found=repr(text))
        return cls(found[1], int(found[2] or 0), int(found[3]) if found[3] else None)


def is_hub_name(dataset: str) -> bool:
    """Whether this can be the name of a dataset on the hub."""
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
    """What a user named: ``embedded``, a file, a folder, a bucket's object, or a dataset of the hub.

    ``keep``: columns that a table must have, beside those that samples are made of.
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
    from spile.data.make.hub import Hub

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
    """ARC files here or one level below (``--split`` names the subfolder); else a dataset as the hub lays it out."""
    data = next((file for kind in ("parquet", "jsonl") for file in path.rglob(f"*.{kind}")), None)
    if data is not None:
        from spile.data.make.hub import Hub

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
