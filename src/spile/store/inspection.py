"""One shard against its commit: every byte, every shape, every index, no NaN. One pass, bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from spile.errors import Damaged, Failure
from spile.objects.crc import crc32c, fold, to_hex
from spile.objects.folder import Folder, NotFound
from spile.spec.ranges import Ranges
from spile.store.codec import CHUNKS, CONTEXT, CONTEXT_OFFSETS, POSITIONS, TAIL, ShardSchema
from spile.store.predictions import answers_problem
from spile.store.record import ShardRecord
from spile.store.report import Problem
from spile.store.shard_reader import ShardReader
from spile.store.statistics import SUMS

__all__ = ["inspect_shard"]

_PIECE = 8 << 20
"""Bytes that are read at once, in whole chunks: at least one."""
# All ones in the exponent: infinite or not a number.
_EXPONENT = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F8_E4M3": (np.uint8, 0x7F),  # has no infinity, and of NaN these bits alone
}


def inspect_shard(
    folder: Folder,
    record: ShardRecord,
    schema: ShardSchema,
    seen: Callable[[int], None] = lambda _: None,
) -> list[Problem]:
    """What is wrong with a shard. ``seen`` is told of bytes as they are read."""
    where = f"{folder.url}/{record.name}"
    try:
        size = folder.info(record.name).size
        if size != record.size:
            raise Damaged(f"{where} has another size", expected=f"{record.size} bytes", found=size)
        shard = ShardReader(folder, record)
        wrong = _header(shard, schema) or _index(shard, schema.keep)
        wrong += _bytes(shard, seen)
        wrong += [] if record.predictions is None else answers_problem(folder, shard)
    except NotFound:
        return [
            Problem(
                "damaged", where, "the shard, or its answers, are gone" if record.predictions else "the shard is gone"
            )
        ]
    except Failure as error:
        return [Problem("damaged", where, str(error).removeprefix(f"{where} "))]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        # Right checksums over nonsense: only a broken writer makes that. Say so, and go on with the other shards.
        return [Problem("damaged", where, f"its content makes no sense: {type(error).__name__}: {error}")]
    return [Problem("damaged", where, text) for text in wrong]


def _header(shard: ShardReader, schema: ShardSchema) -> list[str]:
    header, record = shard.header, shard.record
    schema = replace(schema, statistics=any(name.endswith(SUMS) for name in header.places))  # optional
    context = header.places[CONTEXT].shape[0] if CONTEXT in header.places else 0  # what it must be, _index tells
    shapes = schema.tensors(record.count, record.tokens, context)
    found = {name: (place.code, place.shape) for name, place in header.places.items() if name != CHUNKS}
    wanted = schema.metadata()
    says = [
        f"the header says {name} {header.metadata.get(name)}, expected {value}"
        for name, value in wanted.items()
        if header.metadata.get(name) != value
    ]
    if list(found) != list(shapes):
        says.append(f"it has the tensors {', '.join(found)}, expected {', '.join(shapes)}")
    else:
        says += [
            f"{name} is {found[name][0]} {list(found[name][1])}, expected {kind} {list(shape)}"
            for name, (kind, shape) in shapes.items()
            if found[name] != (kind, shape)
        ]
    if set(record.tensors) != set(header.places):
        says.append("the commit has checksums of other tensors")
    return says


def _index(shard: ShardReader, keep: tuple[str, ...]) -> list[str]:
    offsets, index = shard.whole("offsets"), shard.whole("sample_index")
    says = []
    if offsets[0] != 0 or offsets[-1] != shard.record.tokens or (np.diff(offsets) < 0).any():
        says.append("offsets do not rise from 0 to the number of tokens")
    if len(np.unique(index)) != len(index) or Ranges.of(index.tolist()) != shard.record.samples:
        says.append("sample_index is not the commit's samples")
    if [note.get("index") for note in shard.notes] != index.tolist():
        says.append("the header's samples are not those of sample_index")
    lacking = [note["index"] for note in shard.notes if sorted(note.get("kept") or ()) != sorted(keep)]
    if lacking:
        says.append(f"samples {Ranges.of(lacking).text()} do not have the kept fields {', '.join(keep) or '(none)'}")
    return says + (_context(shard) if POSITIONS in shard.header.places and not says else [])


def _context(shard: ShardReader) -> list[str]:
    """Where only some tokens have rows: whether each row leads back to its token."""
    offsets, starts, context = (shard.whole(name) for name in ("offsets", CONTEXT_OFFSETS, CONTEXT))
    positions, lengths = shard.whole(POSITIONS).astype(np.int64), np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(context) or (lengths < 0).any():
        return ["context_offsets do not rise from 0 to the number of all tokens"]
    sample = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    if (positions < 0).any() or (positions >= lengths[sample]).any():
        return ["positions lie outside their samples"]
    if (np.diff(positions)[np.diff(sample) == 0] <= 0).any():
        return ["positions do not rise within their samples"]
    if not np.array_equal(context[starts[sample] + positions], shard.whole("tokens")):
        return ["tokens are not those of context at positions"]
    return []


def _bytes(shard: ShardReader, seen: Callable[[int], None]) -> list[str]:
    """Every chunk, then every tensor and the whole object from the chunks: the bytes are read once."""
    says: list[str] = []
    sums: list[tuple[int, int]] = [(shard.record.header[1], shard.record.header[0])]
    seen(shard.record.header[0])
    for name, place in shard.header.places.items():
        if name == CHUNKS:
            sums.append((crc32c(shard.whole(name).tobytes()), place.length))
            continue
        bad = 0
        for begin, end in shard.pieces(name, _PIECE):
            data = shard.chunks(name, begin, end)
            if name not in TAIL and place.code in _EXPONENT:
                kind, ones = _EXPONENT[place.code]
                bad += int(np.count_nonzero((np.frombuffer(data, kind) & ones) == ones))
            seen(len(data))
        if bad:
            says.append(f"{name} has {bad} values that are NaN or infinite")
        sums.append((shard.folded(name), place.length))
        if sums[-1][0] != shard.record.tensors[name]:
            says.append(f"{name}: expected crc32c {to_hex(shard.record.tensors[name])}, found {to_hex(sums[-1][0])}")
    if fold(sums) != shard.record.crc32c:
        says.append(f"the object: expected crc32c {to_hex(shard.record.crc32c)}, found {to_hex(fold(sums))}")
    return says
