"""The layout of a shard, the encoding of rows in one byte per number (int8 or float8 e4m3), and the writer of a shard.

An encoded row has one float32 scale. Until it is written, it is one array of bytes, the numbers and then the scale, so
that one transfer carries both. In the shard they are two tensors: the tap's name, and the same name with ``.scale``.
The writer checksums rows and writes them directly to their final offsets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import Damaged, untrusted
from spile.objects.crc import CHUNK, ChunkedCrc, combine_all, combine_chunks, crc32c
from spile.objects.folder import Folder, Writer
from spile.spec.ranges import Ranges
from spile.spec.safetensors import DTYPES, SafetensorsHeader, encode_header, parse_header
from spile.spec.sample import Sample
from spile.spec.taps import SCALE_BYTES, SCALED, STORED_TYPES, TapRows
from spile.store.ledger import FORMAT, ShardRecord, other_version
from spile.store.statistics import SUMS, TapAccumulator

SCALE = ".scale"
"""The suffix of the tensor that contains a tap's scales."""
LIMIT = 248 * 2.0**120
"""Larger numbers (3.3e38) may be infinite when they are decoded."""
_FLOAT8 = np.arange(256, dtype=np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float32)
_Array = npt.NDArray[Any]


def as_stored(rows: _Array, dtype: str) -> _Array:
    """Return rows in the form in which a shard builder accepts them."""
    return encode(rows, dtype) if dtype in SCALED else rows.astype(dtype, copy=False)


def encode(rows: _Array, dtype: str) -> npt.NDArray[np.int8]:
    """Encode ``[n, width]`` numbers as ``[n, width + 4]`` bytes. Rows with numbers from ``LIMIT`` on get the scale NaN.

    The arithmetic is the same as in :func:`spile.models.layers.encode`, which runs on devices.
    """
    wide = rows.astype(np.float32)
    largest = np.abs(wide).max(axis=1, initial=0.0, keepdims=True)
    scale = _scale(largest, dtype)
    with np.errstate(all="ignore"):
        part = np.where(scale > 0, wide / scale, np.float32(0))
        if dtype == "int8":
            part = np.clip(np.rint(part), -127, 127)
        numbers = part.astype(_number(dtype))
    return np.concatenate([numbers.view(np.int8), scale.astype("<f4").view(np.int8)], axis=1)


def _number(dtype: str) -> np.dtype[Any]:
    return DTYPES[STORED_TYPES[dtype].code]


