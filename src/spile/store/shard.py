"""The writer of one shard: rows are checksummed and written directly to their final offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.objects.crc import ChunkedCrc, crc32c, fold, fold_chunks
from spile.objects.folder import Folder, Writer
from spile.spec.ranges import Ranges
from spile.spec.sample import Sample
from spile.store.ledger import ShardRecord
from spile.store.shard_format import (
    CHUNKS,
    CONTEXT,
    CONTEXT_OFFSETS,
    POSITIONS,
    SCALE,
    ShardLayout,
    ShardSchema,
    decode,
    notes_of,
    plan_shard,
    split,
)
from spile.store.statistics import SUMS, TapAccumulator

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
        self._plan = self._lay(len(samples))
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

    def _lay(self, samples: int) -> ShardLayout:
        return self._plan_of(self._schema, samples)

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
        """Discard the unfinished shard."""
        self._writer.abort()

    def _finish(self, samples: int) -> ShardRecord:
        if not 0 < samples <= len(self._notes):
            raise ValueError(f"{samples} samples of the {len(self._notes)} begun")
        tokens = int(self._offsets[samples])
        plan = self._plan if samples == len(self._notes) else self._lay(samples)
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
