"""Batches are the memory that rows were read into: nothing is written there while anybody has one."""

from __future__ import annotations

import gc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.ring import RowRing
from spile.reading.slots import RowSlots
from world import produce


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("root")
    produce(open_folder(str(root)), 120, cut=4)
    return open_dataset(str(root))


def test_a_slot_comes_back_with_the_last_array_of_it() -> None:
    memory = RowSlots([("a", np.dtype("u1"), 4), ("b", np.dtype("u2"), 3)], 2, 2, None)
    first, other = memory.take(), memory.take()
    lent = memory.lend(first, 1)
    assert {tap: rows.shape for tap, rows in lent.items()} == {"a": (1, 4), "b": (1, 3)}
    assert memory.lent == 1
    part = lent.pop("b")[:, 1:]
    del lent
    gc.collect()
    assert memory.lent == 1
    with pytest.raises(IndexError):
        memory.take()
    del part
    assert memory.lent == 0
    assert memory.take() == first
    memory.give_back(other)
    assert memory.take() == other


def test_what_lies_behind_a_kept_batch_goes_back_to_the_system() -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell how much memory is used")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    memory = RowSlots([("a", np.dtype("u1"), 1 << 20)], 16, 4, None)
    memory.taps["a"][:] = 7
    kept, before = memory.lend(3, 4)["a"], resident()
    del memory
    gc.collect()
    assert before - resident() > 48 << 20
    assert (kept == 7).all()


def test_rows_that_were_given_before_are_written_nowhere(dataset: Dataset) -> None:
    ring = RowRing(dataset.shuffled("attn.1")._order.source, 20, 5, 3, None)
    memory = ring._memory.taps["attn.1"]
    memory[:] = 0
    ring.reserve(12, 25)
    places = np.arange(3, 25)
    ring.put("attn.1", ring.rows_at(places, 12), np.ones((len(places), memory.shape[1]), memory.dtype))
    found = ring.room(13)
    ring.copy_into(found, np.arange(12, 25))
    assert (found["attn.1"] == 1).all()
    assert (memory[:-1].astype(np.float32).sum(axis=1) > 0).sum() == 13


def test_a_kept_batch_is_not_written_over(dataset: Dataset) -> None:
    small: dict[str, Any] = {"memory": 4000}
    hows: list[dict[str, Any]] = [small, {**small, "epochs": 2}, {}, {"part": (0, 2)}, {**small, "part": (1, 2)}]
    for how in hows:
        wanted = [batch.copy() for batch in dataset.shuffled("attn.1", 64, **how)]
        reader = dataset.shuffled("attn.1", 64, **how)
        kept, found = {}, []
        for number, batch in enumerate(reader):
            found.append(batch.copy())
            if number % 9 == 2:
                kept[number] = batch
        reader.close()
        assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]
        assert all((batch == wanted[number]).all() for number, batch in kept.items())


def test_who_keeps_many_batches_is_given_copies(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    lend, asked = RowRing.lend, []

    def watched(ring: RowRing, begin: int, count: int) -> Any:
        lent = lend(ring, begin, count)
        asked.append(lent is not None)
        return lent

    monkeypatch.setattr(RowRing, "lend", watched)
    batches = list(dataset.shuffled("attn.1", 16, memory=4000))
    assert asked[:8] == [True] * 8
    assert sum(asked) == 8 < len(batches)
    asked.clear()
    for batch in dataset.shuffled("attn.1", 16, memory=4000):
        del batch
    assert sum(asked) > len(batches) // 2


def test_rows_that_wait_for_the_next_window_outlive_what_was_left_out(dataset: Dataset) -> None:
    """Batches so small that the rows of one, where others lie between them, come from many windows."""
    for batch, memory in ((2, 9000), (3, 1), (7, 4000)):
        how: dict[str, Any] = {"memory": memory, "piece": 100, "tokens": range(300)}
        found = [row.tobytes() for each in dataset.shuffled("attn.1", batch, **how) for row in each]
        assert sorted(found) == sorted(
            row.tobytes() for row in next(dataset.shuffled("attn.1", 99_999, tokens=range(300)))
        )


@given(batch=st.integers(1, 150), memory=st.sampled_from([1500, 4000, 9000]), part=st.sampled_from([(0, 1), (1, 2)]))
@settings(max_examples=25, deadline=None)
def test_an_endless_reader_goes_on_over_epochs_wherever_it_was_stopped(
    dataset: Dataset, batch: int, memory: int, part: tuple[int, int]
) -> None:
    how: dict[str, Any] = {"memory": memory, "part": part, "epochs": None, "piece": 100}
    total = sum(stream.tokens for stream in dataset.streams)
    steps = 2 * total // batch + 2
    with dataset.shuffled("attn.1", batch, **how) as reader:
        wanted, states = [], [reader.state()]
        for each in islice(reader, steps):
            wanted.append(each.tobytes())
            states.append(reader.state())
    for step in {0, 1, steps // 3, total // batch, steps - 1}:
        with dataset.shuffled("attn.1", batch, **how, state=states[step]) as reader:
            assert [each.tobytes() for each in islice(reader, min(9, steps - step))] == wanted[step : step + 9]
