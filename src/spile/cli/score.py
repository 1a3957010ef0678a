"""``spile score``: how many answers are right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spile.cli.shell.pages import write_page
from spile.errors import DataError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from spile.data.arc.answers import Score
    from spile.data.arc.grids import Grid, Task
    from spile.objects.folder import Folder

__all__ = ["score"]


def score(
    root: Annotated[str, Parameter(help="What spile infer wrote: a folder, gs://…, s3://… or az://…")],
    *,
    reference: Annotated[
        str | None, Parameter(help="test_outputs_train.json, or tasks with outputs. [default: the tasks' own outputs]")
    ] = None,
    dataset: Annotated[str | None, Parameter(help="The tasks. [default: where the run read them]")] = None,
    html: Annotated[Path | None, Parameter(help="Write a page of grids there: examples, expected, answered.")] = None,
    json: Annotated[bool, Parameter(help="One JSON object instead of a table.", negative="")] = False,
) -> int:
    """Compare the answers of spile infer with what is right: a table, and with --html a page of grids.

    Variants of a task vote, once their changes are undone. An answer that holds no grid counts as wrong; a task that
    the reference lacks is not scored.
    """
    from spile.objects import open_folder
    from spile.view.report import score_page
    from spile.view.table import Lasting

    found = _scored(open_folder(root), reference, dataset)
    if html is not None:
        write_page(score_page(found, root), html)
    console = Lasting(highlight=False)
    if json:
        from json import dumps

        console.print(dumps(found.record()), markup=False, soft_wrap=True)
    else:
        _tell(console, found, html)
    return 0


def _scored(folder: Folder, reference: str | None, dataset: str | None) -> Score:
    from spile.data.arc.answers import by_task, read_references, score_answers
    from spile.data.arc.encoders import parse_encoder
    from spile.store.predictions import merged
    from spile.store.stream import read_run
    from spile.store.streams import open_streams

    run = read_run(folder)
    if run is None or run.generation is None:
        found = "none" if run is None else "activations alone"
        raise UserError(f"no answers at {folder.url}", expected="what spile infer wrote", found=found)
    if run.prompt.kind != "arc" or not run.prompt.version.startswith("output-from-examples"):
        raise UserError(f"the answers at {folder.url}", expected="outputs of ARC tasks", found=run.prompt.version)
    encoder = parse_encoder(run.prompt.encoder)
    predictions, skipped = [], []
    places = [] if dataset is None else [dataset]
    for stream in open_streams(folder, run):
        predictions += merged(stream.folder, stream.commits)
        skipped += [skip.task_id for commit in stream.commits for skip in commit.skipped]
        places += [] if dataset is not None else [stream.record.identity.data]
    tasks = _tasks(places, needed=reference is None)
    expected: dict[str, Grid] = {}
    for place in places if reference is None else [reference]:
        expected |= read_references(place)
    return score_answers(by_task(predictions, encoder), skipped, expected, tasks)


def _tasks(places: list[str], needed: bool) -> dict[str, Task]:
    """The tasks; without them a page still shows what was expected and answered."""
    from spile.data.arc.answers import read_tasks

    tasks: dict[str, Task] = {}
    for place in places:
        try:
            tasks |= read_tasks(place)
        except DataError as error:
            if needed:
                raise DataError(error.problem, fix="say where the tasks are with --dataset, or --reference") from error
    return tasks


def _tell(console: Console, found: Score, html: Path | None) -> None:
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
