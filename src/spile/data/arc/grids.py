"""ARC grids and tasks: types, checks, and a fast check of a line that does not parse it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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


def grid_problem(grid: object, *, booleans: bool = True) -> str | None:
    """Return why a value is not a grid, in a few words that group similar problems, or None if it is one.

    ``booleans``: whether the value may contain booleans, which Python counts as integers.
    """
    if type(grid) is not list or not grid or set(map(type, grid)) != {list}:
        return "a grid that is no list of rows"
    if len(set(map(len, grid))) != 1:
        return "a ragged grid"
    if not grid[0]:
        return "a grid of empty rows"
    if len(grid) > MAX_SIDE or len(grid[0]) > MAX_SIDE:
        return f"a grid larger than {MAX_SIDE}×{MAX_SIDE}"
    try:
        stray = bytes(chain.from_iterable(grid)).translate(None, _CELLS)
    except TypeError:
        return "a cell that is no number"
    except ValueError:
        return "a cell outside 0 to 9"
    if booleans and set(map(type, chain.from_iterable(grid))) != {int}:
        return "a cell that is no number"
    return "a cell outside 0 to 9" if stray else None


def task_problem(row: Mapping[str, Any], *, booleans: bool = True) -> str | None:
    """Return why a row with ``train`` and ``test`` is not a task, or None if it is one."""
    train, test = row.get("train"), row.get("test")
    if not isinstance(train, list) or not train:
        return "no train pairs"
    if not isinstance(test, list) or not test:
        return "no test input"
    for pair in train:
        if not isinstance(pair, dict) or "input" not in pair or "output" not in pair:
            return "a train pair without input and output"
        problem = grid_problem(pair["input"], booleans=booleans) or grid_problem(pair["output"], booleans=booleans)
        if problem:
            return problem
    for pair in test:
        if not isinstance(pair, dict) or "input" not in pair:
            return "a test without input"
        answer = pair.get("output")
        problem = grid_problem(pair["input"], booleans=booleans) or (
            None if answer is None else grid_problem(answer, booleans=booleans)
        )
        if problem:
            return problem
    return None


def parse_task(row: Mapping[str, Any], task_id: str, *, booleans: bool = True) -> Task | str:
    """Return a row with ``train`` and ``test`` as a task, or the reason why it is not one."""
    problem = task_problem(row, booleans=booleans)
    if problem is not None:
        return problem
    return Task(
        task_id,
        tuple(Pair(pair["input"], pair["output"]) for pair in row["train"]),
        tuple(pair["input"] for pair in row["test"]),
        tuple(pair.get("output") for pair in row["test"]),
    )


_ZEROED = bytes.maketrans(b"0123456789", b"0" * 10)
_KEYS = {"train input": b"input", "train output": b"output", "test input": b"input", "test output": b"output"}
_AFTER = {
    "train input": ((b",", "train output"),),
    "train output": ((b"},{", "train input"), (b"}],", "test")),
    "test input": ((b",", "test output"), (b"}]}", "end"), (b"},{", "test input")),
    "test output": ((b"}]}", "end"), (b"},{", "test input")),
}
"""What may follow a grid of each kind, and the kind that comes next."""


@cache
def _grids() -> frozenset[bytes]:
    """Return the compact JSON of a grid of zeros for every size."""
    rows = [b"[" + b",".join([b"0"] * width) + b"]" for width in range(1, 31)]
    return frozenset(b"[" + b",".join([row] * height) + b"]" for row in rows for height in range(1, 31))


def passes_fast_check(raw: bytes) -> str | None:
    """Return the task's id if the line consists of an id, valid training pairs and valid tests, else None.

    None means "not certain": the caller then parses the line. Lines may be compact or formatted as by ``json.dumps``.
    This check is several times faster than parsing.
    """
    spaced = raw.startswith(b'{"task_id": ')
    compact = raw.replace(b", ", b",").replace(b": ", b":") if spaced else raw
    pieces = compact.translate(_ZEROED).split(b'"')
    if pieces[:3] != [b"{", b"task_id", b":"] or pieces[4:7] != [b",", b"train", b":[{"]:
        return None
    grids, state = _grids(), "train input"
    for key, value in zip(pieces[7::2], pieces[8::2], strict=False):
        if state == "test":
            if key != b"test" or value != b":[{":
                return None
            state = "test input"
            continue
        if key != _KEYS.get(state) or value[:1] != b":":
            return None
        for end, after in _AFTER[state]:
            if value.endswith(end) and value[1 : -len(end)] in grids:
                state = after
                break
        else:
            return None
    return _name(raw) if state == "end" and len(pieces) % 2 else None


def _name(raw: bytes) -> str | None:
    try:
        name = raw.split(b'"', 4)[3].decode()
    except UnicodeDecodeError:
        return None
    return name if name and name.isprintable() and "\\" not in name else None