def _scale(largest: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        scale = largest / np.float32(STORED_TYPES[dtype].largest)
    if dtype == "float8_e4m3":  # The next power of two: dividing by it is exact.
        exponent = np.maximum((scale.view(np.int32) + 0x7FFFFF) >> 23, 1)
        scale = (exponent << 23).astype(np.int32).view(np.float32)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    return np.where(largest < LIMIT, scale, np.float32(np.nan))


def split(rows: npt.NDArray[np.int8], dtype: str) -> tuple[_Array, npt.NDArray[np.float32]]:
    """Split the output of :func:`encode` into a shard's two tensors: numbers ``[n, width]`` and scales ``[n]``."""
    numbers = np.ascontiguousarray(rows[:, :-SCALE_BYTES]).view(_number(dtype))
    return numbers, np.ascontiguousarray(rows[:, -SCALE_BYTES:]).view("<f4")[:, 0]


def decode(
    numbers: _Array, scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """Return the float32 rows that a shard's two tensors represent."""
    wide = np.empty(numbers.shape, np.float32) if out is None else out
    if numbers.dtype == np.int8:
        wide[:] = numbers
    else:
        np.take(_FLOAT8, numbers.view(np.uint8), out=wide, mode="clip")
    wide *= scales[:, None]
    return wide


ALIGN = 4096
_BYTES, _ROWS = "chunk_bytes", "chunk_rows"
_MAX_CHUNK = 64 << 20
"""Bytes of a chunk, unless it is a single row. It limits how much must be read to get one row."""
_SHOWN = 80
"""The number of characters of an invalid value that an error shows."""
CHUNKS = "chunk_crc32c"
POSITIONS, CONTEXT, CONTEXT_OFFSETS = "positions", "context", "context_offsets"
TAIL = ("offsets", "sample_index", CHUNKS, "tokens", "roles")
PREVIEW = 200
"""The number of characters of a preview that are stored, so that a header stays small."""


@dataclass(frozen=True)
class ShardSchema:
    """The properties that all shards of a stream share."""

    rows: tuple[TapRows, ...]
    fingerprint: str
    """The fingerprint of the run."""
    stream: str
    """The stream's id."""
    statistics: bool = False
    """Whether the sums and sums of squares of each tap's columns are stored."""
    keep: tuple[str, ...] = ()
    """The fields that each sample's note contains under ``kept``."""
    positions: bool = False
    """Whether only some tokens have rows. The shard then also contains each row's position and all tokens."""

    def tensors(self, samples: int, tokens: int, context: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype code and shape of every tensor, in the order of the file; that of the checksums is empty.

        ``tokens`` is the number of rows; ``context`` is the number of all tokens if some have no rows.
        """
        return {
            **{tap.name: (STORED_TYPES[tap.dtype].code, (tokens, tap.width)) for tap in self.rows},
            **{name: ("F64", (2, width)) for name, width in self.sums().items()},
            "offsets": ("I64", (samples + 1,)),
            "sample_index": ("I64", (samples,)),
            **({CONTEXT_OFFSETS: ("I64", (samples + 1,))} if self.positions else {}),
            CHUNKS: ("U32", (0,)),  # Wide elements come before narrow ones, so that each tensor is aligned.
            **{tap.name + SCALE: ("F32", (tokens,)) for tap in self.rows if tap.scaled},
            **({POSITIONS: ("I32", (tokens,)), CONTEXT: ("I32", (context,))} if self.positions else {}),
            "tokens": ("I32", (tokens,)),
            "roles": ("U8", (tokens,)),
        }

    def sums(self) -> dict[str, int]:
        """Return the name and width of each tap's sums. Taps of integer ids have none."""
        numbers = [tap for tap in self.rows if tap.dtype != "int32"] if self.statistics else []
        return {tap.name + SUMS: tap.width for tap in numbers}

    def metadata(self) -> dict[str, str]:
        """Return the fields that every header contains besides its samples and chunks."""
        return {"format_version": str(FORMAT), "fingerprint": self.fingerprint, "stream": self.stream}

    def chunk_rows(self) -> dict[str, int]:
        """Return the rows in a chunk of each tap of a new shard: the largest power of two that fits, at least one."""
        fitting = {tap.name: max(1, CHUNK // tap.number_bytes) for tap in self.rows}
        return {name: 1 << rows.bit_length() - 1 for name, rows in fitting.items()}


@dataclass(frozen=True)
class ShardHeader(SafetensorsHeader):
    """The header of a shard."""

    chunk_bytes: Mapping[str, int]
    """The length of the chunks of each tensor; the last chunk of a tensor may be shorter."""

    def chunk_count(self, name: str) -> int:
        """Return the number of chunks of a tensor; 0 if it is empty."""
        return -(-self.places[name].length // self.chunk_bytes[name])

    def notes(self) -> list[dict[str, Any]]:
        """Return each sample's index, task id, preview, augmentation, truncation and kept fields."""
        with untrusted(Damaged, "a shard's header has no records of its samples"):
            return [_checked_note(note) for note in json.loads(self.metadata["samples"])]


_NOTE_TYPES = {"index": int, "task_id": str, "preview": str, "augmentation": dict, "truncated": int, "kept": dict}


def _checked_note(note: dict[str, Any]) -> dict[str, Any]:
    """Return the note of a sample; raise an error if a field has another type than the writer gives it."""
    for name, kind in _NOTE_TYPES.items():
        if (name in note or name in ("index", "task_id")) and type(note[name]) is not kind:
            raise TypeError(f"{name} is {type(note[name]).__name__}")
    return note


def _clean(text: str) -> str:
    """Replace unpaired surrogates by question marks, so that every UTF-8 reader accepts the text."""
    return text.encode("utf-8", "replace").decode()


def notes_of(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Return the note that the header stores for each sample."""
    return [
        {
            "index": sample.index,
            "task_id": _clean(sample.task_id),
            **({"augmentation": sample.augmentation} if sample.augmentation is not None else {}),
            **({"truncated": sample.truncated} if sample.truncated else {}),
            **({"kept": sample.kept} if sample.kept is not None else {}),
            "preview": _clean(sample.preview[:PREVIEW]),
        }
        for sample in samples
    ]


def count_cut(notes: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of samples that were cut to the maximum length."""
    return sum(1 for note in notes if note.get("truncated"))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def plan_shard(
    schema: ShardSchema, notes: Sequence[dict[str, Any]], tokens: int, context: int = 0
) -> tuple[bytes, ShardHeader]:
    """Plan the layout of a shard; return the bytes of its header and the place of every tensor.

    ``tokens`` is the number of rows; ``context`` is the number of all tokens if some have no rows.
    """
    tensors, rows = schema.tensors(len(notes), tokens, context), schema.chunk_rows()
    taps = {tap.name: rows[tap.name] * tap.number_bytes for tap in schema.rows}
    chunk_bytes = {**dict.fromkeys(tensors, CHUNK), **taps}
    lengths = {name: DTYPES[code].itemsize * math.prod(shape) for name, (code, shape) in tensors.items()}
    tensors[CHUNKS] = "U32", (sum(-(-length // chunk_bytes[name]) for name, length in lengths.items()),)
    chunks = {_BYTES: str(CHUNK), **({_ROWS: _json(rows)} if rows else {})}
    metadata = {**schema.metadata(), **chunks, "samples": _json(notes)}
    try:
        data, header = encode_header(((name, *kind) for name, kind in tensors.items()), metadata, align=ALIGN)
    except ValueError as error:
        raise ValueError(f"a shard of {len(notes)} samples needs {error}; begin smaller shards") from error
    return data, ShardHeader(header.length, header.places, metadata, chunk_bytes)


def parse_shard_header(data: bytes, size: int, where: str) -> ShardHeader:
    """Parse the header of a file of ``size`` bytes. ``data`` is the start of the file, at least the whole header."""
    try:
        header = parse_header(data, size)
    except ValueError as error:
        raise Damaged(f"{where} has a header that is not a shard's", found=str(error)) from error
    if (found := header.metadata.get("format_version")) != str(FORMAT):
        raise other_version(where, found)
    unknown = {place.code for place in header.places.values()} - DTYPES.keys()
    tail = tuple(name for name in header.places if name in TAIL)
    if header.length % ALIGN or tail != TAIL or tuple(header.places)[-1] != TAIL[-1] or unknown:
        raise Damaged(f"{where} has a header that is not a shard's", expected=f"{', '.join(TAIL)} after the taps")
    chunk_bytes = _parse_chunk_bytes(header, where)
    shard = ShardHeader(header.length, header.places, header.metadata, chunk_bytes)
    expected, sums = sum(map(shard.chunk_count, header.places.keys() - {CHUNKS})), header.places[CHUNKS]
    if (sums.code, sums.shape) != ("U32", (expected,)):
        found = f"{sums.code} {list(sums.shape)}"
        raise Damaged(f"{where} has the wrong number of chunks", expected=f"U32 [{expected}]", found=found)
    return shard


def _parse_chunk_bytes(header: SafetensorsHeader, where: str) -> dict[str, int]:
    """Return the length of each tensor's chunks; raise :class:`Damaged` if the header does not state valid ones."""
    with untrusted(Damaged, f"{where} has a header without the sizes of its chunks"):
        size, rows = int(header.metadata[_BYTES]), dict(json.loads(header.metadata.get(_ROWS, "{}")))
    if not 1 <= size <= _MAX_CHUNK:
        found, expected = header.metadata[_BYTES][:_SHOWN], f"1 to {_MAX_CHUNK}"
        raise Damaged(f"{where} has a header with an invalid {_BYTES}", expected=expected, found=found)
    taps = {name: place for name, place in header.places.items() if len(place.shape) == 2}
    for name, count in rows.items():
        row = taps[name].dtype.itemsize * taps[name].shape[1] if name in taps else 0
        if not row or type(count) is not int or count < 1 or count * row > max(row, _MAX_CHUNK):
            raise Damaged(
                f"{where} has a header with an invalid {_ROWS}",
                expected=f"for each tap one row, or rows of at most {_MAX_CHUNK} bytes together",
                found=f"{name[:_SHOWN]!r}: {str(count)[:_SHOWN]}",
            )
    if missing := [name for name in taps if name not in rows and not name.endswith(SUMS)]:
        raise Damaged(f"{where} has a header without {_ROWS} of a tap", expected=", ".join(missing)[:_SHOWN])
    return {
        name: rows[name] * place.dtype.itemsize * place.shape[1] if name in rows else size
        for name, place in header.places.items()
    }


_PIECE = 4 << 20
"""Bytes, in whole chunks, that are checksummed and then written while they are still in the processor's cache.

Smaller pieces need more calls, and after each call a thread waits for the interpreter's lock."""


def _starts(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype="<i8")


def _joined(dtype: str, parts: Sequence[_Array]) -> _Array:
    return np.concatenate(parts).astype(dtype, casting="safe")


class ShardBuilder:
    """Writes one shard and returns its record.

    ``write`` may be called from several threads for different taps; the rows of one tap must come in order. Every
    builder must end with ``finish`` or ``abort``.
    """

    def __init__(self, folder: Folder, name: str, samples: Sequence[Sample], schema: ShardSchema) -> None:
        if not samples:
            raise ValueError("a shard has at least one sample")
        self.name = name
        self._schema = schema
        self._notes = notes_of(samples)
        self.offsets = _starts(sample.rows for sample in samples)
        """The first row of each sample, and the end of the last one."""
        self.rows = int(self.offsets[-1])
        """The number of rows at each tap, with all samples."""
        self._tail = _tail_of(samples, schema, self.offsets)
        if len(self._tail["tokens"]) != len(self._tail["roles"]):
            raise ValueError(f"{len(self._tail['tokens'])} tokens and {len(self._tail['roles'])} roles")
        if len(np.unique(self._tail["sample_index"])) != len(samples):
            raise ValueError("a sample is in the shard twice")
        _, self._header = self._plan(schema, len(samples))
        self.size = self._header.size
        """The size of the shard in bytes, with all its samples."""
        self._crcs = [ChunkedCrc(self._header.chunk_bytes[tap.name]) for tap in schema.rows]
        self._statistics = {name.removesuffix(SUMS): TapAccumulator(width) for name, width in schema.sums().items()}
        self._writer: Writer = folder.writer(name, self.size)

    def _plan(self, schema: ShardSchema, samples: int) -> tuple[bytes, ShardHeader]:
        context = int(self._tail[CONTEXT_OFFSETS][samples]) if schema.positions else 0
        return plan_shard(schema, self._notes[:samples], int(self.offsets[samples]), context)

    def write(self, tap: int, row: int, rows: npt.NDArray[np.generic]) -> None:
        """Write the next rows of the tap at index ``tap`` of the stream's taps, from row ``row`` on."""
        kind, crc = self._schema.rows[tap], self._crcs[tap]
        dtype, columns = ("int8", kind.bytes) if kind.scaled else (kind.dtype, kind.width)
        if rows.dtype != dtype or rows.ndim != 2 or rows.shape[1] != columns:
            raise ValueError(f"rows of {rows.dtype} {rows.shape} for {dtype} [n, {columns}]")
        width, stop = kind.number_bytes, row + len(rows)
        if crc.length != row * width or stop > self.rows:
            raise ValueError(f"{kind.name}: rows {row} to {stop} after {crc.length // width}")
        if not len(rows):
            return
        if kind.scaled:
            rows, self._tail[kind.name + SCALE][row:stop] = split(rows.view(np.int8), kind.dtype)
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data
        place = self._header.places[kind.name].start + row * width
        step = max(1, _PIECE // crc.chunk) * crc.chunk
        start = 0
        while start < len(data):
            # End each piece at a chunk boundary: a piece that crosses one needs another call, which waits for the lock.
            piece = data[start : start + step - crc.length % step]
            crc.extend(piece)
            self._writer.write_at(place + start, piece)
            start += len(piece)
        if kind.name in self._statistics:
            self._add_statistics(kind, row, rows)

    def _add_statistics(self, kind: TapRows, row: int, rows: _Array) -> None:
        tail, these = self._tail, slice(row, row + len(rows))
        places = np.arange(these.start, these.stop)
        sample = np.searchsorted(self.offsets, places, side="right") - 1
        positions = tail[POSITIONS][these] if POSITIONS in tail else places - self.offsets[sample]
        rows = decode(rows, tail[kind.name + SCALE][these]) if kind.scaled else rows
        self._statistics[kind.name].add(rows, tail["tokens"][these], tail["sample_index"][sample], positions)

    def finish(self, samples: int | None = None) -> ShardRecord:
        """Make the shard durable with its first ``samples`` samples (default: all), and return its record."""
        try:
            return self._finish(len(self._notes) if samples is None else samples)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        self._writer.abort()

    def _finish(self, samples: int) -> ShardRecord:
        if not 0 < samples <= len(self._notes):
            raise ValueError(f"{samples} samples, but the shard was begun with {len(self._notes)}")
        tokens = int(self.offsets[samples])
        chunks = {tap.name: self._chunks(number, tokens) for number, tap in enumerate(self._schema.rows)}
        statistics = {tap: each.result() for tap, each in self._statistics.items()}
        if any(each.count != tokens for each in statistics.values()):  # They include rows that the shard does not keep.
            statistics = {}
        head, header = self._plan(replace(self._schema, statistics=bool(statistics)), samples)
        self._compact(header)
        arrays = {name: array[: header.places[name].shape[0]] for name, array in self._tail.items()}
        arrays |= {tap + SUMS: each.sums[0].astype("<f8") for tap, each in statistics.items()}
        for name, array in arrays.items():
            whole = ChunkedCrc(header.chunk_bytes[name])
            whole.extend(_bytes_of(array))
            chunks[name] = whole.chunks(array.nbytes)
        arrays[CHUNKS] = np.array([crc for name in header.places if name != CHUNKS for crc in chunks[name]], "<u4")
        chunks[CHUNKS] = [crc32c(_bytes_of(arrays[CHUNKS]))]
        self._writer.write_at(0, head)
        for name, array in arrays.items():
            if array.nbytes:
                self._writer.write_at(header.places[name].start, _bytes_of(array))
        self._writer.finish(header.size)
        crcs = {
            name: combine_chunks(chunks[name], place.length, header.chunk_bytes[name])
            for name, place in header.places.items()
        }
        parts = [(crc32c(head), len(head)), *((crcs[name], place.length) for name, place in header.places.items())]
        return ShardRecord(
            name=self.name,
            size=header.size,
            crc32c=combine_all(parts),
            header=(len(head), crc32c(head)),
            tensors=crcs,
            samples=Ranges.of(arrays["sample_index"].tolist()),
            count=samples,
            tokens=tokens,
            statistics={tap: each.to_json() for tap, each in statistics.items()},
            cut=count_cut(self._notes[:samples]),
        )

    def _chunks(self, tap: int, tokens: int) -> list[int]:
        kind, crc = self._schema.rows[tap], self._crcs[tap]
        try:
            return crc.chunks(tokens * kind.number_bytes)
        except KeyError:
            written = crc.length // kind.number_bytes
            raise ValueError(f"{kind.name}: no write ended at row {tokens}; {written} were written") from None

    def _compact(self, header: ShardHeader) -> None:
        # Blocks move towards the front in order, so a block only overwrites what has been moved already.
        for tap in self._schema.rows:
            source, target = self._header.places[tap.name], header.places[tap.name]
            if source.start != target.start and target.length:
                self._writer.move(source.start, target.start, target.length)


def _tail_of(samples: Sequence[Sample], schema: ShardSchema, offsets: npt.NDArray[np.int64]) -> dict[str, _Array]:
    """Return the tensors that are neither rows nor derived from them; the scales are filled in as rows are written."""
    tail: dict[str, _Array] = {
        "offsets": offsets,
        "sample_index": np.array([sample.index for sample in samples], "<i8"),
        "tokens": _joined("<i4", [sample.of_rows(sample.tokens) for sample in samples]),
        "roles": _joined("u1", [sample.of_rows(sample.roles) for sample in samples]),
        **{tap.name + SCALE: np.zeros(offsets[-1], "<f4") for tap in schema.rows if tap.scaled},
    }
    if schema.positions:
        counting = np.arange(max(map(len, samples)), dtype=np.int32)
        tail[POSITIONS] = _joined("<i4", [sample.of_rows(counting[: len(sample)]) for sample in samples])
        tail[CONTEXT] = _joined("<i4", [sample.tokens for sample in samples])
        tail[CONTEXT_OFFSETS] = _starts(len(sample) for sample in samples)
    return tail


def _bytes_of(array: _Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
