"""``spile plan``: tokens, bytes, hours, dollars and memory, before anyone pays."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spile.cli.flags import ExtractFlags
from spile.cli.shell.defaults import settled
from spile.cli.shell.flag import flag
from spile.errors import SpecError
from spile.models.tensors import parameter_count
from spile.planning.cost import START_SECONDS, Estimate, Rates, refuse_over_budget
from spile.planning.machines import Machine, Prices, list_prices, parse_machine, prices_from
from spile.spec.amounts import amount, duration, size
from spile.view.table import output

if TYPE_CHECKING:
    from spile.planning.forecast import Forecast
    from spile.planning.tpu_compiler import Fit

__all__ = ["plan", "read_prices"]

_PLAN = Group("Plan", sort_key=0)
_USUAL = ("v3-8", "v4-8", "v5litepod-8", "v5litepod-64", "v6e-8", "v5p-8")
"""Shown where no --topology is given."""
_FIRST_TOKENS = 16_384
"""Tokens per device that the compiler is asked for first: the worker's own choice on a TPU."""


_FULL = 0.7
"""The part of a device's memory that weights may take before they are split over more of them."""


def plan(
    *,
    flags: ExtractFlags | None = None,
    topology: Annotated[
        list[str] | None, flag(_PLAN, "Machines: v5litepod-64, v5e:16x16, v3-8 …", consume_multiple=True, negative="")
    ] = None,
    workers: Annotated[int, flag(_PLAN, "How many of the machine work side by side.")] = 1,
    budget: Annotated[float | None, flag(_PLAN, "Dollars: refuse a run that costs more on each machine.")] = None,
    preemptible: Annotated[bool, flag(_PLAN, "Hold the preemptible price against the budget.", negative="")] = False,
    prices: Annotated[Path | None, flag(_PLAN, "A TOML file with your own prices and machines.")] = None,
    count: Annotated[int, flag(_PLAN, "Samples to tokenize, spread over the dataset.")] = 1000,
    efficiency: Annotated[float, flag(_PLAN, "The part of the chips' peak that is reached.")] = Rates.efficiency,
    start_minutes: Annotated[
        float, flag(_PLAN, "Paid for before the first token: to boot, install, load and compile.")
    ] = START_SECONDS / 60,
    tokens_per_second: Annotated[float | None, flag(_PLAN, "Measured on the whole machine, instead.")] = None,
    compile: Annotated[bool | None, flag(_PLAN, "Ask the real TPU compiler. [default: where it is installed]")] = None,  # noqa: A002
    largest: Annotated[bool, flag(_PLAN, "Also find the largest batch that fits.")] = True,
    json_: Annotated[bool, Parameter(name="--json", group=_PLAN, help="One JSON object.", negative="")] = False,
) -> int:
    """Tell what a run would take, and refuse one that is over the budget. Takes the flags of spile extract."""
    from spile.planning.forecast import plan as forecast
    from spile.planning.tpu_compiler import available

    if count < 1:
        raise SpecError("--count", expected="at least 1", found=count)
    if budget is not None and not 0 <= budget < math.inf:
        raise SpecError("--budget", expected="0 dollars or more", found=f"{budget:g}")
    table = list_prices() if prices is None else read_prices(prices)
    machines = [parse_machine(word, table) for word in topology or _USUAL]
    rates = Rates(efficiency=efficiency, start_seconds=start_minutes * 60, tokens_per_second=tokens_per_second)
    console = output(soft_wrap=True)
    named = settled(
        flags or ExtractFlags(), os.environ, lambda line: None if json_ else console.print(line, markup=False)
    )
    found = forecast(named.spec(), count)
    estimates = [found.on(machine, table, rates=rates, workers=workers) for machine in machines]
    compiles = bool(topology) and available() if compile is None else compile
    if not json_:
        _print(console, found, estimates, table, rates)
    fits = {
        machine.name: _compile(console, found, machine, quiet=json_, find_largest=largest)
        for machine in (machines if compiles else ())
        if machine.topology
    }
    if json_:
        record = {"run": found.record(), "prices": {"as_of": table.as_of, "source": table.source}, "rates": vars(rates)}
        machines_ = [{**each.record(), "compiled": fits.get(each.machine.name)} for each in estimates]
        console.print_json(json.dumps({**record, "machines": machines_}))
    elif not compiles:
        console.print(_uncompiled(bool(topology), available()), markup=False)
        for machine in machines:
            console.print(_by_arithmetic(found, machine), markup=False)
    if budget is not None:
        _hold(estimates, budget, preemptible)
    return 0


