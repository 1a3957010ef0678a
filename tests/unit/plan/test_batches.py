import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spile.plan.batches import Batch, BatchPlan, batches, bucket
from spile.plan.shards import ShardBatches, row_bytes, shards
from spile.spec.sample import Sample
from spile.spec.taps import TapRows


def make(lengths):
    return [Sample(i, f"t{i}", np.zeros(n, np.int32), np.zeros(n, np.uint8)) for i, n in enumerate(lengths)]


lengths = st.lists(st.integers(1, 2048), min_size=1, max_size=200)
plans = st.builds(
    BatchPlan,
    batch_tokens=st.integers(64, 8192),
    batch_size=st.none() | st.integers(1, 9),
    longest=st.just(2048),
    groups=st.integers(1, 8),
)


@given(st.integers(1, 100_000))
def test_a_bucket_holds_its_sample_with_little_room_to_spare(length):
    padded = bucket(length, 100_000)
    assert length <= padded <= max(length * 1.125 + 1, length + 63)


def test_buckets_are_few():
    assert len({bucket(n, 2048) for n in range(1, 2049)}) <= 24


def test_no_bucket_passes_the_longest_sample():
    assert bucket(2000, 2001) == 2001


@given(lengths, plans)
def test_every_sample_is_in_one_batch_and_fits(sizes, plan):
    found = []
    for batch in batches(make(sizes), plan):
        assert len(batch.groups) == plan.groups
        assert all(len(group) <= batch.rows for group in batch.groups)
        assert all(len(sample) <= batch.length for sample in batch.samples)
        assert batch.rows == 1 or batch.rows * batch.length <= plan.batch_tokens
        assert plan.batch_size is None or batch.rows <= plan.batch_size
        found += [sample.index for sample in batch.samples]
    assert sorted(found) == list(range(len(sizes)))


@given(lengths, plans)
def test_the_same_samples_give_the_same_batches(sizes, plan):
    def shape(batch: Batch):
        return batch.rows, batch.length, [sample.index for sample in batch.samples]

    samples = make(sizes)
    assert [shape(b) for b in batches(samples, plan)] == [shape(b) for b in batches(iter(samples), plan)]


def test_padding_is_under_eight_percent_on_lengths_like_arcs():
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(6.7, 0.6, 2000).astype(int), 20, 2048)
    for tokens in (4096, 16384, 32768):
        made = list(batches(make(sizes), BatchPlan(tokens, None, 2048)))
        computed = sum(batch.computed_tokens for batch in made)
        assert 1 - sum(batch.real_tokens for batch in made) / computed < 0.08


@given(lengths, plans)
def test_halves_hold_the_same_samples_in_half_the_rows(sizes, plan):
    for batch in batches(make(sizes), plan):
        first, second = batch.halves()
        assert first.rows == second.rows == -(-batch.rows // 2)
        assert sorted(s.index for s in first.samples + second.samples) == sorted(s.index for s in batch.samples)


def test_a_window_is_bounded_whatever_the_stream():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield Sample(taken, "", np.zeros(1, np.int32), np.zeros(1, np.uint8))

    next(batches(endless(), BatchPlan(1 << 20, None, 2048)))
    assert taken <= 8192


@given(lengths, st.integers(1, 10**6))
def test_shards_take_whole_batches_in_order_up_to_their_size(sizes, limit):
    made = list(batches(make(sizes), BatchPlan(2048, None, 2048)))
    plans = list(shards(made, 100, limit))
    assert [batch for plan in plans for batch in plan.batches] == made
    for plan in plans:
        assert len(plan.batches) == 1 or plan.tokens * 100 <= limit


def test_a_shard_of_tiny_rows_still_ends():
    one = tuple(make([1] * 1024))
    assert [len(plan.batches) for plan in shards([Batch((one,), 1024, 64)] * 5, 1, 1e12)] == [2, 2, 1]
    assert [len(plan.batches) for plan in shards([Batch((one,) * 2, 1024, 64)] * 5, 1, 1e12)] == [2, 2, 1]
    assert [len(plan.batches) for plan in shards([Batch((one,) * 16, 1024, 64)] * 3, 1, 1e12)] == [1, 1, 1]
    assert ShardBatches().tokens == 0


def test_what_is_computed_is_every_groups_rectangle():
    a, b, c = make([3, 2, 2])
    batch = Batch(((a, b), (c,)), rows=2, length=4)
    assert (batch.real_tokens, batch.computed_tokens) == (7, 2 * 2 * 4)


def test_a_shard_may_be_just_full():
    one, two = (Batch(((sample,),), rows=1, length=4) for sample in make([4, 4]))
    assert [len(shard.batches) for shard in shards([one, two], 10, 80)] == [2]
    assert [len(shard.batches) for shard in shards([one, two], 10, 79)] == [1, 1]


def test_row_bytes():
    assert row_bytes([TapRows("residual.0", (896,), "bfloat16")] * 24) == 24 * 896 * 2 + 5
    assert row_bytes([TapRows("z.0", (4, 4), "float32"), TapRows("ids", (3,), "int32")]) == 64 + 12 + 5
