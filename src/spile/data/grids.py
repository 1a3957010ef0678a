"""ARC grids and tasks: what one is, and what is wrong with one that is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

__all__ = ["MAX_SIDE", "Grid", "Pair", "Task", "grid_problem", "parse_task"]

Grid = list[list[int]]
"""Rows of cells 0 to 9: 1×1 to 30×30, all rows of one length."""

MAX_SIDE = 30
_CELLS = bytes(range(10))


@dataclass(frozen=True)
class Pair:
    """An input grid and its output."""

    input: Grid
    output: Grid


@dataclass(frozen=True)
class Task:
    """A puzzle: worked examples, and test inputs whose outputs are held back (or known, for scoring)."""

    task_id: str
    train: tuple[Pair, ...]
    test: tuple[Grid, ...]
    answers: tuple[Grid | None, ...] = ()


def grid_problem(grid: object) -> str | None:
    """Why this is no grid, in a few words that group like with like; None when it is one."""
    if type(grid) is not list or not grid or any(type(row) is not list for row in grid):
        return "a grid that is no list of rows"
    widths = set(map(len, grid))
    if len(widths) != 1:
        return "a ragged grid"
    if len(grid) > MAX_SIDE or not 1 <= len(grid[0]) <= MAX_SIDE:
        return f"a grid larger than {MAX_SIDE}×{MAX_SIDE}" if grid[0] else "a grid with empty rows"
    if set(map(type, chain.from_iterable(grid))) != {int}:
        return "a cell that is no number"
    try:
        stray = bytes(chain.from_iterable(grid)).translate(None, _CELLS)
    except ValueError:
        stray = b"x"
    return "a cell outside 0 to 9" if stray else None


def parse_task(row: Mapping[str, Any], task_id: str, *, max_train: int | None = None) -> Task | str:
    """A row with ``train`` and ``test`` as a task, or why it is none."""
    train, test = row.get("train"), row.get("test")
    if not isinstance(train, Sequence) or isinstance(train, str) or not train:
        return "no train pairs"
    if not isinstance(test, Sequence) or isinstance(test, str) or not test:
        return "no test input"
    pairs = train if max_train is None else train[:max_train]
    for pair in pairs:
        if not isinstance(pair, Mapping) or "input" not in pair or "output" not in pair:
            return "a train pair without input and output"
        problem = grid_problem(pair["input"]) or grid_problem(pair["output"])
        if problem:
            return problem
    for pair in test:
        if not isinstance(pair, Mapping) or "input" not in pair:
            return "a test without input"
        problem = grid_problem(pair["input"]) or (
            grid_problem(pair["output"]) if pair.get("output") is not None else None
        )
        if problem:
            return problem
    return Task(
        task_id,
        tuple(Pair(pair["input"], pair["output"]) for pair in pairs),
        tuple(pair["input"] for pair in test),
        tuple(pair.get("output") for pair in test),
    )
