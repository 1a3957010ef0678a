"""One byte per number: what comes back is within what the format promises, and nothing else is accepted as it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench.stored import rounding
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import deserialize

import spile
from recomputing import Rows, recompute_with
from spile.errors import RunMismatch
from spile.models import layers as on_device
from spile.objects import open_folder
from spile.proof.shard_check import _INFINITY
from spile.proof.verification import verify
from spile.reading.export import ExportDtype
from spile.spec.run import StoreDtype
from spile.spec.safetensors import DTYPES
from spile.spec.sample import Sample
from spile.spec.taps import SCALED, STORED_TYPES, Tap
from spile.store.run import join_run
from spile.store.shard import LIMIT, SCALE, as_stored, decode, encode, split
from spile.store.writer import StreamWriter, join_stream
from world import TAPS, D, rows_of, run_identity, sample_of, stream_identity

_NUMBERS = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False) | st.floats(-300, 300, width=32)
_SMALLEST = 127 * 2.0**-126
"""Rows whose largest number is smaller are zero: docs/format.md says so."""


@pytest.mark.parametrize("dtype", SCALED)
@given(rows=hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.just(16)), elements=_NUMBERS))
def test_any_rows_come_back_within_what_is_promised(dtype: str, rows: np.ndarray) -> None:
    back = decode(*split(encode(rows, dtype), dtype))
    error = np.abs(back.astype(np.float64) - rows)
    assert back.dtype == np.float32
    assert (error <= rounding(rows.astype(np.float64), dtype) + _SMALLEST).all()
    assert not back[np.abs(rows).max(axis=1, initial=0) == 0].any()


@pytest.mark.parametrize("dtype", SCALED)
def test_what_is_promised_is_not_far_from_what_happens(dtype: str) -> None:
    """A bound of ten times the error would be kept by a broken encoder too."""
    rows = np.random.default_rng(0).standard_normal((4000, 64)).astype(np.float32)
    error = np.abs(decode(*split(encode(rows, dtype), dtype)) - rows)
    assert (error / rounding(rows.astype(np.float64), dtype)).max() > 0.95


@pytest.mark.parametrize("width", [2304, 4096, 5120])
def test_errors_on_real_shapes_are_those_of_the_docs(width: int) -> None:
    """Rows as models have them: a few dimensions, and the first token, hundreds of times as large as the rest."""
    source = np.random.default_rng(width)
    rows = source.standard_normal((256, width)).astype(np.float32)
    rows[:, :3] *= 40
    rows[0] *= 300
    largest = np.abs(rows).max(axis=1, keepdims=True)
    back = {dtype: decode(*split(np.asarray(on_device.encode(jnp.asarray(rows), dtype)), dtype)) for dtype in SCALED}
    assert (np.abs(back["int8"] - rows) <= largest / 254 * 1.0001).all()
    floor = np.maximum(np.abs(rows) / 17, largest / 229_376)
    assert (np.abs(back["float8_e4m3"] - rows) <= floor * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", SCALED)
def test_a_device_encodes_as_the_host_does(dtype: str) -> None:
    source = np.random.default_rng(1)
    rows = (source.standard_normal((500, 64)) * np.exp(8 * source.standard_normal((500, 1)))).astype(np.float32)
    rows[7], rows[8] = 0, 448
    here, there = encode(rows, dtype), np.asarray(jax.jit(lambda x: on_device.encode(x, dtype))(rows))
    numbers, scales = split(here, dtype)
    device_numbers, device_scales = split(there, dtype)
    np.testing.assert_allclose(scales, device_scales, rtol=2e-7)  # a compiler may multiply by 1 / 127
    step = 1 if dtype == "int8" else 0
    apart = np.abs(numbers.astype(np.float32) - device_numbers.astype(np.float32))
    assert apart.max() <= step
    assert (apart != 0).mean() < 0.01


@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.3e38, np.finfo(np.float32).max])
def test_a_row_that_cannot_be_decoded_has_a_nan_scale(dtype: str, bad: float) -> None:
    rows = np.ones((3, 16), np.float32)
    rows[1, 5] = bad
    assert np.isnan(split(encode(rows, dtype), dtype)[1]).tolist() == [False, True, False]
    device = on_device.encode(jnp.asarray(rows), dtype)
    assert np.asarray(on_device.finite_rows(device)).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", SCALED)
def test_the_largest_rows_are_finite_when_they_are_decoded(dtype: str) -> None:
    rows = np.full((2, 16), np.nextafter(np.float32(LIMIT), np.float32(0)))
    assert np.isfinite(decode(*split(encode(rows, dtype), dtype))).all()


def store_of(root: Path, dtype: str, count: int = 6, statistics: bool = False) -> StreamWriter:
    folder, run = open_folder(str(root)), run_identity(store_dtype=dtype)
    join_run(folder, run)
    store = join_stream(folder, 0, stream_identity(count), run)
    store.statistics = statistics
    samples = [sample_of(index) for index in range(count)]
    builder = store.begin(samples)
    for tap in range(len(TAPS)):
        row = 0
        for sample in samples:
            builder.write(tap, row, as_stored(rows_of(sample, tap, dtype="float32"), dtype))
            row += len(sample)
    store.commit([builder.finish()])
    return store


@pytest.mark.parametrize("dtype", SCALED)
def test_every_way_of_reading_gives_the_same_decoded_rows(tmp_path: Path, dtype: str) -> None:
    store_of(tmp_path, dtype, statistics=True)
    dataset = spile.open(str(tmp_path))
    wanted = {
        index: decode(*split(as_stored(rows_of(sample_of(index), 1, dtype="float32"), dtype), dtype))
        for index in range(6)
    }
    every = np.concatenate(list(wanted.values()))
    assert all(np.array_equal(dataset.sample(0, index).rows("attn.1"), rows) for index, rows in wanted.items())
    assert np.array_equal(np.concatenate(list(dataset.rows("attn.1", 7))), every)
    (batch,) = dataset.shuffled("attn.1", 10_000, context=True)
    assert batch.rows.dtype == np.float32
    order = np.lexsort((batch.positions, batch.samples))
    assert np.array_equal(batch.rows[order], every)
    statistics = dataset.stats("attn.1")
    np.testing.assert_allclose(statistics.mean, every.astype(np.float64).mean(0), rtol=1e-12)
    assert statistics.count == len(every)
    assert verify(str(tmp_path)).ok


@pytest.mark.parametrize("dtype", SCALED)
def test_any_safetensors_reader_reads_it(tmp_path: Path, dtype: str) -> None:
    store = store_of(tmp_path, dtype)
    (file,) = store.ledger.files
    found = dict(deserialize((tmp_path / "tpu_0" / file.name).read_bytes()))
    assert found["attn.1"]["dtype"] == ("I8" if dtype == "int8" else "F8_E4M3")
    kind = np.int8 if dtype == "int8" else ml_dtypes.float8_e4m3fn
    rows = np.frombuffer(found["attn.1"]["data"], kind).reshape(found["attn.1"]["shape"]).astype(np.float32)
    scales = np.frombuffer(found["attn.1" + SCALE]["data"], "<f4")
    assert np.array_equal(rows * scales[:, None], next(spile.open(str(tmp_path)).rows("attn.1")))


@pytest.mark.parametrize(("begun", "resumed"), [("int8", "bfloat16"), ("bfloat16", "int8"), ("int8", "float8_e4m3")])
def test_a_run_keeps_its_dtype(tmp_path: Path, begun: str, resumed: str) -> None:
    store_of(tmp_path, begun)
    wanted = f"with store_dtype {begun}, but this command asks for store_dtype {resumed}. Give the same settings"
    with pytest.raises(RunMismatch, match=wanted):
        join_run(open_folder(str(tmp_path)), run_identity(store_dtype=resumed))


def test_rows_that_would_leave_what_follows_unaligned_stay_bfloat16() -> None:
    assert Tap("residual", 0).stored_as("int8", 4096) == "int8"
    assert Tap("logits", top=10).stored_as("int8", 10) == "bfloat16"
    assert Tap("loss").stored_as("int8", 1) == "float32"
    assert Tap("logits_ids", top=8).stored_as("float8_e4m3", 8) == "int32"


@pytest.mark.parametrize("dtype", SCALED)
def test_a_scale_or_number_that_is_none_is_found(tmp_path: Path, dtype: str) -> None:
    folder, run = open_folder(str(tmp_path)), run_identity(store_dtype=dtype)
    join_run(folder, run)
    store = join_stream(folder, 0, stream_identity(1), run)
    builder = store.begin([Sample(0, "t", np.zeros(5, np.int32), np.zeros(5, np.uint8))])
    for tap in range(len(TAPS)):
        rows = np.ones((5, D), np.float32)
        rows[3, 2] = np.nan if tap == 1 else 1
        builder.write(tap, 0, as_stored(rows, dtype))
    store.commit([builder.finish()])
    (problem, *_) = verify(str(tmp_path)).all_problems
    assert "attn.1.scale has 1 values that are NaN or infinite" in f"{problem.text} {verify(str(tmp_path))}"


@pytest.mark.parametrize("dtype", SCALED)
def test_recompute_allows_for_the_error_of_the_encoding_and_no_more(tmp_path: Path, dtype: str) -> None:
    store_of(tmp_path, dtype)

    def again(push: float) -> Rows:
        def rows(tokens: np.ndarray, taps: tuple[str, ...]) -> list[np.ndarray]:
            sample = Sample(0, "", tokens, np.zeros(len(tokens), np.uint8))
            return [push * rows_of(sample, tap, dtype="float32") for tap in range(len(taps))]

        return rows

    report = verify(str(tmp_path), recompute=recompute_with(again(1.0)), k=6)
    assert not report.all_problems
    assert report.recomputed is not None
    for noise in report.recomputed.taps.values():
        assert noise.fresh == noise.stored
        assert {"int8": 0.002, "float8_e4m3": 0.01}[dtype] < noise.fresh < {"int8": 0.02, "float8_e4m3": 0.04}[dtype]
    push = {"int8": 1.05, "float8_e4m3": 1.25}[dtype]
    report = verify(str(tmp_path), recompute=recompute_with(again(push)), k=6)
    assert {problem.kind for problem in report.all_problems} == {"wrong"}


def test_every_stored_type_is_declared_once() -> None:
    assert {*get_args(StoreDtype), "int32"} == set(STORED_TYPES), "int32: ids of tokens and positions"
    assert {*get_args(ExportDtype)} == {name for name in get_args(StoreDtype) if name not in SCALED}
    for name, stored in STORED_TYPES.items():
        assert DTYPES[stored.code].itemsize == stored.bytes
        assert DTYPES[stored.code].name.removesuffix("fn") == name


@pytest.mark.parametrize("dtype", get_args(StoreDtype))
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_in_the_bytes_of_every_type(dtype: str, value: float) -> None:
    """A scaled type marks the row in its float32 scale."""
    rows = as_stored(np.array([[1.0, value, 448.0, -448.0]], np.float32), dtype)
    code = "F32" if dtype in SCALED else STORED_TYPES[dtype].code
    rows = split(rows, dtype)[1] if dtype in SCALED else rows
    ones = _INFINITY[code]
    assert np.count_nonzero(rows.view(ones.dtype) & ones == ones) == 1


def test_every_bit_pattern_of_float8_that_is_nan_is_found() -> None:
    bits, ones = np.arange(256, dtype=np.uint8), _INFINITY["F8_E4M3"]
    assert ((bits & ones == ones) == np.isnan(bits.view(DTYPES["F8_E4M3"]).astype(np.float32))).all()
