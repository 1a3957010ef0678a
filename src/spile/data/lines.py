"""Read the rows of a dataset as lines of JSON, and compare them with what an earlier pass read, in constant memory.

The data of a run must not change, neither between two runs nor during one. :class:`PartReader` reads rows in parts and
hashes each part; if an earlier pass has read the part, it compares the hashes before it yields a line. A small dataset
is read once before the run: its identity is the sha256 of the whole file, and this pass is the earlier one. A large
dataset is not read before the run: the commits record its parts as they are read, for the next run.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import IO

from spile.errors import DataError, StoreError
from spile.objects import NotFound, is_remote, open_folder, read_chunks, split
from spile.objects.folder import get_if_present
from spile.spec.run import EMBEDDED
from spile.spec.sample import Part

_CHUNK = 1 << 20
MAX_LINE_BYTES = 256 << 20
"""Maximum size of a line or a row in bytes."""
_MAX_COPY_BYTES = 8 << 30
"""Objects above this size are not copied to the local disk but read from the bucket again."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One non-blank line."""

    index: int
    """Its index among the non-blank lines, from 0. Samples are numbered by it."""
    number: int
    """Its line number in the file, from 1, as editors show it."""
    raw: bytes


def changed_data(location: str, rows: str = "the rows") -> DataError:
    """Return the error for data that is not what an earlier pass read, or that changes while it is read."""
    return DataError(
        f"{location} changed since it was read",
        expected=f"{rows} as they were",
        found="other content",
        fix="restore the data, then run the same command again; or use another --output",
    )


def embedded_tasks() -> Path:
    """Return the path of the tasks that ship with the package."""
    return Path(str(resources.files("spile.data") / "embedded" / "tasks.jsonl"))


def first_bytes(location: str, most: int) -> tuple[bytes, int]:
    """Return the beginning of a file, local or in a bucket, and the size of the file."""
    folder, key = split(str(embedded_tasks()) if location == EMBEDDED else location)
    found = open_folder(folder)
    total = found.info(key).size
    return bytes(found.get_range(key, 0, min(most, total))), total


