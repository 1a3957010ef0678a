"""Recomputation finds every kind of error in the rows of a small model with an artificial attention sink."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from spile.models.model_files import find
from spile.proof.comparison import VARIANTS, RowsBySample, _Judge
from spile.proof.rerun import Recomputer
from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.shard import as_stored, decode, split
from unit.models.toy_models import copy_model, edit_tensors, tensors
from world import run_identity

SINK = 7
"""The token whose embedding is 50 times as long as those of other tokens."""
NAMES = ("residual.2", "residual.3")
Rows = list[np.ndarray]


class Computed(NamedTuple):
    samples: list[Sample]
    reference: dict[int, Rows]
    fresh: list[dict[int, Rows]]
    """In bfloat16, by variant."""
    others: dict[int, Rows]
    """In bfloat16, with other weights."""


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    """The rows of a model before they are stored: the programs are compiled once for all dtypes and errors."""
    model = copy_model(tmp_path_factory.mktemp("sink") / "model")
    table = (
        tensors(model)["model.embed_tokens.weight"] * 20
    )  # The rows of different tokens differ by most of their norm.
    table[SINK] *= 50
    edit_tensors(model, model__embed_tokens__weight=table)
    draw = np.random.default_rng(0)
    samples = []
    for index in range(6):
        tokens = draw.integers(8, 1000, 24 + 4 * index).astype(np.int32)
        tokens[::6] = SINK
        samples.append(Sample(index, "", tokens, np.zeros(len(tokens), np.uint8)))
    kinds = [TapRows(name, (192,), "float32") for name in NAMES]

    recompute = Recomputer(find(str(model)), run_identity(dtype="bfloat16"), "jax")

    def rows(variant: int) -> tuple[dict[int, Rows], dict[int, Rows]]:
        reference, fresh = {}, {}
        for batch in recompute(samples, kinds, variant):
            for into, some in zip((reference, fresh), batch, strict=True):
                into.update({index: [np.array(each) for each in of_taps] for index, of_taps in some.items()})
        return reference, fresh

    found = [rows(variant) for variant in range(VARIANTS + 1)]
    params = recompute.fresh_producer.params
    recompute.fresh_producer.params = replace(params, layers=jax.tree.map(lambda x: x * 1.05, params.layers))
    return Computed(samples, found[0][0], [fresh for _, fresh in found], rows(0)[1])


def kept(rows: Rows, dtype: str) -> Rows:
    """The rows as they are read after they were stored."""
    stored = [as_stored(each, dtype) for each in rows]
    return [decode(*split(each, dtype)) if dtype in ("int8", "float8_e4m3") else each for each in stored]


def wrong(computed: Computed, dtype: str, stored: Callable[[int], Rows]) -> set[tuple[int, str]]:
    """The samples and taps that are judged wrong if these rows are stored."""
    kinds = [TapRows(name, (192,), dtype) for name in NAMES]

    def recompute(
        samples: Sequence[Sample], _taps: Sequence[TapRows], variant: int = 0
    ) -> Iterator[tuple[RowsBySample, RowsBySample]]:
        for index in (sample.index for sample in samples):
            yield {index: computed.reference[index]}, {index: computed.fresh[variant][index]}

    place = SimpleNamespace(folder=SimpleNamespace(url="run"))
    chosen = [SimpleNamespace(stream=place, sample=s, read=lambda s=s: stored(s.index)) for s in computed.samples]
    judge = _Judge(kinds, "bfloat16")
    judge.measure(chosen, recompute)  # type: ignore[arg-type]
    found = [re.match(r"sample (\d+) at (\S+):", problem.text) for problem in judge.problems]
    return {(int(match[1]), match[2]) for match in found if match}


def row_error(change: Callable[[np.ndarray, int, Any, np.ndarray], np.ndarray]) -> Callable[[Rows, Rows, Any], Rows]:
    """An error in one row of the second half, at each tap."""

    def broken(rows: Rows, other: Rows, draw: Any) -> Rows:
        found = [np.array(each, np.float32) for each in rows]
        for each, theirs in zip(found, other, strict=True):
            row = int(draw.integers(len(each) // 2, len(each)))
            each[row] = change(each, row, draw, theirs)
        return found

    return broken


def noise(rows: np.ndarray, row: int, draw: Any, _other: np.ndarray) -> np.ndarray:
    random = draw.standard_normal(rows.shape[1])
    return np.asarray(random * np.linalg.norm(rows[row]) / np.linalg.norm(random))


ERRORS: dict[str, Callable[[Rows, Rows, Any], Rows]] = {
    "zeroed row": row_error(lambda rows, row, _draw, _other: 0 * rows[row]),
    "negated row": row_error(lambda rows, row, _draw, _other: -rows[row]),
    "noise": row_error(noise),
    "neighbour's row": row_error(lambda rows, row, _draw, _other: rows[row - 1]),
    "other sample's row": row_error(lambda _rows, row, _draw, other: other[(row + 1) % len(other)]),
    "scaled by 0.97": lambda rows, _other, _draw: [each.astype(np.float32) * np.float32(0.97) for each in rows],
    "layer below": lambda rows, _other, _draw: [rows[1], rows[0]],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3"])
def test_correct_rows_pass_and_every_error_is_found(computed: Computed, dtype: str) -> None:
    """Rows of another computation in bfloat16 are correct, as they are from another machine."""
    every = {(sample.index, name) for sample in computed.samples for name in NAMES}
    norms = np.linalg.norm(computed.reference[0][0], axis=1)
    assert norms.max() > 10 * np.median(norms)
    for variant in (0, 5):
        right = {index: kept(rows, dtype) for index, rows in computed.fresh[variant].items()}
        assert wrong(computed, dtype, right.__getitem__) == set()
        for name, error in ERRORS.items():
            draw = np.random.default_rng(3)
            broken = {n: error(rows, right[(n + 1) % len(right)], draw) for n, rows in right.items()}
            assert (name, every - wrong(computed, dtype, broken.__getitem__)) == (name, set())
    others = {index: kept(rows, dtype) for index, rows in computed.others.items()}
    assert wrong(computed, dtype, others.__getitem__) == every


def test_a_factor_in_float8_is_found_although_one_number_dominates_each_row() -> None:
    """Rows of real models have one number that is hundreds of times the others, and float8 rounds it by up to 6 %."""
    dtype = "float8_e4m3"
    draw = np.random.default_rng(0)
    reference, fresh, samples = {}, [{} for _ in range(VARIANTS + 1)], []
    for index in range(6):
        samples.append(Sample(index, "", np.zeros(24, np.int32), np.zeros(24, np.uint8)))
        rows = draw.standard_normal((24, 192)).astype(np.float32)
        rows[:, 5] = 250 + 10 * draw.standard_normal(24)
        reference[index] = [rows, rows]
        for each in fresh:
            each[index] = [(rows * (1 + 0.01 * draw.standard_normal(rows.shape))).astype(np.float32) for _ in NAMES]
    computed = Computed(samples, reference, fresh, {})
    every = {(index, name) for index in reference for name in NAMES}
    right = {index: kept(rows, dtype) for index, rows in fresh[4].items()}
    assert wrong(computed, dtype, right.__getitem__) == set()
    scaled = {index: kept([each * np.float32(0.97) for each in rows], dtype) for index, rows in fresh[4].items()}
    assert wrong(computed, dtype, scaled.__getitem__) == every
