"""Rows of tables: Parquet files, and datasets of the Hugging Face hub (streamed); and the interface of all sources."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from spile.data.lines import MAX_LINE_BYTES, changed_data, fetch
from spile.data.rows import MASK
from spile.errors import DataError, SpileError, StoreError
from spile.objects.folder import read_ahead
from spile.objects.retry import RequestFailure, Retry, causes, from_status, retry_while_unavailable
from spile.spec.run import EVERY_FIELD

Result = TypeVar("Result")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOOTERS = 8
"""Footers of Parquet files that are fetched at once, to find the file with a row."""
_NO_SAMPLE = frozenset({"task_id", "id", MASK})
"""Columns that make no sample by themselves."""
_BATCH_ROWS, _BATCH_BYTES = 256, 64 << 20
"""Rows of a Parquet file that are read at once, and their approximate size."""


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


class RowSource(ABC):
    """A source of rows that can be read repeatedly, always in the same order."""

    location: str
    """The name that the user gave."""

    @property
    def origin(self) -> dict[str, object]:
        """The description of the source in ``streams.json``."""
        return {"dataset": self.location}

    @abstractmethod
    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        """Yield the rows from number ``start`` on."""

    @abstractmethod
    def count(self) -> int | None:
        """Return about how many rows there are; None if that is unknown without reading them all."""


class Columns(NamedTuple):
    """The columns of a table that are read, if the table has them."""

    samples: frozenset[str] = frozenset()
    keep: tuple[str, ...] = ()
    """The columns that are stored with the samples."""

    def choose(self, names: list[str], location: str) -> list[str]:
        """Return the columns to read; raise an error if none is usable or one of ``keep`` is missing."""
        keep = tuple(names) if self.keep == (EVERY_FIELD,) else self.keep
        chosen = [name for name in names if name in self.samples]
        missing = [name for name in keep if name not in names]
        if missing:
            found = f"no {', '.join(missing)}, but {', '.join(names)}"
            raise DataError(location, expected=f"the columns of --keep: {', '.join(keep)}", found=found)
        if not _NO_SAMPLE.issuperset(chosen):
            return [*chosen, *(name for name in keep if name not in chosen)]
        raise DataError(
            f"{location} has no column that could be used",
            expected=f"one of {', '.join(sorted(self.samples - _NO_SAMPLE))}",
            found=", ".join(names),
            fix="name it with --column",
        )


@dataclass(frozen=True)
class Parquet(RowSource):
    """A Parquet file, read in batches of rows and only the columns that are needed."""

    location: str
    columns: Columns

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        with self._one_line_errors(), self._opened() as content:
            opened = _version(content)
            for number, data in enumerate(parquet_rows(content, start, self.columns, self.location), start):
                if _version(content) != opened:
                    raise changed_data(self.location)  # its rows could mix old and new content
                yield SourceRow(number, data, f"row {number}")

    def count(self) -> int | None:
        if "://" in self.location:
            return None
        with self._one_line_errors():
            from pyarrow import parquet

            return int(parquet.read_metadata(self._path).num_rows)

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise DataError("Parquet needs pyarrow", fix="run: pip install 'spile[data]'") from error
        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.location} is not a Parquet file", found=str(error)) from error

    @property
    def _path(self) -> Path:
        return Path(self.location).expanduser()

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """Open the file. An object in a bucket is fetched to a temporary file first."""
        if "://" not in self.location:
            with self._path.open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as copy:
            for chunk in fetch(self.location):
                copy.write(chunk)
            copy.seek(0)
            yield copy


def _version(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def parquet_rows(
    content: Any, start: int, columns: Columns, location: str, footer: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file from ``start`` on; row groups before it are not read.

    A small file can hold huge values: repeated ones are stored once, and others may compress well. So repeated values
    stay references to a dictionary until their row is made, rows are made one by one, and the number of rows that are
    read at once depends on their average size.
    """
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(content, metadata=footer) as file:
        footer, schema = file.metadata, file.schema_arrow
    names = columns.choose(list(schema.names), location)
    texts = [name for name in names if pyarrow.types.is_string(schema.field(name).type)]
    with parquet.ParquetFile(content, metadata=footer, read_dictionary=texts) as file:
        groups, skip = _row_groups_from(footer, start)
        number = start - skip
        for group in groups:
            rows = _rows_at_once(footer.row_group(group))
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=names):
                values = [(name, batch.column(name)) for name in names]
                large = batch.nbytes > MAX_LINE_BYTES
                for place in range(skip, len(batch)):
                    if large and sum(_value_bytes(column, place) for _, column in values) > MAX_LINE_BYTES:
                        limit = f"at most {MAX_LINE_BYTES >> 20} MiB in a row"
                        raise DataError(f"{location} row {number + place}", expected=limit, found="more")
                    yield {name: column[place].as_py() for name, column in values}
                skip, number = max(0, skip - len(batch)), number + len(batch)


