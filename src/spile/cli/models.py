"""``spile models``: what spile computes itself, with one model of each family worked out."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from spile.models.families import FAMILIES, read_config
from spile.planning.machines import Machine, list_prices, parse_machine

__all__ = ["models"]

_MACHINE = "v5e-8"
_TOKENS = 1_000_000_000
_LENGTH = 1024


def models(
    *,
    json: Annotated[bool, Parameter(help="One JSON object per family instead of a table.", negative="")] = False,
) -> int:
    """List the families that spile computes itself, with a size and a cost worked out for one model of each.

    The cost is that of every layer's residual stream over a billion tokens on a v5e-8, preemptible, at list prices;
    spile plan works out any other run. Every other Hugging Face causal model runs with --backend torch, and slower.
    """
    from rich.table import Table

    from spile.view.table import Lasting

    console = Lasting(highlight=False)
    prices = list_prices()
    rows = [_worked(family, parse_machine(_MACHINE, prices)) for family in FAMILIES]
    if json:
        from json import dumps

        for row in rows:
            console.print(dumps(row), markup=False, soft_wrap=True)
        return 0
    table = Table(box=None, pad_edge=False)
    for title in ("family", "for example", "weights", "per token", "10⁹ tokens"):
        left = title in ("family", "for example")
        table.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in rows:
        table.add_row(
            str(row["family"]), str(row["example"]), f"{row['parameters'] / 1e9:.2g} B",
            f"{row['bytes_per_token'] / 1e3:,.0f} kB", f"{row['hours']:,.0f} h, ${row['dollars']:,.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"Every layer's residual in bfloat16; hours on a {_MACHINE} at preemptible list prices as of {prices.as_of}."
        " spile plan --model M works out yours. Any other Hugging Face causal model: --backend torch.",
        markup=False,
    )
    return 0


def _worked(family: str, machine: Machine) -> dict[str, Any]:
    from spile.models.tensors import flops_per_token, parameter_count
    from spile.planning.cost import Volume, estimate
    from spile.spec.taps import Tap, tap_rows
    from spile.worker.batches import row_bytes

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
