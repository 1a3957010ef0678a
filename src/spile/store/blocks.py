"""Many parts of a tap at once: chunks of a local shard, or equal parts of chunks, read together and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spile.objects.crc import brief_crc32c, crc32c, fold_chunks
from spile.objects.staging import Staging
from spile.store.shard_reader import SMALL_SHARD, ShardReader

__all__ = ["read_blocks"]

_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.int64]


def read_blocks(
    shard: ShardReader, name: str, starts: _Numbers, rows: int, staging: Staging
) -> npt.NDArray[Any] | None:
    """``rows`` rows from each of ``starts`` on, ``[starts, rows, …]``, in ``staging``.

    None unless ``starts`` ascend and each begins a chunk of a local file, or an equal part of one: then the rows must
    be read one range after the other.
    """
    shard = shard.of(name)
    chunk, path, place = shard.chunk_rows(name), shard.folder.local_path, shard.place(name)
    if chunk is None or path is None or shard.record.size <= SMALL_SHARD or rows > chunk or chunk % rows:
        return None
    if (
        (starts % rows).any()
        or (np.diff(starts) <= 0).any()
        or int(starts[-1]) // chunk * chunk + chunk > place.shape[0]
    ):
        return None
    parts, size = starts // rows, rows * (place.length // place.shape[0])
    whole = _unchecked(shard, name, parts, chunk // rows)
    others = np.setdiff1d(whole, parts, assume_unique=True) if whole.shape[1] > 1 else whole[:0, 0]
    asked = np.concatenate([parts, others])
    data = staging.blocks(path / shard.record.name, place.start + asked * size, size)
    if data is None:
        shard.was_cut()
    if len(whole):
        _check(shard, name, whole, asked, data)
    found = data[: len(starts)].view(place.dtype).reshape(len(starts), rows, *place.shape[1:])
    return shard.decoded_blocks(name, starts, found)


def _unchecked(shard: ShardReader, name: str, parts: _Numbers, per: int) -> _Numbers:
    """All ``per`` parts of each chunk that some of these parts are of and that nobody has checked: to check one takes
    all of it.
    """
    chunks = parts // per
    chunks = np.unique(chunks[~shard.sums(name).trusted[chunks]])
    return chunks[:, None] * per + np.arange(per)


def _check(shard: ShardReader, name: str, whole: _Numbers, asked: _Numbers, data: _Bytes) -> None:
    """Chunks whose parts were read together. A mismatch is read once more, and told of by who reads one alone."""
    sums, numbers = shard.sums(name), whole[:, 0] // whole.shape[1]
    if not _alike(sums.crcs[numbers].tolist(), whole, asked, data):
        order = np.argsort(asked)
        places = order[np.searchsorted(asked, whole, sorter=order)]
        for number, mine in zip(numbers.tolist(), places, strict=True):
            crc = 0
            for place in mine.tolist():
                crc = brief_crc32c(data[place], crc)
            if crc != sums.crcs[number]:
                data[mine] = np.frombuffer(shard.chunks(name, number, number + 1), np.uint8).reshape(len(mine), -1)
    sums.trusted[numbers] = True


def _alike(crcs: list[int], whole: _Numbers, asked: _Numbers, data: _Bytes) -> bool:
    """Whether all chunks together are right, where they lie side by side and nothing else does.

    One call gives the interpreter's lock away once, however many chunks there are.
    """
    if not data.flags.c_contiguous or not np.array_equal(whole.reshape(-1), asked):
        return False
    return crc32c(data.data) == fold_chunks(crcs, data.size, data.shape[1] * whole.shape[1])
