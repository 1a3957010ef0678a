import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.compute.batches import Batch, Sizes, batches, single_row_length
from spile.run.pipeline import plan_shards
from spile.spec.sample import Sample
from spile.spec.taps import TapRows, row_bytes


def make(lengths):
    return [Sample(i, f"t{i}", np.zeros(n, np.int32), np.zeros(n, np.uint8)) for i, n in enumerate(lengths)]


lengths = st.lists(st.integers(1, 2048), min_size=1, max_size=200)
plans = st.builds(
    Sizes,
    batch_tokens=st.integers(64, 8192),
    batch_size=st.none() | st.integers(1, 9),
    longest=st.just(2048),
    groups=st.integers(1, 8),
)


@given(st.integers(1, 100_000))
def test_a_row_for_one_sample_has_little_room_to_spare(length):
    assert length <= single_row_length(length) <= max(length * 1.125 + 1, length + 63)


def test_rows_for_single_samples_are_few():
    assert len({single_row_length(n) for n in range(1, 2049)}) <= 24


@given(lengths, plans)
def test_every_sample_is_in_one_row_and_fits(sizes, plan):
    found = []
    for batch in batches(make(sizes), plan):
        assert len(batch.groups) == plan.groups
        assert all(len(group) <= batch.rows for group in batch.groups)
        assert all(sum(map(len, row)) <= batch.length for group in batch.groups for row in group)
        assert batch.rows == 1 or batch.rows * batch.length <= plan.batch_tokens
        assert plan.batch_size is None or batch.rows <= plan.batch_size
        assert batch.samples == [sample for group in range(plan.groups) for sample in batch.samples_of(group)]
        found += [sample.index for sample in batch.samples]
    assert sorted(found) == list(range(len(sizes)))


@given(st.lists(st.integers(1, 2048), min_size=1, max_size=200), st.booleans(), st.integers(1, 8))
def test_one_shape_and_at_most_one_for_the_tail(sizes, short_tail, groups):
    made = list(batches(make(sizes), Sizes(16384, None, 2048, groups=groups, shortest_row=1024, short_tail=short_tail)))
    assert len({batch.shape for batch in made[:-1]}) <= 1
    assert len({batch.shape for batch in made}) <= 1 + short_tail


def test_long_documents_have_rows_of_their_own():
    sizes = [20_000, *([700] * 400), 18_000, *([300] * 400)]
    made = list(batches(make(sizes), Sizes(32768, None, 32768, shortest_row=1024)))
    assert {batch.length for batch in made} == {32768, 1024}
    assert all(len(batch.samples) <= 40 for batch in made if batch.length == 32768)


def test_a_later_window_keeps_the_row_length_it_finds():
    sizes = [2000] * 64 + [600] * 1500
    assert len({batch.length for batch in batches(make(sizes), Sizes(4096, None, 2048, shortest_row=1024))}) == 1


@given(st.lists(st.integers(1, 500), min_size=500, max_size=2000))
@settings(max_examples=20, deadline=None)
def test_no_sample_waits_longer_than_a_window(sizes):
    """A sample is at most two chunks behind the newest of its batch."""
    plan = Sizes(512, None, 512, shortest_row=512)
    newest = 0
    for batch in batches(make(sizes), plan):
        newest = max(newest, *(sample.index for sample in batch.samples))
        tokens = [sum(sizes[sample.index : newest + 1]) for sample in batch.samples]
        assert max(tokens) <= 3 * (1 << 17)


@given(lengths, plans)
def test_the_same_samples_give_the_same_batches(sizes, plan):
    def shape(batch: Batch):
        return batch.rows, batch.length, [sample.index for sample in batch.samples]

    samples = make(sizes)
    assert [shape(b) for b in batches(samples, plan)] == [shape(b) for b in batches(iter(samples), plan)]


