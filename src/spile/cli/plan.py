"""``spile plan`` and ``spile models``: sizes, times and costs."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from spile.cli.flags import MANY, NEGATABLE, AsJson, ExtractFlags, plain_table, print_json
from spile.errors import SpecError
from spile.models.architecture import WEIGHTS_FRACTION, flops_per_token, parameter_count
from spile.models.families import FAMILIES, read_config
from spile.objects import is_remote, open_folder
from spile.planning.cost import START_SECONDS, Estimate, Rates, Volume, estimate, refuse_over_budget
from spile.planning.machines import Machine, Prices, list_prices, parse_machine, parse_planned, prices_from
from spile.spec.amounts import amount, counted, duration, size
from spile.spec.options import check_number
from spile.spec.taps import Tap, row_bytes, tap_rows
from spile.store.run import read_run
from spile.view.table import output, print_facts

if TYPE_CHECKING:
    from spile.planning.forecast import Forecast, ThisMachine
    from spile.planning.tpu_compiler import Fit

_PLAN = Group("Plan", sort_key=0)
_DEFAULT_MACHINES = ("L4", "A100", "H100", "H100-8", "v5litepod-8", "v5litepod-64", "v6e-8", "v5p-8", "v4-8", "v3-8")
"""The machines to show, after this one, if no --topology is given."""
_FIRST_TOKENS = 16_384
"""Tokens per device of the first attempt to compile: the worker's own choice on a TPU."""


@Parameter(name="*", group=_PLAN)
@dataclass(frozen=True)
class PlanFlags:
    """The machines, and what is assumed of them."""

    topology: Annotated[list[str] | None, MANY] = None
    """Machines: H100, A100-8, v5litepod-64, v5e:16x16, … [default: this machine and some others]"""
    workers: int = 1
    """The number of machines that run at once."""
    budget: float | None = None
    """Fail if the run costs more dollars on every machine."""
    preemptible: bool = False
    """Compare the preemptible price with the budget."""
    prices: Path | None = None
    """A TOML file with your own prices and machines."""
    count: int = 1000
    """The number of samples to tokenize and count."""
    efficiency: float = Rates.efficiency
    """The fraction of the chips' peak that is reached."""
    start_minutes: float = START_SECONDS / 60
    """Minutes before the first token: boot, install, load and compile."""
    tokens_per_second: float | None = None
    """The measured rate of one machine instead."""
    compile: Annotated[bool | None, NEGATABLE] = None
    """Use the TPU compiler. [default: if it is installed]"""
    largest: Annotated[bool, NEGATABLE] = True
    """Also find the largest batch that fits in memory."""


def plan(
    *,
    flags: ExtractFlags = ExtractFlags(),
    options: PlanFlags = PlanFlags(),
    as_json: Annotated[AsJson, Parameter(group=_PLAN)] = False,
) -> int:
    """Estimate what a run takes on this machine, GPUs and TPUs, and fail if it is over the budget.

    Takes the flags of spile extract. A large dataset is not read to its end: the estimate is made from its beginning.

    Args:
        as_json: One JSON object.
    """
    from spile.planning.forecast import plan as forecast
    from spile.planning.forecast import this_machine
    from spile.planning.tpu_compiler import available

    check_number("--count", options.count, 1)
    check_number("--budget", options.budget, 0)
    prices = list_prices() if options.prices is None else read_prices(options.prices)
    machines = [parse_planned(word, prices) for word in options.topology or _DEFAULT_MACHINES]
    seconds = options.start_minutes * 60
    rates = Rates(efficiency=options.efficiency, start_seconds=seconds, tokens_per_second=options.tokens_per_second)
    spec = flags.spec()
    existing = None if is_remote(spec.output) else read_run(open_folder(spec.output))
    found = forecast(spec, options.count, machines=machines if options.topology else (), existing=existing)
    estimates = [found.on(machine, prices, rates=rates, workers=options.workers) for machine in machines]
    here = None
    if not options.topology:
        here = this_machine(found.spec.output)  # It needs no time to boot.
        estimates.insert(0, found.on(here.machine, prices, rates=replace(rates, start_seconds=0.0), workers=1))
    compiles = bool(options.topology) and available() if options.compile is None else options.compile
    console = output(quiet=as_json)
    _print_plan(console, found, estimates, prices, rates, here)
    fits = {
        machine.name: _compile(console, found, machine, find_largest=options.largest)
        for machine in (machines if compiles else ())
        if machine.topology
    }
    if as_json:
        record = {"run": found.record(), "prices": {"as_of": prices.as_of, "source": prices.source}}
        planned = [{**each.record(), "compiled": fits.get(each.machine.name)} for each in estimates]
        facts = None if here is None else here.record()
        print_json({**record, "rates": vars(rates), "this_machine": facts, "machines": planned})
    elif not compiles:
        for line in _memory_lines(found, [each.machine for each in estimates], chosen=bool(options.topology)):
            console.print(line)
    if options.budget is not None:
        _check_budget(estimates, options.budget, options.preemptible)
    return 0


