"""``spile inspect`` and ``spile score``: show what a dataset contains, and how many answers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from spile.cli.engines import part_workers
from spile.cli.flags import WorkerFlags
from spile.data.arc.answers import Score
from spile.errors import Failure, SpecError, UserError, untrusted
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.inspection import commit_sizes, known_stats, merged_parts, part_statistics
from spile.reading.scoring import score_run
from spile.spec.amounts import counted, size
from spile.store.parts import DatasetPart, RunParts
from spile.store.statistics import TapStatistics
from spile.store.streams import read_ledgers
from spile.view.table import Lasting, output
from spile.view.web.export import inspection_page, score_page, write_page


def inspect(
    root: Annotated[str, Parameter(help="A folder, gs://bucket/prefix, s3://… or az://….")] = "./activations",
    *,
    stats: Annotated[
        bool, Parameter(negative="", help="Read all rows of taps that have no stored statistics.")
    ] = False,
    html: Annotated[Path | None, Parameter(help="Write a page with plots to this file; implies --stats.")] = None,
    tap: Annotated[str | None, Parameter(help="The tap whose main directions the page shows.")] = None,
    samples: Annotated[int, Parameter(help="The number of samples whose heat maps the page shows.")] = 3,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print the description as JSON.")] = False,
    part: Annotated[str | None, Parameter(show=False, help="Print the statistics of this part, for --engine.")] = None,
    engine: WorkerFlags | None = None,
) -> int:
    """Describe a dataset: its model, streams, samples and taps, and each tap's norms and attention sinks.

    With --engine, many processes or machines read the rows; this implies --stats.
    """
    if html is not None and engine is not None and engine.asked:
        raise SpecError("--engine", expected="no --html", found="--html, which one process writes")
    dataset = open_dataset(root)
    if part is not None:
        print(json.dumps(part_statistics(dataset, DatasetPart.parse(part))))
        return 0
    if tap is not None and tap not in dataset.taps:
        raise UserError(f"no tap {tap} in this dataset", expected=f"one of {', '.join(dataset.taps)}")
    if html is not None and not len(dataset.samples):
        raise UserError(f"{root} has no samples yet", fix="inspect it after the first commit")
    read_ledgers(dataset.streams)
    with part_workers("inspect", root, engine) as run_parts:
        found = _statistics(dataset, run_parts, all_taps=stats or html is not None)
    if as_json:
        summaries = {name: each.summary() if each else None for name, each in found.items()}
        print(json.dumps({**_facts(dataset), "taps": summaries}, indent=1))
    else:
        _show(dataset, found)
    if html is not None:
        _write_page(dataset, html, tap, samples)
    return 0


def _statistics(dataset: Dataset, run_parts: RunParts | None, *, all_taps: bool) -> dict[str, TapStatistics | None]:
    """Return the statistics of each tap, or None for taps whose rows would have to be read."""
    if run_parts is None:
        return {name: dataset.stats(name) if all_taps or known_stats(dataset, name) else None for name in dataset.taps}
    with untrusted(Failure, "the result of a worker is malformed"):
        merged = merged_parts(run_parts(commit_sizes(dataset)))
    return {name: merged.get(name) for name in dataset.taps}


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
    page = inspection_page(dataset, tap=tap, samples=samples)
    write_page(page, html)
    output().print(f"wrote {html} ({size(len(page.encode()))}): one file, nothing is fetched", markup=False)


def score(
    root: Annotated[str, Parameter(help="What spile infer wrote: a folder, gs://…, s3://… or az://…")],
    *,
    reference: Annotated[
        str | None, Parameter(help="test_outputs_train.json, or tasks with outputs. [default: the tasks' own outputs]")
    ] = None,
    dataset: Annotated[str | None, Parameter(help="The tasks. [default: where the run read them]")] = None,
    html: Annotated[
        Path | None, Parameter(help="Write a page with the grids to this file: examples, expected outputs and answers.")
    ] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object instead of a table.", negative="")] = False,
) -> int:
    """Compare the answers of spile infer with the expected outputs, as a table or with --html as a page of grids.

    The variants of a task vote, after their augmentations are undone. An answer without a grid counts as wrong. A
    task without a reference is not scored.
    """
    found = score_run(root, reference, dataset)
    if html is not None:
        write_page(score_page(root, found), html)
    console = Lasting(highlight=False)
    if json:
        from json import dumps

        console.print(dumps(found.record()), markup=False, soft_wrap=True)
    else:
        _print_score(console, found, html)
    return 0


def _print_score(console: Console, found: Score, html: Path | None) -> None:
    from rich.table import Table

    record = found.record()
    table = Table("TASK", "RIGHT", "VOTES", "UNREADABLE", box=None)
    for task in found.tasks:
        state = "not scored" if task.expected is None else "yes" if task.right else "no"
        votes = f"{task.answers.votes[0] if task.answers.votes else 0} of {task.answers.predictions}"
        table.add_row(task.answers.task_id, state, votes, str(task.answers.unreadable or ""))
    console.print(table)
    scored, right = len(found.scored), found.right
    part = f" ({right / scored:.1%}), {record['right_in_two']} within two attempts" if scored else ""
    console.print(f"{right} of {scored} tasks right{part}", soft_wrap=True)
    if record["unreadable"]:
        console.print(f"{record['unreadable']} of {record['predictions']} answers hold no grid, and count as wrong")
    if record["without_reference"]:
        console.print(f"{record['without_reference']} tasks have no reference, and are not scored")
    if html is not None:
        console.print(f"page: {html}", soft_wrap=True, markup=False)