class LineSource:
    """The lines of a file (a path, ``embedded``, or an object in a bucket), or the rows of another source as lines.

    Data from the network is kept in a local copy for the next pass.
    """

    def __init__(
        self,
        location: str,
        rows: Callable[[int], Iterator[bytes]] | None = None,
        revision: str | None = None,
        *,
        stream: int = 0,
        streams: int = 1,
        from_hub: bool = False,
    ) -> None:
        """Open a source.

        Args:
            location: Its path, URL or name.
            rows: Makes the lines of another source from a row number on.
            revision: The commit of a dataset of the hub, whose content never changes.
            stream: The number of the stream to read, if several streams share the rows.
            streams: The number of these streams. Stream k of n has the rows k, k + n, k + 2n, …, numbered from 0.
            from_hub: Whether ``rows`` come from the hub.
        """
        self.location, self.revision = location, revision
        self._stream, self.streams = stream, streams
        self._rows = rows
        self._remote, self._from_hub = is_remote(location), from_hub
        self._copy: IO[bytes] | None = None
        self._path = embedded_tasks() if location == EMBEDDED else Path(location.removeprefix("file://")).expanduser()
        if not self._remote and rows is None:
            _check_file(self._path, location)

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes in chunks."""
        if self._copy is not None:
            return _read_copy(self._copy)
        if self._rows is not None:
            chunks = self._rows(0)
        else:
            chunks = fetch(self.location) if self._remote else self._read_file()
        return self._copied(chunks) if self._remote or self._from_hub else chunks

    def _read_file(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                before = os.fstat(file.fileno())
                while chunk := file.read(_CHUNK):
                    now = os.fstat(file.fileno())
                    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                        raise changed_data(self.location)  # a line could mix old and new content
                    yield chunk
        except OSError as error:
            raise StoreError(f"{self.location} cannot be read", found=error.strerror or str(error)) from error

    def _copied(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks, and keep them in a temporary file for the next pass."""
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            complete = True
            for chunk in chunks:
                if complete and not (complete := _append(file, chunk)):
                    file.close()
                yield chunk
            if complete:
                self._copy = file
                weakref.finalize(self, stack.pop_all().close)

    def read_sibling(self, name: str) -> bytes | None:
        """Return the content of the file ``name`` in the same folder, or None."""
        if self._rows is not None:
            return None
        folder, _ = split(self.location if self._remote else str(self._path))
        return get_if_present(open_folder(folder), name)

    def number(self, line: Line) -> str:
        """Return the number of a line for messages: ``line 1`` of a file is the first, ``row 0`` of a table."""
        return f"line {line.number}" if self._rows is None else f"row {line.number - 1}"

    def span(self, part: Part) -> str:
        """Return the rows of a part for messages."""
        first, last = self.row_of(part.first), self.row_of(part.stop - 1)
        return f"lines {first + 1:,} to {last + 1:,}" if self._rows is None else f"rows {first:,} to {last:,}"

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.location.rsplit("/", 1)[-1] if self._remote or self._rows is not None else self._path.name

    def row_of(self, index: int) -> int:
        """Return the row of the whole dataset that a line of this stream is."""
        return index * self.streams + self._stream

    def lines(self, start: int = 0, digest: hashlib._Hash | None = None) -> Iterator[Line]:
        """Yield the non-blank lines from index ``start`` on. A table skips the rows before; a file is read through.

        ``digest`` gets all bytes of the file.
        """
        first = self.row_of(start)
        if start and self._rows is not None and self._copy is None:
            lines = self._split(self._rows(first), first)
        else:
            lines = self._split(_hashed(self.chunks(), digest))
        for line in lines:
            if line.index >= first and (line.index - self._stream) % self.streams == 0:
                yield line if self.streams == 1 else Line(line.index // self.streams, line.number, line.raw)

    def _split(self, chunks: Iterator[bytes], start: int = 0) -> Iterator[Line]:
        index = number = start
        length = 0
        rest: list[bytes] = []
        for chunk in chunks:
            first, *more = chunk.split(b"\n")
            rest.append(first)
            length += len(first)
            if length > MAX_LINE_BYTES:
                raise DataError(
                    f"{self.location} line {number + 1}",
                    expected=f"at most {MAX_LINE_BYTES >> 20} MiB in a line",
                    found="more",
                )
            for following in more:
                number += 1
                line = b"".join(rest).strip()
                if line:
                    yield Line(index, number, line)
                    index += 1
                rest = [following]
                length = len(following)
        line = b"".join(rest).strip()
        if line:
            yield Line(index, number + 1, line)


def _hashed(chunks: Iterator[bytes], digest: hashlib._Hash | None) -> Iterator[bytes]:
    """Yield the chunks of a file without its byte order mark, which belongs to the hash."""
    for number, chunk in enumerate(chunks):
        if digest is not None:
            digest.update(chunk)
        yield chunk if number else chunk.removeprefix(_BYTE_ORDER_MARK)


def _append(file: IO[bytes], chunk: bytes) -> bool:
    """Append to a copy; return False if it becomes too large or the disk is full."""
    try:
        return file.tell() + len(chunk) <= _MAX_COPY_BYTES and file.write(chunk) == len(chunk)
    except OSError:
        return False


def _read_copy(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file by positional reads, so that several readers can work at once."""
    place = 0
    while chunk := os.pread(file.fileno(), _CHUNK, place):
        yield chunk
        place += len(chunk)


_PART_BYTES, _PART_ROWS = 1 << 20, 8192
"""The size of a new part: a few hundred rows of text, so that a commit records few hashes."""


@dataclass(eq=False)
class PartReader:
    """One pass over a dataset. Its rows are hashed part by part; parts that an earlier pass read are compared."""

    file: LineSource
    known: Sequence[Part] = ()
    """The parts that earlier passes read, from the first row on."""
    head: tuple[int, str] | None = None
    """Of a streamed dataset: the number of rows that were read before the run, and their sha256 in the identity."""
    complete: bool = False
    """Whether the known parts are the whole dataset."""
    needed: Callable[[Part], bool] = lambda _: True
    """Whether a known part has rows that are needed. Others are skipped if the content is pinned, else compared."""

    def __post_init__(self) -> None:
        self.parts: list[Part] = list(self.known)
        """The parts that are known or were read so far. The reading thread appends to it."""

    def lines(self, digest: hashlib._Hash | None = None) -> Iterator[Line]:
        """Yield the needed lines; each after the whole part that it belongs to was hashed and compared.

        ``digest`` gets all bytes of the file if no part is known.
        """
        row = 0
        source: Iterator[Line] | None = None
        for part in self.known:
            needed = self.needed(part)
            if needed or self.file.revision is None:
                source = source or self._open(row)
                lines = list(islice(source, part.rows))
                if hash_lines(lines) != part.hash:
                    raise changed_data(self.file.location, self.file.span(part))
                yield from lines if needed else ()
            else:
                source = None
            row = part.stop
        if self.complete:
            self._refuse_growth(source, row)
            return
        source = source or self._open(row, digest)
        while lines := _read_part(source):
            self.parts.append(Part(row, len(lines), hash_lines(lines)))
            row += len(lines)
            yield from lines

    def _refuse_growth(self, source: Iterator[Line] | None, rows: int) -> None:
        if self.file.revision is None and source is not None and next(source, None) is not None:
            raise DataError(
                f"{self.file.location} has grown since it was read to its end",
                expected=f"{rows:,} rows",
                found="more",
                fix="restore the data, or use another --output",
            )

    def _open(self, row: int, digest: hashlib._Hash | None = None) -> Iterator[Line]:
        """Return the lines from a row on. If the content may change, the first rows must be those of the identity."""
        source = self.file.lines(row, digest)
        if row or self.head is None or self.file.revision is not None:
            return source
        first = list(islice(source, self.head[0]))
        if head_hash(first) != self.head[1]:
            raise changed_data(self.file.location)
        return chain(first, source)


def head_hash(lines: Iterable[Line]) -> str:
    """Return the sha256 of the first rows of a streamed dataset."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.raw + b"\n")
    return digest.hexdigest()


def hash_lines(lines: Iterable[Line]) -> str:
    """Return the hash of a part."""
    return blake2b(b"".join(line.raw + b"\n" for line in lines), digest_size=16).hexdigest()


def _read_part(source: Iterator[Line]) -> list[Line]:
    """Return the lines of the next part."""
    lines: list[Line] = []
    size = 0
    for line in source:
        lines.append(line)
        size += len(line.raw)
        if size >= _PART_BYTES or len(lines) >= _PART_ROWS:
            break
    return lines


def fetch(location: str) -> Iterator[bytes]:
    """Yield the bytes of an object in a bucket in chunks."""
    folder, key = split(location)
    try:
        yield from read_chunks(open_folder(folder), key)
    except NotFound as error:
        raise DataError(f"no such dataset: {location}", fix="check --dataset or --dataset-dir") from error


def _check_file(path: Path, location: str) -> None:
    if path.is_dir():
        raise DataError(
            f"{location} is a folder",
            expected="a JSONL file",
            fix=f"name one of its files, or make streams of it: spile data streams --dataset {location}",
        )
    if not path.is_file():
        raise DataError(f"no such dataset: {location}", fix="check --dataset, or --dataset-dir and --worker-id")
