"""ARC answers: parse grids from text, undo augmentations, vote over variants, score, and write the submission."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from spile.data.arc.encoders import GridEncoder, parse_encoder
from spile.data.arc.grids import Grid, Task, grid_problem
from spile.data.arc.prompts import revert
from spile.data.lines import LineSource
from spile.data.rows import parse_row, parse_task
from spile.data.sources import open_input
from spile.errors import DataError, untrusted
from spile.spec.run import DataSpec
from spile.spec.sample import Prediction

_ATTEMPTS = 2
"""The number of attempts that the challenge accepts for a test input."""
_NO_GRID: Grid = [[0]]
"""The attempt for a task without a readable answer: the format requires a grid."""


@dataclass(frozen=True)
class TaskAnswers:
    """The answers to all variants of a task."""

    task_id: str
    grids: tuple[Grid, ...]
    """Distinct grids, best first: by votes, then by the highest likelihood of an answer with this grid."""
    votes: tuple[int, ...]
    predictions: int
    unreadable: int
    """The number of answers without a valid grid. They count as wrong."""


def parse_answer(text: str, encoder: GridEncoder) -> Grid | None:
    """Return the grid in a text: the whole text, or the last paragraph that is a grid; None if there is none."""
    whole = text.strip()
    for part in (whole, *reversed([part.strip() for part in whole.split("\n\n")])):
        try:
            return encoder.to_grid(part)
        except (DataError, ValueError, IndexError):
            continue
    return None


def by_task(predictions: Iterable[Prediction], encoder: GridEncoder) -> dict[str, TaskAnswers]:
    """Group answers, which are in the order of the data, by task and undo the augmentations of the variants."""
    tasks: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        tasks[prediction.task_id].append(prediction)
    return {name: _counted(name, given, encoder) for name, given in tasks.items()}


def _counted(task_id: str, predictions: list[Prediction], encoder: GridEncoder) -> TaskAnswers:
    voters: dict[str, list[float]] = defaultdict(list)
    grids: dict[str, Grid] = {}
    for prediction in predictions:
        grid = parse_answer(prediction.text, encoder)
        if grid is not None:
            with untrusted(DataError, f"the answer of sample {prediction.sample} has an invalid augmentation"):
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
    """Return the submission in the challenge's format: two attempts per test input, the best first."""
    made = {}
    for answer in answers:
        grids = [*answer.grids, *[answer.grids[0] if answer.grids else _NO_GRID] * _ATTEMPTS]
        made[answer.task_id] = [{f"attempt_{n}": grids[n - 1] for n in range(1, _ATTEMPTS + 1)}]
    return made


def submission_bytes(predictions: Iterable[Prediction], encoder: str) -> bytes:
    """Return the content of ``submission.json`` for these answers."""
    answers = by_task(predictions, parse_encoder(encoder)).values()
    return json.dumps(submission(answers), separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class TaskScore:
    """The score of one task."""

    answers: TaskAnswers
    expected: Grid | None
    """The expected grid; None if there is no reference, so that the task is not scored."""
    task: Task | None = None
    """The task with its examples, if the dataset could be read."""

    @property
    def right(self) -> bool:
        return self.expected is not None and self.answers.grids[:1] == (self.expected,)

    @property
    def right_in_two(self) -> bool:
        return self.expected is not None and self.expected in self.answers.grids[:2]


@dataclass(frozen=True)
class Score:
    """The scores of all tasks."""

    tasks: tuple[TaskScore, ...]

    @property
    def scored(self) -> tuple[TaskScore, ...]:
        """The tasks with a reference."""
        return tuple(task for task in self.tasks if task.expected is not None)

    @property
    def right(self) -> int:
        return sum(task.right for task in self.tasks)

    def record(self) -> dict[str, object]:
        scored = self.scored
        return {
            "tasks": len(self.tasks),
            "scored": len(scored),
            "right": self.right,
            "right_in_two": sum(task.right_in_two for task in scored),
            "score": self.right / len(scored) if scored else None,
            "predictions": sum(task.answers.predictions for task in self.tasks),
            "unreadable": sum(task.answers.unreadable for task in self.tasks),
            "without_reference": len(self.tasks) - len(scored),
            "by_task": {
                task.answers.task_id: {"right": task.right, "votes": list(task.answers.votes)} for task in scored
            },
        }


def score_answers(
    answers: Mapping[str, TaskAnswers], skipped: Iterable[str], expected: Mapping[str, Grid], tasks: Mapping[str, Task]
) -> Score:
    """Score every task; a task whose prompt was skipped has no answer and counts as wrong."""
    asked = {**{name: TaskAnswers(name, (), (), 0, 0) for name in skipped}, **answers}
    return Score(tuple(TaskScore(asked[name], expected.get(name), tasks.get(name)) for name in sorted(asked)))


def read_tasks(location: str) -> dict[str, Task]:
    file = open_input(DataSpec(dataset=location))
    places = ((line, f"{location} {file.number(line)}") for line in file.lines())
    return {task.task_id: task for task in (parse_task(parse_row(line.raw, place), place) for line, place in places)}


def read_references(location: str) -> dict[str, Grid]:
    """Read the first output of each task, from a file such as ``test_outputs_train.json`` or from the tasks."""
    content = b"".join(LineSource(location).chunks())
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict) and found and all(isinstance(outputs, list) for outputs in found.values()):
        return {str(name): _first(name, outputs, location) for name, outputs in found.items() if outputs}
    tasks = read_tasks(location)
    return {name: task.answers[0] for name, task in tasks.items() if task.answers and task.answers[0] is not None}


def _first(name: str, outputs: list[object], location: str) -> Grid:
    grid = outputs[0].get("output") if isinstance(outputs[0], dict) else outputs[0]
    problem = grid_problem(grid)
    if problem is not None:
        raise DataError(f"{location}, task {name}", expected="its outputs, each a grid", found=problem)
    made: Grid = grid  # type: ignore[assignment]  # grid_problem has looked
    return made
