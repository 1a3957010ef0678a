from __future__ import annotations

from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.compute import sizes as sizing
from spile.spec.run import DataSpec, RunSpec

ALL_LAYERS = 43_013
"""Bytes a token of Qwen2.5-0.5B's 24 layers."""


def spec(output: str = "out", **more: object) -> RunSpec:
    return RunSpec(model="m", data=DataSpec(dataset="d", max_seq_length=2048), output=output, **more)  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(sizing.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(sizing, "host_memory", lambda: 128 << 30)


def test_a_gpu_fills_several_files_of_a_folder_and_one_object_of_a_bucket(gpu: None) -> None:
    local, bucket = sizing.choose_sizes(spec(), ALL_LAYERS), sizing.choose_sizes(spec("gs://b/run"), ALL_LAYERS)
    assert (local.writers, local.finishers, local.in_flight) == (8, None, 10)
    assert (bucket.writers, bucket.finishers, bucket.in_flight) == (1, 2, 4)


def test_a_batch_is_a_fraction_of_a_shard_between_what_a_device_needs_and_what_it_can_use(gpu: None) -> None:
    assert sizing.choose_sizes(spec(), ALL_LAYERS).batch_tokens == 4_096
    assert sizing.choose_sizes(spec(), 1_797).batch_tokens == 32_768
    assert sizing.choose_sizes(spec(), 200_709).batch_tokens == 4_096


def test_what_the_user_says_counts(gpu: None) -> None:
    assert sizing.choose_sizes(spec(batch_tokens=1000), ALL_LAYERS).batch_tokens == 1000
    by_rows = sizing.choose_sizes(spec(batch_size=3), ALL_LAYERS)
    assert (by_rows.batch_tokens, by_rows.batch_size) == (3 * 2048, 3)


def test_on_a_small_host_fewer_batches_are_in_flight(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "host_memory", lambda: 8 << 30)
    assert sizing.choose_sizes(spec(), ALL_LAYERS).in_flight == 10
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    assert sizing.choose_sizes(spec(), ALL_LAYERS).in_flight == 2


def test_batches_in_flight_fit_into_a_pool_of_a_power_of_two(gpu: None) -> None:
    chosen = sizing.choose_sizes(spec(), ALL_LAYERS)
    assert chosen.in_flight is not None
    assert (chosen.in_flight + sizing.UNRELEASED) * chosen.batch_tokens * ALL_LAYERS <= 2 << 30


@given(st.integers(1, 64), st.integers(1, 1 << 40), st.integers(1 << 20, 1 << 45))
def test_rows_in_flight_stay_within_their_share_of_memory(writers: int, batch: int, memory: int) -> None:
    chosen = sizing.in_flight(writers, batch, memory)
    assert chosen >= 2
    assert chosen == 2 or chosen * batch <= memory // 4


def test_the_memory_of_a_container_is_what_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, unlimited, absent = (str(tmp_path / name) for name in ("limit", "unlimited", "absent"))
    Path(limit).write_text("123456789\n")
    Path(unlimited).write_text("max\n")
    monkeypatch.setattr(sizing, "_CGROUP_LIMITS", (absent, unlimited))
    whole = sizing.host_memory()
    assert whole > 123456789
    monkeypatch.setattr(sizing, "_CGROUP_LIMITS", (limit, unlimited, absent))
    assert sizing.host_memory() == 123456789
