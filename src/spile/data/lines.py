"""Read the lines of a stream's file from a folder or a bucket, hashing them block by block in constant memory.

The first pass records the sha256 of the file up to the end of each block. A later pass compares these hashes before it
yields a line, so that no sample is made of bytes that the stream's identity does not cover. A hash of the whole file
would reveal an edit only after the last line, when samples are already committed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from spile.errors import DataError, StoreError
from spile.objects.opening import is_remote
from spile.spec.run import EMBEDDED

_CHUNK = 1 << 20
_LONGEST = 256 << 20
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
        raise DataError(
            f"{self._location} changed while it was read",
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


class StreamFile:
    """A file of lines: a path, ``embedded``, or an object in a bucket, which is fetched once and then read from a copy.

    ``rows`` makes the lines of other sources, such as the rows of a table; they are also made only once.
    """

    def __init__(self, location: str, rows: Callable[[], Iterator[bytes]] | None = None) -> None:
        self.location = location
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
            for chunk in fetched(self.location) if self._rows is None else self._rows():
                copy.add(chunk)
                yield chunk
            self._copy = copy.ended()
            return
        try:
            with self._path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except OSError as error:
            raise StoreError(f"{self.location} cannot be read", found=error.strerror or str(error)) from error

    def read_sibling(self, name: str) -> bytes | None:
        """Return the content of the file ``name`` in the same folder, or None."""
        if self._rows is not None:
            return None
        if self._remote:
            from spile import objects

            folder, _ = objects.split(self.location)
            try:
                return objects.open_folder(folder).get(name)
            except objects.NotFound:
                return None
        file = self._path.with_name(name)
        return file.read_bytes() if file.is_file() else None

    @property
    def unit(self) -> str:
        """What the file consists of, for messages: lines of a file, or rows of a table."""
        return "line" if self._rows is None else "row"

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.location.rsplit("/", 1)[-1] if self._remote or self._rows is not None else self._path.name

    def lines(self, hashes: BlockHashes | None = None) -> Iterator[Line]:
        """Yield the non-blank lines. With ``hashes``, each line follows after all of its blocks have been checked."""
        yield from self._split(self._hashed(hashes))

    def _split(self, chunks: Iterator[bytes]) -> Iterator[Line]:
        index = number = held = 0
        rest: list[bytes] = []
        for chunk in chunks:
            first, *more = chunk.split(b"\n")
            rest.append(first)
            held += len(first)
            if held > _LONGEST:
                raise DataError(
                    f"{self.location} line {number + 1}",
                    expected=f"at most {_LONGEST >> 20} MiB in a line",
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


def fetched(location: str) -> Iterator[bytes]:
    """Yield the bytes of an object in a bucket in chunks."""
    from spile import objects

    folder, key = objects.split(location)
    try:
        yield from objects.read_chunks(objects.open_folder(folder), key)
    except objects.NotFound as error:
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
