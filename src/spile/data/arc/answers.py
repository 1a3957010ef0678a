"""ARC answers: text back to a grid, variants back to their task, votes over them, and the challenge's submission."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from spile.data.arc.augment import revert
from spile.data.arc.encoders import GridEncoder
from spile.data.arc.grids import Grid
from spile.errors import DataError
from spile.spec.prediction import Prediction

__all__ = ["TaskAnswers", "by_task", "parse_answer", "submission"]

_ATTEMPTS = 2
"""How many grids the challenge takes for a test input."""
_NO_GRID: Grid = [[0]]
"""What a submission has where no answer could be read: the form wants a grid."""


@dataclass(frozen=True)
class TaskAnswers:
    """What the variants of a task came to."""

    task_id: str
    grids: tuple[Grid, ...]
    """Different ones, best first: by votes, then by the likeliest of those who voted for it."""
    votes: tuple[int, ...]
    predictions: int
    unreadable: int
    """Answers that hold no grid of 1×1 to 30×30. They are kept, and count as wrong."""


def parse_answer(text: str, encoder: GridEncoder) -> Grid | None:
    """The grid that a text holds: all of it, or its last paragraph that is one; None where there is none."""
    whole = text.strip()
    for part in (whole, *reversed([part.strip() for part in whole.split("\n\n")])):
        try:
            return encoder.to_grid(part)
        except (DataError, ValueError, IndexError):
            continue
    return None


def by_task(predictions: Iterable[Prediction], encoder: GridEncoder) -> dict[str, TaskAnswers]:
    """Every task's answers, its variants' changes undone."""
    tasks: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in sorted(predictions, key=lambda each: each.sample):
        tasks[prediction.task_id].append(prediction)
    return {name: _counted(name, given, encoder) for name, given in tasks.items()}


def _counted(task_id: str, predictions: list[Prediction], encoder: GridEncoder) -> TaskAnswers:
    voters: dict[str, list[float]] = defaultdict(list)
    grids: dict[str, Grid] = {}
    for prediction in predictions:
        grid = parse_answer(prediction.text, encoder)
        if grid is not None:
            own = revert(grid, prediction.augmentation)
            grids[str(own)] = own
            voters[str(own)].append(sum(prediction.logprobs) / max(len(prediction.logprobs), 1))
    order = sorted(voters, key=lambda name: (-len(voters[name]), -max(voters[name])))
    return TaskAnswers(
        task_id=task_id,
        grids=tuple(grids[name] for name in order),
        votes=tuple(len(voters[name]) for name in order),
        predictions=len(predictions),
        unreadable=len(predictions) - sum(map(len, voters.values())),
    )


def submission(answers: Iterable[TaskAnswers]) -> dict[str, list[dict[str, Grid]]]:
    """In the challenge's form: two attempts for the one test input that is asked, the best first."""
    made = {}
    for answer in answers:
        grids = [*answer.grids, *[answer.grids[0] if answer.grids else _NO_GRID] * _ATTEMPTS]
        made[answer.task_id] = [{f"attempt_{n}": grids[n - 1] for n in range(1, _ATTEMPTS + 1)}]
    return made
