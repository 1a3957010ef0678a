"""What a dataset holds, as numbers for a page: norms, sinks, taps beside each other, main directions, its past."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.reading.dataset import Dataset
from spile.spec.sample import Role
from spile.store.statistics import TapStatistics
from spile.store.stream import parse_iso

__all__ = ["HeatMap", "Inspection", "inspect_dataset", "known_stats"]

_ROWS = 1024
"""Random rows that the comparison of layers and the main directions are made of."""
_POSITIONS = 96
"""Tokens of a sample that a heat map shows."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class HeatMap:
    """The norms of one sample's rows at every tap."""

    title: str
    preview: str
    norms: _Array
    """[taps, positions]"""


@dataclass(frozen=True)
class Inspection:
    """All that a page shows."""

    taps: tuple[str, ...]
    stats: dict[str, TapStatistics]
    heat: tuple[HeatMap, ...] = ()
    cosine: _Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Mean cosine of the same token's rows at two taps."""
    chosen: str = ""
    """The tap of the main directions."""
    plane: _Array = field(default_factory=lambda: np.zeros((0, 2)))
    roles: _Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    explained: tuple[float, float] = (0.0, 0.0)
    timeline: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Of each stream: when it committed, and how many samples it had then."""


def known_stats(dataset: Dataset, tap: str) -> bool:
    """Whether a tap's statistics were taken while extracting, in every shard."""
    shards = [shard for stream in dataset.having((tap,), None) for shard in stream.shards]
    return bool(shards) and all(tap in shard.statistics for shard in shards)


def inspect_dataset(dataset: Dataset, *, samples: int = 3, tap: str | None = None, seed: int = 0) -> Inspection:
    """Read what a page needs: statistics, a few samples, and some random rows."""
    numbers = [name for name in dataset.taps if _is_float(dataset, name)]
    stats = {name: dataset.stats(name) for name in numbers}
    chosen = tap or numbers[len(numbers) // 2]
    alike = [name for name in numbers if stats[name].sums[0].shape == stats[chosen].sums[0].shape]
    batch = next(dataset.shuffled(alike, _ROWS, seed=seed, context=True, dtype="float32"))
    plane, explained = _main_plane(batch.rows[chosen])
    return Inspection(
        taps=tuple(numbers),
        stats=stats,
        heat=tuple(_heat(dataset, number, numbers) for number in _spread(len(dataset.samples), samples)),
        cosine=_cosine([batch.rows[name] for name in alike]),
        chosen=chosen,
        plane=plane,
        roles=batch.roles & (Role.SPECIAL | Role.SYSTEM | Role.USER | Role.ASSISTANT),
        explained=explained,
        timeline=_timeline(dataset),
    )


def _is_float(dataset: Dataset, tap: str) -> bool:
    (stream, *_) = dataset.having((tap,), None)
    return bool(stream.shards) and dataset.shard(stream, stream.shards[0]).row_type(tap)[0].kind not in "iu"


def _spread(count: int, wanted: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, count - 1, min(wanted, count))})


def _heat(dataset: Dataset, number: int, taps: list[str]) -> HeatMap:
    ref = dataset.samples[number]
    stored = dataset.sample(ref.stream, ref.index)
    having = [tap for tap in taps if tap in stored.taps]
    norms = [np.linalg.norm(stored.rows(tap)[:_POSITIONS].astype(np.float32), axis=1) for tap in having]
    return HeatMap(f"stream {ref.stream}, sample {ref.index} ({ref.task_id})", ref.preview, np.stack(norms))


def _cosine(taps: list[_Array]) -> _Array:
    unit = [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in taps]
    return np.array([[float(np.mean(np.sum(a * b, axis=1))) for b in unit] for a in unit])


def _main_plane(rows: _Array) -> tuple[_Array, tuple[float, float]]:
    """Rows on their first two principal directions, and what part of the variance those hold."""
    centered = rows - rows.mean(0)
    _, values, directions = np.linalg.svd(centered, full_matrices=False)
    part = values**2 / max(float(np.sum(values**2)), 1e-30)
    second = float(part[1]) if len(part) > 1 else 0.0
    return centered @ directions[:2].T, (float(part[0]), second)


def _timeline(dataset: Dataset) -> dict[int, list[tuple[float, int]]]:
    found: dict[int, list[tuple[float, int]]] = {}
    for stream in dataset.streams:
        total = 0
        for commit in stream.commits:
            total += sum(shard.count for shard in commit.shards) + len(commit.skipped)
            if commit.created:
                found.setdefault(stream.number, []).append((parse_iso(commit.created), total))
    return found
