"""The bytes of a shard: a safetensors file whose whole layout follows from its samples' lengths.

    8 bytes   N, the length of the header, little-endian
    N bytes   the header: JSON, padded with spaces so that 8 + N is a multiple of 4096
    taps      one block each, [tokens, width], in the order of the stream's taps
    offsets   [samples + 1] int64      sample_index  [samples] int64
    chunk_crc32c  [chunks] uint32      one for every started chunk of each other tensor, in the file's order
    scales    [tokens] float32, one for each tap whose numbers have one byte
    tokens    [tokens] int32           roles         [tokens] uint8

Where only some tokens' rows are stored, ``tokens`` are those, and ``context_offsets``, ``positions`` and ``context``
lead back to all of a sample's tokens.

The samples' notes are the header's ``samples``: a JSON list in a string, because safetensors allows strings only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.errors import Damaged, untrusted
from spile.objects.crc import CHUNK
from spile.spec.safetensors import DTYPES, SafetensorsHeader, TensorPlace, encode_header, parse_header
from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.chunking import Chunking
from spile.store.encoding import SCALE
from spile.store.sealed import FORMAT
from spile.store.statistics import SUMS

__all__ = [
    "ALIGN",
    "CHUNKS",
    "CONTEXT",
    "CONTEXT_OFFSETS",
    "POSITIONS",
    "TAIL",
    "ShardHeader",
    "ShardLayout",
    "ShardSchema",
    "notes_of",
    "parse_shard_header",
    "plan_shard",
]

ALIGN = 4096
CHUNKS = "chunk_crc32c"
POSITIONS, CONTEXT, CONTEXT_OFFSETS = "positions", "context", "context_offsets"
TAIL = ("offsets", "sample_index", CHUNKS, "tokens", "roles")
PREVIEW = 200
"""Characters of a preview that are kept, so that a header stays small beside its rows."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _code(dtype: str) -> str:
    return "F8_E4M3" if dtype == "float8_e4m3" else _CODES[np.dtype(dtype)]


@dataclass(frozen=True)
class ShardSchema:
    """What all shards of a stream have in common."""

    rows: tuple[TapRows, ...]
    fingerprint: str
    """The run's."""
    stream: str
    """The stream's id."""
    statistics: bool = False
    """Whether the two sums of each tap's columns are there."""
    keep: tuple[str, ...] = ()
    """The fields that each sample's note has under ``kept``."""
    positions: bool = False
    """Whether only some tokens have rows: then each row's position, and all tokens, are there too."""

    def tensors(self, samples: int, tokens: int, context: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → dtype's code and shape of every tensor but the checksums, in the file's order.

        ``tokens`` have rows; ``context`` are all tokens, where not all have.
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
        """Name and width of each tap's sums: of the taps that are numbers, not the places of some."""
        numbers = [tap for tap in self.rows if tap.dtype != "int32"] if self.statistics else []
        return {tap.name + SUMS: tap.width for tap in numbers}

    def metadata(self) -> dict[str, str]:
        """What every header says, beside its samples."""
        return {
            "format_version": str(FORMAT),
            "fingerprint": self.fingerprint,
            "stream": self.stream,
        }

    def chunking(self) -> Chunking:
        """How a new shard is cut: taps at whole rows, the largest power of two of them that fits, at least one."""
        fitting = {tap.name: max(1, CHUNK // tap.number_bytes) for tap in self.rows}
        return Chunking(CHUNK, {name: 1 << rows.bit_length() - 1 for name, rows in fitting.items()})


@dataclass(frozen=True)
class ShardLayout:
    """A shard before its rows: the header's bytes and the place of every tensor."""

    header: bytes
    places: dict[str, TensorPlace]
    size: int
    chunk_bytes: dict[str, int]
    """The length of each tensor's chunks."""


@dataclass(frozen=True)
class ShardHeader(SafetensorsHeader):
    """What a shard's header says."""

    chunking: Chunking

    def chunk_bytes(self, name: str) -> int:
        """The length of a tensor's chunks."""
        place = self.places[name]
        return self.chunking.length(name, place.code, place.shape)

    def chunk_count(self, name: str) -> int:
        """How many a tensor has."""
        place = self.places[name]
        return self.chunking.count(name, place.code, place.shape)

    def notes(self) -> list[dict[str, Any]]:
        """Each sample's index, task id, preview, augmentation, truncation and kept fields."""
        with untrusted(Damaged, "a shard's header has no notes of its samples"):
            return [dict(note) for note in json.loads(self.metadata["samples"])]


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
    """Lay a shard out. ``tokens`` is the sum of the samples' rows; ``context`` of all tokens, where some have none."""
    said = json.dumps(notes, separators=(",", ":"), ensure_ascii=False)
    chunking = schema.chunking()
    metadata = {**schema.metadata(), **chunking.metadata(), "samples": said}
    shapes = _shapes(schema, len(notes), tokens, context)
    try:
        data, header = encode_header(shapes, metadata, align=ALIGN)
    except ValueError as error:
        raise ValueError(f"a shard of {len(notes)} samples needs {error}; begin smaller shards") from error
    return ShardLayout(data, header.places, header.size, {each[0]: chunking.length(*each) for each in shapes})


def parse_shard_header(data: bytes, size: int, where: str) -> ShardHeader:
    """The header of a file of ``size`` bytes, of which ``data`` are the first, at least up to the header's end."""
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
        raise Damaged(f"{where} has another number of chunks", expected=f"U32 [{expected}]", found=found)
    return shard
