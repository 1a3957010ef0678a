"""The order of a shuffled pass: each row has one place in an epoch, and its room in memory until it is given out."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from spile.planning.shuffle import EpochOrder, EpochPlan, RowPieces, ShuffleSpec, piece_rows, plan_epoch

SHARDS = st.lists(st.integers(0, 3000), min_size=1, max_size=8).filter(any)


@st.composite
def specs(draw: st.DrawFn, total: int, width: int) -> ShuffleSpec:
    parts = draw(st.integers(1, 3))
    return ShuffleSpec(
        memory=draw(st.integers(1, total * width)),
        piece=draw(st.integers(1, 400)) * width,
        parts=parts,
        part=draw(st.integers(0, parts - 1)),
        seed=draw(st.integers(0, 99)),
    )


@given(shards=SHARDS, width=st.sampled_from([2, 64, 1792]), first=st.sampled_from([1 << 10, 1 << 14]), data=st.data())
@settings(max_examples=150, deadline=None)
def test_rows_have_one_place_each_and_room_until_they_are_given(
    shards: list[int], width: int, first: int, data: st.DataObject
) -> None:
    spec = data.draw(specs(sum(shards), width))
    base, given_out = 0, 0
    with patch("spile.planning.shuffle._FIRST_GROUP", first):
        plans = [plan_epoch(shards, [width], spec, epoch) for epoch in range(3)]
    for epoch, plan in enumerate(plans):
        order = EpochOrder(plan, spec, epoch)
        places = [order.places(group) for group in range(len(plan.groups))]
        assert [len(each) for each in places] == [group.rows for group in plan.groups]
        assert sorted(place for each in places for place in each.tolist()) == list(range(order.starts[-1]))
        if plan.whole:
            assert order.starts[-1] == sum(shards) <= plan.capacity
            continue
        for group in range(len(plan.groups)):  # is read while the window before it is given out
            end = base + order.starts[min(group + plan.spread, len(plan.groups))]
            assert end - given_out <= plan.capacity
            assert base + places[group].max() < end
            assert base + places[group].min() >= base + order.starts[group]
            given_out = base + order.starts[group]
        if plan.spread > 1:
            assert plan.capacity <= spec.memory // width + plan.spread * (plan.spread + 1)
        base += order.starts[-1]


@given(shards=SHARDS, width=st.sampled_from([2, 1792]), parts=st.integers(1, 5), memory=st.integers(1, 1 << 22))
@settings(max_examples=100, deadline=None)
def test_readers_share_out_every_row(shards: list[int], width: int, parts: int, memory: int) -> None:
    found: list[tuple[int, int]] = []
    for part in range(parts):
        plan = plan_epoch(shards, [width], ShuffleSpec(memory=memory, part=part, parts=parts), 0)
        found += [(shard, row) for group in plan.groups for shard, start, stop in group for row in range(start, stop)]
    assert sorted(found) == [(shard, row) for shard, count in enumerate(shards) for row in range(count)]


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=9), rows=st.integers(1, 60))
def test_pieces_split_and_joined_are_the_same_rows(lengths: list[int], rows: int) -> None:
    pieces = RowPieces.cut(lengths, rows)
    assert list(pieces) == [
        (shard, at, min(at + rows, count)) for shard, count in enumerate(lengths) for at in range(0, count, rows)
    ]
    if len(pieces):
        assert list(pieces.joined()) == [(shard, 0, count) for shard, count in enumerate(lengths) if count]
        assert list(pieces.split(7).joined()) == list(pieces.joined())
        assert max(pieces.split(7).lengths) <= 7


def test_pieces_end_with_chunks_or_are_parts_of_one() -> None:
    gib = 1 << 30
    assert piece_rows([1792], gib, None, 128) == 18 * 128  # some 4 MiB
    assert piece_rows([1792], 1, None, 128) == 4 * 128  # a MiB, whatever the memory
    assert piece_rows([1792], gib, 256 << 10, 128) == 128
    assert piece_rows([1792], gib, 43 << 10, 128) == 16
    assert piece_rows([1792], gib, 1, 128) == 1
    assert piece_rows([1792, 4], gib, 256 << 10, 128) == 128
    assert piece_rows([1792], 256 << 20, None, 128, local=False) == 36 * 128  # some 8 MiB: each is a request
    assert piece_rows([1792], 256 << 20, local=False) == 4096
    assert piece_rows([1792], gib) == 4096  # seven MiBs, as earlier versions' shards are cut


def test_the_last_groups_are_smaller() -> None:
    """Fewer windows are left for them, and what is left of the groups before comes there too."""
    plan: EpochPlan = plan_epoch([100_000], [100], ShuffleSpec(memory=1_300_000, piece=1000), 1)
    rows = [group.rows for group in plan.groups]
    assert (plan.spread, plan.room, max(rows[:-13])) == (12, 1000, 1000)
    assert max(rows[-12:]) <= 541
