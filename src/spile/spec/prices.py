"""A user's own prices and machines, from a TOML file, on top of the dated list."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spile.errors import SpecError
from spile.spec.machines import BY_SPELLING, GENERATIONS, GIB, Machine, Price, Prices, list_prices, parse_machine

__all__ = ["prices_from"]


def prices_from(raw: Mapping[str, Any], source: str) -> Prices:
    """The list's prices with a parsed TOML file's on top.

    ::

        as_of = "2026-11-01"
        storage_gb_month = 0.020
        [chip_hour]                    # by generation
        v5e = { on_demand = 1.20, preemptible = 0.30 }
        [machine_hour]                 # a whole machine, by any spelling
        v3-8 = { on_demand = 4.00, preemptible = 1.35 }
        [machines.h100-8]              # one that the table does not know
        chips = 8
        hbm_gib = 80
        tflops = 989
        on_demand = 24.0
        preemptible = 12.0
    """
    base = list_prices()
    unknown = sorted(set(raw) - {"as_of", "storage_gb_month", "chip_hour", "machine_hour", "machines"})
    if unknown:
        raise SpecError(
            source,
            expected="as_of, storage_gb_month, chip_hour, machine_hour, machines",
            found=", ".join(map(repr, unknown)),
        )
    chip_hour = dict(base.chip_hour)
    for word, value in raw.get("chip_hour", {}).items():
        generation = BY_SPELLING.get(word.lower())
        if generation is None:
            known = ", ".join(row.name for row in GENERATIONS)
            raise SpecError(f"{source}: chip_hour", expected=f"one of {known}", found=repr(word))
        chip_hour[generation.name] = _price(value, f"{source}: chip_hour.{word}")
    return Prices(
        as_of=str(raw.get("as_of", base.as_of)),
        source=source,
        chip_hour=chip_hour,
        machine_hour={
            parse_machine(word).name: _price(value, f"{source}: machine_hour.{word}")
            for word, value in raw.get("machine_hour", {}).items()
        },
        machines={word.lower(): _own(word, value, source) for word, value in raw.get("machines", {}).items()},
        storage_gb_month=_number(raw.get("storage_gb_month", base.storage_gb_month), f"{source}: storage_gb_month"),
    )


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
        raise SpecError(where, expected="a number, 0 or more", found=repr(value))
    return float(value)


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(where, expected="a whole number, 1 or more", found=repr(value))
    return value


def _price(value: object, where: str) -> Price:
    if not isinstance(value, Mapping) or "on_demand" not in value:
        raise SpecError(where, expected="{ on_demand = …, preemptible = … }", found=repr(value))
    on_demand = _number(value["on_demand"], where)
    return Price(on_demand, _number(value.get("preemptible", on_demand), where))


def _own(name: str, value: object, source: str) -> Machine:
    where = f"{source}: machines.{name}"
    if not isinstance(value, Mapping) or not {"chips", "hbm_gib", "tflops"} <= set(value):
        raise SpecError(where, expected="chips, hbm_gib, tflops, on_demand and, if not 1, hosts", found=repr(value))
    chips, hosts = (_whole(value.get(key, 1), f"{where}.{key}") for key in ("chips", "hosts"))
    if chips % hosts:
        raise SpecError(where, expected="chips that divide over the hosts", found=f"{chips} chips, {hosts} hosts")
    tflops = _number(value["tflops"], where)
    if not tflops:
        raise SpecError(f"{where}.tflops", expected="more than 0", found=0)
    return Machine(
        name=name,
        topology="",
        generation="",
        shape=(chips,),
        chips=chips,
        cores=chips,
        devices=chips,
        hosts=hosts,
        hbm_bytes=int(_number(value["hbm_gib"], where) * GIB),
        tflops=tflops,
        price=_price(value, where),
    )
