"""Statistics of a tap, and what ``spile inspect`` shows of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spile.errors import UserError
from spile.objects.folder import read_ahead
from spile.reading.rows import RowBatch, context_of
from spile.spec.amounts import counted
from spile.spec.sample import Role
from spile.store.ledger import ShardRecord
from spile.store.parts import DatasetPart
from spile.store.shard_reader import ShardReader
from spile.store.statistics import SUMS, TapAccumulator, TapStatistics, TopRow
from spile.store.stored_stream import Stream, read_ledgers

if TYPE_CHECKING:
    from spile.reading.dataset import Dataset

_ROWS = 1024  # random rows for the comparison of layers and the main directions
_SAMPLES = 64  # the random samples that these rows are taken from
_SHARDS = 8  # the shards from which the statistics of dimensions are computed
_READ_ROWS = 16_384
_THREADS = 4
_READS = 32  # concurrent reads of a few rows: a bucket answers each after tens of milliseconds

_Array = npt.NDArray[Any]


_WHOLE = DatasetPart((0, 0), (1 << 62, 0))


def tap_statistics(
    dataset: Dataset, tap: str, streams: Iterable[int] | None = None, part: DatasetPart = _WHOLE
) -> TapStatistics:
    """Return the statistics of a tap: from the commits if they have them, otherwise from the rows."""
    chosen = [stream for stream in dataset._streams_with((tap,), streams) if part.has_stream(stream.number)]
    read_ledgers(chosen)
    shards = []
    for stream in chosen:
        numbers = [commit.number for commit in stream.commits for _ in commit.shards]
        pairs = zip(stream.shards, numbers, strict=True)
        shards += [(stream, shard) for shard, number in pairs if part.has_commit(stream.number, number)]
    return _merged_statistics(shards, tap)


def _merged_statistics(shards: Iterable[tuple[Stream, ShardRecord]], tap: str) -> TapStatistics:
    calls = (partial(_shard_statistics, stream, record, tap) for stream, record in shards)
    return TapStatistics.merged(read_ahead(calls, _THREADS))


def commit_sizes(dataset: Dataset) -> dict[int, dict[int, int]]:
    """Return the bytes of the shards of each commit, by stream, to divide the dataset into parts."""
    read_ledgers(dataset.streams)
    return {
        stream.number: {commit.number: sum(shard.size for shard in commit.shards) for commit in stream.commits}
        for stream in dataset.streams
    }


def part_statistics(dataset: Dataset, part: DatasetPart) -> dict[str, Any]:
    """Return the statistics of each tap over a part of the dataset as JSON values, without the sums."""
    found = {tap: tap_statistics(dataset, tap, part=part) for tap in dataset.taps}
    return {tap: [each.count, list(each.norms.items()), each.top] for tap, each in found.items()}


def merged_parts(results: Iterable[Mapping[str, Any]]) -> dict[str, TapStatistics]:
    """Return the statistics of each tap from the results of :func:`part_statistics` for all parts."""
    parts: dict[str, list[TapStatistics]] = {}
    for result in results:
        for tap, (count, norms, top) in result.items():
            rows = tuple(TopRow(*row) for row in top)
            parts.setdefault(tap, []).append(TapStatistics(count, dict(map(tuple, norms)), rows))
    return {tap: TapStatistics.merged(each) for tap, each in parts.items()}


def _shard_statistics(stream: Stream, record: ShardRecord, tap: str) -> TapStatistics:
    shard = stream.open(record)
    known = TapStatistics.from_json(record.statistics[tap], stream.number) if tap in record.statistics else None
    if known is not None and tap + SUMS in shard.of(tap).header.places:
        return replace(known, sums=(shard.read_tensor(tap + SUMS),))
    accumulator = TapAccumulator(shard.place(tap).shape[1])
    for start in range(0, record.tokens, _READ_ROWS):
        stop = min(start + _READ_ROWS, record.tokens)
        _add_rows(accumulator, shard.rows(tap, start, stop), context_of(stream, shard, start, stop))
    found = accumulator.result()
    return replace(found, top=tuple(row._replace(stream=stream.number) for row in found.top))


def _add_rows(accumulator: TapAccumulator, rows: _Array, known: RowBatch) -> None:
    accumulator.add(rows, *(np.asarray(each) for each in (known.tokens, known.samples, known.positions)))


def sampled_statistics(batch: RowBatch, tap: str) -> TapStatistics:
    """Return the statistics of the rows of :func:`sampled_rows` at a tap."""
    accumulator = TapAccumulator(batch.rows[tap].shape[1])
    _add_rows(accumulator, batch.rows[tap], batch)
    return accumulator.result()


NORMS = ("tap", "rows", "median norm", "99 %", "largest", "sinks")


def norm_lines(stats: Mapping[str, TapStatistics | None]) -> list[list[str]]:
    """Return the table of norms: a row for each tap."""
    found = []
    for tap, known in stats.items():
        cells = ["–"] * 5
        if known is not None and known.top:
            norms = (known.norm_quantile(0.5), known.norm_quantile(0.99), known.top[0].norm)
            cells = [f"{known.count:,}", *(f"{norm:.4g}" for norm in norms), f"{known.sinks:,}"]
        found.append([tap, *cells])
    return found


@dataclass(frozen=True, repr=False)
class Inspection:
    """Statistics of each tap, the similarity of taps, and the main directions of one of them."""

    taps: tuple[str, ...]
    stats: dict[str, TapStatistics]
    cosine: _Array
    """Mean cosine similarity of the same token's rows at two taps."""
    chosen: str
    """The tap whose main directions are shown."""
    plane: _Array
    roles: _Array
    explained: tuple[float, float]

    def __repr__(self) -> str:
        rows = [list(NORMS), *norm_lines(self.stats)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(NORMS))]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in NORMS)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in norm_lines(self.stats)
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def known_stats(dataset: Dataset, tap: str) -> TapStatistics | None:
    """Return the statistics of a tap from the commits alone, without sums; None if a shard has none."""
    parts = [
        TapStatistics.from_json(shard.statistics.get(tap), stream.number) for stream, shard in dataset._shards((tap,))
    ]
    known = [part for part in parts if part is not None]
    return TapStatistics.merged(known) if known and len(known) == len(parts) else None


