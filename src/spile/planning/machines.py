"""Machine types: one table with every spelling of a topology, its chips, hosts, memory and price.

``v5litepod-64``, ``v5e-64``, ``v5e:8x8`` and ``V5LITE_POD:8x8`` are one machine. In a name with a dash the number
counts chips for v5e and v6e and TensorCores (two per chip) for all others; a colon precedes the chips' grid.

Prices are list prices of a US region, per chip and hour, as of :data:`PRICES_AS_OF`. They change, and spot prices
change monthly: a TOML file overrides them (``spile plan --prices prices.toml``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from spile.errors import SpecError

PRICES_AS_OF = "2025-11"

GIB = 1 << 30
_CHIPS_PER_HOST = 4

Shape = tuple[int, ...]

_V5E_SHAPES: tuple[Shape, ...] = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_V3_SHAPES: tuple[Shape, ...] = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
_V4_SHAPES: tuple[Shape, ...] = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8)),
    *((4, 8, 8), (8, 8, 8), (8, 8, 12), (8, 8, 16), (8, 16, 16), (16, 16, 16)),
)
_V5P_SHAPES: tuple[Shape, ...] = (*_V4_SHAPES[:6], (4, 4, 12), *_V4_SHAPES[6:], (16, 16, 24))
_TPU7X_SHAPES: tuple[Shape, ...] = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)),
    *((4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16)),
)


@dataclass(frozen=True)
class Price:
    """Dollars."""

    on_demand: float
    preemptible: float

    def times(self, factor: float) -> Price:
        return Price(self.on_demand * factor, self.preemptible * factor)


@dataclass(frozen=True)
class Generation:
    """One generation of TPU: a row of the table."""

    name: str
    """The name in JAX's compiler, before the colon: ``v5e``."""
    accelerator: str
    """The name in the Cloud TPU API, before the dash: ``v5litepod``. TPU7x, which it does not have: as in xpk."""
    cores_per_chip: int
    """If it is not 1, the number after the dash counts cores instead of chips."""
    devices_per_chip: int
    """How many devices JAX sees: both cores of a v2, v3 or TPU7x chip, one for all others."""
    one_host_chips: tuple[int, ...]
    """Sizes, in chips, that are a single host. Larger slices have hosts of four chips."""
    shapes: tuple[Shape, ...]
    """The available grids, smallest first."""
    hbm_gib: float
    """Memory per chip."""
    tflops: float
    """Peak of a chip in bf16."""
    gke: str
    """The value of ``cloud.google.com/gke-tpu-accelerator``."""
    price: Price
    """Per chip and hour; 0 if it is not known."""
    tpu_api: bool = True
    """Whether the Cloud TPU API creates it. Google adds no generations to it; GKE and Compute Engine have all."""


# Sources: Cloud TPU's system-architecture and pricing pages. The $4.00 and $1.35 for a v3-8 in the old guides are not
# its list prices.
# fmt: off
GENERATIONS: tuple[Generation, ...] = (
    Generation("v2", "v2", 2, 2, (4,), _V3_SHAPES[:6], 16, 46, "tpu-v2-podslice", Price(1.125, 0.3375)),
    Generation("v3", "v3", 2, 2, (4,), _V3_SHAPES, 32, 123, "tpu-v3-slice", Price(2.00, 0.60)),
    Generation("v4", "v4", 2, 1, (4,), _V4_SHAPES, 32, 275, "tpu-v4-podslice", Price(3.22, 0.966)),
    Generation("v5e", "v5litepod", 1, 1, (1, 4, 8), _V5E_SHAPES, 16, 197, "tpu-v5-lite-podslice", Price(1.2, 0.6)),
    Generation("v5p", "v5p", 2, 1, (4,), _V5P_SHAPES, 95, 459, "tpu-v5p-slice", Price(4.20, 2.10)),
    Generation("v6e", "v6e", 1, 1, (1, 4, 8), _V5E_SHAPES, 32, 918, "tpu-v6e-slice", Price(2.70, 1.35)),
    Generation("tpu7x", "tpu7x", 2, 2, (4,), _TPU7X_SHAPES, 192, 2307, "tpu7x", Price(0, 0), tpu_api=False),
)
# fmt: on

_OTHER_SPELLINGS = {
    "v2": ("tpu-v2",),
    "v3": ("tpu-v3",),
    "v4": ("tpu-v4", "v4pod", "v4_pod"),
    "v5e": ("v5lite", "v5lite_pod", "v5litepodslice", "tpu-v5e", "tpu-v5-lite-podslice"),
    "v5p": ("v5", "v5p_pod", "tpu-v5p"),
    "v6e": ("v6lite", "v6lite_pod", "trillium", "tpu-v6e", "tpu-v6e-slice"),
    "tpu7x": ("tpu7", "v7x", "ironwood"),
}

BY_SPELLING = {
    spelling: generation
    for generation in GENERATIONS
    for spelling in (generation.name, generation.accelerator, *_OTHER_SPELLINGS[generation.name])
}