def read_prices(path: Path) -> Prices:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError("--prices", expected="a TOML file", found=f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError("--prices", expected="TOML", found=f"{path}: {error}") from error
    return prices_from(raw, str(path))


def _check_budget(estimates: list[Estimate], budget: float, preemptible: bool) -> None:
    """Raise if no requested machine is within the budget; the error describes what the cheapest one could do."""
    estimates = [each for each in estimates if each.machine.price.on_demand]
    if not estimates:
        raise SpecError("--budget", expected="a machine with a price", found="none", fix="give prices with --prices")
    tier = "preemptible" if preemptible else "on_demand"
    cheapest = min(estimates, key=lambda each: float(getattr(each.dollars, tier)))
    refuse_over_budget(cheapest, budget, preemptible=preemptible)


def _memory_lines(found: Forecast, machines: list[Machine], *, chosen: bool) -> Iterator[str]:
    """Yield how to check the memory, and for each chosen machine, or each that is too small, an estimate of it."""
    from spile.planning.tpu_compiler import available

    how = "leave --no-compile out to compile for it" if chosen else "give a --topology to compile for it"
    if not available():
        how = "pip install 'spile[tpu]' lets the real TPU compiler check it, here"
    yield f"Memory: not checked; {how}."
    lines = [_estimate_memory(found, machine) for machine in machines]
    shown = [text for text, fits in lines if chosen or not fits]
    yield from shown or ["  by arithmetic, weights and two batches fit on each of these machines"]


def _estimate_memory(found: Forecast, machine: Machine) -> tuple[str, bool]:
    """Return whether weights and activations fit on a device, estimated without a compiler and without temporaries."""
    weights = parameter_count(found.config) * (4 if found.spec.dtype == "float32" else 2)
    room, parts = machine.hbm_per_device, 1
    while weights / parts > WEIGHTS_FRACTION * room and parts < machine.devices:
        parts *= 2
    tokens = found.spec.batch_tokens or _FIRST_TOKENS
    rows = 2 * tokens * found.volume.bytes_per_token
    fits = weights / parts + rows <= room
    split = f", 1/{parts} of them on each device" if parts > 1 else ""
    verdict = "fits" if fits else "does not fit: fewer --batch-tokens or taps, or more chips"
    return (
        f"  {machine.name}, by arithmetic: weights {size(weights)}{split}, rows {size(rows)} (two batches of "
        f"{tokens:,} tokens), {size(room)} on a device: {verdict}"
    ), fits


def _print_plan(
    console: Console, found: Forecast, estimates: list[Estimate], prices: Prices, rates: Rates, here: ThisMachine | None
) -> None:
    volume, lengths = found.volume, found.lengths
    spread = f"± {2 * lengths.error:.1%}" if len(lengths.counted) > 1 else "too few to estimate the error"
    how = "all counted" if lengths.exact else f"{len(lengths.counted):,} counted, {spread}"
    about = "" if lengths.head is None else "about "
    basis = "" if lengths.head is None else f" (an estimate from the first {counted(lengths.head, 'row')})"
    positions = "" if volume.rows is None else f", rows of {volume.rows:,} tokens (--positions {found.spec.positions})"
    rows = [
        ("model", f"{found.model}: {found.config.n_layers} layers of {found.config.d_model}"),
        ("data", f"{found.location}: {about}{counted(volume.samples, 'sample')}{basis}"),
        ("tokens", f"{about}{volume.tokens:,} ({how}; {lengths.mean:,.0f} per sample)"),
        *([] if found.limit is None else [("lengths", found.limit.quantiles()), ("limit", found.limit.sentence())]),
        ("stored", f"{about}{size(volume.bytes)} in {counted(volume.shards, 'shard')}: "
         f"{counted(len(found.taps), 'tap')}, {volume.bytes_per_token:,} bytes per token{positions}"),
        ("storage", f"${estimates[0].storage_month:,.2f} per month"),
        *([] if here is None else [("this machine", here.line())]),
    ]  # fmt: skip
    print_facts(console, rows)
    console.print("", _machine_table(estimates), "", sep="\n")
    peak = f"the peak{' (of a measured matrix product for CPUs)' if here else ''}"
    basis = f"{rates.efficiency:.0%} of {peak}, {rates.padding - 1:.0%} padding"
    if rates.tokens_per_second is not None:
        basis = f"{rates.tokens_per_second:,.0f} tokens/s as measured"
    console.print(
        f"Assumed: {basis}, {size(rates.sink_bytes)}/s from each host into the store, "
        f"{duration(rates.start_seconds)} to boot, install, load and compile{' elsewhere' if here else ''}. "
        f"Prices: {prices.source}, as of {prices.as_of}; --prices FILE overrides them.",
    )
    if warning := prices.warning(date.today()):
        console.print(warning)
    for line in _small_shards(found, estimates):
        console.print(line)


def _small_shards(found: Forecast, estimates: list[Estimate]) -> Iterator[str]:
    """Yield a line for each machine on which ``--commit-every`` closes shards before they are half full."""
    every = found.spec.commit_every
    for each in estimates:
        expected, seconds = each.shard_bytes(every), each.full_shard_seconds()
        whole = min(found.volume.shard_bytes, each.volume.bytes / each.workers)
        if every is not None and expected < whole / 2:
            yield (
                f"Shards on {each.machine.name}: about {size(expected)} instead of {size(whole)}, because "
                f"--commit-every {every:g} closes them early. --commit-every {math.ceil(seconds)} fills them; a killed "
                f"worker then loses up to {duration(seconds)} of work."
            )


def _machine_table(estimates: list[Estimate]) -> Table:
    table = plain_table(
        "machine", "chips", "hosts", "time", "tokens/s", "limit", "on demand", "preemptible", left=("machine", "limit")
    )
    for each in estimates:
        workers = f"{each.workers} × " if each.workers > 1 else ""
        table.add_row(
            f"{workers}{each.machine.name}",
            f"{each.machine.chips * each.workers}",
            f"{each.machine.hosts * each.workers}",
            duration(each.hours * 3600),
            amount(each.tokens_per_second),
            "storage" if each.slowest == "sink" else each.slowest,
            *(f"${cost:,.2f}" if each.machine.price.on_demand else "–" for cost in vars(each.dollars).values()),
        )
    return table


def _compile(console: Console, found: Forecast, machine: Machine, *, find_largest: bool) -> dict[str, Any]:
    """Compile for a machine, and print each attempt when it is done because each takes a while."""
    from spile.planning.tpu_compiler import largest, search

    program = found.program(machine)
    fits: list[Fit] = []
    console.print(f"Compiling for {machine.topology}: this takes the TPU compiler a minute or more …")
    for fit in search(program, max(1, _FIRST_TOKENS // program.length), find_largest=find_largest):
        fits.append(fit)
        console.print(_describe_fit(machine, fit))
    best = largest(fits)
    if find_largest:
        fitting = f"largest batch that fits: --batch-tokens {best.tokens}" if best else ""
        console.print(f"  {fitting or 'nothing fits: more chips, or fewer taps'}")
    return {"tried": [vars(fit) for fit in fits], "largest_batch_tokens": best.tokens if best else None}


def _describe_fit(machine: Machine, fit: Fit) -> str:
    batch = f"  mesh {fit.mesh[0]} × {fit.mesh[1]}, {fit.rows} × {fit.length} tokens per device"
    if not fit.peak:
        return f"{batch}: does not fit in {size(fit.memory)}"
    verdict = "fits" if fit.fits else "does not fit"
    return (
        f"{batch}: {size(fit.peak)} of {size(fit.memory)} ({fit.peak / fit.memory:.0%}; weights {size(fit.weights)}), "
        f"{verdict}; compiled for {machine.name} in {fit.seconds:.0f} s"
    )


_MACHINE = "v5e-8"
_TOKENS = 1_000_000_000
_LENGTH = 1024


def models(*, as_json: AsJson = False) -> int:
    """List the model families that spile implements, with the size and cost of one model of each.

    The cost is that of every layer's residual stream over a billion tokens on a v5e-8, preemptible, at list prices;
    spile plan estimates any other run. extract and infer run any other model of transformers in PyTorch, slower.

    Args:
        as_json: Print one JSON object per family instead of a table.
    """
    prices = list_prices()
    rows = [_example_size(family, parse_machine(_MACHINE, prices)) for family in FAMILIES]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return 0
    table = plain_table("family", "for example", "weights", "per token", "10⁹ tokens", left=("family", "for example"))
    for row in rows:
        table.add_row(
            row["family"], row["example"], f"{row['parameters'] / 1e9:.2g} B",
            f"{row['bytes_per_token'] / 1e3:,.0f} kB", f"{row['hours']:,.0f} h, ${row['dollars']:,.0f}",
        )  # fmt: skip
    output().print(
        table,
        f"Every layer's residual in bfloat16; hours on a {_MACHINE} at preemptible list prices as of {prices.as_of}."
        " spile plan --model M estimates yours. extract and infer run any other model of transformers in PyTorch.",
        sep="\n",
    )
    return 0


def _example_size(family: str, machine: Machine) -> dict[str, Any]:
    name, fields = FAMILIES[family].example
    config = read_config({"model_type": family, **fields})
    rows = [tap_rows(Tap("residual", layer), config.sizes(layer), "bfloat16") for layer in range(config.n_layers)]
    volume = Volume(_TOKENS // _LENGTH, _TOKENS, row_bytes(rows), 1e9)
    flops = flops_per_token(config, _LENGTH)
    found = estimate(volume, machine, flops_per_token=flops)
    return {
        "family": family,
        "models": FAMILIES[family].models,
        "differs": FAMILIES[family].differs,
        "example": name,
        "parameters": parameter_count(config),
        "bytes_per_token": volume.bytes_per_token,
        "flops_per_token": flops,
        "machine": machine.name,
        "hours": found.hours,
        "dollars": found.dollars.preemptible,
    }
