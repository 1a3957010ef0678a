"""Read the lines of a stream's file from a folder or a bucket, and hash them, in constant memory.

The data of a run must not change, neither between two runs nor during one. A small dataset is read once before the run:
its identity is the sha256 of the whole file, and a later pass compares the hash of each block before it yields a line.
A large dataset is not read before the run: :class:`PartReader` hashes its rows part by part as they are read, the
commits record these hashes, and a later pass compares them before it yields a line.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import resources
from itertools import chain, islice
from pathlib import Path

from spile.errors import DataError, StoreError
from spile.objects import NotFound, is_remote, open_folder, read_chunks, split
from spile.objects.folder import get_if_present
from spile.spec.run import EMBEDDED
from spile.spec.sample import Part

_CHUNK = 1 << 20
LONGEST_LINE = 256 << 20
"""Maximum size of a line or a row in bytes."""
_MOST_COPIED = 8 << 30
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


class BlockHashes:
    """The sha256 of a file up to the end of each of its blocks."""

    def __init__(self, location: str, known: tuple[bytes, ...] | None = None) -> None:
        self._location, self._known = location, known
        self._digest = hashlib.sha256()
        self._seen: list[bytes] = []

    @property
    def hexdigest(self) -> str:
        """The hash of all blocks so far."""
        return self._digest.hexdigest()

    @property
    def blocks(self) -> tuple[bytes, ...]:
        """The recorded hashes, for a later pass to compare with."""
        return tuple(self._seen)

    def add(self, block: bytes) -> None:
        """Add the next block; raise :class:`DataError` if an earlier pass saw other bytes."""
        self._digest.update(block)
        self._seen.append(self._digest.digest())
        place = len(self._seen) - 1
        if self._known is not None and (place >= len(self._known) or self._seen[place] != self._known[place]):
            self._refuse()

    def end(self) -> None:
        """Finish; raise :class:`DataError` if an earlier pass saw more blocks."""
        if self._known is not None and len(self._seen) != len(self._known):
            self._refuse()

    def again(self) -> BlockHashes:
        """Return hashes for a pass that must see the same bytes."""
        return BlockHashes(self._location, self.blocks)

    def _refuse(self) -> None:
        raise changed(self._location)


def changed(location: str) -> DataError:
    """Return the error for a file whose content changes while a run reads it."""
    return DataError(
        f"{location} changed while it was read",
        expected="the bytes that were hashed when the run began",
        found="different bytes",
        fix="restore the file, then run the same command again",
    )


def embedded_tasks() -> Path:
    """Return the path of the tasks that ship with the package."""
    return Path(str(resources.files("spile.data") / "embedded" / "tasks.jsonl"))


class _Copy:
    """A local copy of fetched chunks in an unnamed temporary file that disappears with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as its stream
        weakref.finalize(self, self._file.close)
        self._sizes: list[int] = []
        self._whole = True

    def add(self, chunk: bytes) -> None:
        """Append a chunk. If the disk is full or the copy would be too large, discard the copy."""
        if not self._whole:
            return
        self._sizes.append(len(chunk))
        try:
            self._whole = self._file.tell() + len(chunk) <= _MOST_COPIED and self._file.write(chunk) == len(chunk)
        except OSError:  # a full disk only means that the object is fetched again
            self._whole = False
        if not self._whole:
            self._file.close()

    def ended(self) -> _Copy | None:
        """Return the complete copy, or None if it was discarded."""
        if self._whole:
            self._file.flush()
        return self if self._whole else None

    def chunks(self) -> Iterator[bytes]:
        """Yield the same chunks, by positional reads, so that several readers can work at once."""
        place = 0
        for size in self._sizes:
            yield os.pread(self._file.fileno(), size, place)
            place += size


def first_bytes(location: str, most: int) -> tuple[bytes, int]:
    """Return the beginning of a file, local or in a bucket, and the size of the file."""
    folder, key = split(str(embedded_tasks()) if location == EMBEDDED else location)
    found = open_folder(folder)
    total = found.info(key).size
    return bytes(found.get_range(key, 0, min(most, total))), total


