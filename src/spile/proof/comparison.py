"""Compare stored activations with a new computation, calibrated by the noise of that computation.

Each chosen sample is computed twice: in float32 at the highest precision (the reference), and again in the run's own
dtype and stored the same way (the fresh rows). The distance between fresh rows and the reference is the noise that a
correct run has. A stored row is right if its distance from the reference is explained by that noise. All distances are
relative to the norm of the reference row, so rows with large norms (attention sinks) do not hide errors in others.

Three rules judge a sample at a tap:

- one row: its distance is at most ``ROW`` times the tap's median noise, or ``OWN`` times the row's own noise, plus
  ``ENCODING`` times the error of its encoding, which has no heavy tail;
- all rows: the median distance is at most ``1 + (ROW - 1) / rows`` times the median noise, at least ``SAMPLE`` times;
- the gain: the stored rows are not all longer, or all shorter, than the fresh rows in the direction of the reference.
  Noise and the errors of an encoding have no preferred direction, so this finds a wrong factor that is smaller than the
  noise of a row. In float8 the largest numbers of a row count no more than its other ones, because the encoding of a
  single number can be off by 6 %. The quarters of the rows with the lowest and the highest gains are left out.

Noise has a heavy tail: a few rows are twenty times noisier than the median, and not in every computation. Therefore a
sample that breaks a rule is computed several times more with embeddings that are changed by one rounding error, and a
row's own noise is the largest that any of these computations shows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.errors import Failure
from spile.proof.report import Problem, Recomputed, TapNoise
from spile.spec.identity import RunIdentity
from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.shard import as_stored, decode, split
from spile.store.shard_reader import ShardReader
from spile.store.stored_stream import Stream

ROW, OWN, ENCODING, SAMPLE, GAIN = 16.0, 4.0, 2.0, 1.5, 8.0
VARIANTS = 8
"""Additional computations of a sample that breaks a rule."""
FLOOR = {"float32": 2.0**-16, "float16": 2.0**-12, "bfloat16": 2.0**-9}
"""The least noise that is assumed for a compute dtype: 256 units in the last place of float32, which is what other
devices and batch shapes differ by, and half a unit of the 16-bit dtypes."""
_IDS_FLOOR = 1 / 6
"""The least noise of a tap of ids, as a share of them: ids of almost equal logits change places."""
_NARROW_WIDTH = 8
"""A narrower row, such as a loss, may be almost 0, so its distance is relative to the tap's median norm."""

_LEAST_GAIN_ROWS = 4
"""A sample of fewer rows is not judged by its gain: a few noisy rows may agree by chance."""

_Array = npt.NDArray[Any]
RowsBySample = Mapping[int, Sequence[_Array]]
"""By the index of a sample: its rows, ``[rows, width]``, at each tap."""


class Recompute(Protocol):
    """Computes samples again."""

    def __call__(
        self, samples: Sequence[Sample], taps: Sequence[TapRows], variant: int = 0
    ) -> Iterator[tuple[RowsBySample, RowsBySample]]:
        """Yield, for some samples at a time and in any order, their reference rows and their fresh rows.

        ``variant`` 0 is the run's own computation. Each other number changes the embeddings by one rounding error of
        the run's dtype, differently for each number.
        """


def distances(reference: _Array, fresh: _Array, stored: _Array, kind: TapRows) -> npt.NDArray[np.float32]:
    """Return ``[6, rows]``: for each row, its norm, noise, encoding error, distance, fresh gain and stored gain.

    The norm is that of the reference row. The noise is the distance of the fresh row from it, and the distance that of
    the stored row. The gains are how much longer the fresh and the stored row are in the direction of the reference.

    For a tap of integers (the ids of the largest logits) the norm is 1 and the distance is the share of ids that are
    not in the reference row.
    """
    if kind.dtype == "int32":
        noise, distance = (
            [np.setdiff1d(ids, right).size / max(1, right.size) for ids, right in zip(rows, reference, strict=True)]
            for rows in (fresh, stored)
        )
        zeros = np.zeros(len(reference))
        return np.array([zeros + 1, noise, zeros, distance, zeros, zeros], np.float32)
    encoded = as_stored(fresh, kind.dtype)
    encoded = decode(*split(encoded, kind.dtype)) if kind.scaled else encoded
    reference, fresh, encoded, stored = (each.astype(np.float64) for each in (reference, fresh, encoded, stored))
    with np.errstate(invalid="ignore", over="ignore"):
        norm = np.linalg.norm(reference, axis=1)
        changes = fresh - reference, encoded - fresh, stored - reference
        weights = _gain_weights(reference, kind.dtype)
        total = np.maximum((weights * reference).sum(axis=1), 1e-30)
        gains = [norm * (rows * weights).sum(axis=1) / total for rows in (encoded - reference, stored - reference)]
        return np.array([norm, *(np.linalg.norm(change, axis=1) for change in changes), *gains], np.float32)