@dataclass(frozen=True)
class Machine:
    """A slice of a generation, or a machine that a user's price file names."""

    name: str
    """As Cloud TPU's API spells it: ``v5litepod-64``."""
    topology: str
    """As JAX's compiler spells it: ``v5e:8x8``."""
    generation: str
    shape: Shape
    chips: int
    cores: int
    devices: int
    """As JAX counts them."""
    hosts: int
    hbm_bytes: int
    """Memory per chip."""
    tflops: float
    """Peak of a chip in bf16."""
    price: Price
    """Per hour, for all chips; 0 if it is not known."""
    gke: str = ""
    tpu_api: bool = False
    """Whether the Cloud TPU API creates it."""

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def hbm_per_device(self) -> int:
        """Bytes of memory that one JAX device can use."""
        return self.hbm_bytes * self.chips // self.devices

    @property
    def grid(self) -> str:
        return "x".join(map(str, self.shape))


@dataclass(frozen=True)
class Prices:
    """Prices from the list or from a user's file, and their date."""

    as_of: str
    source: str
    chip_hour: Mapping[str, Price]
    """By generation."""
    machine_hour: Mapping[str, Price] = field(default_factory=dict)
    """By the name of a machine; replaces the price of its generation."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """Machines that the user defines, such as GPUs."""
    storage_gb_month: float = 0.020
    """Dollars per GB (10⁹ bytes) and month: standard storage in one region."""

    def warning(self, today: date) -> str:
        """Return a warning if the prices are a year old; otherwise, or if the date is unknown, an empty string."""
        found = re.match(r"(\d{4})-(0[1-9]|1[0-2])\b", self.as_of)
        if found is None or today < date(int(found[1]) + 1, int(found[2]), 1):
            return ""
        return f"These prices are from {self.as_of}, a year ago or more: check them before you rely on them."

    def of(self, machine: Machine) -> Price:
        """Return the price of the whole machine per hour."""
        own = self.machine_hour.get(machine.name)
        return own or self.chip_hour[machine.generation].times(machine.chips)


def list_prices() -> Prices:
    return Prices(PRICES_AS_OF, "list prices, US", {generation.name: generation.price for generation in GENERATIONS})


def parse_machine(text: str, prices: Prices | None = None) -> Machine:
    """Return the machine, with its price, for any spelling of a topology."""
    prices = prices or list_prices()
    name = text.strip().lower()
    if name in prices.machines:
        return prices.machines[name]
    found = re.fullmatch(r"(?P<family>.+?)[:-](?P<size>\d+(?:x\d+)*)", name)  # families contain dashes themselves
    generation = BY_SPELLING.get(found["family"]) if found else None
    if found is None or generation is None:
        examples = ", ".join(["v3-8", "v4-8", "v5litepod-64", "v5e:8x8", "v5p-8", "v6e-8", *sorted(prices.machines)])
        raise SpecError("--topology", expected=f"a machine such as {examples}", found=repr(text))
    asked = [int(part) for part in found["size"].split("x")]
    if len(asked) == 3 and asked[2] == 1 and len(generation.shapes[0]) == 2:
        asked.pop()  # JAX's compiler has three numbers for a v3 (v3:2x2x1), Cloud TPU has two (2x2)
    machines = [_make_slice(generation, shape) for shape in generation.shapes]
    for machine in machines:
        # Of a generation with one core per chip, the number of cores is the number of chips.
        if asked == [machine.cores] or sorted(asked) == sorted(machine.shape):
            return replace(machine, price=prices.of(machine))
    available = ", ".join(f"{machine.name} ({machine.grid})" for machine in machines)
    raise SpecError(f"--topology {text}: {generation.name} has no such slice", expected=f"one of {available}")


def _make_slice(generation: Generation, shape: Shape) -> Machine:
    chips = math.prod(shape)
    cores = chips * generation.cores_per_chip
    grid = (*shape, 1) if generation.name in ("v2", "v3") else shape
    return Machine(
        name=f"{generation.accelerator}-{cores}",
        topology=f"{generation.name}:{'x'.join(map(str, grid))}",
        generation=generation.name,
        shape=shape,
        chips=chips,
        cores=cores,
        devices=chips * generation.devices_per_chip,
        hosts=1 if chips in generation.one_host_chips else chips // _CHIPS_PER_HOST,
        hbm_bytes=int(generation.hbm_gib * GIB),
        tflops=generation.tflops,
        price=generation.price.times(chips),
        gke=generation.gke,
        tpu_api=generation.tpu_api,
    )


def known_machines() -> tuple[Machine, ...]:
    return tuple(_make_slice(generation, shape) for generation in GENERATIONS for shape in generation.shapes)


GPUS: Mapping[str, tuple[float, float]] = {
    "T4": (16, 65), "V100": (32, 125), "A10": (24, 125), "L4": (24, 121), "L40S": (48, 362),
    "RTX3090": (24, 71), "RTX4090": (24, 165), "RTX5090": (32, 209),
    "A100": (80, 312), "H100": (80, 989), "H200": (141, 989), "B200": (180, 2250),
}  # fmt: skip
"""Memory in GiB and dense bf16 TFLOP/s (fp16 for T4 and V100) of one GPU, from NVIDIA's data sheets."""


