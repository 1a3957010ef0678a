"""Stored rows against rows computed again: random samples of a dataset, each tap within what rounding allows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from spile.errors import Failure
from spile.spec.identity import RunIdentity
from spile.store.encoding import rounding
from spile.store.report import Problem, Recomputed
from spile.store.shard_reader import ShardReader
from spile.store.streams import Stream

__all__ = ["Recompute", "compare"]

Recompute = Callable[[npt.NDArray[np.int32], tuple[str, ...]], Sequence[npt.NDArray[np.float32]]]
"""One sample's rows at these taps, from its tokens: ``[tokens, d]`` each, in the taps' order, before rounding."""

# Beside the rounding of the stored dtype, what another batch, device or kernel may change, relative to the tap's RMS.
_SLACK = {"float32": 1e-3, "bfloat16": 2.0**-3}


def compare(
    run: RunIdentity, streams: Sequence[Stream], recompute: Recompute, k: int, seed: int
) -> tuple[Recomputed, list[Problem]]:
    """Compute ``k`` random samples again and compare them with what is stored."""
    shards = [(stream, record) for stream in streams for record in stream.shards]
    ends = list(accumulate(record.count for _, record in shards))
    places = np.random.default_rng(seed).permutation(ends[-1] if ends else 0)[:k]
    problems: list[Problem] = []
    worst: dict[str, float] = {}
    for place in sorted(places.tolist()):
        which = bisect_right(ends, place)
        stream, record = shards[which]
        try:
            index, tokens, chosen, stored = _read(stream, stream.open(record), place - ends[which] + record.count)
        except Failure as error:
            problems.append(Problem("damaged", stream.folder.url, str(error)))
            continue
        kinds = stream.kinds(run)
        for kind, fresh, rows in zip(kinds, recompute(tokens, stream.taps), stored, strict=True):
            again = fresh[chosen] if len(fresh) == len(tokens) else fresh
            tap, off = kind.name, _distance(again, rows, kind.dtype, run.dtype)
            worst[tap] = max(worst.get(tap, 0.0), off)
            if not off <= 1.0:
                text = f"sample {index} at {tap} differs from its recomputation by {off:.3g} × what rounding allows"
                problems.append(Problem("wrong", stream.folder.url, text))
    return Recomputed(len(places), worst), problems


def _read(
    stream: Stream, shard: ShardReader, place: int
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64], list[npt.NDArray[np.generic]]]:
    """A sample's index, all of its tokens, the positions that have rows, and those at every tap."""
    start, stop = shard.bounds(place)
    index = int(shard.whole("sample_index")[place])
    stored = [shard.rows(tap, start, stop) for tap in stream.taps]
    return index, shard.context(place), shard.positions(start, stop), stored


def _distance(fresh: npt.NDArray[np.float32], stored: npt.NDArray[np.generic], kind: str, computed: str) -> float:
    """The largest |Δ| in units of what is allowed: 1 and below is the same row."""
    if fresh.shape != stored.shape:
        return float("inf")
    wanted, found = fresh.astype(np.float64), stored.astype(np.float64)
    scale = float(np.sqrt(np.mean(wanted**2))) if wanted.size else 1.0
    allowed = rounding(wanted, kind) + _SLACK[computed] * scale + 1e-30
    return float(np.max(np.abs(wanted - found) / allowed, initial=0.0))