class StreamFile:
    """A file of lines: a path, ``embedded``, or an object in a bucket, which is fetched once and then read from a copy.

    ``rows`` makes the lines of other sources, such as the rows of a table; they are also made only once.
    """

    def __init__(
        self,
        location: str,
        rows: Callable[[int], Iterator[bytes]] | None = None,
        revision: str | None = None,
        turn: tuple[int, int] = (0, 1),
    ) -> None:
        """Open a file.

        Args:
            location: Its path, URL or name.
            rows: Makes the lines from a row number on.
            revision: What pins the content, which then never changes.
            turn: (k, n) reads only one of n streams: rows k, k + n, k + 2n, …, which it numbers from 0.

        """
        self.location, self.revision = location, revision
        self._stream, self.streams = turn
        self._rows = rows
        self._remote = is_remote(location)
        self._copy: _Copy | None = None
        self._path = embedded_tasks() if location == EMBEDDED else Path(location.removeprefix("file://")).expanduser()
        if not self._remote and rows is None:
            _check(self._path, location)

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes in chunks."""
        if self._copy is not None:
            yield from self._copy.chunks()
            return
        if self._remote or self._rows is not None:
            copy = _Copy()
            for chunk in fetched(self.location) if self._rows is None else self._rows(0):
                copy.add(chunk)
                yield chunk
            self._copy = copy.ended()
            return
        try:
            with self._path.open("rb") as file:
                before = os.fstat(file.fileno())
                while chunk := file.read(_CHUNK):
                    now = os.fstat(file.fileno())
                    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                        raise changed(self.location)  # a line could be half of the old content and half of the new
                    yield chunk
        except OSError as error:
            raise StoreError(f"{self.location} cannot be read", found=error.strerror or str(error)) from error

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

    def lines(self, hashes: BlockHashes | None = None) -> Iterator[Line]:
        """Yield the non-blank lines. With ``hashes``, each line follows after all of its blocks have been checked."""
        return self._own(self._split(self._hashed(hashes)))

    def row_of(self, index: int) -> int:
        """Return the row of the whole dataset that a line of this stream is."""
        return index * self.streams + self._stream

    def _own(self, lines: Iterator[Line]) -> Iterator[Line]:
        if self.streams == 1:
            return lines
        own = (line for line in lines if line.index % self.streams == self._stream)
        return (Line(line.index // self.streams, line.number, line.raw) for line in own)

    def lines_from(self, start: int) -> Iterator[Line]:
        """Yield the non-blank lines from index ``start`` on. A table skips the rows before; a file is read through."""
        row = self.row_of(start)
        if self._rows is not None:
            return self._own(self._split(self._rows(row), row))
        return self._own(line for line in self._split(self._hashed(None)) if line.index >= row)

    def _split(self, chunks: Iterator[bytes], start: int = 0) -> Iterator[Line]:
        index = number = start
        held = 0
        rest: list[bytes] = []
        for chunk in chunks:
            first, *more = chunk.split(b"\n")
            rest.append(first)
            held += len(first)
            if held > LONGEST_LINE:
                raise DataError(
                    f"{self.location} line {number + 1}",
                    expected=f"at most {LONGEST_LINE >> 20} MiB in a line",
                    found="more",
                )
            for following in more:
                number += 1
                line = b"".join(rest).strip()
                if line:
                    yield Line(index, number, line)
                    index += 1
                rest = [following]
                held = len(following)
        line = b"".join(rest).strip()
        if line:
            yield Line(index, number + 1, line)

    def _hashed(self, hashes: BlockHashes | None) -> Iterator[bytes]:
        first = True
        for chunk in self.chunks():
            if hashes is not None:
                hashes.add(chunk)
            yield chunk.removeprefix(_BYTE_ORDER_MARK) if first else chunk
            first = False
        if hashes is not None:
            hashes.end()


_PART_BYTES, _PART_ROWS = 1 << 20, 8192
"""The size of a new part: a few hundred rows of text, so that a commit records few hashes."""


class PartReader:
    """One pass over a streamed dataset. Its rows are hashed part by part; parts that are known are compared."""

    def __init__(
        self,
        file: StreamFile,
        head: tuple[int, str],
        known: Sequence[Part],
        end: int | None,
        needed: Callable[[Part], bool] = lambda _: True,
    ) -> None:
        """Prepare a pass.

        Args:
            file: The dataset.
            head: The number of rows that were read before the run, and their sha256, which the identity holds.
            known: The parts that earlier runs read, from the first row on.
            end: The number of all rows, if an earlier run read the last one.
            needed: Returns whether a known part has rows that are needed. Others are skipped if the content is pinned,
                and only compared if it is not.

        """
        self._file, self._head, self._known, self._end, self._needed = file, head, known, end, needed
        self.parts: list[Part] = list(known)
        """The parts that are known or were read so far. The reading thread appends to it."""

    def lines(self) -> Iterator[Line]:
        """Yield the needed lines; each after the whole part that it belongs to was hashed and compared."""
        row = 0
        source: Iterator[Line] | None = None
        for part in self._known:
            needed = self._needed(part)
            if needed or self._file.revision is None:
                source = source or self._opened(row)
                lines = list(islice(source, part.rows))
                if hash_lines(lines) != part.hash:
                    raise self._differs(part)
                yield from lines if needed else ()
            else:
                source = None
            row = part.stop
        if self._end is not None:
            self._refuse_more(source)
            return
        source = source or self._opened(row)
        while lines := _take(source):
            self.parts.append(Part(row, len(lines), hash_lines(lines)))
            row += len(lines)
            yield from lines

    def compare(self) -> None:
        """Raise an error if a known part, or the known end, has changed."""
        source = self._opened(0)
        for part in self._known:
            if hash_lines(islice(source, part.rows)) != part.hash:
                raise self._differs(part)
        if self._end is not None:
            self._refuse_more(source)

    def _refuse_more(self, source: Iterator[Line] | None) -> None:
        if self._file.revision is None and source is not None and next(source, None) is not None:
            raise DataError(
                f"{self._file.location} has grown since it was read to its end",
                expected=f"{self._end:,} rows",
                found="more",
                fix="restore the data, or use another --output",
            )

    def _opened(self, row: int) -> Iterator[Line]:
        """Return the lines from a row on. If the content may change, the first rows must be those of the identity."""
        source = self._file.lines_from(row)
        if row or self._file.revision is not None:
            return source
        first = list(islice(source, self._head[0]))
        if head_hash(first).hexdigest() != self._head[1]:
            raise changed(self._file.location)
        return chain(first, source)

    def _differs(self, part: Part) -> DataError:
        return DataError(
            f"{self._file.location} changed since the run read it",
            expected=f"{self._file.span(part)} as they were (hash {part.hash})",
            found="other content",
            fix="restore the data, then run the same command again; or use another --output",
        )


def head_hash(lines: Iterable[Line]) -> hashlib._Hash:
    """Return the sha256 of the first rows of a streamed dataset."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.raw + b"\n")
    return digest


def hash_lines(lines: Iterable[Line]) -> str:
    """Return the hash of a part."""
    return blake2b(b"".join(line.raw + b"\n" for line in lines), digest_size=16).hexdigest()


def _take(source: Iterator[Line]) -> list[Line]:
    """Return the lines of the next part."""
    lines: list[Line] = []
    size = 0
    for line in source:
        lines.append(line)
        size += len(line.raw)
        if size >= _PART_BYTES or len(lines) >= _PART_ROWS:
            break
    return lines


def fetched(location: str) -> Iterator[bytes]:
    """Yield the bytes of an object in a bucket in chunks."""
    folder, key = split(location)
    try:
        yield from read_chunks(open_folder(folder), key)
    except NotFound as error:
        raise DataError(f"no such dataset: {location}", fix="check --dataset or --dataset-dir") from error


def _check(path: Path, location: str) -> None:
    if path.is_dir():
        raise DataError(
            f"{location} is a folder",
            expected="a JSONL file",
            fix=f"name one of its files, or make streams of it: spile data streams --dataset {location}",
        )
    if not path.is_file():
        raise DataError(f"no such dataset: {location}", fix="check --dataset, or --dataset-dir and --worker-id")