ARC = np.clip(np.random.default_rng(0).lognormal(7.0, 0.6, 1000).astype(int), 100, 2048)
"""As a thousand ARC prompts are: a median of 1,100 tokens, a fifth of them cut at 2,048."""
TEXTS = np.random.default_rng(1).integers(50, 501, 1000)
CPU = {"shortest_row": 4096, "short_tail": True}


@pytest.mark.parametrize(("sizes", "most"), [(ARC, 0.045), (TEXTS, 0.02)], ids=["arc", "texts"])
@pytest.mark.parametrize(
    "plan", [Sizes(16384, None, 2048, shortest_row=1024), Sizes(4096, None, 2048, **CPU)], ids=["gpu", "cpu"]
)
def test_padding(sizes, most, plan):
    made = list(batches(make(sizes), plan))
    rows = [row for batch in made for group in batch.groups for row in group]
    computed = sum(batch.computed_tokens for batch in made)
    assert computed - len(rows) * made[0].length < plan.batch_tokens  # beyond it, no more than a part of one batch
    if plan.short_tail:
        assert 1 - sum(sizes) / computed < most
    else:
        assert 1 - sum(sizes) / (len(rows) * made[0].length) < most


@given(lengths, plans)
def test_halves_hold_the_same_samples_in_half_the_rows(sizes, plan):
    for batch in batches(make(sizes), plan):
        first, second = batch.halves()
        assert first.rows == second.rows == -(-batch.rows // 2)
        assert sorted(s.index for s in first.samples + second.samples) == sorted(s.index for s in batch.samples)


def test_a_window_is_bounded_for_any_stream():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield Sample(taken, "", np.zeros(1, np.int32), np.zeros(1, np.uint8))

    next(batches(endless(), Sizes(1 << 20, None, 2048)))
    assert taken <= 8193


def shards(made, bytes_per_token, shard_bytes):
    """The shards that these batches become."""
    return plan_shards([], lambda samples: [*samples, *made], bytes_per_token, shard_bytes)


@given(lengths, st.integers(1, 10**6))
def test_shards_take_whole_batches_in_order_up_to_their_size(sizes, limit):
    made = list(batches(make(sizes), Sizes(2048, None, 2048)))
    plans = list(shards(made, 100, limit))
    assert [batch for plan in plans for batch in plan.batches] == made
    for plan in plans:
        assert len(plan.batches) == 1 or sum(batch.stored_rows for batch in plan.batches) * 100 <= limit


def test_a_shard_of_tiny_rows_still_ends():
    one = tuple(make([1] * 1024))
    assert [len(plan.batches) for plan in shards([Batch(((one,),), 1024, 64)] * 5, 1, 1e12)] == [2, 2, 1]
    assert [len(plan.batches) for plan in shards([Batch(((one,),) * 2, 1024, 64)] * 5, 1, 1e12)] == [2, 2, 1]
    assert [len(plan.batches) for plan in shards([Batch(((one,),) * 16, 1024, 64)] * 3, 1, 1e12)] == [1, 1, 1]


def test_what_is_computed_is_every_groups_rectangle():
    a, b, c = make([3, 2, 2])
    batch = Batch((((a,), (b, c)), ()), rows=2, length=4)
    assert (batch.real_tokens, batch.computed_tokens) == (7, 2 * 2 * 4)


def test_a_shard_may_be_just_full():
    one, two = (Batch((((sample,),),), rows=1, length=4) for sample in make([4, 4]))
    assert [len(shard.batches) for shard in shards([one, two], 10, 80)] == [2]
    assert [len(shard.batches) for shard in shards([one, two], 10, 79)] == [1, 1]


def test_row_bytes():
    assert row_bytes([TapRows("residual.0", (896,), "bfloat16")] * 24) == 24 * 896 * 2 + 5
    assert row_bytes([TapRows("z.0", (4, 4), "float32"), TapRows("ids", (3,), "int32")]) == 64 + 12 + 5
