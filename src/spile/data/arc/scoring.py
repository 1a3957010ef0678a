"""Answers against what is right: task by task, from the tasks' own outputs or a file of references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from spile.data.arc.answers import TaskAnswers
from spile.data.arc.grids import Grid, Task, grid_problem
from spile.data.lines import StreamFile
from spile.data.rows import parse_row, task_of
from spile.errors import DataError

__all__ = ["Score", "TaskScore", "read_references", "read_tasks", "score_answers"]


@dataclass(frozen=True)
class TaskScore:
    """One task."""

    answers: TaskAnswers
    expected: Grid | None
    """None: no reference has it, and it is not scored."""
    task: Task | None = None
    """Its examples, where the dataset could be read."""

    @property
    def right(self) -> bool:
        """The first attempt is right."""
        return self.expected is not None and self.answers.grids[:1] == (self.expected,)

    @property
    def right_in_two(self) -> bool:
        """One of the challenge's two attempts is."""
        return self.expected is not None and self.expected in self.answers.grids[:2]


@dataclass(frozen=True)
class Score:
    """All tasks that were asked."""

    tasks: tuple[TaskScore, ...]

    @property
    def scored(self) -> tuple[TaskScore, ...]:
        """Those with a reference."""
        return tuple(task for task in self.tasks if task.expected is not None)

    @property
    def right(self) -> int:
        """Tasks whose first attempt is right."""
        return sum(task.right for task in self.tasks)

    def record(self) -> dict[str, object]:
        """For programs."""
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
    """Every task that was asked; one whose prompt was skipped has no answer, and is wrong."""
    asked = {**{name: TaskAnswers(name, (), (), 0, 0) for name in skipped}, **answers}
    return Score(tuple(TaskScore(asked[name], expected.get(name), tasks.get(name)) for name in sorted(asked)))


def read_tasks(location: str) -> dict[str, Task]:
    """The tasks of a dataset by their ids."""
    file = StreamFile(location)
    places = ((line, f"{location} line {line.number}") for line in file.lines())
    return {task.task_id: task for task in (task_of(parse_row(line.raw, place), place) for line, place in places)}


def read_references(location: str) -> dict[str, Grid]:
    """The first output of each task, from a file such as ``test_outputs_train.json`` or from tasks with outputs."""
    content = b"".join(StreamFile(location).chunks())
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