def _gain_weights(reference: _Array, dtype: str) -> _Array:
    """Return the weight of each number of ``[…, width]`` in the gain: the number itself, so that it is a projection.

    In float8 the weight of a number above the row's mean is less: weight times number is at most the square of the
    mean, so that a few large numbers do not decide the gain. In int8 the largest number is exact.
    """
    if dtype != "float8_e4m3":
        return reference
    size = np.abs(reference)
    mean = size.mean(axis=-1, keepdims=True)
    return np.asarray(reference * np.minimum(1.0, np.square(mean / np.maximum(size, 1e-30))))


@dataclass
class _Measured:
    """One sample and its measurements, all relative to the norms of its reference rows."""

    stream: Stream
    sample: Sample
    noise: npt.NDArray[np.float64]
    """``[taps, rows]``: the largest noise of any computation so far, without the error of the encoding."""
    encoding: npt.NDArray[np.float64]
    stored: npt.NDArray[np.float64]
    fresh_gain: npt.NDArray[np.float64]
    """``[taps, rows]``: how much longer the rows of the first computation are than those of the reference."""
    gain: npt.NDArray[np.float64]
    """``[taps]``: how much longer the stored rows are than those of the first computation (:func:`_common_change`)."""
    median: npt.NDArray[np.float64]
    """``[taps]``: the largest median distance of any computation so far, with the error of the encoding."""
    drift: npt.NDArray[np.float64]
    """``[taps]``: how much longer or shorter the rows of any other computation are than those of the first."""
    spread: npt.NDArray[np.float64]
    """``[taps]``: how much such changes vary from row to row, as a standard deviation; the largest one so far."""

    @classmethod
    def measured(cls, stream: Stream, sample: Sample, values: _Array, least: _Array) -> _Measured:
        """Return what the first computation measured: ``[taps, 6, rows]`` as :func:`distances` returns it."""
        noise, encoding, stored, fresh_gain, stored_gain = np.moveaxis(_relative(values, least), 1, 0)
        change = stored_gain - fresh_gain
        return cls(
            stream,
            sample,
            noise,
            encoding,
            stored,
            fresh_gain,
            gain=_common_change(change),
            median=_median(np.hypot(noise, encoding)),
            drift=np.zeros(len(change)),
            spread=_spread(change),
        )

    def add(self, values: _Array, least: _Array) -> None:
        """Add the noise of another computation."""
        noise, encoding, _, fresh_gain, _ = np.moveaxis(_relative(values, least), 1, 0)
        self.noise = np.fmax(self.noise, noise)
        self.median = np.fmax(self.median, _median(np.hypot(noise, encoding)))
        change = fresh_gain - self.fresh_gain
        self.drift = np.fmax(self.drift, np.abs(_common_change(change)))
        self.spread = np.fmax(self.spread, _spread(change))

    @property
    def rows(self) -> int:
        return int(self.stored.shape[1])


def _relative(values: _Array, least: _Array) -> npt.NDArray[np.float64]:
    """Return all figures except the norms, ``[taps, 5, rows]``, in units of the norms."""
    return np.asarray(values[:, 1:] / np.maximum(values[:, :1].astype(np.float64), least[:, None]))


