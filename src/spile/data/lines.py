"""Lines of a stream's file, wherever it lies, hashed as they pass and never all in memory.

The first pass keeps the file's sha256 up to the end of each block. A later pass compares them before it gives out a
line, so that nothing is ever made of bytes that the stream's identity does not cover: the hash of the whole would show
an edit only after the last line, behind the commits.
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

import orjson

from spile.errors import DataError, StoreError
from spile.objects.opening import is_remote
from spile.spec.run import EMBEDDED

__all__ = ["BlockHashes", "Line", "StreamFile", "embedded_tasks", "fetched"]

_CHUNK = 1 << 20
_LONGEST = 256 << 20
_MOST_COPIED = 8 << 30
"""A larger object is read from its bucket again: the disk is for activations."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank."""

    index: int
    """Its number among such lines, from 0: what samples are numbered by."""
    number: int
    """Its number in the file, from 1: what an editor shows."""
    raw: bytes


class BlockHashes:
    """The sha256 of a file up to the end of each of its blocks: one hash, looked at on the way."""

    def __init__(self, location: str, known: tuple[bytes, ...] | None = None) -> None:
        self._location, self._known = location, known
        self._digest = hashlib.sha256()
        self._seen: list[bytes] = []

    @property
    def hexdigest(self) -> str:
        """Of all that has passed."""
        return self._digest.hexdigest()

    @property
    def blocks(self) -> tuple[bytes, ...]:
        """What a later pass compares with."""
        return tuple(self._seen)

    def add(self, block: bytes) -> None:
        """The next block; :class:`DataError` where an earlier pass saw other bytes."""
        self._digest.update(block)
        self._seen.append(self._digest.digest())
        place = len(self._seen) - 1
        if self._known is not None and (place >= len(self._known) or self._seen[place] != self._known[place]):
            self._refuse()

    def end(self) -> None:
        """Nothing follows; :class:`DataError` where more did in an earlier pass."""
        if self._known is not None and len(self._seen) != len(self._known):
            self._refuse()

    def again(self) -> BlockHashes:
        """For a pass that must see the same bytes."""
        return BlockHashes(self._location, self.blocks)

    def _refuse(self) -> None:
        raise DataError(
            f"{self._location} changed while it was read",
            expected="the bytes that were hashed when the run began",
            found="others",
            fix="put the file back as it was, then run the same command again",
        )


def embedded_tasks() -> Path:
    """The tasks that ship inside the package."""
    return Path(str(resources.files("spile.data") / "embedded" / "tasks.jsonl"))


class _Copy:
    """What was fetched, on this machine's disk, in the pieces that it came in: a file without a name, gone with us."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as its stream
        weakref.finalize(self, self._file.close)
        self._sizes: list[int] = []
        self._whole = True

    def add(self, chunk: bytes) -> None:
        """The next piece, unless there is no room for it: then there is no copy."""
        if not self._whole:
            return
        self._sizes.append(len(chunk))
        try:
            self._whole = self._file.tell() + len(chunk) <= _MOST_COPIED and self._file.write(chunk) == len(chunk)
        except OSError:  # a full disk costs a second reading and not the run
            self._whole = False
        if not self._whole:
            self._file.close()

    def ended(self) -> _Copy | None:
        """The copy, once all of it has come; None where it was not kept."""
        if self._whole:
            self._file.flush()
        return self if self._whole else None

    def chunks(self) -> Iterator[bytes]:
        """The same pieces. By their place, so that several may read at once."""
        place = 0
        for size in self._sizes:
            yield os.pread(self._file.fileno(), size, place)
            place += size


class StreamFile:
    """A file of lines: a path, ``embedded``, or an object of a bucket, fetched once and then read from a copy.

    ``rows``: lines made of something else, a table's rows; likewise made once.
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
        """The file's bytes, a piece at a time."""
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

    def beside(self, name: str) -> bytes | None:
        """The small file of that name in the same folder, if there is one."""
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
    def name(self) -> str:
        """The file's own name."""
        return self.location.rsplit("/", 1)[-1] if self._remote or self._rows is not None else self._path.name

    def lines(self, hashes: BlockHashes | None = None) -> Iterator[Line]:
        """The lines that are not blank. With ``hashes``, a line comes after every block that it lies in was hashed.

        A ``.json`` file that is one object of tasks by their ids, as the challenge has it, gives a line for each task.
        """
        if self.name.endswith(".json"):
            yield from self._tasks(hashes)
            return
        yield from self._split(self._hashed(hashes))

    def _tasks(self, hashes: BlockHashes | None) -> Iterator[Line]:
        """Tasks by their ids; anything else as it stands."""
        content = b""
        for chunk in self._hashed(hashes):
            content += chunk
            if len(content) > _LONGEST:
                raise DataError(self.location, expected=f"at most {_LONGEST >> 20} MiB of JSON", found="more")
        try:
            tasks = orjson.loads(content)
        except orjson.JSONDecodeError:
            tasks = None
        if not isinstance(tasks, dict) or not all(
            isinstance(task, dict) and "train" in task for task in tasks.values()
        ):
            yield from self._split(iter([content]))
            return
        for index, (name, task) in enumerate(tasks.items()):
            yield Line(index, index + 1, orjson.dumps({"task_id": name, **task}))

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
    """The bytes of a bucket's object, a piece at a time."""
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
