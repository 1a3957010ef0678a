"""``spile deploy --dry-run``: what would be made, changed and paid, with every check done and nothing made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spile.cli.flags import RunFlags
from spile.planning.cost import START_SECONDS, Estimate, Rates
from spile.planning.machines import list_prices, parse_machine
from spile.spec.amounts import counted, duration, size

if TYPE_CHECKING:
    from rich.console import Console

    from spile.fleet.deploy import StreamsPlan
    from spile.fleet.spec import FleetSpec

__all__ = ["show"]

_COUNTED = 200
"""Samples of the first stream whose tokens are counted."""


def show(
    console: Console,
    fleet: FleetSpec,
    streams: StreamsPlan,
    flags: RunFlags,
    changed: list[str],
    cleared: list[int],
) -> int:
    """Lines for people."""
    machine = parse_machine(fleet.machine.accelerator_type)
    cheap = fleet.machine.preemptible or fleet.machine.spot or fleet.best_effort
    price = machine.price.preemptible if cheap else machine.price.on_demand
    workers = len(fleet.workers)
    lines = [
        f"would be made: {counted(workers, 'machine')} {machine.name} ({fleet.workers[0].name} …) in "
        f"{', '.join(fleet.zones)}, ${price:,.2f} an hour each, ${price * workers:,.2f} together",
        f"streams: {streams.url}" + (f", from {streams.local}" if streams.local else ", as they are there"),
        f"output: {fleet.root}",
        f"workers: {workers}, which claim {counted(fleet.stream_count, 'stream')} one after another",
    ]
    if changed:
        lines.append(f"fleet {fleet.name} is deployed already, and would change: {'; '.join(changed)}")
    if cleared:
        lines.append(f"removed, after a question: what is stored of {counted(len(cleared), 'stream')} in {fleet.root}")
    found = _estimate(streams, flags, fleet)
    dollars = found.dollars.preemptible if cheap else found.dollars.on_demand
    lines += [
        f"about {duration(found.hours * 3600)}, ${dollars:,.2f}, {size(found.volume.bytes)} stored "
        f"(assumed: {duration(START_SECONDS)} to boot, install, load and compile, {Rates.efficiency:.0%} of the chips' "
        f"peak, no preemption; {list_prices().source})",
        "nothing was made",
    ]
    for line in lines:
        console.print(line, markup=False)
    return 0


def _estimate(streams: StreamsPlan, flags: RunFlags, fleet: FleetSpec) -> Estimate:
    """From the first stream: the others are as long."""
    from spile.planning.forecast import plan as forecast

    one = flags.stored_in("gs://b/x").replaced(
        dataset=None, dataset_dir=str(streams.local or streams.url), worker_id=0,
        checkpointing=True, overwrite=False,
    )  # fmt: skip
    found = forecast(one.spec(), _COUNTED)
    whole = replace(found, lengths=replace(found.lengths, samples=found.lengths.samples * fleet.stream_count))
    rates = Rates(start_seconds=START_SECONDS)
    return whole.on(
        parse_machine(fleet.machine.accelerator_type), list_prices(), rates=rates, workers=len(fleet.workers)
    )
