"""Rows in the order of the data: each once an epoch, the same for all shards, and continued from every state."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_joint import made

import spile
from spile.errors import UserError
from spile.spec.sample import Role

HOW: dict[str, Any] = {"order": "data", "context": True}


def places(reader: Any) -> list[tuple[int, int]]:
    return [place for batch in reader for place in zip(batch.samples.tolist(), batch.positions.tolist(), strict=True)]


@given(
    memory=st.integers(100, 60_000),
    batch_rows=st.integers(1, 300),
    parts=st.integers(1, 3),
    seed=st.integers(0, 9),
    wanted=st.sampled_from([{}, {"exclude": Role.FIRST}, {"positions": (2, 9)}, {"include": Role.ASSISTANT}]),
)
def test_each_row_is_given_once_whatever_the_buffer_and_the_shards(
    memory: int, batch_rows: int, parts: int, seed: int, wanted: dict[str, Any]
) -> None:
    one, other = spile.open(made(8, "float32", 7)), spile.open(made(3, "float32", 60))
    how = {**HOW, "buffer_rows": max(1, memory // 32), "seed": seed, **wanted}
    found: Counter[tuple[int, int]] = Counter()
    for part in range(parts):
        mine = places(one.shuffled("residual.0", batch_rows, part=(part, parts), **how))
        assert mine == places(other.shuffled("residual.0", batch_rows, part=(part, parts), **how))
        found.update(mine)
    assert found == Counter(places(one.shuffled("residual.0", context=True, **wanted)))


def test_every_state_continues_in_every_epoch() -> None:
    dataset = spile.open(made(8, "float32", 7))
    how = {**HOW, "epochs": 2, "memory": 9000}
    whole = [places([batch]) for batch in dataset.shuffled("residual.0", 64, **how)]
    reader = dataset.shuffled("residual.0", 64, **how)
    for number in range(len(whole) + 1):
        rest = dataset.shuffled("residual.0", 64, state=reader.state_dict(), **how)
        assert [places([batch]) for batch in rest] == whole[number:], number
        next(reader, None)
    half = len(whole) // 2
    assert sorted(chain(*whole[:half])) == sorted(chain(*whole[half:]))
    assert whole[:half] != whole[half:]


def test_rows_are_mixed_with_those_of_near_samples_only() -> None:
    dataset = spile.open(made(8, "float32", 7))
    order = [sample for sample, _ in places(dataset.shuffled("residual.0", 64, buffer_rows=200, **HOW))]
    assert max(order[:60]) < 30 < min(order[-60:])
    assert order != sorted(order)


def test_what_needs_the_whole_dataset_is_refused() -> None:
    dataset = spile.open(made(8, "float32", 7))
    with pytest.raises(UserError, match="drop_last"):
        dataset.shuffled("residual.0", order="data", drop_last=True, part=(0, 2))
    with pytest.raises(UserError, match="after"):
        dataset.shuffled("residual.0", order="data", after=3)
    with pytest.raises(UserError, match="random, data"):
        dataset.shuffled("residual.0", order="date")  # type: ignore[arg-type]
