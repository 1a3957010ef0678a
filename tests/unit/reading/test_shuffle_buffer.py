"""The shuffle buffer: slots are used again, rows stay what they are, and it grows if it must."""

from __future__ import annotations

import queue
import threading
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.shuffle import ShuffleBuffer
from world import produce

TYPES: dict[str, tuple[np.dtype[Any], int]] = {"a": (np.dtype(ml_dtypes.bfloat16), 4), "b": (np.dtype("f4"), 3)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("root")
    produce(open_folder(str(root)), 120, cut=4)
    return open_dataset(str(root))


def block(first: int, count: int) -> dict[str, list[Any]]:
    numbers = np.arange(first, first + count, dtype=np.float32)[:, None]
    half = count // 2
    whole = {"a": np.repeat(numbers % 256, 4, axis=1).astype(ml_dtypes.bfloat16), "b": np.repeat(numbers, 3, axis=1)}
    return {tap: [rows[:half], rows[half:]] for tap, rows in whole.items()}


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=20), capacity=st.integers(1, 50), seed=st.integers(0))
def test_rows_come_back_as_they_were_put(counts: list[int], capacity: int, seed: int) -> None:
    buffer, source = ShuffleBuffer(TYPES, capacity), np.random.default_rng(seed)
    held: dict[int, int] = {}
    first = 0
    for count in counts:
        slots = buffer.put(block(first, count), count)
        assert not set(slots.tolist()) & held.keys()
        held.update(zip(slots.tolist(), range(first, first + count), strict=True))
        first += count
        some = source.permutation(list(held))[: source.integers(0, len(held) + 1)].astype(np.int64)
        rows = buffer.take(some)
        assert rows["a"].dtype == ml_dtypes.bfloat16
        assert rows["b"][:, 0].tolist() == [held[slot] for slot in some.tolist()]
        assert rows["a"][:, 3].astype(int).tolist() == [held[slot] % 256 for slot in some.tolist()]
        buffer.release(some)
        for slot in some.tolist():
            del held[slot]


def test_rows_are_taken_while_the_buffer_grows() -> None:
    buffer = ShuffleBuffer(TYPES, 8)
    waiting: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()

    def fill() -> None:
        for first in range(0, 3000, 10):
            waiting.put((first, buffer.put(block(first, 10), 10)))
        waiting.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    held: dict[int, Any] = {}
    while (found := waiting.get()) is not None:
        held[found[0]] = found[1]
        assert len({slot for slots in held.values() for slot in slots.tolist()}) == 10 * len(held)
        for first, slots in held.items():
            assert buffer.take(slots)["b"][:, 1].tolist() == list(range(first, first + 10))
        if len(held) == 30:
            for first in [*held][::2]:
                buffer.release(held.pop(first))
    thread.join()


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


def test_rows_that_wait_for_the_next_window_outlive_what_was_left_out(dataset: Dataset) -> None:
    """Batches so small, or selections so strict, that the rows of one come from many windows."""
    for batch, memory in ((2, 9000), (3, 1), (7, 4000)):
        how: dict[str, Any] = {"memory": memory, "tokens": range(300)}
        found = [row.tobytes() for each in dataset.shuffled("attn.1", batch, **how) for row in each]
        assert sorted(found) == sorted(
            row.tobytes() for row in next(dataset.shuffled("attn.1", 99_999, tokens=range(300)))
        )


@pytest.mark.slow
@given(batch=st.integers(1, 150), memory=st.sampled_from([1500, 4000, 9000]), part=st.sampled_from([(0, 1), (1, 2)]))
@settings(max_examples=25, deadline=None)
def test_an_endless_reader_continues_over_epochs_from_any_stop(
    dataset: Dataset, batch: int, memory: int, part: tuple[int, int]
) -> None:
    how: dict[str, Any] = {"memory": memory, "part": part, "epochs": None}
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


def test_a_closed_reader_stops_loading(dataset: Dataset) -> None:
    before = {thread.name for thread in threading.enumerate()}
    reader = dataset.shuffled("attn.1", 16, epochs=None, memory=4000)
    next(reader)
    reader.close()
    assert list(reader) == []
    assert {thread.name for thread in threading.enumerate() if thread.is_alive()} <= before
