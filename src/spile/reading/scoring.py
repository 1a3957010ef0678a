"""Score the answers of ``spile infer`` to ARC tasks."""

from __future__ import annotations

from spile.data.arc.answers import Score, by_task, read_references, read_tasks, score_answers
from spile.data.arc.encoders import parse_encoder
from spile.data.arc.grids import Grid, Task
from spile.errors import DataError, UserError
from spile.objects import open_folder
from spile.store.predictions import read_all_answers
from spile.store.run import read_run
from spile.store.stored_stream import open_streams


def score_run(root: str, reference: str | None, dataset: str | None) -> Score:
    """Score the answers of a run; errors name the flags of ``spile score``."""
    folder = open_folder(root)
    run = read_run(folder)
    if run is None or run.generation is None:
        found = "none" if run is None else "activations alone"
        raise UserError(f"no answers at {folder.url}", expected="what spile infer wrote", found=found)
    if not run.answers_are_grids:
        raise UserError(f"the answers at {folder.url}", expected="outputs of ARC tasks", found=run.prompt.version)
    encoder = parse_encoder(run.prompt.encoder)
    streams, skipped = open_streams(folder, run), []
    places = [] if dataset is None else [dataset]
    for stream in streams:
        skipped += [skip.task_id for commit in stream.commits for skip in commit.skipped]
        places += [] if dataset is not None else [stream.record.identity.data]
    tasks = _read_tasks(places, needed=reference is None)
    expected: dict[str, Grid] = {}
    for place in places if reference is None else [reference]:
        expected |= read_references(place)
    predictions = (prediction for _, prediction in read_all_answers(streams))
    return score_answers(by_task(predictions, encoder), skipped, expected, tasks)


def _read_tasks(places: list[str], needed: bool) -> dict[str, Task]:
    """Return the tasks. Unless they are needed, unreadable ones are left out, and a page shows only the answers."""
    tasks: dict[str, Task] = {}
    for place in places:
        try:
            tasks |= read_tasks(place)
        except DataError as error:
            if needed:
                raise DataError(error.problem, fix="name the tasks with --dataset or --reference") from error
    return tasks
