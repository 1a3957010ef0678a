"""The JSON endpoints of the web application: each is a function of the query that reads and returns plain values.

A dataset is named by its number on the command line, so that a request cannot name another path. The same functions
answer the server's requests and fill an exported file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spile.data.arc.answers import Score, TaskScore
from spile.errors import SpileError, UserError
from spile.reading.blocks import SampleTable
from spile.reading.dataset import Dataset
from spile.reading.inspection import (
    compare_datasets,
    dimension_stats,
    known_stats,
    main_plane,
    mean_cosine,
    row_distances,
    sampled_rows,
    sampled_statistics,
    tap_widths,
)
from spile.reading.rows import RowBatch, SampleRef, ref_of
from spile.reading.samples import StoredSample
from spile.reading.scoring import score_run
from spile.spec.sample import Prediction, Role
from spile.store.predictions import read_predictions
from spile.store.shard_reader import ShardReader
from spile.store.statistics import TapStatistics, bin_edge

if TYPE_CHECKING:
    from spile.view.web.features import FeatureIndex
    from spile.view.web.roots import Root

_PAGE = 500  # the largest number of samples in one answer
_SEARCH_SECONDS = 1.0
_SEARCHED = 2000  # samples that are searched at a time
_MATCHES = 200
_TOKENS = 256  # the most tokens of a layer × token view
_VIEW_BYTES = 32e6
"""The most bytes that it reads, approximately: all taps of a long sample would be hundreds of megabytes."""
_COMPARED = 24
_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_OUTLIER = 6.0  # a dimension whose root mean square exceeds the median of all dimensions by this factor is an outlier
_DEAD = 1e-6  # a dimension whose standard deviation is below this fraction of the median is dead

_LARGE = 3e38

_Array = npt.NDArray[Any]
_Answer = dict[str, Any]


class Viewer:
    """Answers the requests of the pages."""

    def __init__(self, roots: Sequence[Root], features: FeatureIndex | None = None) -> None:
        self.roots, self.features = list(roots), features
        self.scores: dict[int, Score] = {}
        """Scores that are known, by the number of the root."""

    def answer(self, name: str, values: Mapping[str, str]) -> Any:
        """Return the answer of an endpoint; raise :class:`SpileError` if there is none."""
        if name not in ENDPOINTS:
            raise UserError(f"no endpoint {name[:40]!r}", expected=f"one of {', '.join(ENDPOINTS)}")
        return ENDPOINTS[name](Query(self, values))


class Query:
    """The parameters of a request, each of which is checked when it is read."""

    def __init__(self, viewer: Viewer, values: Mapping[str, str]) -> None:
        self.viewer, self._values = viewer, values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)[:1000]

    def number(self, name: str, default: int | None = None, *, below: int = 10**9) -> int:
        found = self._values.get(name, "" if default is None else str(default))
        if not (found.isascii() and found.isdigit() and len(found) < 10):
            raise UserError(name, expected="a whole number", found=repr(found[:40]))
        if int(found) >= below:
            raise UserError(name, expected=f"a number below {below}", found=found)
        return int(found)

    def root(self, name: str = "root") -> Root:
        return self.viewer.roots[self.number(name, 0, below=len(self.viewer.roots))]

    def dataset(self, name: str = "root") -> Dataset:
        return self.root(name).dataset()

    def sample(self) -> StoredSample:
        return self.dataset().sample(self.number("stream"), self.number("index"))

    def features(self) -> FeatureIndex:
        if self.viewer.features is None:
            raise UserError("no autoencoder was given", fix="start with: spile view ROOT --sae PATH")
        return self.viewer.features


def _compact(values: _Array) -> _Array:
    """Return numbers as float32, which is shorter as text, unless some are too large for it."""
    return values if np.abs(values).max(initial=0.0) > _LARGE else values.astype(np.float32)


def _about(query: Query) -> _Answer:
    roots = [{"url": root.url, "fleet": root.home is not None} for root in query.viewer.roots]
    return {"roots": roots, "features": query.viewer.features is not None}


def _dataset(query: Query) -> _Answer:
    dataset = query.dataset()
    run = dataset.run
    return {
        **dataset.summary(),
        "url": dataset.root.url,
        "taps": dataset.taps,
        "keep": list(run.keep or ()),
        "answers": run.generation is not None,
        "grids": bool(run.generation is not None and run.answers_are_grids),
    }


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(query: Query) -> _Answer:
    """Return a page of the list of samples, or the samples that match a search."""
    dataset = query.dataset()
    names = ("find", "label", "role", "min", "max")
    if any(query.text(name) for name in names):
        return _search(dataset, query)
    start, count = query.number("start", 0), min(query.number("count", 100), _PAGE)
    rows = [sample_row(ref) for ref in dataset.samples[start : start + count]]
    return {"total": len(dataset), "start": start, "rows": rows}


def sample_row(ref: SampleRef) -> list[Any]:
    """Return a row of the list of samples."""
    return [ref.stream, ref.index, ref.task_id, ref.length, ref.preview, ref.kept]


def _search(dataset: Dataset, query: Query) -> _Answer:
    """Search in the order of the data for about a second. ``next`` continues the search in a later request."""
    wanted, role = query.text("find").lower(), query.text("role").upper()
    label, _, value = query.text("label").partition("=")
    low, high = query.number("min", 0), query.number("max", 999_999_999)
    if role and role not in Role.__members__:
        raise UserError("role", expected=f"one of {', '.join(Role.__members__).lower()}", found=role)
    shards, total = dataset._shards(), len(dataset)
    table, rows = SampleTable.of(shards), list[list[Any]]()
    first = place = query.number("next", 0)
    end = time.monotonic() + _SEARCH_SECONDS
    while place < total and len(rows) < _MATCHES and time.monotonic() < end:
        found = []
        numbers = np.arange(place, min(place + _SEARCHED, total))
        for number, samples, indices in table.by_shard(numbers):
            stream, shard = shards[number][0], dataset._open_shard(*shards[number])
            places = dict(zip(shard.places_of(indices).tolist(), samples.tolist(), strict=True))
            whole = bool(query.text("whole"))
            for each in _matches(shard, [*places], wanted, role, (low, high), whole=whole, dataset=dataset):
                ref = ref_of(stream, shard, each)
                if not label or str(ref.kept.get(label)) == value:
                    found.append((places[each], sample_row(ref)))
        rows += [row for _, row in sorted(found, key=itemgetter(0))]
        place += len(numbers)
    return {"rows": rows, "scanned": place - first, "next": place if place < total else None}


def _matches(
    shard: ShardReader,
    places: list[int],
    wanted: str,
    role: str,
    lengths: tuple[int, int],
    *,
    whole: bool,
    dataset: Dataset,
) -> list[int]:
    """Return those of these places of a shard whose samples match."""
    offsets, chosen = shard.read_tensor("offsets"), np.array(places)
    starts, stops = offsets[chosen], offsets[chosen + 1]
    keep = (stops - starts >= lengths[0]) & (stops - starts <= lengths[1])
    if role:
        roles = shard.read_tensor("roles") & np.uint8(Role[role])
        bounds = zip(starts.tolist(), stops.tolist(), strict=True)
        keep &= np.array([bool(roles[a:b].any()) for a, b in bounds], np.bool_)
    found = []
    for number in chosen[keep].tolist():
        note = shard.notes[number]
        text = f"{note['task_id']}\n{note['preview']}\n{' '.join(map(str, note.get('kept', {}).values()))}".lower()
        if wanted in text or (whole and wanted in dataset.decode(shard.context(number)).lower()):
            found.append(number)
    return found


def _sample(query: Query) -> _Answer:
    """Return a sample without its rows: tokens and their texts, roles, kept fields, and its answer."""
    dataset, sample = query.dataset(), query.sample()
    ref = sample.ref
    return {
        "stream": ref.stream,
        "index": ref.index,
        "task_id": ref.task_id,
        "truncated": ref.truncated,
        "kept": ref.kept,
        "tokens": sample.shown_texts(),
        "ids": sample.tokens,
        "positions": sample.positions,
        "roles": sample.roles,
        "taps": [tap for tap in tap_widths(dataset) if tap in sample.taps],
        "answer": _answer_of(dataset, sample),
    }


def _answer_of(dataset: Dataset, sample: StoredSample) -> _Answer | None:
    stream = dataset.stream(sample.ref.stream)
    record = stream.shard_with(sample.ref.index)
    if record is None or record.predictions is None:
        return None
    answers = read_predictions(stream.folder, record)
    found: Prediction | None = next((each for each in answers if each.sample == sample.ref.index), None)
    if found is None:
        return None
    try:
        texts = dataset.tokenizer.pieces(found.tokens)
    except SpileError:
        texts = [f" {token}" for token in found.tokens]
    return {"text": found.text, "tokens": texts, "logprobs": list(found.logprobs), "stop_reason": found.stop_reason}


def _heat(query: Query) -> _Answer:
    """Return one number for each token of a sample."""
    sample, measure, tap = query.sample(), query.text("measure", "norm"), query.text("tap")
    if measure == "distance":
        other = query.text("other")
        both = sample.all_rows((tap, other))
        return {"values": _compact(row_distances(both[tap], both[other], f"{tap} and {other}")[0])}
    rows = sample[tap].astype(np.float64)
    if measure == "norm":
        values = np.linalg.norm(rows, axis=1)
    elif measure == "dimension":
        values = rows[:, query.number("dimension", 0, below=rows.shape[1])]
    elif measure == "similarity":
        unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        values = unit @ unit[query.number("token", 0, below=len(rows))]
    else:
        raise UserError("measure", expected="norm, dimension, similarity or distance", found=measure[:40])
    return {"values": _compact(np.asarray(values))}


def _grid(query: Query) -> _Answer:
    """Return the layer × token view: the norm of each row, or its distance from the row at the tap before."""
    sample, first = query.sample(), query.number("first", 0)
    widths = {tap: width for tap, width in tap_widths(query.dataset()).items() if tap in sample.taps}
    rows = sample.all_rows(widths, first=first, count=_token_count(widths))
    if query.text("measure", "norm") == "norm":
        norms = [_compact(np.linalg.norm(each.astype(np.float64), axis=1)) for each in rows.values()]
        return {"taps": [*widths], "first": first, "values": norms}
    pairs = [(before, tap) for before, tap in pairwise(widths) if widths[before] == widths[tap]]
    values = [_compact(row_distances(rows[before], rows[tap], tap)[0]) for before, tap in pairs]
    return {"taps": [tap for _, tap in pairs], "first": first, "values": values}


def _token_count(widths: Mapping[str, int]) -> int:
    """Return for how many tokens the rows of all taps are read at once."""
    return int(min(_TOKENS, max(16, _VIEW_BYTES / max(1, 2 * sum(widths.values())))))


# -- layers ------------------------------------------------------------------------------------------------------------


def _layers(query: Query) -> _Answer:
    """Return the norms of every tap, from the commits, or from random rows if those have no statistics."""
    dataset = query.dataset()
    known = {tap: known_stats(dataset, tap) for tap in tap_widths(dataset)}
    missing = [tap for tap, stats in known.items() if stats is None]
    batch = sampled_rows(dataset, missing) if missing else RowBatch(np.zeros((0, 0)))
    rows = [
        _norms(tap, stats or sampled_statistics(batch, tap), complete=stats is not None) for tap, stats in known.items()
    ]
    return {"quantiles": _QUANTILES, "taps": rows}


def _norms(tap: str, stats: TapStatistics, *, complete: bool) -> _Answer:
    return {
        "tap": tap,
        "rows": stats.count,
        "complete": complete,
        "quantiles": [stats.norm_quantile(q) for q in _QUANTILES],
        "largest": stats.top[0].norm if stats.top else None,
        "sinks": stats.sinks,
    }


def _tap(query: Query) -> _Answer:
    """Return an overview of a tap: the distribution of norms, its largest rows, and its dimensions."""
    dataset, tap = query.dataset(), query.text("tap")
    sampled = dimension_stats(dataset, tap)
    stats = known_stats(dataset, tap) or sampled
    mean, deviation = sampled.mean, np.sqrt(sampled.variance)
    size = np.sqrt(mean**2 + deviation**2)
    typical = float(np.median(size))
    return {
        "tap": tap,
        "rows": stats.count,
        "bins": [[bin_edge(place), bin_edge(place + 1), count] for place, count in stats.norms.items()],
        "median": stats.norm_quantile(0.5),
        "sink_norm": stats.sink_norm,
        "sinks": stats.sinks,
        "top": [[row.norm, _text_of(dataset, row.token), row.stream, row.sample, row.position] for row in stats.top],
        "dimension_rows": sampled.count,
        "size": _compact(size),
        "mean": _compact(mean),
        "outliers": np.flatnonzero(size > _OUTLIER * typical),
        "dead": np.flatnonzero(deviation < _DEAD * max(float(np.median(deviation)), 1e-30)),
    }


def _text_of(dataset: Dataset, token: int) -> str:
    try:
        return dataset.decode(token)
    except SpileError:
        return f"token {token}"


def _space(query: Query) -> _Answer:
    """Return random rows on their first two principal directions, with the role and the kept fields of each."""
    dataset, tap = query.dataset(), query.text("tap")
    batch = sampled_rows(dataset, [tap])
    plane, explained = main_plane(batch.rows[tap])
    return {
        "points": _compact(plane),
        "explained": explained,
        "roles": batch.roles,
        "tokens": [_text_of(dataset, token) for token in np.asarray(batch.tokens).tolist()],
        "streams": batch.streams,
        "samples": batch.samples,
        "kept": {name: values.tolist() for name, values in (batch.kept or {}).items()},
    }


def _cosine(query: Query) -> _Answer:
    """Return the mean cosine similarity of the same token at each pair of taps of the same width."""
    dataset = query.dataset()
    widths = tap_widths(dataset)
    middle = [*widths.values()][len(widths) // 2]
    same_width = [tap for tap, width in widths.items() if width == middle]
    batch = sampled_rows(dataset, same_width)
    values = _compact(mean_cosine([batch.rows[tap] for tap in same_width]))
    return {"taps": same_width, "values": values, "rows": len(np.asarray(batch.tokens))}


# -- two datasets, features, scores ------------------------------------------------------------------------------------


def _compare(query: Query) -> _Answer:
    """Return how far some samples of two datasets are apart, and which samples differ most."""
    a, b = query.dataset(), query.dataset("other")
    widths = tap_widths(b)
    shared = [tap for tap, width in tap_widths(a).items() if widths.get(tap) == width]
    found = compare_datasets(a, b, shared or None, samples=_COMPARED)
    return {
        "samples": found.samples,
        "different": list(found.different[:20]),
        "taps": [[tap, each.rows, each.median, each.largest, each.cosine] for tap, each in found.taps.items()],
        "by_sample": [
            [far, stream, index, a.sample(stream, index).task_id, tap] for far, stream, index, tap in found.by_sample
        ],
    }


def _difference(query: Query) -> _Answer:
    """Return the distance of each token's row in two datasets, relative to the norm in the first, at every tap."""
    one, other_samples = query.sample(), query.dataset("other").samples
    address = other_samples.by_key.get(query.dataset().stream(one.ref.stream).key(one.ref.index))
    if address is None:
        raise UserError(f"the other dataset has no sample {one.task_id}")
    two = query.dataset("other").sample(*address)
    first = query.number("first", 0)
    widths = tap_widths(query.dataset())
    shared = {tap: width for tap, width in widths.items() if tap in one.taps and tap in two.taps}
    rows, other = (each.all_rows(shared, first=first, count=_token_count(shared)) for each in (one, two))
    taps = [tap for tap in shared if rows[tap].shape == other[tap].shape]
    values = [_compact(row_distances(rows[tap], other[tap], tap)[0]) for tap in taps]
    return {"taps": taps, "first": first, "values": values, "tokens": one.shown_texts(), "task_id": one.task_id}