HERE = "this machine"


def gpus(name: str, count: int = 1) -> Machine:
    """Return a machine with GPUs. It has no price: that depends on the provider, and ``--prices`` can give it."""
    memory, tflops = GPUS[name]
    return _without_price(f"{count} × {name}" if count > 1 else name, count, memory * GIB, tflops)


def gpus_here(names: Sequence[str]) -> Machine | None:
    """Return the machine with the GPUs that nvidia-smi names, or None if there is none or one is unknown."""
    words = [name.upper().replace(" ", "") for name in names]
    known = [next((key for key in sorted(GPUS, key=len, reverse=True) if key in name), None) for name in words]
    if not known or None in known or len(set(known)) > 1:
        return None
    return replace(gpus(str(known[0]), len(known)), name=HERE)


def processors_here(memory: int, flops: float) -> Machine:
    """Return this machine without a GPU: its processors are one device, whose rate was measured."""
    return _without_price(HERE, 1, memory, flops / 1e12)


def _without_price(name: str, chips: int, memory: float, tflops: float) -> Machine:
    return Machine(name, "", "", (chips,), chips, chips, chips, 1, int(memory), tflops, Price(0, 0))


def parse_planned(text: str, prices: Prices | None = None) -> Machine:
    """Return the machine for a forecast: as :func:`parse_machine`, or GPUs such as ``H100`` and ``h100-8``."""
    name, _, count = text.strip().upper().partition("-")
    defined = prices is not None and text.strip().lower() in prices.machines
    if not defined and name in GPUS and (not count or (count.isdecimal() and 0 < int(count) <= 64)):
        return gpus(name, int(count or 1))
    return parse_machine(text, prices)


def prices_from(raw: Mapping[str, Any], source: str) -> Prices:
    """Return the list prices, changed by a parsed TOML file; docs/guides/pods.md shows one."""
    base = list_prices()
    known = ("as_of", "storage_gb_month", "chip_hour", "machine_hour", "machines")
    if unknown := sorted(set(raw) - set(known)):
        raise SpecError(source, expected=", ".join(known), found=", ".join(map(repr, unknown)))
    chip_hour = dict(base.chip_hour)
    for name, value in raw.get("chip_hour", {}).items():
        generation = BY_SPELLING.get(name.lower())
        if generation is None:
            names = ", ".join(row.name for row in GENERATIONS)
            raise SpecError(f"{source}: chip_hour", expected=f"one of {names}", found=repr(name))
        chip_hour[generation.name] = _read_price(value, f"{source}: chip_hour.{name}")
    return Prices(
        as_of=str(raw.get("as_of", base.as_of)),
        source=source,
        chip_hour=chip_hour,
        machine_hour={
            parse_machine(name).name: _read_price(value, f"{source}: machine_hour.{name}")
            for name, value in raw.get("machine_hour", {}).items()
        },
        machines={name.lower(): _read_machine(name, value, source) for name, value in raw.get("machines", {}).items()},
        storage_gb_month=_read_number(
            raw.get("storage_gb_month", base.storage_gb_month), f"{source}: storage_gb_month"
        ),
    )


def _read_number(value: object, where: str, *, whole: bool = False) -> float:
    """Return a number from a price file: 0 or more, or a whole number from 1."""
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not int(whole) <= value < math.inf:
        expected = "a whole number, 1 or more" if whole else "a number, 0 or more"
        raise SpecError(where, expected=expected, found=repr(value))
    return value


def _read_price(value: object, where: str) -> Price:
    if not isinstance(value, Mapping) or "on_demand" not in value:
        raise SpecError(where, expected="{ on_demand = …, preemptible = … }", found=repr(value))
    on_demand = _read_number(value["on_demand"], where)
    return Price(on_demand, _read_number(value.get("preemptible", on_demand), where))


def _read_machine(name: str, value: object, source: str) -> Machine:
    where = f"{source}: machines.{name}"
    if not isinstance(value, Mapping) or not {"chips", "hbm_gib", "tflops"} <= set(value):
        raise SpecError(where, expected="chips, hbm_gib, tflops, on_demand and, if not 1, hosts", found=repr(value))
    chips, hosts = (int(_read_number(value.get(key, 1), f"{where}.{key}", whole=True)) for key in ("chips", "hosts"))
    if chips % hosts:
        raise SpecError(where, expected="chips that divide over the hosts", found=f"{chips} chips, {hosts} hosts")
    tflops = _read_number(value["tflops"], where)
    if not tflops:
        raise SpecError(f"{where}.tflops", expected="more than 0", found=0)
    machine = _without_price(name, chips, _read_number(value["hbm_gib"], where) * GIB, tflops)
    return replace(machine, hosts=hosts, price=_read_price(value, where))
