"""Statistics of a tap's rows: count, mean, variance, norms and the rows with the largest norms.

Sums are float64. A merge keeps the sums of its parts and adds them in sorted order when they are needed, so the result
does not depend on the order of the merges. Norms are counted in bins that grow by 4 %: quantiles are exact within 2 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

SUMS = ".sums"
"""The suffix of the tensor that contains a tap's sums and sums of squares."""
SINK = 10.0
"""A row whose norm exceeds the median by this factor is considered an attention sink."""
_GROWTH = math.log(1.04)
_ZERO = -1_000_000
_MAX_BIN = int(math.log(1.7e308) / _GROWTH)
"""The norms of bins beyond this one are not finite."""
_MAX_ROWS = 1 << 53
_TOP = 8
_BLOCK = 1 << 17
"""The number of values that are converted at a time, so that they stay in a core's cache until they are summed."""

_Array = npt.NDArray[Any]


class TopRow(NamedTuple):
    """A row with a large norm: its token and its location."""

    norm: float
    token: int
    sample: int
    position: int
    stream: int = 0


@dataclass(frozen=True)
class TapStatistics:
    """The statistics of a tap's rows."""

    count: int = 0
    norms: Mapping[int, int] = field(default_factory=dict)
    """The number of rows in each bin of norms."""
    top: tuple[TopRow, ...] = ()
    """The rows with the largest norms."""
    sums: tuple[_Array, ...] = ()
    """For each merged part: the sum and the sum of squares of each column."""

    @staticmethod
    def merged(parts: Iterable[TapStatistics]) -> TapStatistics:
        """Return the statistics of the rows of all parts together."""
        known = list(parts)
        norms: Counter[int] = Counter()
        for part in known:
            norms.update(part.norms)
        return TapStatistics(
            count=sum(part.count for part in known),
            norms=dict(sorted(norms.items())),
            top=tuple(nlargest(_TOP, (row for part in known for row in part.top))),
            sums=tuple(each for part in known for each in part.sums),
        )

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """The mean of each column."""
        return np.asarray(self._total()[0] / max(self.count, 1))

    @property
    def variance(self) -> npt.NDArray[np.float64]:
        """The variance of each column over all rows."""
        total = self._total()
        return np.asarray(np.maximum(total[1] / max(self.count, 1) - (total[0] / max(self.count, 1)) ** 2, 0.0))

    def norm_quantile(self, q: float) -> float:
        """Return the norm below which this fraction of the rows is, within 2 %, and never above the largest norm."""
        left, found = q * self.count, max(self.norms, default=_ZERO)
        for index, count in sorted(self.norms.items()):
            left -= count
            if left <= 0:
                found = index
                break
        return min([_middle(found), *(row.norm for row in self.top[:1])])

    @property
    def sink_norm(self) -> float:
        """The norm above which a row is considered an attention sink, for ``shuffled(…, max_norm=…)``."""
        return SINK * self.norm_quantile(0.5)

    @property
    def sinks(self) -> int:
        """The number of rows above :attr:`sink_norm`, with the precision of the bins."""
        return sum(count for index, count in self.norms.items() if _middle(index) > self.sink_norm)

    def _total(self) -> _Array:
        if not self.sums:
            raise ValueError("these statistics have no sums")
        return np.asarray(np.sort(np.stack(self.sums), axis=0).sum(axis=0))

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a commit stores them: without the sums, which are a tensor of the shard."""
        return {
            "count": self.count,
            "norms": {str(index): count for index, count in sorted(self.norms.items())},
            "top": [[float(f"{row.norm:.6g}"), *row[1:4]] for row in self.top],
        }

    @classmethod
    def from_json(cls, fields: Any, stream: int = 0) -> TapStatistics | None:
        """Return the inverse of :meth:`to_json`, or None if the fields are malformed: a commit may contain anything."""
        try:
            found = cls(
                count=int(fields["count"]),
                norms={int(index): int(count) for index, count in fields["norms"].items()},
                top=tuple(
                    TopRow(float(norm), int(token), int(sample), int(position), stream)
                    for norm, token, sample, position in fields["top"]
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        indices = [index for index in found.norms if index != _ZERO]
        counts = [found.count, *found.norms.values()]
        known = min(counts) >= 0 and max(counts) < _MAX_ROWS and sum(found.norms.values()) <= found.count
        finite = all(0 <= row.norm < math.inf for row in found.top)
        ordered = [row.norm for row in found.top] == sorted((row.norm for row in found.top), reverse=True)
        return found if known and finite and ordered and all(abs(index) <= _MAX_BIN for index in indices) else None

    def summary(self) -> dict[str, Any]:
        """Return a readable summary, as ``metadata.json`` contains it."""
        quantiles = {f"{100 * q:g} %": float(f"{self.norm_quantile(q):.4g}") for q in (0.01, 0.25, 0.5, 0.75, 0.99)}
        tokens = sorted({row.token for row in self.top if row.norm > self.sink_norm})
        return {"count": self.count, "norms": quantiles, "sinks": self.sinks, "sink_tokens": tokens}


def bin_edge(index: int) -> float:
    """Return the smallest norm of a bin."""
    return 0.0 if index in (_ZERO, _ZERO + 1) else math.exp(index * _GROWTH)


def _middle(index: int) -> float:
    return 0.0 if index == _ZERO else math.exp((index + 0.5) * _GROWTH)


class TapAccumulator:
    """Computes the statistics of a tap's rows as they arrive. It is not thread-safe."""

    def __init__(self, width: int) -> None:
        self._sums = np.zeros((2, width))
        self._norms: Counter[int] = Counter()
        self._top: list[TopRow] = []
        self.count = 0

    def add(self, rows: _Array, tokens: _Array, samples: _Array, positions: _Array) -> None:
        """Add rows with the token, the sample number and the position in the sample of each row."""
        norms, step = np.empty(len(rows)), max(64, _BLOCK // rows.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):  # Rows with NaN are stored but have no norm.
            for start in range(0, len(rows), step):
                wide = widened(rows[start : start + step], np.float64)
                squares = np.square(wide)
                # BLAS would start its own threads for each writer thread, which is slower.
                self._sums += wide.sum(axis=0), squares.sum(axis=0)
                norms[start : start + step] = np.sqrt(squares.sum(axis=1))
        self._count(norms)
        self._rank(norms, tokens, samples, positions)
        self.count += len(rows)

    def _count(self, norms: _Array) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            indices = np.where(norms == 0, _ZERO, np.floor(np.log(norms) / _GROWTH))
        found, counts = np.unique(indices[np.isfinite(indices)].astype(np.int64), return_counts=True)
        self._norms.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def _rank(self, norms: _Array, tokens: _Array, samples: _Array, positions: _Array) -> None:
        least = self._top[-1].norm if len(self._top) == _TOP else -1.0
        known = np.flatnonzero(np.isfinite(norms))
        best = known[np.argsort(norms[known])[-_TOP:]]
        found = [
            TopRow(float(norms[n]), int(tokens[n]), int(samples[n]), int(positions[n]))
            for n in best.tolist()
            if norms[n] >= least
        ]
        self._top = nlargest(_TOP, [*self._top, *found]) if found else self._top

    def result(self) -> TapStatistics:
        return TapStatistics(self.count, dict(sorted(self._norms.items())), tuple(self._top), (self._sums.copy(),))


def widened(rows: _Array, dtype: npt.DTypeLike) -> _Array:
    """Convert rows to another dtype. For bfloat16, shifting the bits is many times faster than NumPy's conversion."""
    if rows.dtype == ml_dtypes.bfloat16 and dtype in (np.float32, np.float64):
        rows = (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(dtype, copy=False)
