"""ARC grids and tasks: types and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

Grid = list[list[int]]
"""Rows of cells with values 0 to 9; 1×1 to 30×30, all rows of the same length."""

MAX_SIDE = 30
_CELLS = bytes(range(10))


@dataclass(frozen=True)
class Pair:
    """An input grid and its output."""

    input: Grid
    output: Grid


@dataclass(frozen=True)
class Task:
    """A task: training pairs, and test inputs whose outputs may be known for scoring."""

    task_id: str
    train: tuple[Pair, ...]
    test: tuple[Grid, ...]
    answers: tuple[Grid | None, ...] = ()


def grid_problem(grid: object) -> str | None:
    """Return why a value is not a grid, as a short text that is equal for similar problems, or None if it is one."""
    if type(grid) is not list or not grid or set(map(type, grid)) != {list}:
        return "a grid that is not a list of rows"
    if len(set(map(len, grid))) != 1:
        return "a ragged grid"
    if not grid[0]:
        return "a grid of empty rows"
    if len(grid) > MAX_SIDE or len(grid[0]) > MAX_SIDE:
        return f"a grid larger than {MAX_SIDE}×{MAX_SIDE}"
    try:
        stray = bytes(chain.from_iterable(grid)).translate(None, _CELLS)
    except TypeError:
        return "a cell that is not a number"
    except ValueError:
        return "a cell outside 0 to 9"
    if set(map(type, chain.from_iterable(grid))) != {int}:  # True and False are integers too
        return "a cell that is not a number"
    return "a cell outside 0 to 9" if stray else None


def task_problem(row: Mapping[str, Any]) -> str | None:
    """Return why a row with ``train`` and ``test`` is not a task, or None if it is one."""
    train, test = row.get("train"), row.get("test")
    if not isinstance(train, list) or not train:
        return "no train pairs"
    if not isinstance(test, list) or not test:
        return "no test input"
    for pair in train:
        if not isinstance(pair, dict) or "input" not in pair or "output" not in pair:
            return "a train pair without input and output"
        problem = grid_problem(pair["input"]) or grid_problem(pair["output"])
        if problem:
            return problem
    for pair in test:
        if not isinstance(pair, dict) or "input" not in pair:
            return "a test without input"
        answer = pair.get("output")
        problem = grid_problem(pair["input"]) or (None if answer is None else grid_problem(answer))
        if problem:
            return problem
    return None
