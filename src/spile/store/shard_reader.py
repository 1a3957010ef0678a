"""One committed shard, opened for reading: nothing that it gives was not checked against the commit.

The commit holds the crc32c of the header and of every tensor. ``chunk_crc32c``, itself checked so, holds one crc32c for
every chunk of the other tensors, as long as the header says; a partial read fetches and checks the whole chunks that it
touches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from spile.errors import Damaged
from spile.objects.crc import brief_crc32c, crc32c, fold_chunks, to_hex
from spile.objects.disk import MappedFile, read_into
from spile.objects.folder import Folder
from spile.objects.staging import Staging
from spile.spec.safetensors import TensorPlace
from spile.store.codec import CHUNKS, CONTEXT, CONTEXT_OFFSETS, POSITIONS, ShardHeader, parse_shard_header
from spile.store.encoding import SCALE, decode
from spile.store.record import ShardRecord

__all__ = ["SMALL_SHARD", "ShardReader"]

_Numbers = npt.NDArray[np.int64]

_LARGE = 64 << 20
_SMALL = 4 << 20
"""A tail (all that is no tap) up to this many bytes comes in one read."""


_TOGETHER = 8
"""Chunks that are read at once for parts of them."""

SMALL_SHARD = 256 << 10
"""A shard up to this many bytes comes whole, in one read, and is kept as long as it is open."""


class ShardReader:
    """A shard whose header, tail and rows are read when they are asked for. Safe to use from several threads."""

    def __init__(
        self, folder: Folder, record: ShardRecord, *, stream: str | None = None, fingerprint: str | None = None
    ) -> None:
        self.folder, self.record = folder, record
        self.belongs = {"stream": stream, "fingerprint": fingerprint}
        """What the header must say; None: whatever it says."""
        self.where = f"{folder.url}/{record.name}"
        self._lock = threading.RLock()
        self._map: MappedFile | Literal[False] | None = None
        self._object: memoryview | None = None
        self._header: ShardHeader | None = None
        self._notes: list[dict[str, Any]] | None = None
        self._tail: tuple[int, memoryview] | None = None
        self._kept: dict[str, npt.NDArray[Any]] = {}
        self._sums: dict[str, npt.NDArray[np.uint32]] = {}
        self._trusted: dict[str, npt.NDArray[np.bool_]] = {}

    @property
    def header(self) -> ShardHeader:
        """Checked against the commit."""
        with self._lock:
            if self._header is None:
                length, crc = self.record.header
                data = self._checked("its header", 0, length, [crc], length)
                header = parse_shard_header(bytes(data), self.record.size, self.where)
                for name, wanted in self.belongs.items():
                    if wanted is not None and header.metadata.get(name) != wanted:
                        found = header.metadata.get(name)
                        raise Damaged(f"{self.where} is another {name}'s shard", expected=wanted, found=found)
                self._header = header
            return self._header

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Each sample's index, task id, preview, augmentation, truncation and kept fields."""
        with self._lock:  # no cached_property: before Python 3.12 it has one lock for all shards, and this one reads
            if self._notes is None:
                self._notes = self.header.notes()
            return self._notes

    def whole(self, name: str) -> npt.NDArray[Any]:
        """A whole tensor that is no tap, checked against the commit and kept."""
        with self._lock:
            if name not in self._kept:
                place, wanted = self.place(name), self.record.tensors.get(name)
                if wanted is None:
                    raise Damaged(f"{self.where}: its commit has no checksum of {name}")
                data = self._tail_bytes(place)
                if crc32c(data) != wanted:
                    data = self._checked(
                        name, place.start, place.length, [wanted], max(1, place.length), read=self._read
                    )
                self._kept[name] = np.frombuffer(data, place.dtype).reshape(place.shape)
            return self._kept[name]

    def bounds(self, place: int) -> tuple[int, int]:
        """The first row of the sample at this place, and the one after its last."""
        start, stop = self.whole("offsets")[place : place + 2].tolist()
        return start, stop

    def context(self, place: int) -> npt.NDArray[np.int32]:
        """All tokens of the sample at this place, those without rows too."""
        if CONTEXT not in self.header.places:
            return self.rows("tokens", *self.bounds(place))
        start, stop = self.whole(CONTEXT_OFFSETS)[place : place + 2].tolist()
        return self.rows(CONTEXT, start, stop)

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Each row's place in its sample, from 0."""
        if POSITIONS in self.header.places:
            return self.whole(POSITIONS)[start:stop].astype(np.int64)
        rows, offsets = np.arange(start, stop), self.whole("offsets")
        return np.asarray(rows - offsets[np.searchsorted(offsets, rows, side="right") - 1])

    def rows(self, name: str, start: int, stop: int, staging: Staging | None = None) -> npt.NDArray[Any]:
        """Rows ``start`` to ``stop`` of a tensor: one range read, of whole chunks.

        With ``staging`` those of a local file lie there, until it is used again.
        """
        place = self.place(name)
        width = place.length // place.shape[0] if place.shape[0] else 0
        first, last = start * width, stop * width
        if not 0 <= start <= stop <= place.shape[0]:
            raise IndexError(f"rows {start} to {stop} of {place.shape[0]}")
        if first == last:
            return self.decoded(name, start, np.empty((0, *place.shape[1:]), place.dtype))
        chunk = self.chunk_bytes(name)
        begin, end = first // chunk, -(-last // chunk)
        if self._known_good(name, begin, end):
            part = self._bytes(place.start + first, last - first, staging)
        else:
            part = self.chunks(name, begin, end, staging)[first - begin * chunk : last - begin * chunk]
        return self.decoded(name, start, np.frombuffer(part, place.dtype).reshape(stop - start, *place.shape[1:]))

    def blocks(self, name: str, starts: _Numbers, rows: int, staging: Staging) -> npt.NDArray[Any] | None:
        """``rows`` rows from each of ``starts`` on, ``[starts, rows, …]``, read together into ``staging``.

        None unless each is a chunk of a local file, or an equal part of one: then they must be read one by one.
        """
        chunk, path, place = self.chunk_rows(name), self.folder.local_path, self.place(name)
        if chunk is None or path is None or self.record.size <= SMALL_SHARD or rows > chunk or chunk % rows:
            return None
        if (starts % rows).any() or int(starts.max()) // chunk * chunk + chunk > place.shape[0]:
            return None
        file, width = path / self.record.name, place.length // place.shape[0]
        self._sums_of(name)
        if rows < chunk and not self._trusted[name][starts // chunk].all():
            data = self._parts_of_chunks(name, file, starts, rows, staging)
        else:
            data = self._read_blocks(file, place.start + starts * width, rows * width, staging)
            if rows == chunk:
                self._check(name, starts // chunk, data)
        found = data.view(place.dtype).reshape(len(starts), rows, *place.shape[1:])
        if not self._encoded(name):
            return found
        scales = self.whole(name + SCALE)[(starts[:, None] + np.arange(rows)).reshape(-1)]
        return decode(found.reshape(-1, *place.shape[1:]), scales).reshape(len(starts), rows, -1)

    def _parts_of_chunks(
        self, name: str, file: Path, starts: _Numbers, rows: int, staging: Staging
    ) -> npt.NDArray[np.uint8]:
        """Blocks, of which some are of chunks that nobody has checked: those are read whole, once."""
        place, chunk = self.place(name), self.chunk_bytes(name)
        size = rows * (place.length // place.shape[0])
        numbers, within = np.divmod(starts // rows, chunk // size)
        found = np.empty((len(starts), size), np.uint8)
        known = self._trusted[name][numbers]
        if known.any():
            found[known] = self._read_blocks(file, place.start + starts[known] // rows * size, size, staging)
        unknown = np.unique(numbers[~known])
        for begin in range(0, len(unknown), _TOGETHER):
            some = unknown[begin : begin + _TOGETHER]
            data = self._read_blocks(file, place.start + some * chunk, chunk, staging)
            self._check(name, some, data)
            mine = np.flatnonzero(~known & (numbers >= some[0]) & (numbers <= some[-1]))
            found[mine] = data.reshape(len(some), -1, size)[np.searchsorted(some, numbers[mine]), within[mine]]
        return found

    def _read_blocks(self, file: Path, offsets: _Numbers, length: int, staging: Staging) -> npt.NDArray[np.uint8]:
        data = staging.blocks(file, offsets, length)
        return data if data is not None else self._cut()

    def _check(self, name: str, numbers: _Numbers, data: npt.NDArray[np.uint8]) -> None:
        """Whole chunks that were read together. A mismatch is read once more, and told of by who reads one alone."""
        sums, trusted = self._sums_of(name), self._trusted[name]
        for place, number in enumerate(numbers.tolist()):
            if not trusted[number]:
                if brief_crc32c(data[place]) != sums[number]:
                    data[place] = np.frombuffer(self.chunks(name, number, number + 1), np.uint8)
                trusted[number] = True

    def row_type(self, name: str) -> tuple[np.dtype[Any], int]:
        """The dtype that a tap's rows are given in, and how many numbers each has."""
        place = self.place(name)
        return np.dtype(np.float32) if self._encoded(name) else place.dtype, place.shape[1]

    def decoded(self, name: str, start: int, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stored rows, of which the first is number ``start``, as the numbers that they stand for."""
        if not self._encoded(name):
            return rows
        return decode(rows, self.whole(name + SCALE)[start : start + len(rows)])

    def _encoded(self, name: str) -> bool:
        return name + SCALE in self.header.places

    def chunk_bytes(self, name: str) -> int:
        """The length of a tensor's chunks: what is read and checked whole."""
        return self.header.chunk_bytes(name)

    def chunk_rows(self, name: str) -> int | None:
        """Rows in each of them; None where a tensor is cut in bytes, and rows may lie in two."""
        return self.header.chunking.rows.get(name)

    def pieces(self, name: str, size: int) -> list[tuple[int, int]]:
        """All chunks of a tensor, as ranges of about so many bytes: what to ask :meth:`chunks` for, one by one."""
        chunk = self.chunk_bytes(name)
        count, step = -(-self.place(name).length // chunk), max(1, size // chunk)
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def chunks(self, name: str, begin: int, end: int, staging: Staging | None = None) -> memoryview:
        """The bytes of chunks ``begin`` to ``end`` of a tensor, checked. On a local disk: of the file itself, once."""
        place, chunk = self.place(name), self.chunk_bytes(name)
        sums = self._sums_of(name)
        start, length = place.start + begin * chunk, min(end * chunk, place.length) - begin * chunk
        if self._known_good(name, begin, end):
            return self._bytes(start, length, staging)
        read = partial(self._bytes, staging=staging)
        data = self._checked(f"{name}, chunk {{}}", start, length, sums[begin:end].tolist(), chunk, begin, read)
        self._trusted[name][begin:end] = True
        return data

    def _known_good(self, name: str, begin: int, end: int) -> bool:
        """Whether these chunks of a local file were checked before; what comes over a network is checked each time."""
        self._sums_of(name)
        return self.folder.local_path is not None and bool(self._trusted[name][begin:end].all())

    def folded(self, name: str) -> int:
        """The crc32c of a whole tensor, from those of its chunks."""
        return fold_chunks(self._sums_of(name).tolist(), self.place(name).length, self.chunk_bytes(name))

    def place(self, name: str) -> TensorPlace:
        """Where a tensor lies; KeyError where the shard has none of that name."""
        return self.header.places[name]

    def _checked(
        self,
        what: str,
        start: int,
        length: int,
        sums: Sequence[int],
        step: int,
        first: int = 0,
        read: Callable[[int, int], memoryview] | None = None,
    ) -> memoryview:
        """Bytes whose every ``step`` has its checksum. A mismatch is read once more: the line may be to blame."""
        for last in (False, True):
            data = (read or self._bytes)(start, length)
            found = [crc32c(data[at : at + step]) for at in range(0, max(1, len(data)), step)]
            if found == list(sums):
                break
            self._object = None
            if last:
                place = next((n for n, (a, b) in enumerate(zip(found, sums, strict=False)) if a != b), len(found) - 1)
                raise Damaged(
                    f"{self.where} is damaged: {what.format(first + place)}",
                    expected=f"crc32c {to_hex(sums[place])}",
                    found=to_hex(found[place]),
                )
        return data

    def _sums_of(self, name: str) -> npt.NDArray[np.uint32]:
        with self._lock:
            if not self._sums:
                sums, at = self.whole(CHUNKS), 0
                for each in self.header.places:
                    count = self.header.chunk_count(each) if each != CHUNKS else 0
                    self._sums[each] = sums[at : at + count]
                    self._trusted[each] = np.zeros(count, np.bool_)
                    at += count
            return self._sums[name]

    def _tail_bytes(self, place: TensorPlace) -> memoryview:
        begin = self.place("offsets").start
        if place.start < begin or self.record.size - begin > _SMALL:
            return self._read(place.start, place.length)
        if self._tail is None:
            self._tail = begin, self._read(begin, self.record.size - begin)
        return self._tail[1][place.start - begin : place.stop - begin]

    def _bytes(self, start: int, length: int, staging: Staging | None = None) -> memoryview:
        """Of a local file: what is read into ``staging``, or the file itself, where it can be."""
        path = self.folder.local_path
        if self.record.size <= SMALL_SHARD or path is None or not length:
            return self._read(start, length)
        if staging is not None:
            data = staging.read(path / self.record.name, start, length)
            return data if len(data) == length else self._cut()
        mapped = self._mapping(path)
        if mapped is not None and mapped.is_there(start, length):
            return mapped.view[start : start + length]
        return self._read(start, length)

    def _read(self, start: int, length: int) -> memoryview:
        """A copy, for what is kept: no file that is cut later takes it away."""
        if not length:
            return memoryview(b"")
        if self.record.size > SMALL_SHARD:
            return self._copied(start, length)
        with self._lock:
            if self._object is None:
                self._object = self._copied(0, self.record.size)
            return self._object[start : start + length]

    def _copied(self, start: int, length: int) -> memoryview:
        path = self.folder.local_path
        if length > _LARGE:  # before memory is asked for: a forged commit can say anything
            self._check_size()
        if path is None:
            return memoryview(self.folder.get_range(self.record.name, start, length))
        target = np.empty(length, np.uint8).data
        self._fill(path, start, target)
        return target

    def _fill(self, path: Path, start: int, target: memoryview) -> None:
        if read_into(path / self.record.name, start, target) != len(target):
            self._cut()

    def _cut(self) -> NoReturn:
        self._check_size()
        raise Damaged(f"{self.where} was cut while it was read")

    def _check_size(self) -> None:
        found = self.folder.info(self.record.name).size
        if found != self.record.size:
            raise Damaged(f"{self.where} has another size", expected=self.record.size, found=found)

    def _mapping(self, path: Path) -> MappedFile | None:
        with self._lock:
            if self._map is None:
                self._map = MappedFile.of(path / self.record.name, self.record.size) or False
            return self._map or None
