"""Which tokens are stored: the same ones wherever and whenever a sample is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.errors import SpecError
from spile.spec.positions import check_positions, choose_positions
from spile.spec.run import GenerationSpec, RunSpec
from spile.spec.sample import Role


def roles(length: int, *answer: int) -> np.ndarray:
    found = np.full(length, Role.USER, np.uint8)
    found[list(answer)] = Role.ASSISTANT
    return found


@given(length=st.integers(0, 60), count=st.integers(1, 40), seed=st.integers(0, 2**63 - 1), index=st.integers(0, 2**40))
def test_random_positions_are_some_in_order_and_always_the_same(length: int, count: int, seed: int, index: int) -> None:
    chosen = choose_positions(f"random:{count}", seed, index, roles(length))
    assert chosen is not None
    assert chosen.dtype == np.int32
    assert len(chosen) == min(count, length)
    assert (np.diff(chosen) > 0).all()
    assert set(chosen.tolist()) <= set(range(length))
    again = choose_positions(f"random:{count}", seed, index, roles(length))
    assert np.array_equal(chosen, again)


def splitmix64(value: int) -> int:
    """As docs/format.md spells it out, in whole numbers."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@given(length=st.integers(1, 50), seed=st.integers(0, 2**63 - 1), index=st.integers(0, 2**40))
def test_random_positions_are_those_of_the_format(length: int, seed: int, index: int) -> None:
    key = splitmix64(splitmix64(seed) ^ index)
    wanted = sorted(sorted(range(length), key=lambda position: splitmix64(position ^ key))[:5])
    chosen = choose_positions("random:5", seed, index, roles(length))
    assert chosen is not None
    assert chosen.tolist() == wanted


def test_another_seed_or_sample_has_others_and_every_position_is_chosen_as_often() -> None:
    def chosen(seed: int, index: int) -> list[int]:
        found = choose_positions("random:8", seed, index, roles(64))
        assert found is not None
        return found.tolist()

    assert chosen(0, 1) != chosen(0, 2)
    assert chosen(0, 1) != chosen(1, 1)
    counts = np.bincount([place for index in range(4000) for place in chosen(0, index)], minlength=64)
    assert (abs(counts - 500) < 120).all()


def test_the_others() -> None:
    some = roles(6, 3, 4)
    assert choose_positions("all", 0, 0, some) is None
    assert choose_positions("last", 0, 0, some).tolist() == [5]  # type: ignore[union-attr]
    assert choose_positions("last", 0, 0, some, 0, 4).tolist() == [3]  # type: ignore[union-attr]
    assert choose_positions("answer", 0, 0, some).tolist() == [3, 4]  # type: ignore[union-attr]
    assert choose_positions("answer", 0, 0, roles(4)).tolist() == []  # type: ignore[union-attr]
    assert set(choose_positions("random:9", 0, 0, some, 2, 5).tolist()) == {2, 3, 4}  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["first", "first:0", "mean:2", "random", "random:0", "random:-1", "", "last:3"])
def test_what_names_no_positions_is_refused(text: str) -> None:
    with pytest.raises(
        SpecError, match="--positions: expected all, last, last-content, mean, answer, first:N or random:N"
    ):
        check_positions(text)
    with pytest.raises(SpecError, match="--positions"):
        RunSpec(positions=text)


@pytest.mark.parametrize(("positions", "capture"), [("answer", "prompt"), ("answer", "none"), ("last", "none")])
def test_positions_of_rows_that_are_not_there_are_refused(positions: str, capture: str) -> None:
    wanted = f"--positions {positions}: expected --capture both or answer, found --capture {capture}"
    with pytest.raises(SpecError, match=wanted):
        RunSpec(positions=positions, generation=GenerationSpec(capture=capture))  # type: ignore[arg-type]
