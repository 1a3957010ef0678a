"""``spile inspect``: what a dataset is and holds, in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.box import ROUNDED
from rich.table import Table

from spile.cli.shell.pages import write_page
from spile.errors import UserError
from spile.spec.amounts import counted, size
from spile.view.table import output

if TYPE_CHECKING:
    from spile.reading.dataset import Dataset
    from spile.store.statistics import TapStatistics

__all__ = ["inspect"]


def inspect(
    root: Annotated[str, Parameter(help="A folder, gs://bucket/prefix, s3://… or az://….")] = "./activations",
    *,
    stats: Annotated[bool, Parameter(negative="", help="Read all rows where no statistics were taken.")] = False,
    html: Annotated[Path | None, Parameter(help="Write a page with plots to this file; implies --stats.")] = None,
    tap: Annotated[str | None, Parameter(help="The tap whose main directions the page shows.")] = None,
    samples: Annotated[int, Parameter(help="Samples whose heat maps the page shows.")] = 3,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="The facts as JSON.")] = False,
) -> int:
    """Show what a dataset is: its model, streams, samples, taps, and each tap's norms and attention sinks."""
    from spile.reading.dataset import open as open_dataset
    from spile.reading.inspection import known_stats

    dataset = open_dataset(root)
    if tap is not None and tap not in dataset.taps:
        raise UserError(f"no tap {tap} in this dataset", expected=f"one of {', '.join(dataset.taps)}")
    if html is not None and not len(dataset.samples):
        raise UserError(f"{root} has no samples yet", fix="inspect it when something was committed")
    wanted = stats or html is not None
    found = {name: dataset.stats(name) if wanted or known_stats(dataset, name) else None for name in dataset.taps}
    if as_json:
        summaries = {name: each.summary() if each else None for name, each in found.items()}
        print(json.dumps({**_facts(dataset), "taps": summaries}, indent=1))
    else:
        _show(dataset, found)
    if html is not None:
        _write_page(dataset, html, tap, samples)
    return 0


def _facts(dataset: Dataset) -> dict[str, Any]:
    files = [shard for stream in dataset.streams for shard in stream.files]
    return {
        "root": dataset.root.url,
        "model": dataset.run.model,
        "store_dtype": dataset.run.store_dtype,
        "streams": len(dataset.streams),
        "samples": sum(stream.samples for stream in dataset.streams),
        "skipped": sum(len(stream.skipped) for stream in dataset.streams),
        "tokens": sum(stream.tokens for stream in dataset.streams),
        "shards": len(files),
        "bytes": sum(shard.size for shard in files),
    }


def _show(dataset: Dataset, found: dict[str, TapStatistics | None]) -> None:
    console, facts = output(), _facts(dataset)
    console.print(f"{facts['root']}: {facts['model']}, rows stored as {facts['store_dtype']}", markup=False)
    console.print(
        f"{counted(facts['samples'], 'sample')} ({facts['skipped']:,} skipped), {counted(facts['tokens'], 'token')}, "
        f"{size(facts['bytes'])} in {counted(facts['shards'], 'shard')} of {counted(facts['streams'], 'stream')}"
    )
    table = Table(box=ROUNDED)
    for name in ("tap", "median norm", "99 %", "largest", "sinks"):
        table.add_column(name, justify="left" if name == "tap" else "right")
    for tap, each in found.items():
        known = each is not None and each.count
        cells = (
            [
                f"{each.norm_quantile(0.5):.4g}",
                f"{each.norm_quantile(0.99):.4g}",
                f"{each.top[0].norm:.4g}",
                f"{each.sinks:,}",
            ]
            if each is not None and known and each.top
            else ["–"] * 4
        )
        table.add_row(tap, *cells)
    console.print(table)
    if any(each is None for each in found.values()):
        console.print("–: no statistics were taken while extracting; --stats reads the rows for them")


def _write_page(dataset: Dataset, html: Path, tap: str | None, samples: int) -> None:
    from spile.reading.inspection import inspect_dataset
    from spile.view.report import report_page

    page = report_page(dataset, inspect_dataset(dataset, tap=tap, samples=max(0, samples)))
    write_page(page, html)
    output().print(f"wrote {html} ({size(len(page.encode()))}): one file, nothing is fetched", markup=False)