def _value_bytes(column: Any, place: int) -> int:
    """Return the size of a value without copying it. The values of a text column refer to a dictionary."""
    if not hasattr(column, "dictionary"):
        return int(column.slice(place, 1).nbytes)
    value = column[place].value
    return int(value.as_buffer().size) if value.is_valid else 0


def _rows_at_once(group: Any) -> int:
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))))


def _row_groups_from(metadata: Any, start: int) -> tuple[list[int], int]:
    """Return the row groups of a Parquet file from row ``start`` on, and the rows to skip in the first of them."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if start < rows:
            return list(range(group, metadata.num_row_groups)), start
        start -= rows
    return [], 0


@dataclass(frozen=True)
class Hub(RowSource):
    """One split of a dataset on the hub, or of a local folder in the same layout."""

    name: str
    split: str
    config_name: str | None
    columns: Columns
    folder: str | None = None
    """The local folder that the user named, if any."""
    revision: str | None = None
    """The commit that is read; None reads the newest one."""

    @property
    def location(self) -> str:  # type: ignore[override]
        return self.folder or self.name

    def pinned(self, revision: str | None = None) -> Hub:
        """Return the dataset at the commit of a branch or tag, by default at the newest one.

        A local folder has no commits. If the hub does not return one and no ``revision`` is requested, none is set.
        """
        if self.folder is not None or find_spec("datasets") is None:
            return self
        if revision is not None and _COMMIT.fullmatch(revision):
            return replace(self, revision=revision)
        try:
            return replace(self, revision=self._retry(lambda: resolve_commit(self.name, revision)))
        except SpileError as error:
            if isinstance(error.__cause__, RequestFailure) or revision is not None:
                raise
            return self  # it may be in the cache; otherwise reading it fails with a more specific error

    @property
    def origin(self) -> dict[str, object]:
        pin = {} if self.revision is None else {"revision": self.revision}
        return {"dataset": self.location, "split": self.split, "config_name": self.config_name, **pin}

    def rows(self, start: int = 0) -> Iterator[SourceRow]:
        """Yield rows from ``start``. If the hub becomes unreachable, retry from the first row that was not received."""
        if find_spec("datasets") is None:
            raise DataError("datasets of the hub need the datasets library", fix="run: pip install 'spile[data]'")
        number = start
        while True:
            rows = self._retry(partial(self._open, number))
            try:
                for data in rows:
                    yield SourceRow(number, data, f"row {number}")
                    number += 1
            except Exception as error:
                failure = self._translate(error)
                if not isinstance(failure, RequestFailure):
                    raise failure from error
            else:
                return

    def count(self) -> int | None:
        """Return the number of rows: what the dataset's card says, or an estimate from its first Parquet file."""
        return self._retry(self._count)

    def _count(self) -> int | None:
        from huggingface_hub import HfFileSystem
        from pyarrow import parquet

        known = (self._builder.info.splits or {}).get(self.split)
        if known is not None and known.num_examples:
            return int(known.num_examples)
        if self.folder is not None or not self._parquet_files:
            return None
        sizes = [int(HfFileSystem().info(address)["size"]) for address in self._parquet_files]
        with HfFileSystem().open(self._parquet_files[0]) as content:
            return int(parquet.read_metadata(content).num_rows * sum(sizes) / sizes[0])

    def _retry(self, call: Callable[[], Result]) -> Result:
        """Call the hub, and repeat the call while the hub is unavailable."""

        def attempt() -> Result:
            try:
                if self.folder is None:
                    _check_connection()
                return call()
            except Exception as error:
                raise self._translate(error) from error

        try:
            retry = Retry.for_name(self.name) if self.revision is None else Retry.from_environment()
            return retry_while_unavailable(self.name, attempt, retry)
        except RequestFailure as outage:
            raise _unreachable(self.name, outage.cause) from outage

    def _open(self, start: int) -> Iterator[Any]:
        """Return the rows from ``start`` on after receiving the first of them.

        Parquet files of a pinned dataset are read from the right row group on.
        """
        from datasets import load_dataset

        if self.revision is not None and self._parquet_files:
            rows = self._records(start)
        else:
            pin = {} if self.revision is None else {"revision": self.revision}
            dataset = load_dataset(self.name, self.config_name, split=self.split, streaming=True, **pin)
            if dataset.column_names is not None:
                dataset = dataset.select_columns(self.columns.choose(dataset.column_names, self.name))
            rows = iter(dataset.skip(start) if start else dataset)
        return chain(list(islice(rows, 1)), rows)

    @cached_property
    def _builder(self) -> Any:
        from datasets import load_dataset_builder

        return load_dataset_builder(self.name, self.config_name, revision=self.revision)

    @property
    def _parquet_files(self) -> list[str]:
        """The addresses of the split's Parquet files; an empty list if the dataset has another format."""
        files = (self._builder.config.data_files or {}).get(self.split, [])
        return list(files) if type(self._builder).__module__.endswith(".parquet") else []

    def _records(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of the Parquet files from ``start`` on. Of the files before, only the footers are read."""
        from huggingface_hub import HfFileSystem
        from pyarrow import parquet

        files = HfFileSystem()

        def metadata(address: str) -> tuple[str, Any]:
            with files.open(address) as content:
                return address, parquet.read_metadata(content)

        ahead = (partial(metadata, address) for address in self._parquet_files)
        for address, footer in read_ahead(ahead, _FOOTERS):
            if start >= footer.num_rows:
                start -= footer.num_rows
                continue
            with files.open(address) as content:
                yield from parquet_rows(content, start, self.columns, self.name, footer)
            start = 0

    def _translate(self, error: Exception) -> SpileError | RequestFailure:
        """Return the error for the user, or :class:`RequestFailure` if the hub is temporarily unavailable."""
        if isinstance(error, SpileError):
            return error
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub import constants
        from huggingface_hub.errors import RevisionNotFoundError

        name, message = self.location, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        no_network = _is_network_error(error)
        if not no_network and isinstance(error, RevisionNotFoundError):
            expected = "a branch, tag or commit of the dataset"
            return DataError(f"--dataset-revision of {name}", expected=expected, found="none with this name")
        if not no_network and isinstance(error, DatasetNotFoundError):
            return DataError(
                f"no dataset {name} on the hub, or no access to it",
                found=message,
                fix="check its name, and for a private or gated one set HF_TOKEN",
            )
        if not no_network and isinstance(error, ValueError):
            return DataError(f"{name} cannot be opened", found=message, fix="check --split and --config-name")
        statuses = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes(error))
        status = next((each for each in statuses if isinstance(each, int)), None)
        transient = no_network if status is None else from_status(status).transient
        if transient and self.folder is None and not constants.HF_HUB_OFFLINE:  # offline is the user's own setting
            return RequestFailure(message, transient=True)
        return _unreachable(name, message) if no_network else StoreError(f"{name} cannot be read", found=message)


def resolve_commit(name: str, revision: str | None) -> str | None:
    """Return the commit of a dataset's branch or tag on the hub; without a name the newest one."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name, revision=revision, timeout=30).sha


def _unreachable(name: str, message: str) -> StoreError:
    return StoreError(
        f"the hub cannot be reached for {name}",
        found=message,
        fix="check the network, or download it elsewhere and name the folder or file: --dataset DIR",
    )


def _check_connection() -> None:
    """Fail at once without a network; the library would retry by itself and print each attempt."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=10).close()
    except OSError as error:  # of a failed name resolution it is not a ConnectionError
        raise ConnectionError(f"{constants.ENDPOINT}: {error.strerror or error}") from error


def _is_network_error(error: BaseException) -> bool:
    """Return whether the cause is a missing network."""
    words = ("Connect", "Timeout", "Offline", "NameResolution", "Resolve", "LocalEntryNotFound")
    for cause in causes(error):
        if isinstance(cause, ConnectionError | TimeoutError) or any(word in type(cause).__name__ for word in words):
            return True
    return "Couldn't reach" in str(error) or "offline" in str(error).lower()
