"""The layout of a shard, the encoding of rows in one byte per number (int8 or float8 e4m3), and the writer of a shard.

An encoded row has one float32 scale. Until it is written, it is one array of bytes, the numbers and then the scale, so
that one transfer carries both. In the shard they are two tensors: the tap's name, and the same name with ``.scale``.
The writer checksums rows and writes them directly to their final offsets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spile.errors import Damaged, untrusted
from spile.objects.crc import CHUNK, ChunkedCrc, crc32c, fold, fold_chunks
from spile.objects.folder import Folder, Writer
from spile.spec.ranges import Ranges
from spile.spec.safetensors import DTYPES, SafetensorsHeader, TensorPlace, encode_header, parse_header
from spile.spec.sample import Sample
from spile.spec.taps import SCALE_BYTES, SCALED, TapRows
from spile.store.ledger import FORMAT, ShardRecord
from spile.store.statistics import SUMS, TapAccumulator

SCALE = ".scale"
"""The suffix of the tensor that contains a tap's scales."""
_LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}
LIMIT = 248 * 2.0**120
"""Larger numbers (3.3e38) may be infinite when they are decoded."""
_NUMBERS: dict[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
_FLOAT8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_RELATIVE = {"float32": 0.0, "int32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}
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
        numbers = part.astype(_NUMBERS[dtype])
    return np.concatenate([numbers.view(np.int8), scale.astype("<f4").view(np.int8)], axis=1)


def _scale(largest: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        scale = largest / np.float32(_LARGEST[dtype])
    if dtype == "float8_e4m3":  # The next power of two: dividing by it is exact.
        exponent = np.maximum((scale.view(np.int32) + 0x7FFFFF) >> 23, 1)
        scale = (exponent << 23).astype(np.int32).view(np.float32)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    return np.where(largest < LIMIT, scale, np.float32(np.nan))


def split(rows: npt.NDArray[np.int8], dtype: str) -> tuple[_Array, npt.NDArray[np.float32]]:
    """Split the output of :func:`encode` into a shard's two tensors: numbers ``[n, width]`` and scales ``[n]``."""
    numbers = np.ascontiguousarray(rows[:, :-SCALE_BYTES]).view(_NUMBERS[dtype])
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


def rounding(rows: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.float64]:
    """Return the largest rounding error of each stored number, as ``docs/format.md`` guarantees it."""
    if dtype not in SCALED:
        return np.asarray(_RELATIVE[dtype] * np.abs(rows))
    largest = np.abs(rows).max(axis=-1, initial=0.0, keepdims=True)
    if dtype == "int8":  # Half a step, plus the float32 rounding of the quotient and the product.
        return np.broadcast_to(largest / 254 * (1 + 2.0**-15), rows.shape)
    # Half a unit in the last of four bits, largest just above a power of two; half of 2^-9 scales below 2^-6 scales.
    return np.asarray(np.maximum(np.abs(rows) / 17, largest / 224 / 1024) * (1 + 2.0**-40))


_BYTES, _ROWS = "chunk_bytes", "chunk_rows"
_MOST = 64 << 20
"""The largest chunk in bytes, unless it is a single row. It limits how much must be read to get one row."""
_SHOWN = 80
"""The number of characters of an invalid value that an error shows."""


@dataclass(frozen=True)
class Chunking:
    """The length of the chunks of each tensor; the last chunk of a tensor may be shorter."""

    bytes: int
    """The length of chunks in bytes, for tensors that are not taps."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """The number of rows in a chunk, by tap."""

    def length(self, name: str, code: str, shape: Sequence[int]) -> int:
        rows = self.rows.get(name)
        return self.bytes if rows is None else rows * _row_bytes(code, shape)

    def count(self, name: str, code: str, shape: Sequence[int]) -> int:
        """Return the number of chunks of this tensor; 0 if it is empty."""
        return -(-DTYPES[code].itemsize * math.prod(shape) // self.length(name, code, shape))

    def metadata(self) -> dict[str, str]:
        """Return the fields of a header that describe the chunks."""
        rows = {_ROWS: json.dumps(dict(self.rows), separators=(",", ":"), ensure_ascii=False)} if self.rows else {}
        return {_BYTES: str(self.bytes), **rows}

    @classmethod
    def of(cls, metadata: Mapping[str, str], places: Mapping[str, TensorPlace], where: str) -> Chunking:
        """Return the chunking that an untrusted header describes.

        Raises:
            Damaged: If the fields are malformed, the lengths are impossible, or a tap is missing.

        """
        with untrusted(Damaged, f"{where} has a header without the sizes of its chunks"):
            size, rows = int(metadata[_BYTES]), dict(json.loads(metadata.get(_ROWS, "{}")))
        if not 1 <= size <= _MOST:
            found = metadata[_BYTES][:_SHOWN]
            raise Damaged(f"{where} has a header with an invalid {_BYTES}", expected=f"1 to {_MOST}", found=found)
        for name, count in rows.items():
            if expected := _wanted(count, places.get(name)):
                found = f"{name[:_SHOWN]!r}: {str(count)[:_SHOWN]}"
                raise Damaged(f"{where} has a header with an invalid {_ROWS}", expected=expected, found=found)
        if missing := [name for name in places if name not in rows and _is_tap(name, places[name])]:
            raise Damaged(f"{where} has a header without {_ROWS} of a tap", expected=", ".join(missing)[:_SHOWN])
        return cls(size, rows)


def _row_bytes(code: str, shape: Sequence[int]) -> int:
    return DTYPES[code].itemsize * shape[1]


def _is_tap(name: str, place: TensorPlace) -> bool:
    return len(place.shape) == 2 and not name.endswith(SUMS)


def _wanted(count: object, place: TensorPlace | None) -> str | None:
    """Return what was expected if ``count`` is not a valid number of rows in a chunk, else None."""
    if place is None or len(place.shape) != 2 or not place.shape[1]:
        return "a tensor of rows"
    if type(count) is not int or count < 1:
        return "a positive number of rows"
    if count > 1 and count * _row_bytes(place.code, place.shape) > _MOST:
        return f"one row, or rows of at most {_MOST} bytes together"
    return None


ALIGN = 4096
CHUNKS = "chunk_crc32c"
POSITIONS, CONTEXT, CONTEXT_OFFSETS = "positions", "context", "context_offsets"
TAIL = ("offsets", "sample_index", CHUNKS, "tokens", "roles")
PREVIEW = 200
"""The number of characters of a preview that are stored, so that a header stays small."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _code(dtype: str) -> str:
    return "F8_E4M3" if dtype == "float8_e4m3" else _CODES[np.dtype(dtype)]


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
        """Return the dtype code and shape of every tensor except the checksums, in the order of the file.

        ``tokens`` is the number of rows; ``context`` is the number of all tokens if some have no rows.
        """
        return {
            **{tap.name: (_code(tap.dtype), (tokens, tap.width)) for tap in self.rows},
            **{name: ("F64", (2, width)) for name, width in self.sums().items()},
            "offsets": ("I64", (samples + 1,)),
            "sample_index": ("I64", (samples,)),
            **({CONTEXT_OFFSETS: ("I64", (samples + 1,))} if self.positions else {}),
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
        """Return the fields that every header contains besides its samples."""
        return {
            "format_version": str(FORMAT),
            "fingerprint": self.fingerprint,
            "stream": self.stream,
        }

    def chunking(self) -> Chunking:
        """Return the chunking of a new shard: for taps, the largest power of two of rows that fits, at least one."""
        fitting = {tap.name: max(1, CHUNK // tap.number_bytes) for tap in self.rows}
        return Chunking(CHUNK, {name: 1 << rows.bit_length() - 1 for name, rows in fitting.items()})


@dataclass(frozen=True)
class ShardLayout:
    """The header's bytes and the place of every tensor of a shard that is to be written."""

    header: bytes
    places: dict[str, TensorPlace]
    size: int
    chunk_bytes: dict[str, int]
    """The length of each tensor's chunks in bytes."""


@dataclass(frozen=True)
class ShardHeader(SafetensorsHeader):
    """The parsed header of a shard."""

    chunking: Chunking

    def chunk_bytes(self, name: str) -> int:
        place = self.places[name]
        return self.chunking.length(name, place.code, place.shape)

    def chunk_count(self, name: str) -> int:
        place = self.places[name]
        return self.chunking.count(name, place.code, place.shape)

    def notes(self) -> list[dict[str, Any]]:
        """Return each sample's index, task id, preview, augmentation, truncation and kept fields."""
        with untrusted(Damaged, "a shard's header has no records of its samples"):
            return [dict(note) for note in json.loads(self.metadata["samples"])]


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


def _shapes(schema: ShardSchema, samples: int, tokens: int, context: int) -> list[tuple[str, str, tuple[int, ...]]]:
    known = [(name, code, shape) for name, (code, shape) in schema.tensors(samples, tokens, context).items()]
    chunking = schema.chunking()
    chunks = sum(chunking.count(*each) for each in known)
    # Wide elements before narrow ones, so that each tensor is aligned to its element.
    last = CONTEXT_OFFSETS if schema.positions else "sample_index"
    place = [name for name, _, _ in known].index(last) + 1
    return [*known[:place], (CHUNKS, "U32", (chunks,)), *known[place:]]


def plan_shard(schema: ShardSchema, notes: Sequence[dict[str, Any]], tokens: int, context: int = 0) -> ShardLayout:
    """Plan the layout of a shard.

    ``tokens`` is the number of rows; ``context`` is the number of all tokens if some have no rows.
    """
    records = json.dumps(notes, separators=(",", ":"), ensure_ascii=False)
    chunking = schema.chunking()
    metadata = {**schema.metadata(), **chunking.metadata(), "samples": records}
    shapes = _shapes(schema, len(notes), tokens, context)
    try:
        data, header = encode_header(shapes, metadata, align=ALIGN)
    except ValueError as error:
        raise ValueError(f"a shard of {len(notes)} samples needs {error}; begin smaller shards") from error
    return ShardLayout(data, header.places, header.size, {each[0]: chunking.length(*each) for each in shapes})


def parse_shard_header(data: bytes, size: int, where: str) -> ShardHeader:
    """Parse the header of a file of ``size`` bytes. ``data`` is the start of the file, at least the whole header."""
    try:
        header = parse_header(data, size)
    except ValueError as error:
        raise Damaged(f"{where} has a header that is not a shard's", found=str(error)) from error
    if (found := header.metadata.get("format_version")) != str(FORMAT):
        raise Damaged(
            f"{where} has a header of a format that this version cannot read", expected=f"version {FORMAT}", found=found
        )
    unknown = sorted({place.code for place in header.places.values()} - DTYPES.keys())
    tail = tuple(name for name in header.places if name in TAIL)
    if header.length % ALIGN or tail != TAIL or tuple(header.places)[-1] != TAIL[-1] or unknown:
        raise Damaged(f"{where} has a header that is not a shard's", expected=f"{', '.join(TAIL)} after the taps")
    chunking = Chunking.of(header.metadata, header.places, where)
    shard = ShardHeader(header.length, header.places, header.metadata, chunking)
    expected, sums = sum(map(shard.chunk_count, header.places.keys() - {CHUNKS})), header.places[CHUNKS]
    if (sums.code, sums.shape) != ("U32", (expected,)):
        found = f"{sums.code} {list(sums.shape)}"
        raise Damaged(f"{where} has the wrong number of chunks", expected=f"U32 [{expected}]", found=found)
    return shard


_PIECE = 4 << 20
"""Bytes, in whole chunks, that are checksummed and then written while they are still in the processor's cache.

Smaller pieces need more calls, and after each call a thread waits for the interpreter's lock."""


def _starts(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")


def _joined(dtype: str, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, casting="safe")


@dataclass(frozen=True)
class _Context:
    """All tokens, and each row's position in its sample, for shards in which only some tokens have rows."""

    offsets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Context:
        counting = np.arange(max(map(len, samples)), dtype=np.int32)
        return cls(
            _starts([len(sample) for sample in samples]),
            _joined("<i4", [sample.of_rows(counting[: len(sample)]) for sample in samples]),
            _joined("<i4", [sample.tokens for sample in samples]),
        )

    def tensors(self, samples: int, rows: int) -> dict[str, npt.NDArray[Any]]:
        return {POSITIONS: self.positions[:rows], CONTEXT: self.tokens[: self.offsets[samples]]}


class ShardBuilder:
    """Writes one shard and returns its record.

    ``write`` may be called from several threads for different taps; the rows of one tap must come in order. Every
    builder must end with ``finish`` or ``abort``.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        samples: Sequence[Sample],
        schema: ShardSchema,
    ) -> None:
        if not samples:
            raise ValueError("a shard has at least one sample")
        self.name = name
        self._schema = schema
        self._taps = [tap.name for tap in schema.rows]
        self._notes = notes_of(samples)
        self._index = np.array([sample.index for sample in samples], np.int64)
        self._offsets = _starts([sample.rows for sample in samples])
        self._tokens = _joined("<i4", [sample.of_rows(sample.tokens) for sample in samples])
        self._roles = _joined("u1", [sample.of_rows(sample.roles) for sample in samples])
        if len(self._tokens) != len(self._roles):
            raise ValueError(f"{len(self._tokens)} tokens and {len(self._roles)} roles")
        self._context = _Context.of(samples) if schema.positions else None
        if len(np.unique(self._index)) != len(samples):
            raise ValueError("a sample is in the shard twice")
        self._plan = self._plan_of(schema, len(samples))
        self._crcs = [ChunkedCrc(self._plan.chunk_bytes[tap]) for tap in self._taps]
        widths = [schema.sums().get(tap + SUMS) for tap in self._taps]
        self._statistics = [None if width is None else TapAccumulator(width) for width in widths]
        self._scales = {tap.name: np.zeros(self.rows, "<f4") for tap in schema.rows if tap.scaled}
        self._writer: Writer = folder.writer(name, self._plan.size)

    @property
    def size(self) -> int:
        """The size of the shard in bytes, with all its samples."""
        return self._plan.size

    @property
    def rows(self) -> int:
        """The number of rows at each tap, with all samples."""
        return int(self._offsets[-1])

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The first row of each sample, and the end of the last one."""
        return self._offsets

    def _plan_of(self, schema: ShardSchema, samples: int) -> ShardLayout:
        context = 0 if self._context is None else int(self._context.offsets[samples])
        return plan_shard(schema, self._notes[:samples], int(self._offsets[samples]), context)

    def write(self, tap: int, row: int, rows: npt.NDArray[np.generic]) -> None:
        """Write the next rows of the tap at index ``tap`` of the stream's taps, from row ``row`` on."""
        expected = self._schema.rows[tap]
        dtype, columns = ("int8", expected.bytes) if expected.scaled else (expected.dtype, expected.width)
        if rows.dtype != dtype or rows.ndim != 2 or rows.shape[1] != columns:
            raise ValueError(f"rows of {rows.dtype} {rows.shape} for {dtype} [n, {columns}]")
        crc = self._crcs[tap]
        width = expected.number_bytes
        if crc.length != row * width or row + len(rows) > self.rows:
            raise ValueError(f"{self._taps[tap]}: rows {row} to {row + len(rows)} after {crc.length // width}")
        if not len(rows):
            return
        if expected.scaled:
            rows, scales = split(rows.view(np.int8), expected.dtype)
            self._scales[expected.name][row : row + len(rows)] = scales
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data
        place = self._plan.places[self._taps[tap]].start + row * width
        step = max(1, _PIECE // crc.chunk) * crc.chunk
        start = 0
        while start < len(data):
            # End each piece at a chunk boundary: a piece that crosses one needs another call, which waits for the lock.
            piece = data[start : start + step - crc.length % step]
            crc.extend(piece)
            self._writer.write_at(place + start, piece)
            start += len(piece)
        self._take(tap, row, rows)

    def _take(self, tap: int, row: int, rows: npt.NDArray[np.generic]) -> None:
        """Add rows to the tap's statistics."""
        statistics = self._statistics[tap]
        if statistics is not None:
            place = np.arange(row, row + len(rows))
            sample = np.searchsorted(self._offsets, place, side="right") - 1
            tokens = self._tokens[row : row + len(rows)]
            scales = self._scales.get(self._taps[tap])
            rows = rows if scales is None else decode(rows, scales[row : row + len(rows)])
            positions = place - self._offsets[sample]
            if self._context is not None:
                positions = self._context.positions[row : row + len(rows)]
            statistics.add(rows, tokens, self._index[sample], positions)

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
            raise ValueError(f"{samples} samples of the {len(self._notes)} begun")
        tokens = int(self._offsets[samples])
        plan = self._plan if samples == len(self._notes) else self._plan_of(self._schema, samples)
        chunks = {tap: self._chunks(number, tokens) for number, tap in enumerate(self._taps)}
        known = {tap: each.result() for tap, each in zip(self._taps, self._statistics, strict=True) if each is not None}
        if any(each.count != tokens for each in known.values()):  # They include rows that the shard does not keep.
            known = {}
            plan = self._plan_of(replace(self._schema, statistics=False), samples)
        self._compact(plan)
        tail = {
            **{tap + SUMS: each.sums[0].astype("<f8") for tap, each in known.items()},
            "offsets": self._offsets[: samples + 1].astype("<i8"),
            "sample_index": self._index[:samples].astype("<i8"),
            **({} if self._context is None else {CONTEXT_OFFSETS: self._context.offsets[: samples + 1]}),
            **{tap + SCALE: scales[:tokens] for tap, scales in self._scales.items()},
            **({} if self._context is None else self._context.tensors(samples, tokens)),
            "tokens": self._tokens[:tokens],
            "roles": self._roles[:tokens],
        }
        for name, array in tail.items():
            whole = ChunkedCrc(plan.chunk_bytes[name])
            whole.extend(array.reshape(-1).view(np.uint8).data)
            chunks[name] = whole.chunks(array.nbytes)
        sums = np.array([crc for each in chunks.values() for crc in each], "<u4")
        crcs = {
            name: fold_chunks(each, plan.places[name].length, plan.chunk_bytes[name]) for name, each in chunks.items()
        }
        crcs[CHUNKS] = crc32c(sums.tobytes())
        crcs = {name: crcs[name] for name in plan.places}
        self._writer.write_at(0, plan.header)
        for name, array in {**tail, CHUNKS: sums}.items():
            if array.nbytes:
                self._writer.write_at(plan.places[name].start, array.reshape(-1).view(np.uint8).data)
        self._writer.finish(plan.size)
        header = (len(plan.header), crc32c(plan.header))
        return ShardRecord(
            name=self.name,
            size=plan.size,
            crc32c=fold([(header[1], header[0]), *((crc, plan.places[name].length) for name, crc in crcs.items())]),
            header=header,
            tensors=crcs,
            samples=Ranges.of(self._index[:samples].tolist()),
            count=samples,
            tokens=tokens,
            statistics={tap: each.to_json() for tap, each in known.items()},
        )

    def _chunks(self, tap: int, tokens: int) -> list[int]:
        width = self._schema.rows[tap].number_bytes
        try:
            return self._crcs[tap].chunks(tokens * width)
        except KeyError:
            written = self._crcs[tap].length // width
            raise ValueError(f"{self._taps[tap]}: no write ended at row {tokens}; {written} were written") from None

    def _compact(self, plan: ShardLayout) -> None:
        # Blocks move towards the front in order, so a block only overwrites what has been moved already.
        for tap in self._taps:
            source, target = self._plan.places[tap], plan.places[tap]
            if source.start != target.start and target.length:
                self._writer.move(source.start, target.start, target.length)