def read_prices(path: Path) -> Prices:
    """A user's price file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError("--prices", expected="a TOML file", found=f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError("--prices", expected="TOML", found=f"{path}: {error}") from error
    return prices_from(raw, str(path))


def _hold(estimates: list[Estimate], budget: float, preemptible: bool) -> None:
    """Refuse when no machine that was asked for is within the budget; the cheapest says what would fit."""
    cost = {id(each): each.dollars.preemptible if preemptible else each.dollars.on_demand for each in estimates}
    refuse_over_budget(min(estimates, key=lambda each: cost[id(each)]), budget, preemptible=preemptible)


def _uncompiled(asked: bool, installed: bool) -> str:
    if not installed:
        return "Memory: not checked; pip install 'spile[tpu]' lets the real TPU compiler check it, here."
    return (
        "Memory: not checked; " + ("leave --no-compile out" if asked else "give a --topology") + " to compile for it."
    )


def _by_arithmetic(found: Forecast, machine: Machine) -> str:
    """Whether weights and rows have room on a device, without a compiler: what it computes in between is left out."""
    weights = parameter_count(found.config) * (4 if found.spec.dtype == "float32" else 2)
    room, parts = machine.hbm_per_device, 1
    while weights / parts > _FULL * room and parts < machine.devices:
        parts *= 2
    tokens = found.spec.batch_tokens or _FIRST_TOKENS
    rows = 2 * tokens * found.volume.bytes_per_token
    fits = weights / parts + rows <= room
    split = f", 1/{parts} of them on each device" if parts > 1 else ""
    verdict = "fits" if fits else "does not fit: fewer --batch-tokens or taps, or more chips"
    return (
        f"  {machine.name}, by arithmetic: weights {size(weights)}{split}, rows {size(rows)} (two batches of "
        f"{tokens:,} tokens), {size(room)} on a device: {verdict}"
    )


def _print(console: Console, found: Forecast, estimates: list[Estimate], prices: Prices, rates: Rates) -> None:
    volume, lengths = found.volume, found.lengths
    spread = f"± {2 * lengths.error:.1%}" if len(lengths.counted) > 1 else "too few to tell how far off"
    counted = "all counted" if lengths.exact else f"{len(lengths.counted):,} counted, {spread}"
    shards = "1 shard" if volume.shards == 1 else f"{volume.shards:,} shards"
    rows = [
        ("model", f"{found.model}: {found.config.n_layers} layers of {found.config.d_model}"),
        ("data", f"{found.location}: {volume.samples:,} samples"),
        ("tokens", f"{volume.tokens:,} ({counted}; {lengths.mean:,.0f} per sample)"),
        ("stored", f"{size(volume.bytes)} in {shards}: {len(found.taps)} taps, "
         f"{volume.bytes_per_token:,} bytes per token{_some(found)}"),
        ("storage", f"${estimates[0].storage_month:,.2f} per month"),
    ]  # fmt: skip
    grid = Table.grid(padding=(0, 2))
    for name, text in rows:
        grid.add_row(Text(name, style="bold"), text)
    console.print(grid)
    console.print(_machines(estimates))
    basis = (
        f"{rates.tokens_per_second:,.0f} tokens/s as measured"
        if rates.tokens_per_second is not None
        else f"{rates.efficiency:.0%} of the chips' peak, {rates.padding - 1:.0%} padding"
    )
    console.print(
        f"Assumed: {basis}, {size(rates.sink_bytes)}/s from each host into the store, "
        f"{duration(rates.start_seconds)} to boot, install, load and compile. "
        f"Prices: {prices.source}, as of {prices.as_of}; --prices FILE overrides them.",
        markup=False,
    )


def _some(found: Forecast) -> str:
    if found.volume.rows is None:
        return ""
    return f", rows of {found.volume.rows:,} tokens (--positions {found.spec.positions})"


def _machines(estimates: list[Estimate]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("machine", "chips", "hosts", "time", "tokens/s", "limit", "on demand", "preemptible"):
        table.add_column(name, justify="left" if name in ("machine", "limit") else "right", no_wrap=True)
    for each in estimates:
        workers = f"{each.workers} × " if each.workers > 1 else ""
        table.add_row(
            f"{workers}{each.machine.name}",
            f"{each.machine.chips * each.workers}",
            f"{each.machine.hosts * each.workers}",
            duration(each.hours * 3600),
            amount(each.tokens_per_second),
            each.slowest.name,
            f"${each.dollars.on_demand:,.2f}",
            f"${each.dollars.preemptible:,.2f}",
        )
    return table


def _compile(console: Console, found: Forecast, machine: Machine, *, quiet: bool, find_largest: bool) -> dict[str, Any]:
    """Each try as it comes, since each takes the compiler a while."""
    from spile.planning.tpu_compiler import largest, search

    program = found.program(machine)
    fits: list[Fit] = []
    if not quiet:
        console.print(f"Compiling for {machine.topology}: this takes the TPU compiler a minute or more …", markup=False)
    for fit in search(program, max(1, _FIRST_TOKENS // program.length), find_largest=find_largest):
        fits.append(fit)
        if not quiet:
            console.print(_said(machine, fit), markup=False)
    best = largest(fits)
    if not quiet and find_largest:
        console.print(
            f"  largest batch that fits: --batch-tokens {best.tokens}"
            if best
            else "  nothing fits: more chips, or fewer taps",
            markup=False,
        )
    return {"tried": [vars(fit) for fit in fits], "largest_batch_tokens": best.tokens if best else None}


def _said(machine: Machine, fit: Fit) -> str:
    batch = f"  mesh {fit.mesh[0]} × {fit.mesh[1]}, {fit.rows} × {fit.length} tokens per device"
    if not fit.peak:
        return f"{batch}: does not fit in {size(fit.memory)}"
    verdict = "fits" if fit.fits else "does not fit"
    return (
        f"{batch}: {size(fit.peak)} of {size(fit.memory)} ({fit.peak / fit.memory:.0%}; weights {size(fit.weights)}), "
        f"{verdict}; compiled for {machine.name} in {fit.seconds:.0f} s"
    )