def _median(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.median(values, axis=1) if values.shape[1] else np.zeros(len(values))


def _spread(changes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1.48 * _median(np.abs(changes - _median(changes)[:, None]))


def _common_change(changes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return, for ``[taps, rows]``, the change nearest 0 that all rows have in the same direction, or 0.

    Of eight or more rows, the quarters with the lowest and the highest changes are left out.
    """
    count = changes.shape[1]
    if not count:
        return np.zeros(len(changes))
    ordered, cut = np.sort(changes, axis=1), count // 8 * 2
    low, high = ordered[:, cut], ordered[:, count - 1 - cut]
    return np.where(low > 0, low, np.where(high < 0, high, 0.0))


@dataclass(frozen=True)
class _Chosen:
    """A stored sample; its rows are read when they are compared."""

    stream: Stream
    shard: ShardReader
    sample: Sample
    rows: slice

    def read(self) -> Sequence[_Array]:
        return [self.shard.rows(tap, self.rows.start, self.rows.stop) for tap in self.stream.taps]


def compare(
    run: RunIdentity, streams: Sequence[Stream], recompute: Recompute, k: int, seed: int
) -> tuple[Recomputed, list[Problem]]:
    """Compute ``k`` random samples again and compare them with what is stored."""
    chosen, problems = _choose(streams, k, seed)
    taps: dict[str, list[TapNoise]] = {}
    for names in dict.fromkeys(each.stream.taps for each in chosen):
        alike = [each for each in chosen if each.stream.taps == names]
        judge = _Judge(alike[0].stream.kinds(run), run.dtype)
        judge.measure(alike, recompute)
        problems += judge.problems
        for noise in judge.report():
            taps.setdefault(noise.tap, []).append(noise)
    return Recomputed(len(chosen), run.dtype, {tap: TapNoise.merged(parts) for tap, parts in taps.items()}), problems


def _choose(streams: Sequence[Stream], k: int, seed: int) -> tuple[list[_Chosen], list[Problem]]:
    """Choose samples at random over all streams, and read their tokens."""
    shards = [(stream, record) for stream in streams for record in stream.shards]
    ends = list(accumulate(record.count for _, record in shards))
    places = np.random.default_rng(seed).permutation(ends[-1] if ends else 0)[:k]
    chosen: list[_Chosen] = []
    problems: list[Problem] = []
    opened: dict[int, ShardReader] = {}
    for place in sorted(places.tolist()):
        which = bisect_right(ends, place)
        stream, record = shards[which]
        try:
            if which not in opened:
                opened[which] = stream.open(record)
            chosen.append(_read_tokens(stream, opened[which], place - ends[which] + record.count))
        except Failure as error:
            problems.append(Problem("damaged", stream.folder.url, str(error)))
    return chosen, problems


def _read_tokens(stream: Stream, shard: ShardReader, place: int) -> _Chosen:
    start, stop = shard.bounds(place)
    index, tokens = int(shard.read_tensor("sample_index")[place]), shard.context(place)
    positions = None if stop - start == len(tokens) else shard.positions(start, stop).astype(np.int32)
    sample = Sample(index, "", tokens, np.zeros(len(tokens), np.uint8), positions=positions)
    return _Chosen(stream, shard, sample, slice(start, stop))


class _Judge:
    """Judges the samples of streams that have the same taps."""

    def __init__(self, kinds: Sequence[TapRows], dtype: str) -> None:
        self.kinds, self.dtype = kinds, dtype
        floor = [_IDS_FLOOR if kind.dtype == "int32" else FLOOR[dtype] for kind in kinds]
        self.floor = np.array(floor)[:, None]
        self.samples: dict[int, _Measured] = {}
        self.problems: list[Problem] = []
        self.typical = self.floor

    def measure(self, chosen: Sequence[_Chosen], recompute: Recompute) -> None:
        """Measure all samples once, and those that break a rule up to ``VARIANTS`` times more."""
        damaged: dict[int, Failure] = {}

        def read(number: int) -> Sequence[_Array]:
            try:
                return chosen[number].read()
            except Failure as error:
                damaged[number] = error
                return [np.zeros((chosen[number].sample.rows, kind.width), np.float32) for kind in self.kinds]

        def measure(reference: RowsBySample, fresh: RowsBySample, number: int) -> tuple[int, _Array]:
            rows = zip(reference[number], fresh[number], read(number), self.kinds, strict=True)
            return number, np.stack([distances(*each) for each in rows])

        def compute(numbers: Iterable[int], variant: int) -> Iterator[tuple[int, _Array]]:
            samples = [replace(chosen[number].sample, index=number) for number in numbers]
            with ThreadPoolExecutor(thread_name_prefix="spile-distances") as pool:
                for reference, fresh in recompute(samples, self.kinds, variant):
                    yield from pool.map(partial(measure, reference, fresh), reference)

        found = dict(compute(range(len(chosen)), 0))
        norms = np.concatenate([values[:, 0] for values in found.values()], axis=1)
        share = np.array([1.0 if kind.width < _NARROW_WIDTH else 2.0**-20 for kind in self.kinds])
        least = np.maximum(_median(np.nan_to_num(norms.astype(np.float64))) * share, 1e-30)[:, None]
        for number, each in enumerate(chosen):
            if number in damaged:
                self.problems.append(Problem("damaged", each.stream.folder.url, str(damaged[number])))
                continue
            self.samples[number] = _Measured.measured(each.stream, each.sample, found[number], least)
        noise = [each.noise for each in self.samples.values()]
        self.typical = np.fmax(self.floor, _median(np.concatenate(noise, axis=1))[:, None]) if noise else self.floor
        for variant in range(1, VARIANTS + 1):
            again = [number for number, each in self.samples.items() if self._broken_taps(each).any()]
            if not again:
                break
            for number, values in compute(again, variant):
                self.samples[number].add(values, least)
        self.problems += self._find_problems()

    def _row_limits(self, each: _Measured) -> npt.NDArray[np.float64]:
        return np.asarray(np.maximum(ROW * self.typical, OWN * each.noise) + ENCODING * each.encoding)

    def _sample_limits(self, each: _Measured) -> npt.NDArray[np.float64]:
        factor = max(SAMPLE, 1 + (ROW - 1) / max(1, each.rows))
        return np.asarray(factor * np.fmax(self.floor[:, 0], each.median))

    def _gain_limits(self, each: _Measured) -> npt.NDArray[np.float64]:
        deviation = each.spread / max(1, each.rows) ** 0.5
        return np.asarray(2 * self.floor[:, 0] + SAMPLE * each.drift + GAIN * deviation)

    def _broken_taps(self, each: _Measured) -> npt.NDArray[np.bool_]:
        """Return ``[taps]``: whether one of the rules is broken. A distance that is NaN breaks them."""
        right = (each.stored <= self._row_limits(each)).all(axis=1)
        right &= _median(each.stored) <= self._sample_limits(each)
        if each.rows >= _LEAST_GAIN_ROWS:
            right &= np.abs(each.gain) <= self._gain_limits(each)
        return np.asarray(~right)

    def _find_problems(self) -> list[Problem]:
        found = []
        for each in self.samples.values():
            for tap in np.flatnonzero(self._broken_taps(each)).tolist():
                text = f"sample {each.sample.index} at {self.kinds[tap].name}: {self._describe_error(each, tap)}"
                found.append(Problem("wrong", each.stream.folder.url, text))
        return found

    def _describe_error(self, each: _Measured, tap: int) -> str:
        stored, limits = each.stored[tap], self._row_limits(each)[tap]
        median, limit = _median(each.stored)[tap], self._sample_limits(each)[tap]
        fresh = f"a new {self.dtype} computation"
        bad = np.flatnonzero(~(stored <= limits))
        if len(bad):
            worst = bad[np.argmax(np.nan_to_num(stored[bad] / limits[bad], nan=np.inf))]
            at = int(worst) if each.sample.positions is None else int(each.sample.positions[worst])
            more = f" and {len(bad) - 1} more rows" if len(bad) > 1 else ""
            return (
                f"the row of token {at}{more} is {_percent(stored[worst])} of its norm away from the float32 "
                f"reference; {fresh} is {_percent(np.hypot(each.noise, each.encoding)[tap, worst])} away, "
                f"and noise explains up to {_percent(limits[worst])}"
            )
        if not median <= limit:
            return (
                f"its rows are {_percent(median)} (median) of their norm away from the float32 reference; {fresh} is "
                f"{_percent(each.median[tap])} away, and noise explains up to {_percent(limit)}"
            )
        change = f"{_percent(abs(each.gain[tap]))} {'longer' if each.gain[tap] > 0 else 'shorter'}"
        limit = _percent(self._gain_limits(each)[tap])
        return f"its rows are {change} than those of {fresh}, and noise explains up to {limit}"

    def report(self) -> list[TapNoise]:
        if not self.samples:
            return []
        samples = self.samples.values()
        fresh = np.concatenate([np.hypot(each.noise, each.encoding) for each in samples], axis=1)
        stored = np.concatenate([each.stored for each in samples], axis=1)
        limits = np.concatenate([self._row_limits(each) for each in samples], axis=1)
        sample_limits = np.stack([self._sample_limits(each) for each in samples])
        gain_limits = np.stack([self._gain_limits(each) for each in samples])
        shares = [
            (stored / limits).max(axis=1, initial=0.0),
            (np.stack([_median(each.stored) for each in samples]) / sample_limits).max(axis=0),
            (np.stack([np.abs(each.gain) * (each.rows >= _LEAST_GAIN_ROWS) for each in samples]) / gain_limits).max(
                axis=0
            ),
        ]
        fresh_median, stored_median, row_limits = _median(fresh), _median(stored), _median(limits)
        return [
            TapNoise(
                tap=kind.name,
                rows=fresh.shape[1],
                fresh=float(fresh_median[tap]),
                stored=float(stored_median[tap]),
                worst=float(np.max([share[tap] for share in shares])),
                row_limit=float(row_limits[tap]),
                sample_limit=float(np.median(sample_limits[:, tap])),
                gain_limit=float(np.median(gain_limits[:, tap])),
                unjudged=int(np.count_nonzero(limits[tap] >= 1.0)),
            )
            for tap, kind in enumerate(self.kinds)
        ]


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if np.isfinite(value) else "not a number"
