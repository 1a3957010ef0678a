"""Hours and dollars: arithmetic that a user pays by."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.errors import SpecError
from spile.planning.cost import Lengths, Rates, Volume, estimate, refuse_over_budget
from spile.planning.machines import known_machines, parse_machine

VOLUME = Volume(samples=1000, tokens=1_000_000, bytes_per_token=43_013, shard_bytes=1e9)


def test_a_run_by_hand() -> None:
    machine = parse_machine("v5e-4")
    found = estimate(VOLUME, machine, flops_per_token=1e9, rates=Rates(efficiency=0.5, sink_bytes=1e9, padding=1.0))
    assert found.limits["model"] == pytest.approx(1e6 * 1e9 / (4 * 197e12 * 0.5) / 3600)
    assert found.limits["sink"] == pytest.approx(43.013 / 3600)
    assert found.slowest == "sink"
    assert found.dollars.on_demand == pytest.approx(43.013 / 3600 * 4 * 1.2)
    assert (found.volume.bytes, found.volume.shards) == (43_013_000_000, 44)


def test_measured_rates_replace_the_peak() -> None:
    found = estimate(VOLUME, parse_machine("v3-8"), flops_per_token=1e30, rates=Rates(tokens_per_second=500.0))
    assert found.hours == pytest.approx(2000 / 3600)
    assert found.tokens_per_second == pytest.approx(500)


@given(
    st.sampled_from([machine for machine in known_machines() if machine.price.on_demand]),
    st.integers(1, 64),
    st.floats(1e6, 1e12),
)
def test_more_workers_are_faster_and_no_dearer(machine, workers: int, flops: float) -> None:  # type: ignore[no-untyped-def]
    one = estimate(VOLUME, machine, flops_per_token=flops)
    many = estimate(VOLUME, machine, flops_per_token=flops, workers=workers)
    assert many.hours == pytest.approx(one.hours / workers)
    assert many.dollars.on_demand == pytest.approx(one.dollars.on_demand)
    assert many.dollars.preemptible < many.dollars.on_demand
    json.dumps(many.record())


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=50), st.integers(0, 10_000))
def test_tokens_are_exact_when_all_were_counted(lengths: list[int], more: int) -> None:
    whole = Lengths(lengths, len(lengths))
    assert (whole.tokens, whole.error) == (sum(lengths), 0.0)
    part = Lengths(lengths, len(lengths) + more)
    assert part.tokens == pytest.approx(part.mean * part.samples, abs=1)
    assert part.error >= 0


def test_a_sample_says_how_sure_it_is() -> None:
    assert Lengths([10, 10, 10], 1000).error == 0
    assert Lengths([5, 15] * 50, 1000).error == pytest.approx(0.5 * (100 / 99) ** 0.5 / 10 * 0.9**0.5)


def test_the_budget() -> None:
    found = estimate(VOLUME, parse_machine("v5e-4"), flops_per_token=1e13)
    cost = found.dollars.on_demand
    refuse_over_budget(found, cost, preemptible=False)
    with pytest.raises(SpecError) as caught:
        refuse_over_budget(found, cost * 0.5, preemptible=False)
    line = str(caught.value)
    assert "over budget on 1 × v5litepod-4 on demand: expected at most $" in line
    assert "--preemptible would fit, or --max-samples 500 would fit" in line
    with pytest.raises(SpecError, match="preemptible: expected at most") as caught:
        refuse_over_budget(found, 0.01, preemptible=True)
    assert "--preemptible" not in str(caught.value)
    with pytest.raises(SpecError) as caught:
        refuse_over_budget(found, found.dollars.preemptible * 0.9, preemptible=False)
    assert "--preemptible" not in str(caught.value)  # it would not fit either


def test_storage_a_month() -> None:
    found = estimate(VOLUME, parse_machine("v5e-4"), flops_per_token=1.0, storage_gb_month=0.02)
    assert found.storage_month == pytest.approx(43.013 * 0.02)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rates(efficiency=1.5), "--efficiency: expected at most 1"),
        (lambda: Rates(padding=0), "padding: expected more than 0"),
        (
            lambda: estimate(VOLUME, parse_machine("v3-8"), flops_per_token=1, workers=0),
            "--workers: expected at least 1, found 0",
        ),
    ],
)
def test_mistakes(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError) as caught:
        make()
    assert says in str(caught.value)
