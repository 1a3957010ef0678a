"""``spile bench``: this machine against its own limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from spile.cli.flags import ExtractFlags
from spile.errors import SpecError
from spile.spec.amounts import amount, counted, duration, size
from spile.view.table import output

if TYPE_CHECKING:
    from spile.planning.bench import BenchResult
    from spile.planning.timed_run import TimedRun

__all__ = ["bench"]

_HOME = "./.bench"


def bench(
    *,
    flags: ExtractFlags | None = None,
    tokens: Annotated[int, Parameter(help="Real tokens to run, the dataset repeated as needed.")] = 100_000,
    compare: Annotated[bool, Parameter(help="Run the loop people write with transformers too, where torch is.")] = True,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="One JSON object.")] = False,
) -> int:
    """Print this machine's limits for a model, the rate it reaches, and its fraction of the slowest limit.

    Nothing is kept: shards go to a temporary folder below --output, or below ./.bench, and are removed.
    """
    from spile.planning.bench import bench as run

    if tokens < 1:
        raise SpecError("--tokens", expected="1 or more", found=tokens)
    result = run(_at_home(flags or ExtractFlags()).spec(), tokens=tokens, compare=compare)
    console = output()
    if as_json:
        console.print_json(json.dumps(result.record()))
    else:
        _show(result, console)
    return 0


def _at_home(flags: ExtractFlags) -> ExtractFlags:
    """Where no place is named, one of its own: not beside the activations of somebody's run."""
    named = flags.output or flags.output_dir or flags.gcs_bucket
    return flags if named else flags.replaced(output=_HOME)


def _show(result: BenchResult, console: Console) -> None:
    table = Table(
        "limit", "rate", "tokens/s of this run", title=f"{result.model} on {result.device}", title_style="bold"
    )
    rates, limits = result.limit_tokens, result.limits
    table.add_row("matrix products", f"{amount(limits.matmul_flops / 1e9)} GFLOP/s", "")
    table.add_row("bare forward", f"{result.forward_of_matmul:.0%} of the products' rate", amount(rates["model"]))
    if limits.device_to_host is not None:
        table.add_row("device to host", f"{size(limits.device_to_host)}/s", amount(rates["device to host"]))
    table.add_row("copy, checksum, write", f"{size(limits.host_copy)}/s", amount(rates["host copy"]))
    rate = f"{size(limits.sink)}/s ({size(limits.one_file)}/s into one file)"
    table.add_row("write and sync", rate, amount(rates["sink"]))
    console.print(table)
    for name, run in (("cold, no program cached", result.cold), ("again, programs cached", result.warm)):
        if run is not None:
            console.print(f"the command, {name}: {_whole(run)}", soft_wrap=True)
    console.print(
        "laboratory, all compiled, pinned and tokenized beforehand: "
        f"reached {amount(result.tokens_per_second)} tokens/s over {duration(result.seconds)}: "
        f"{result.fraction:.0%} of the slowest limit ({result.slowest}), {result.of_forward:.0%} of the bare forward; "
        f"{result.padding:.1%} padding; {result.shapes} programs compiled in {duration(result.compile_seconds)}; "
        f"steady after {result.steady_after:.0f} batches; "
        f"host memory {size(result.peak_memory)} at most, {size(max(0, result.grown_memory))} grown",
        soft_wrap=True,
    )
    theirs = result.naive_tokens_per_second
    if theirs is not None:
        console.print(
            f"transformers, padded batches, every hidden state to the host and saved: {amount(theirs)} tokens/s; "
            f"spile is {result.tokens_per_second / theirs:.1f}× that",
            soft_wrap=True,
        )


def _whole(run: TimedRun) -> str:
    end = run.seconds - run.first_batch - run.wall.run
    return (
        f"{duration(run.seconds)} for {amount(run.tokens)} tokens, {amount(run.tokens_per_second)} tokens/s of it all; "
        f"first batch after {duration(run.first_batch)}, run {duration(run.wall.run)}, end {duration(end)}; "
        f"{counted(run.programs, 'program')}"
    )
