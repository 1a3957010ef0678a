"""``spile inspect`` and ``spile score``: show what a dataset contains, and how many answers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.box import ROUNDED
from rich.table import Table

from spile.cli.engines import part_workers
from spile.cli.flags import ENGINE, AsJson, log, print_json
from spile.data.arc.answers import Score
from spile.engines.registry import WorkerOptions
from spile.errors import Failure, SpecError, UserError, untrusted
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.inspection import (
    NORMS,
    commit_sizes,
    known_stats,
    merged_parts,
    norm_lines,
    part_statistics,
)
from spile.reading.scoring import score_run
from spile.spec.amounts import counted, size
from spile.store.parts import DatasetPart, RunParts
from spile.store.statistics import TapStatistics
from spile.store.stored_stream import read_ledgers
from spile.view.table import PipeSafeConsole, output
from spile.view.web.export import inspection_page, score_page, write_page


def inspect(
    root: str = "./activations",
    *,
    stats: bool = False,
    html: Path | None = None,
    tap: str | None = None,
    samples: int = 3,
    as_json: AsJson = False,
    part: Annotated[str | None, Parameter(show=False)] = None,
    engine: Annotated[WorkerOptions, ENGINE] = WorkerOptions(),
) -> int:
    """Describe a dataset: its model, streams, samples and taps, and each tap's norms and attention sinks.

    With --engine, many processes or machines read the rows; this implies --stats.

    Args:
        root: A folder, gs://bucket/prefix, s3://… or az://….
        stats: Read all rows of taps that have no stored statistics.
        html: Write a page with plots to this file; implies --stats.
        tap: The tap whose main directions the page shows.
        samples: The number of samples whose heat maps the page shows.
        as_json: Print the description as JSON.
        part: Print the statistics of this part, for --engine.
    """
    if html is not None and engine.requested:
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
        print_json({**dataset.summary(), "taps": summaries})
    else:
        _print_description(dataset, found)
    if html is not None:
        page = inspection_page(dataset, tap=tap, samples=samples)
        write_page(page, html)
        log(f"wrote {html} ({size(len(page.encode()))}): one file, nothing is fetched")
    return 0


def _statistics(dataset: Dataset, run_parts: RunParts | None, *, all_taps: bool) -> dict[str, TapStatistics | None]:
    """Return the statistics of each tap, or None for taps whose rows would have to be read."""
    if run_parts is None:
        return {name: dataset.stats(name) if all_taps or known_stats(dataset, name) else None for name in dataset.taps}
    with untrusted(Failure, "the result of a worker is malformed"):
        merged = merged_parts(run_parts(commit_sizes(dataset)))
    return {name: merged.get(name) for name in dataset.taps}


def _print_description(dataset: Dataset, found: dict[str, TapStatistics | None]) -> None:
    console, facts = output(), dataset.summary()
    console.print(f"{facts['root']}: {facts['model']}, rows stored as {facts['store_dtype']}")
    console.print(
        f"{counted(facts['samples'], 'sample')} ({facts['skipped']:,} skipped), {counted(facts['tokens'], 'token')}, "
        f"{size(facts['bytes'])} in {counted(facts['shards'], 'shard')} of {counted(facts['streams'], 'stream')}"
    )
    table = Table(box=ROUNDED)
    for name in NORMS:
        table.add_column(name, justify="left" if name == "tap" else "right")
    for row in norm_lines(found):
        table.add_row(*row)
    console.print(table)
    if any(each is None for each in found.values()):
        console.print("–: no statistics were taken while extracting; --stats reads the rows for them")


def score(
    root: str,
    *,
    reference: str | None = None,
    dataset: str | None = None,
    html: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Compare the answers of spile infer with the expected outputs, as a table or with --html as a page of grids.

    The variants of a task vote, after their augmentations are undone. An answer without a grid counts as wrong. A
    task without a reference is not scored.

    Args:
        root: What spile infer wrote: a folder, gs://…, s3://… or az://…
        reference: test_outputs_train.json, or tasks with outputs. [default: the tasks' own outputs]
        dataset: The tasks. [default: where the run read them]
        html: Write a page with the grids to this file: examples, expected outputs and answers.
        as_json: Print one JSON object instead of a table.
    """
    found = score_run(root, reference, dataset)
    if html is not None:
        write_page(score_page(root, found), html)
    if as_json:
        print_json(found.record())
    else:
        _print_score(found, html)
    return 0


def _print_score(found: Score, html: Path | None) -> None:
    console, record = PipeSafeConsole(soft_wrap=True), found.record()
    table = Table("TASK", "RIGHT", "VOTES", "UNREADABLE", box=None)
    for task in found.tasks:
        state = "not scored" if task.expected is None else "yes" if task.right else "no"
        votes = f"{task.answers.votes[0] if task.answers.votes else 0} of {task.answers.predictions}"
        table.add_row(task.answers.task_id, state, votes, str(task.answers.unreadable or ""))
    console.print(table)
    scored, right = len(found.scored), found.right
    part = f" ({right / scored:.1%}), {record['right_in_two']} within two attempts" if scored else ""
    console.print(f"{right} of {scored} tasks right{part}")
    if record["unreadable"]:
        console.print(f"{record['unreadable']} of {record['predictions']} answers hold no grid, and count as wrong")
    if record["without_reference"]:
        console.print(f"{record['without_reference']} tasks have no reference, and are not scored")
    if html is not None:
        console.print(f"page: {html}")
