"""The reader of one committed shard. All data is checked against the commit before it is returned.

The commit contains the crc32c of the header and of every tensor. The tensor ``chunk_crc32c`` contains one crc32c for
every chunk of the other tensors; the header states the length of the chunks. A partial read fetches and checks all
chunks that it overlaps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spile.errors import Damaged, StoreError
from spile.objects.crc import combine_chunks, crc32c, to_hex
from spile.objects.folder import Folder, NotFound
from spile.spec.safetensors import TensorPlace
from spile.store.ledger import ShardRecord
from spile.store.shard import (
    CHUNKS,
    CONTEXT,
    CONTEXT_OFFSETS,
    POSITIONS,
    SCALE,
    ShardHeader,
    decode,
    parse_shard_header,
)
from spile.store.statistics import SUMS

_LARGE = 64 << 20
_SMALL_TAIL = 4 << 20
"""A tail (the tensors that are not taps) of at most this many bytes is fetched with one read."""
SMALL_SHARD = 256 << 10
"""A shard of at most this many bytes is fetched with one read and kept in memory while it is open."""


class ChunkSums(NamedTuple):
    """The crc32c of each chunk of a tensor, and whether the chunk was checked successfully."""

    crcs: npt.NDArray[np.uint32]
    trusted: npt.NDArray[np.bool_]


class ShardReader:
    """Reads the header, tail and rows of a shard on demand. It is thread-safe.

    Args:
        folder: The folder of the stream.
        record: The record of the shard in its commit.
        expected: Values that the header must have, such as the id of the stream.
        added: The readers of the files that hold added taps of the same rows, by tap.

    """

    def __init__(
        self,
        folder: Folder,
        record: ShardRecord,
        expected: Mapping[str, str] = MappingProxyType({}),
        added: Mapping[str, ShardReader] = MappingProxyType({}),
    ) -> None:
        self.folder, self.record = folder, record
        self._expected, self._added = expected, added
        self.where = f"{folder.url}/{record.name}"
        self._lock = threading.RLock()
        self._header: ShardHeader | None = None
        self._notes: list[dict[str, Any]] | None = None
        self._cache: tuple[int, memoryview] | None = None
        """The last bytes of the file, and the offset of the first of them."""
        self._kept: dict[str, npt.NDArray[Any]] = {}
        self._sums: dict[str, ChunkSums] = {}
        self._places: npt.NDArray[np.intp] | None = None

    @property
    def header(self) -> ShardHeader:
        """The header, checked against the commit."""
        with self._lock:
            if self._header is None:
                length, crc = self.record.header
                data = self._checked("its header", 0, length, [crc], length)
                header = parse_shard_header(bytes(data), self.record.size, self.where)
                for name, wanted in self._expected.items():
                    if (found := header.metadata.get(name)) != wanted:
                        raise Damaged(f"{self.where} is a shard of another {name}", expected=wanted, found=found)
                self._header = header
            return self._header

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Each sample's index, task id, preview, augmentation, truncation and kept fields."""
        with self._lock:  # A cached_property of Python 3.11 would lock all shards during the read.
            if self._notes is None:
                self._notes = self.header.notes()
            return self._notes

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a whole tensor that is not a tap, checked against the commit. It is kept in memory."""
        if (file := self.of(name)) is not self:
            return file.read_tensor(name)
        with self._lock:
            if name not in self._kept:
                place, wanted = self.place(name), self.record.tensors.get(name)
                if wanted is None:
                    raise Damaged(f"{self.where}: its commit has no checksum of {name}")
                data = self._checked(name, place.start, place.length, [wanted], max(1, place.length))
                self._kept[name] = np.frombuffer(data, place.dtype).reshape(place.shape)
            return self._kept[name]

    def bounds(self, place: int) -> tuple[int, int]:
        """Return the first row of the sample at this index of the shard, and the end of its rows."""
        start, stop = self.read_tensor("offsets")[place : place + 2].tolist()
        return start, stop

    def place_of(self, index: int) -> int:
        """Return the place in this shard of the sample with this index in its stream."""
        return int(self.places_of(index))

    def places_of(self, indices: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return the places in this shard of the samples with these indices in their stream."""
        numbers = self.read_tensor("sample_index")
        with self._lock:
            if self._places is None:
                self._places = np.argsort(numbers, kind="stable")
        return np.asarray(self._places[np.searchsorted(numbers, indices, sorter=self._places)])

    def context(self, place: int) -> npt.NDArray[np.int32]:
        """Return all tokens of the sample at this index of the shard, including those without rows."""
        if CONTEXT not in self.header.places:
            return self.rows("tokens", *self.bounds(place))
        start, stop = self.read_tensor(CONTEXT_OFFSETS)[place : place + 2].tolist()
        return self.rows(CONTEXT, start, stop)

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the position of each row in its sample, starting from 0."""
        if POSITIONS in self.header.places:
            return self.read_tensor(POSITIONS)[start:stop].astype(np.int64)
        rows, offsets = np.arange(start, stop), self.read_tensor("offsets")
        return np.asarray(rows - offsets[np.searchsorted(offsets, rows, side="right") - 1])

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``start`` to ``stop`` of a tensor, fetched with one range read of whole chunks."""
        if (file := self.of(name)) is not self:
            return file.rows(name, start, stop)
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
            part = self._read(place.start + first, last - first)
        else:
            part = self.chunks(name, begin, end)[first - begin * chunk : last - begin * chunk]
        return self.decoded(name, start, np.frombuffer(part, place.dtype).reshape(stop - start, *place.shape[1:]))

    def row_type(self, name: str) -> tuple[np.dtype[Any], int]:
        """Return the dtype in which a tap's rows are returned, and their width."""
        place = self.place(name)
        return np.dtype(np.float32) if self._encoded(name) else place.dtype, place.shape[1]

    def decoded(self, name: str, start: int, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Decode stored rows, the first of which is row ``start``."""
        if not self._encoded(name):
            return rows
        return decode(rows, self.read_tensor(name + SCALE)[start : start + len(rows)])

    def _encoded(self, name: str) -> bool:
        return name + SCALE in self.of(name).header.places

    def chunk_bytes(self, name: str) -> int:
        return self.of(name).header.chunk_bytes[name]

    def chunk_rows(self, tap: str) -> int:
        place = self.place(tap)
        return self.chunk_bytes(tap) // (place.dtype.itemsize * place.shape[1])

    def pieces(self, name: str, size: int) -> list[tuple[int, int]]:
        """Return ranges of chunks of about ``size`` bytes that cover a tensor, as arguments for :meth:`chunks`."""
        chunk = self.chunk_bytes(name)
        count, step = -(-self.place(name).length // chunk), max(1, size // chunk)
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def chunks(self, name: str, begin: int, end: int) -> memoryview:
        """Return the bytes of chunks ``begin`` to ``end`` of a tensor. Chunks of local files are checked only once."""
        place, chunk = self.place(name), self.chunk_bytes(name)
        sums = self.sums(name)
        start, length = place.start + begin * chunk, min(end * chunk, place.length) - begin * chunk
        if self._known_good(name, begin, end):
            return self._read(start, length)
        crcs = sums.crcs[begin:end].tolist()
        data = self._checked(f"{name}, chunk {{}}", start, length, crcs, chunk, begin)
        sums.trusted[begin:end] = True
        return data

    def _known_good(self, name: str, begin: int, end: int) -> bool:
        """Return whether these chunks of a local file were checked before. Remote data is checked at each read."""
        return self.folder.local_path is not None and bool(self.sums(name).trusted[begin:end].all())

    def tensor_checksum(self, name: str) -> int:
        """Return the crc32c of a whole tensor, computed from those of its chunks."""
        return combine_chunks(self.sums(name).crcs.tolist(), self.place(name).length, self.chunk_bytes(name))

    def of(self, name: str) -> ShardReader:
        """Return the reader of the file that contains a tensor: this one, except for added taps."""
        return self._added.get(name.removesuffix(SUMS).removesuffix(SCALE), self)

    def place(self, name: str) -> TensorPlace:
        """Return the place of a tensor; raise KeyError if the shard does not contain it."""
        return self.of(name).header.places[name]

    def _checked(
        self, what: str, start: int, length: int, sums: Sequence[int], step: int, first: int = 0
    ) -> memoryview:
        """Return bytes that match their checksums, one per ``step`` bytes. After a mismatch they are read once more.

        They are checked with one call, because each call releases the interpreter's lock and must wait to get it back.
        """
        for last in (False, True):
            data = self._read(start, length)
            if crc32c(data) == combine_chunks(sums, length, step):
                break
            self._cache = None
            if last:
                found = [crc32c(data[at : at + step]) for at in range(0, max(1, len(data)), step)]
                place = next((n for n, (a, b) in enumerate(zip(found, sums, strict=False)) if a != b), len(found) - 1)
                raise Damaged(
                    f"{self.where} is damaged: {what.format(first + place)}",
                    expected=f"crc32c {to_hex(sums[place])}",
                    found=to_hex(found[place]),
                )
        return data

    def sums(self, name: str) -> ChunkSums:
        with self._lock:
            if not self._sums:
                sums, at = self.read_tensor(CHUNKS), 0
                for each in self.header.places:
                    count = self.header.chunk_count(each) if each != CHUNKS else 0
                    self._sums[each] = ChunkSums(sums[at : at + count], np.zeros(count, np.bool_))
                    at += count
            return self._sums[name]

    def _read(self, start: int, length: int) -> memoryview:
        """Return a copy of bytes. Those of a small shard, or of a small tail, are fetched with one read and kept."""
        begin = self._kept_from()
        if start < begin or not length:
            return self._fetch(start, length)
        with self._lock:
            if self._cache is None:
                self._cache = begin, self._fetch(begin, self.record.size - begin)
            begin, data = self._cache
        return data[start - begin : start - begin + length]

    def _kept_from(self) -> int:
        """Return the offset from which on the bytes of the file are kept in memory."""
        size = self.record.size
        if size <= SMALL_SHARD:
            return 0
        tail = size if self._header is None else self._header.places["offsets"].start
        return tail if size - tail <= _SMALL_TAIL else size

    def _fetch(self, start: int, length: int) -> memoryview:
        if length > _LARGE:  # Check before allocating memory, because a forged commit may contain any length.
            self._check_size()
        try:
            return memoryview(self.folder.get_range(self.record.name, start, length))
        except NotFound:
            raise
        except StoreError:
            self._check_size()
            raise

    def _check_size(self) -> None:
        found = self.folder.info(self.record.name).size
        if found != self.record.size:
            raise Damaged(f"{self.where} has the wrong size", expected=self.record.size, found=found)