def _feature(query: Query) -> _Answer:
    index = query.features()
    return index.feature(query.dataset(), query.number("feature", below=index.sae.features))


def _score(query: Query) -> _Answer:
    """Return the score of an infer run on ARC tasks, with the grids of each task."""
    scores, number, root = query.viewer.scores, query.number("root", 0), query.root()
    if number not in scores:
        scores[number] = score_run(root.url, None, None)
    summary = {name: value for name, value in scores[number].record().items() if name != "by_task"}
    return {"summary": summary, "tasks": [_task(task) for task in scores[number].tasks]}


def _task(task: TaskScore) -> _Answer:
    known = task.task
    return {
        "id": task.answers.task_id,
        "state": "unscored" if task.expected is None else "right" if task.right else "wrong",
        "train": [] if known is None else [{"input": pair.input, "output": pair.output} for pair in known.train],
        "test": None if known is None else known.test[0],
        "expected": task.expected,
        "attempts": list(task.answers.grids[:2]),
        "votes": list(task.answers.votes[:2]),
        "predictions": task.answers.predictions,
        "unreadable": task.answers.unreadable,
    }


ENDPOINTS: dict[str, Callable[[Query], _Answer]] = {
    "about": _about,
    "run": lambda query: query.root().describe_run(),
    "stream": lambda query: query.root().describe_stream(query.number("stream")),
    "events": lambda query: {"events": query.root().events()},
    "dataset": _dataset,
    "samples": _samples,
    "sample": _sample,
    "heat": _heat,
    "grid": _grid,
    "layers": _layers,
    "tap": _tap,
    "space": _space,
    "cosine": _cosine,
    "compare": _compare,
    "difference": _difference,
    "features": lambda query: query.features().overview(query.dataset()),
    "feature": _feature,
    "score": _score,
}
