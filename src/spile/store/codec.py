"""The bytes of a shard: a safetensors file whose whole layout follows from its samples' lengths.

    8 bytes   N, the length of the header, little-endian
    N bytes   the header: JSON, padded with spaces so that 8 + N is a multiple of 4096
    taps      one block each, [tokens, width], in the order of the stream's taps
    offsets   [samples + 1] int64      sample_index  [samples] int64
    chunk_crc32c  [chunks] uint32      one for every started MiB of each other tensor, in the file's order
    tokens    [tokens] int32           roles         [tokens] uint8

The samples' notes are the header's ``samples``: a JSON list in a string, because safetensors allows strings only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from spile.errors import Damaged
from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.crc import CHUNK
from spile.store.sealed import FORMAT

__all__ = [
    "ALIGN",
    "CHUNKS",
    "DTYPES",
    "TAIL",
    "Header",
    "ShardLayout",
    "ShardSchema",
    "TensorPlace",
    "notes_of",
    "parse_header",
    "plan_shard",
]

ALIGN = 4096
CHUNKS = "chunk_crc32c"
TAIL = ("offsets", "sample_index", CHUNKS, "tokens", "roles")
PREVIEW = 200
"""Characters of a preview that are kept, so that a header stays small beside its rows."""
_MOST_HEADER = 100_000_000  # the safetensors library refuses a longer one

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: ``start`` and ``stop`` count from the file's first byte."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """As NumPy calls it."""
        return DTYPES[self.code]

    @property
    def length(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardSchema:
    """What all shards of a stream have in common."""

    rows: tuple[TapRows, ...]
    fingerprint: str
    """The run's."""
    stream: str
    """The stream's id."""

    def tensors(self, samples: int, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → dtype's code and shape of every tensor but the checksums, in the file's order."""
        return {
            **{tap.name: (_CODES[np.dtype(tap.dtype)], (tokens, tap.width)) for tap in self.rows},
            "offsets": ("I64", (samples + 1,)),
            "sample_index": ("I64", (samples,)),
            "tokens": ("I32", (tokens,)),
            "roles": ("U8", (tokens,)),
        }

    def metadata(self) -> dict[str, str]:
        """What every header says, beside its samples."""
        return {
            "format_version": str(FORMAT),
            "fingerprint": self.fingerprint,
            "stream": self.stream,
            "chunk_bytes": str(CHUNK),
        }


@dataclass(frozen=True)
class ShardLayout:
    """A shard before its rows: the header's bytes and the place of every tensor."""

    header: bytes
    places: dict[str, TensorPlace]
    size: int


@dataclass(frozen=True)
class Header:
    """What a shard's header says."""

    length: int
    """Of the header and the eight bytes before it: where the data starts."""
    places: dict[str, TensorPlace]
    metadata: dict[str, str]

    def notes(self) -> list[dict[str, Any]]:
        """Each sample's index, task id, preview, augmentation and truncation."""
        return list(json.loads(self.metadata["samples"]))


def _clean(text: str) -> str:
    """Text that every UTF-8 reader accepts: half of a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def notes_of(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """What the header keeps of each sample."""
    return [
        {
            "index": sample.index,
            "task_id": _clean(sample.task_id),
            **({"augmentation": sample.augmentation} if sample.augmentation is not None else {}),
            **({"truncated": sample.truncated} if sample.truncated else {}),
            "preview": _clean(sample.preview[:PREVIEW]),
        }
        for sample in samples
    ]


def _shapes(schema: ShardSchema, samples: int, tokens: int) -> list[tuple[str, str, tuple[int, ...]]]:
    known = [(name, code, shape) for name, (code, shape) in schema.tensors(samples, tokens).items()]
    chunks = sum(-(-_bytes(code, shape) // CHUNK) for _, code, shape in known)
    # Wide elements before narrow ones, so that each tensor is aligned to its element.
    place = len(schema.rows) + 2
    return [*known[:place], (CHUNKS, "U32", (chunks,)), *known[place:]]


def _bytes(code: str, shape: tuple[int, ...]) -> int:
    return DTYPES[code].itemsize * math.prod(shape)


def plan_shard(schema: ShardSchema, notes: Sequence[dict[str, Any]], tokens: int) -> ShardLayout:
    """Lay a shard out. ``tokens`` is the sum of the samples' lengths."""
    metadata = {**schema.metadata(), "samples": json.dumps(notes, separators=(",", ":"), ensure_ascii=False)}
    header: dict[str, Any] = {"__metadata__": metadata}
    relative = 0
    shapes = _shapes(schema, len(notes), tokens)
    for name, code, shape in shapes:
        stop = relative + _bytes(code, shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [relative, stop]}
        relative = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > _MOST_HEADER:
        raise ValueError(f"a shard of {len(notes)} samples needs a header of {len(text)} bytes; begin smaller shards")
    begin = 8 + len(text)
    places = {
        name: TensorPlace(name, code, shape, *(begin + offset for offset in header[name]["data_offsets"]))
        for name, code, shape in shapes
    }
    return ShardLayout(len(text).to_bytes(8, "little") + text, places, begin + relative)


def parse_header(data: bytes, size: int, where: str) -> Header:
    """The header of a file of ``size`` bytes, of which ``data`` are the first, at least up to the header's end."""
    try:
        length = 8 + int.from_bytes(data[:8], "little")
        if len(data) < length or length % ALIGN:
            raise ValueError(f"its length is {length - 8}")
        fields = json.loads(data[8:length])
        metadata = {str(key): str(value) for key, value in fields.pop("__metadata__").items()}
        places = {name: _place(name, field, length) for name, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{where} has a header that is not a shard's", found=str(error)) from error
    known = {"format_version": str(FORMAT), "chunk_bytes": str(CHUNK)}
    if (found := {name: metadata.get(name) for name in known}) != known:
        raise Damaged(f"{where} has a format this version cannot read", expected=known, found=found)
    ends = [length, *(place.stop for place in places.values())]
    starts = [*(place.start for place in places.values()), size]
    if ends != starts or tuple(places)[-len(TAIL) :] != TAIL:
        raise Damaged(f"{where} has a header whose tensors do not fill the file", expected=f"{size} bytes")
    return Header(length, places, metadata)


def _place(name: str, field: dict[str, Any], begin: int) -> TensorPlace:
    start, stop = field["data_offsets"]
    place = TensorPlace(name, field["dtype"], tuple(field["shape"]), begin + start, begin + stop)
    if place.length != _bytes(place.code, place.shape):
        raise ValueError(f"{name} has {place.length} bytes for the shape {list(place.shape)} of {place.code}")
    return place
