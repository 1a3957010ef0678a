"""The order of a shuffled pass: blocks, groups and windows contain each row once, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spile.reading import shuffle
from spile.reading.shuffle import ShufflePlan

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80).filter(any)


@st.composite
def plans(draw: st.DrawFn, lengths: list[int]) -> ShufflePlan:
    parts = draw(st.integers(1, 3))
    return ShufflePlan(
        buffer_rows=draw(st.integers(1, 2 * sum(lengths))),
        parts=parts,
        part=draw(st.integers(0, parts - 1)),
        seed=draw(st.integers(0, 99)),
        samples=len(lengths),
        rows=sum(lengths),
        remote=draw(st.booleans()),
        whole_samples=draw(st.booleans()),
    )


SMALL_BLOCKS = patch.multiple(shuffle, _BLOCKS=8, _REMOTE_BLOCKS=3, _MIN_PART_ROWS=4)
"""Small plans then have blocks of several samples, of one, and of a part of one."""


@given(lengths=LENGTHS, epoch=st.integers(0, 3), data=st.data())
@SMALL_BLOCKS
def test_readers_share_out_every_part_of_every_sample_once(lengths: list[int], epoch: int, data: st.DataObject) -> None:
    plan = data.draw(plans(lengths))
    found: list[tuple[int, int]] = []
    for part in range(plan.parts):
        mine = replace(plan, part=part)
        for group in range(mine.groups):
            samples, parts = mine.group(epoch, group)
            assert (np.diff(samples) >= 0).all()  # in the order they are stored
            found += zip(samples.tolist(), parts.tolist(), strict=True)
    parts = plan.block_shape[1]
    assert sorted(found) == [(sample, part) for sample in range(len(lengths)) for part in range(parts)]


@given(lengths=LENGTHS, epoch=st.integers(0, 3), data=st.data())
@SMALL_BLOCKS
def test_windows_divide_the_rows_of_groups(lengths: list[int], epoch: int, data: st.DataObject) -> None:
    plan = data.draw(plans(lengths))
    parts = plan.block_shape[1]
    rows = np.array(lengths)[:, None]
    counts = rows * (np.arange(parts) + 1) // parts - rows * np.arange(parts) // parts
    assert counts.sum() == plan.rows
    totals = [int(counts[plan.group(epoch, group)].sum()) for group in range(plan.groups)]
    for group, total in enumerate(totals):
        left = plan.groups - group
        shares = [plan.share(total, age, age + 1 == left) for age in range(min(plan.spread, left))]
        assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
        assert shares[-1].stop == total
    assert sum(plan.window_rows(epoch, counts)) == sum(totals)
    for total in {0, 1, *totals}:
        for of_group in (False, True):
            order = plan.permutation(epoch, 0, total, of_group=of_group)
            assert sorted(order.tolist()) == list(range(total))


@given(samples=st.integers(500, 5000), share=st.integers(3, 30), data=st.data())
def test_the_buffer_holds_what_it_was_given(samples: int, share: int, data: st.DataObject) -> None:
    """Rows that were loaded and not given yet, with the group that loads, fill the buffer and little more."""
    rows = samples * 64
    block = data.draw(st.sampled_from([16, 64, 256]))
    with patch.multiple(shuffle, _BLOCKS=max(1, rows // share // block), _MIN_PART_ROWS=16):
        plan = ShufflePlan(rows // share, samples=samples, rows=rows)
        assert plan.block_shape == (1, 1) or abs(plan.rows / plan.blocks - block) < 0.5 * block
    counts = np.full((samples, plan.block_shape[1]), 64 // plan.block_shape[1])
    totals = [int(counts[plan.group(0, group)].sum()) for group in range(plan.groups)]
    windows, loaded, given_out, most = plan.window_rows(0, counts), 0, 0, 0
    for window in range(plan.groups):
        loaded = sum(totals[: window + 2])  # the next group loads while a window is given
        most = max(most, loaded - given_out)
        given_out += windows[window]
    assert most <= 1.06 * plan.buffer_rows + 8 * max(totals) * (plan.group_blocks < 2) + 64
    assert plan.group_blocks < 4 or most >= 0.6 * plan.buffer_rows


def test_blocks_are_parts_of_samples_if_the_buffer_holds_few_samples() -> None:
    def shape(samples: int, length: int, buffer: int, **how: Any) -> tuple[int, int]:
        return ShufflePlan(buffer, samples=samples, rows=samples * length, **how).block_shape

    million = 1 << 20
    assert shape(100_000, 512, million) == (1, 2)
    assert shape(100_000, 512, million, remote=True) == (4, 1)  # each block is a request
    assert shape(100_000, 512, million, whole_samples=True) == (1, 1)
    assert shape(100_000, 2048, million) == (1, 8)
    assert shape(100_000, 512, 1000) == (1, 8)  # not smaller than 64 rows
    assert shape(1_000_000, 64, million) == (4, 1)
    assert shape(1_000_000, 64, million, remote=True) == (32, 1)
    assert shape(1000, 512, million) == (1, 1)  # all rows fit
    assert shape(100, 512, million, parts=8) == (1, 6)  # 64 blocks for each reader
    assert shape(100_000, 512, million, order="data") == (1, 1)


def test_orders_differ_by_seed_epoch_and_reader() -> None:
    plan = ShufflePlan(buffer_rows=100, samples=1000, rows=10_000)
    orders = [replace(plan, seed=seed).block_order(epoch, 0) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    assert len({plan.permutation(epoch, window, 50).tobytes() for epoch in (0, 1) for window in (0, 1)}) == 4
    assert (plan.permutation(0, 1, 50) != plan.permutation(0, 1, 50, of_group=True)).any()