def dimension_stats(dataset: Dataset, tap: str) -> TapStatistics:
    """Return the statistics of a tap, with sums, of a few shards that are spread over the dataset."""
    found = dataset._shards((tap,))
    return _merged_statistics((found[number] for number in evenly_spaced(len(found), _SHARDS)), tap)


def sampled_rows(dataset: Dataset, taps: Sequence[str]) -> RowBatch:
    """Return random rows at several taps, ``rows[tap]``, with their context.

    They are runs of neighbouring rows of up to 64 random samples, so that a large dataset in a bucket needs few reads.
    """
    source, count = np.random.default_rng(0), len(dataset.samples)
    places = np.sort(source.choice(count, min(count, _SAMPLES), replace=False))
    length, picked = -(-_ROWS // max(1, len(places))), []
    for number, index in dataset.samples.addresses(places):
        stream = dataset.stream(number)
        record = stream.shard_with(index)
        if record is not None and set(taps) <= set(stream.taps):
            picked.append((stream, dataset._open_shard(stream, record), index, float(source.random())))
    calls = (partial(_run_of_rows, *each, length, tuple(taps)) for each in picked)
    parts = [part for part in read_ahead(calls, _READS) if len(part.tokens if part.tokens is not None else ())]
    if not parts:
        raise UserError(f"no rows at {', '.join(taps)} in {dataset.root.url}", fix="look again after the first commit")
    return RowBatch.join(parts)


def _run_of_rows(
    stream: Stream, shard: ShardReader, index: int, at: float, length: int, taps: Sequence[str]
) -> RowBatch:
    start, stop = shard.bounds(shard.place_of(index))
    first = start + int(at * max(0, stop - start - length + 1))
    last = min(stop, first + length)
    known = context_of(stream, shard, first, last)
    return replace(known, rows={tap: shard.rows(tap, first, last) for tap in taps})  # type: ignore[arg-type]


def inspect_dataset(dataset: Dataset, *, tap: str | None = None) -> Inspection:
    """Return the statistics of each tap, from the commits if they have them, and figures of random rows."""
    widths = tap_widths(dataset)
    chosen = tap or list(widths)[len(widths) // 2]
    same_width = [name for name, width in widths.items() if width == widths[chosen]]
    batch = sampled_rows(dataset, same_width)
    plane, explained = main_plane(batch.rows[chosen])
    assert batch.roles is not None  # noqa: S101  for the type checker
    return Inspection(
        taps=tuple(widths),
        stats={name: dataset.stats(name) for name in widths},
        cosine=mean_cosine([batch.rows[name] for name in same_width]),
        chosen=chosen,
        plane=plane,
        roles=batch.roles & (Role.SPECIAL | Role.SYSTEM | Role.USER | Role.ASSISTANT),
        explained=explained,
    )


def tap_widths(dataset: Dataset) -> dict[str, int]:
    """Return the width of each tap whose rows are numbers with a norm, not token ids; none before the first commit."""
    found = {}
    for tap in dataset.taps:
        (stream, *_) = dataset._streams_with((tap,), None)
        if stream.shards:
            dtype, width = dataset._open_shard(stream, stream.shards[0]).row_type(tap)
            if dtype.kind not in "iu":
                found[tap] = width
    return found


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return up to ``wanted`` numbers below ``count``, evenly spread from the first to the last."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(wanted, count))})


def _finite(rows: _Array) -> _Array:
    """Return rows in float64, because the square of a large float32 is infinite, with 0 for NaN and infinity."""
    return np.nan_to_num(rows.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def mean_cosine(taps: Sequence[_Array]) -> _Array:
    """Return the mean cosine similarity of the same row at each pair of taps."""
    wide = [_finite(rows) for rows in taps]
    unit = [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in wide]
    return np.array([[float(np.mean(np.sum(a * b, axis=1))) for b in unit] for a in unit])


def main_plane(rows: _Array) -> tuple[_Array, tuple[float, float]]:
    """Return rows on their first two principal directions, and the parts of the variance that these explain."""
    centered = _finite(rows)
    centered -= centered.mean(0)
    centered /= max(float(np.abs(centered).max(initial=0.0)), 1e-300)  # only relative sizes are shown
    wide = centered.shape[1] > len(centered)  # The smaller of the two products is many times faster than an SVD.
    squares, vectors = np.linalg.eigh(centered @ centered.T if wide else centered.T @ centered)
    squares, vectors = np.maximum(squares[::-1], 0.0), vectors[:, ::-1]
    plane = vectors[:, :2] * np.sqrt(squares[:2]) if wide else centered @ vectors[:, :2]
    part = squares / max(float(np.sum(squares)), 1e-30)
    if plane.shape[1] < 2:
        return np.pad(plane, ((0, 0), (0, 2 - plane.shape[1]))), (float(part[0]), 0.0)
    return plane, (float(part[0]), float(part[1]))


@dataclass(frozen=True)
class TapComparison:
    """How far the rows of one tap in two datasets are apart. Distances are relative to the norms of the first."""

    rows: int
    median: float
    largest: float
    cosine: float
    """The mean cosine similarity of the rows of the same tokens."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The same samples in two datasets, tap by tap."""

    samples: int
    """Samples with the same tokens in both datasets."""
    different: tuple[str, ...]
    """Task ids of samples at the same place of the data whose tokens differ."""
    taps: dict[str, TapComparison]
    by_sample: tuple[tuple[float, int, int, str], ...] = ()
    """The largest distance in each sample, its stream, its index and the tap: the most different samples first."""

    def __repr__(self) -> str:
        lines = [f"{counted(self.samples, 'sample')} in both datasets, {len(self.different):,} with other tokens"]
        for tap, found in self.taps.items():
            lines.append(
                f"{tap}: {counted(found.rows, 'row')}, distance {found.median:.2g} (median) to {found.largest:.2g} of "
                f"the norm, cosine similarity {found.cosine:.4f}"
            )
        return "\n".join(lines)


def compare_datasets(
    a: Dataset, b: Dataset, taps: Sequence[str] | None = None, *, samples: int | None = None
) -> Comparison:
    """Compare the rows of the same samples in two datasets. Samples are matched by their number in the input or, in
    prepared streams, by stream and index.

    ``samples`` limits the comparison to this many samples, spread over the data.
    """
    for tap in taps or ():
        a._streams_with((tap,), None), b._streams_with((tap,), None)
    wanted = [tap for tap in (taps or a.taps) if tap in b.taps]
    if not wanted:
        raise UserError("taps", expected=f"a tap of both datasets, such as {', '.join(a.taps[:3])}", found="none")
    ours, theirs = a.samples.by_key, b.samples.by_key
    common = [(address, theirs[key]) for key, address in ours.items() if key in theirs]
    if samples is not None:
        common = [common[place] for place in evenly_spaced(len(common), samples)]
    pairs: dict[str, list[tuple[_Array, _Array]]] = {tap: [] for tap in wanted}
    different, by_sample, same = [], [], 0
    for address, other_address in common:
        one, other = a.sample(*address), b.sample(*other_address)
        if not np.array_equal(one.context, other.context) or not np.array_equal(one.positions, other.positions):
            different.append(one.task_id)
            continue
        same += 1
        shared = [tap for tap in wanted if tap in one.taps and tap in other.taps]
        rows, other_rows = one.all_rows(shared), other.all_rows(shared)
        found = {tap: row_distances(rows[tap], other_rows[tap], tap) for tap in shared}
        for tap, each in found.items():
            pairs[tap].append(each)
        largest = ((float(distances.max(initial=0.0)), *address, tap) for tap, (distances, _) in found.items())
        by_sample.append(max(largest))
    if not same:
        raise UserError("the two datasets have no sample with the same tokens", fix="extract the same data with both")
    summaries = {tap: _summarize_distances(found) for tap, found in pairs.items() if found}
    return Comparison(same, tuple(different), summaries, tuple(sorted(by_sample, reverse=True)))


def row_distances(one: _Array, other: _Array, tap: str) -> tuple[_Array, _Array]:
    """Return the relative distance and the cosine similarity of each row."""
    if one.shape != other.shape:
        raise UserError(f"{tap} of the two datasets", expected=f"rows of {one.shape[1]}", found=other.shape[1])
    x, y = one.astype(np.float64), other.astype(np.float64)
    norms = np.maximum(np.linalg.norm(x, axis=1), 1e-30)
    cosines = (x * y).sum(axis=1) / (norms * np.maximum(np.linalg.norm(y, axis=1), 1e-30))
    return np.linalg.norm(x - y, axis=1) / norms, cosines


def _summarize_distances(parts: Sequence[tuple[_Array, _Array]]) -> TapComparison:
    distances, cosines = (np.concatenate(each) for each in zip(*parts, strict=True))
    if not len(distances):
        return TapComparison(0, 0.0, 0.0, 1.0)
    return TapComparison(len(distances), float(np.median(distances)), float(distances.max()), float(cosines.mean()))
