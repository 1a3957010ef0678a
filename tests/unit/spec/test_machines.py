"""Every spelling of a topology is one machine, and its price can be overridden."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.errors import SpecError
from spile.planning.machines import (
    _OTHER_SPELLINGS,
    GENERATIONS,
    PRICES_AS_OF,
    known_machines,
    list_prices,
    parse_machine,
    prices_from,
)
from spile.spec.run import parse_mesh_shape


@pytest.mark.parametrize(
    "spelling",
    ["v5litepod-64", "v5e-64", "v5e:8x8", "V5LITEPOD-64", "v5lite_pod:8x8", "v5litepod:8x8", " v5e-8x8 ", "tpu-v5e-64"],
)
def test_spellings_of_one_machine(spelling: str) -> None:
    machine = parse_machine(spelling)
    assert (machine.name, machine.topology) == ("v5litepod-64", "v5e:8x8")
    assert (machine.chips, machine.hosts, machine.chips_per_host, machine.devices) == (64, 16, 4, 64)


@pytest.mark.parametrize(
    ("spelling", "topology", "chips", "cores", "devices", "hosts", "hbm"),
    [
        ("v2-8", "v2:2x2x1", 4, 8, 8, 1, 16),
        ("v3-8", "v3:2x2x1", 4, 8, 8, 1, 32),
        ("v3-32", "v3:4x4x1", 16, 32, 32, 4, 32),
        ("v4-8", "v4:2x2x1", 4, 8, 4, 1, 32),
        ("v4-16", "v4:2x2x2", 8, 16, 8, 2, 32),
        ("v5p-8", "v5p:2x2x1", 4, 8, 4, 1, 95),
        ("v5e-1", "v5e:1x1", 1, 1, 1, 1, 16),
        ("v5e-8", "v5e:2x4", 8, 8, 8, 1, 16),
        ("v5e-16", "v5e:4x4", 16, 16, 16, 4, 16),
        ("v5e-256", "v5e:16x16", 256, 256, 256, 64, 16),
        ("v6e-8", "v6e:2x4", 8, 8, 8, 1, 32),
        ("v6e-64", "v6e:8x8", 64, 64, 64, 16, 32),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8, 8, 1, 192),
        ("ironwood-128", "tpu7x:4x4x4", 64, 128, 128, 16, 192),
    ],
)
def test_sizes(spelling: str, topology: str, chips: int, cores: int, devices: int, hosts: int, hbm: int) -> None:
    machine = parse_machine(spelling)
    assert machine.topology == topology
    assert (machine.chips, machine.cores, machine.devices, machine.hosts) == (chips, cores, devices, hosts)
    assert machine.hbm_bytes == hbm << 30
    assert machine.hbm_per_device * machine.devices == machine.hbm_bytes * machine.chips


@given(st.sampled_from(known_machines()))
def test_both_own_spellings_lead_back(machine) -> None:  # type: ignore[no-untyped-def]
    assert parse_machine(machine.name) == machine
    assert parse_machine(machine.topology) == machine
    assert machine.chips_per_host * machine.hosts == machine.chips
    assert machine.price.preemptible < machine.price.on_demand or machine.generation == "tpu7x"


def test_no_spelling_means_two_generations() -> None:
    spellings = [word for row in GENERATIONS for word in {row.name, row.accelerator, *_OTHER_SPELLINGS[row.name]}]
    assert len(spellings) == len(set(spellings))
    assert all(word == word.lower() for word in spellings)


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("h100", "--topology: expected a machine such as v3-8, v4-8, v5litepod-64"),
        ("v5e", "found 'v5e'"),
        ("v5e-7", "v5e has no such slice: expected one of v5litepod-1 (1x1), v5litepod-4 (2x2)"),
        ("v4-9", "v4 has no such slice"),
        ("v5e:3x5", "v5e has no such slice"),
    ],
)
def test_unknown_spellings_name_the_known(spelling: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_machine(spelling)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prices_are_dated_and_a_whole_machines() -> None:
    prices = list_prices()
    assert prices.as_of == PRICES_AS_OF
    assert parse_machine("v3-8").price.on_demand == pytest.approx(8.0)
    assert parse_machine("v5e-64").price.on_demand == pytest.approx(64 * 1.20)


def test_a_file_overrides_prices_and_adds_machines() -> None:
    raw = tomllib.loads(
        """
        as_of = "2026-11-01"
        storage_gb_month = 0.01
        [chip_hour]
        v5litepod = { on_demand = 1.0, preemptible = 0.25 }
        [machine_hour]
        v3-8 = { on_demand = 4.0, preemptible = 1.35 }
        [machines.h100-8]
        chips = 8
        hbm_gib = 80
        tflops = 989
        on_demand = 24
        """
    )
    prices = prices_from(raw, "prices.toml")
    assert (prices.as_of, prices.storage_gb_month) == ("2026-11-01", 0.01)
    assert parse_machine("v5e:2x2", prices).price.preemptible == pytest.approx(1.0)
    assert parse_machine("v3-8", prices).price.on_demand == 4.0
    assert parse_machine("v3-32", prices).price == parse_machine("v3-32").price
    assert parse_machine("H100-8", prices).chips == 8
    with pytest.raises(SpecError, match="h100-8"):
        parse_machine("tpu", prices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "price = 3",
            "prices.toml: expected as_of, storage_gb_month, chip_hour, machine_hour, machines, found 'price'",
        ),
        ("chip_hour = { v9 = { on_demand = 1 } }", "prices.toml: chip_hour: expected one of v2, v3, v4"),
        ("chip_hour = { v4 = 3 }", "prices.toml: chip_hour.v4: expected { on_demand = …"),
        ("chip_hour = { v4 = { on_demand = -3 } }", "expected a number, 0 or more, found -3"),
        ("machines = { x = { chips = 8 } }", "prices.toml: machines.x: expected chips, hbm_gib, tflops"),
        (
            "machines = { x = { chips = 0, hbm_gib = 1, tflops = 1, on_demand = 1 } }",
            "x.chips: expected a whole number",
        ),
        ("machines = { x = { chips = 2.5, hbm_gib = 1, tflops = 1, on_demand = 1 } }", "1 or more, found 2.5"),
        ("machines = { x = { chips = 1, hosts = 0, hbm_gib = 1, tflops = 1 } }", "x.hosts: expected a whole number"),
        ("machines = { x = { chips = 1, hbm_gib = 1, tflops = 0, on_demand = 1 } }", "x.tflops: expected more than 0"),
        ("machines = { x = { chips = 8, hosts = 3, hbm_gib = 1, tflops = 1, on_demand = 1 } }", "8 chips, 3 hosts"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        prices_from(tomllib.loads(text), "prices.toml")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shape"), [("16,16", (16, 16)), ("16x16", (16, 16)), ("(4, 2)", (4, 2)), ("8", (8, 1)), ("1,1", (1, 1))]
)
def test_mesh_shapes(text: str, shape: tuple[int, int]) -> None:
    assert parse_mesh_shape(text) == shape


@pytest.mark.parametrize("text", ["", "0,4", "2,2,2", "a,b", "-1,2"])
def test_wrong_mesh_shapes(text: str) -> None:
    with pytest.raises(SpecError, match="--mesh-shape: expected DATA,MODEL such as 16,16, found"):
        parse_mesh_shape(text)


@pytest.mark.parametrize(
    ("spelling", "grid"), [("v5p-384", "4x4x12"), ("v5p:4x4x12", "4x4x12"), ("v5p-12288", "16x16x24")]
)
def test_v5p_has_shapes_that_v4_does_not_have(spelling: str, grid: str) -> None:
    assert parse_machine(spelling).grid == grid
    with pytest.raises(SpecError, match="v4 has no such slice"):
        parse_machine(spelling.replace("v5p", "v4"))
