"""The order of a shuffled pass: blocks, groups and windows contain each row once, whatever the sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spile.reading.shuffle_order import ShufflePlan, ShuffleSpec

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80).filter(any)


@st.composite
def plans(draw: st.DrawFn, lengths: list[int]) -> ShufflePlan:
    parts = draw(st.integers(1, 3))
    spec = ShuffleSpec(
        buffer_rows=draw(st.integers(1, 2 * sum(lengths))),
        block_rows=draw(st.none() | st.integers(1, 200)),
        parts=parts,
        part=draw(st.integers(0, parts - 1)),
        seed=draw(st.integers(0, 99)),
    )
    return ShufflePlan(spec, len(lengths), sum(lengths), draw(st.booleans()))


@given(lengths=LENGTHS, epoch=st.integers(0, 3), data=st.data())
def test_readers_share_out_every_part_of_every_sample_once(lengths: list[int], epoch: int, data: st.DataObject) -> None:
    plan = data.draw(plans(lengths))
    found: list[tuple[int, int]] = []
    for part in range(plan.spec.parts):
        mine = ShufflePlan(ShuffleSpec(**{**vars(plan.spec), "part": part}), plan.samples, plan.rows, plan.remote)
        for group in range(mine.groups):
            samples, parts = mine.group(epoch, group)
            assert (np.diff(samples) >= 0).all()  # in the order they are stored
            found += zip(samples.tolist(), parts.tolist(), strict=True)
    parts = plan.block_shape[1]
    assert sorted(found) == [(sample, part) for sample in range(len(lengths)) for part in range(parts)]


@given(lengths=LENGTHS, epoch=st.integers(0, 3), data=st.data())
def test_windows_divide_the_rows_of_groups(lengths: list[int], epoch: int, data: st.DataObject) -> None:
    plan = data.draw(plans(lengths))
    parts = plan.block_shape[1]
    rows = np.array(lengths)[:, None]
    counts = rows * (np.arange(parts) + 1) // parts - rows * np.arange(parts) // parts
    assert counts.sum() == plan.rows
    totals = [int(counts[plan.group(epoch, group)].sum()) for group in range(plan.groups)]
    for group, total in enumerate(totals):
        windows = [window for window in range(plan.groups) if group in plan.sources(window)]
        assert windows[0] == group
        shares = [plan.share(total, group, window) for window in windows]
        assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
        assert shares[-1].stop == total
    assert sum(plan.window_rows(epoch, counts)) == sum(totals)
    for total in {0, 1, *totals}:
        assert sorted(plan.deal_order(epoch, 0, total).tolist()) == list(range(total))
        assert sorted(plan.row_order(epoch, 0, total).tolist()) == list(range(total))


@given(samples=st.integers(500, 5000), share=st.integers(3, 30), data=st.data())
def test_the_buffer_holds_what_it_was_given(samples: int, share: int, data: st.DataObject) -> None:
    """Rows that were loaded and not given yet, with the group that loads, fill the buffer and little more."""
    rows = samples * 64
    block = data.draw(st.sampled_from([None, 16, 64, 256]))
    plan = ShufflePlan(ShuffleSpec(buffer_rows=rows // share, block_rows=block), samples, rows)
    counts = np.full((samples, plan.block_shape[1]), 64 // plan.block_shape[1])
    totals = [int(counts[plan.group(0, group)].sum()) for group in range(plan.groups)]
    windows, loaded, given_out, most = plan.window_rows(0, counts), 0, 0, 0
    for window in range(plan.groups):
        loaded = sum(totals[: window + 2])  # the next group loads while a window is given
        most = max(most, loaded - given_out)
        given_out += windows[window]
    assert most <= 1.06 * plan.spec.buffer_rows + 2 * max(totals) * (plan.spread == 1) + 64
    assert plan.group_blocks < 4 or most >= 0.6 * plan.spec.buffer_rows


def test_blocks_are_parts_of_samples_if_the_buffer_holds_few_samples() -> None:
    def shape(samples: int, length: int, buffer: int, **spec: int | None) -> tuple[int, int]:
        remote = spec.pop("remote", 0)
        return ShufflePlan(ShuffleSpec(buffer_rows=buffer, **spec), samples, samples * length, bool(remote)).block_shape  # type: ignore[arg-type]

    million = 1 << 20
    assert shape(100_000, 512, million) == (1, 2)
    assert shape(100_000, 512, million, remote=1) == (1, 1)  # each part would be a request for a whole chunk
    assert shape(100_000, 2048, million) == (1, 8)
    assert shape(100_000, 512, 1000) == (1, 16)  # not smaller than 32 rows
    assert shape(1_000_000, 64, million) == (32, 1)
    assert shape(1_000_000, 64, million, remote=1) == (256, 1)
    assert shape(1000, 512, million) == (1, 1)  # all rows fit
    assert shape(100_000, 512, million, block_rows=4096) == (8, 1)
    assert shape(100_000, 512, million, block_rows=100) == (1, 6)
    assert shape(100, 512, million, parts=8) == (1, 6)  # 64 blocks for each reader


def test_orders_differ_by_seed_epoch_and_reader() -> None:
    plan = ShufflePlan(ShuffleSpec(buffer_rows=100, block_rows=10), 1000, 10_000)
    orders = [
        ShufflePlan(ShuffleSpec(**{**vars(plan.spec), "seed": seed}), plan.samples, plan.rows).block_order(epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({order.tobytes() for order in orders}) == 4
    assert len({plan.row_order(epoch, window, 50).tobytes() for epoch in (0, 1) for window in (0, 1)}) == 4
