"""Statistics: equal to a float64 recomputation, independent of the order of merges, and the same from stored rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.store.run import join_run
from spile.store.statistics import TapAccumulator, TapStatistics
from spile.store.writer import join_stream
from world import TAPS, produce, rows_of, run_identity, sample_of, stream_identity, write_shard


def taken(rows: np.ndarray, first: int = 0) -> TapStatistics:
    found = TapAccumulator(rows.shape[1])
    place = np.arange(first, first + len(rows))
    half = len(rows) // 2
    for part in (slice(0, half), slice(half, None)):
        found.add(rows[part], place[part] % 50, place[part] // 7, place[part] % 7)
    return found.result()


def test_it_equals_a_float64_recomputation() -> None:
    source = np.random.default_rng(0)
    wide = source.standard_normal((5000, 32)) * 3 + np.linspace(-1000, 1000, 32)
    for dtype in ("float32", "float16", "bfloat16"):
        rows = wide.astype(dtype)
        exact = rows.astype(np.float64)
        found = taken(rows)
        assert found.count == 5000
        np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.variance, exact.var(0), rtol=1e-7)
        norms = np.linalg.norm(exact, axis=1)
        for q in (0.01, 0.5, 0.9, 0.999):
            assert found.norm_quantile(q) == pytest.approx(np.quantile(norms, q), rel=0.03)
        assert [row.norm for row in found.top] == pytest.approx(np.sort(norms)[::-1][:8])


def test_rows_that_are_no_numbers_are_counted_and_make_no_noise() -> None:
    rows = np.full((70, 3), np.nan, np.float32)
    rows[:40] = 2.0
    rows[40] = np.inf
    found = taken(rows.astype("bfloat16"))
    assert (found.count, sum(found.norms.values())) == (70, 40)
    assert [row.norm for row in found.top] == [pytest.approx(12**0.5)] * 8
    assert TapAccumulator(3).result().count == taken(rows[:0]).count == 0


@given(st.permutations(range(6)), st.integers(1, 5))
def test_merging_in_any_order_and_grouping_gives_the_same(order: list[int], cut: int) -> None:
    source = np.random.default_rng(1)
    parts = [taken(source.standard_normal((40 + n, 8)).astype(np.float32) * 10.0**n, 100 * n) for n in range(6)]
    whole = TapStatistics.merged(parts)
    mixed = [parts[n] for n in order]
    again = TapStatistics.merged([TapStatistics.merged(mixed[cut:]), TapStatistics.merged(mixed[:cut])])
    assert np.array_equal(whole.mean, again.mean)
    assert np.array_equal(whole.variance, again.variance)
    assert (whole.count, whole.norms, whole.top) == (again.count, again.norms, again.top)
    again = TapStatistics.from_json(json.loads(json.dumps(whole.to_json())))
    assert again is not None
    assert again.norms == whole.norms


def test_sinks_are_found() -> None:
    rows = np.random.default_rng(2).standard_normal((1000, 16)).astype(np.float32)
    rows[[3, 500]] *= 300
    found = taken(rows)
    assert found.sinks == 2
    assert {(row.sample, row.position) for row in found.top if row.norm > found.sink_norm} == {(0, 3), (71, 3)}
    assert found.summary()["sink_tokens"] == [0, 3]


def test_taken_while_writing_or_from_rows_later_they_are_the_same(tmp_path: Path) -> None:
    with_them, without = open_folder(str(tmp_path / "a")), open_folder(str(tmp_path / "b"))
    produce(without, 45, cut=4)
    run = run_identity()
    join_run(with_them, run)
    store = join_stream(with_them, 0, stream_identity(45), run)
    store.statistics = True
    samples = [sample_of(index) for index in range(40)]
    for first in range(0, 40, 8):
        part = samples[first : first + 8]
        builder = store.begin(part)
        write_shard(builder, part, 6)
        store.commit([builder.finish(6)])  # a shard that ends early
    written = store.finish()
    assert set(written["statistics"]) == {str(tap) for tap in TAPS}
    kept = [sample for first in range(0, 40, 8) for sample in samples[first : first + 6]]
    rows = np.concatenate([rows_of(sample, 1) for sample in kept]).astype(np.float64)
    dataset = open_dataset(with_them)
    found = dataset.stats("attn.1")
    np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.variance, rows.var(0), rtol=1e-10)
    assert found.count == len(rows) == written["statistics"]["attn.1"]["count"]
    assert all("statistics" in shard.to_json() for stream in dataset.streams for shard in stream.shards)
    assert [p for p in verify(with_them, max_samples=1).problems if p.kind == "damaged"] == []
    for stream in verify(with_them).streams:
        assert all(problem.kind == "missing" for problem in stream.problems)
    older = open_dataset(without).stats("attn.1")
    whole = np.concatenate(list(open_dataset(without).rows("attn.1"))).astype(np.float64)
    np.testing.assert_allclose(older.mean, whole.mean(0), rtol=1e-12, atol=1e-15)
    assert older.count == len(whole)
