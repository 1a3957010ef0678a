"""ARC prompts and augmented variants of tasks: rotated, mirrored, recoloured, with the examples reordered.

A variant depends only on the seed, the task's id and the variant's number, through a keyed hash, so that another split,
another machine or a resumed run makes the same variant. Variant 0 is the task itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from spile.data.arc.encoders import GridEncoder
from spile.data.arc.grids import Grid, Pair, Task


def shuffled(count: int, *key: object) -> list[int]:
    """Return a permutation of ``range(count)`` that depends only on the key."""
    numbers, words = list(range(count)), _random_numbers(key)
    for last in range(count - 1, 0, -1):
        other = next(words) % (last + 1)
        numbers[last], numbers[other] = numbers[other], numbers[last]
    return numbers


def _random_numbers(key: Sequence[object]) -> Iterator[int]:
    """Yield 64-bit numbers derived from a key, without end."""
    seed = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=32).digest()
    block = 0
    while True:
        digest = hashlib.blake2b(block.to_bytes(8, "little"), key=seed, digest_size=64).digest()
        yield from (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8))
        block += 1


Augmentation = dict[str, Any]
"""How a variant differs from its task, as it is stored with a sample. The grids are changed in this order:

- ``rotation``: quarter turns counter-clockwise, 0 to 3
- ``flip``: whether they are mirrored left to right
- ``colors``: ``colors[old]`` is the new colour
- ``order``: ``order[i]`` is the index of the original training pair at position ``i``
"""


def draw(seed: int, task_id: str, variant: int, pairs: int) -> Augmentation:
    """Return the augmentation of one variant of a task with ``pairs`` training pairs."""
    if variant == 0:
        return {"rotation": 0, "flip": False, "colors": list(range(10)), "order": list(range(pairs))}
    key = ("augment", seed, task_id, variant)
    turns = next(_random_numbers((*key, "turns"))) % 8
    colors, order = shuffled(10, *key, "colors"), shuffled(pairs, *key, "order")
    return {"rotation": turns % 4, "flip": turns >= 4, "colors": colors, "order": order}


def augment(task: Task, seed: int, variant: int) -> tuple[Task, Augmentation | None]:
    """Return a variant of the task and its augmentation, which is None for the task itself."""
    if variant == 0:
        return task, None
    drawn = draw(seed, task.task_id, variant, len(task.train))
    pairs = [task.train[number] for number in drawn["order"]]
    changed = Task(
        task.task_id,
        tuple(Pair(apply(pair.input, drawn), apply(pair.output, drawn)) for pair in pairs),
        tuple(apply(grid, drawn) for grid in task.test),
        tuple(None if grid is None else apply(grid, drawn) for grid in task.answers),
    )
    return changed, drawn


def apply(grid: Grid, augmentation: Augmentation) -> Grid:
    for _ in range(augmentation["rotation"]):
        grid = _rotate(grid)
    rows = [row[::-1] for row in grid] if augmentation["flip"] else grid
    return [[augmentation["colors"][cell] for cell in row] for row in rows]


def revert(grid: Grid, augmentation: Augmentation | None) -> Grid:
    if augmentation is None:
        return grid
    old = {new: number for number, new in enumerate(augmentation["colors"])}
    rows = [[old[cell] for cell in row] for row in grid]
    rows = [row[::-1] for row in rows] if augmentation["flip"] else rows
    for _ in range(-augmentation["rotation"] % 4):
        rows = _rotate(rows)
    return rows


def _rotate(grid: Grid) -> Grid:
    """Rotate a grid by a quarter turn counter-clockwise."""
    return [list(column) for column in zip(*grid, strict=True)][::-1]


Messages = list[dict[str, str]]

_SYSTEM = (
    "You work out the rule behind puzzles made of coloured grids. A colour is a digit from 0 to 9. "
    "Reply with one grid and nothing else, written the way the grids you are shown are written."
)
_OUTPUT_V0 = (
    "In each example below, one rule changes an input grid into an output grid. "
    "Find the rule, apply it to the last input, and write the output grid."
)
_OUTPUT_V1 = "Every pair below follows one rule. Use that rule on the last input and give its output."
_INPUTS = "The grids below were all drawn by one generator. Write another grid that it could have drawn."
_OUTPUTS = "The grids below are all results of one rule. Write another grid that could be a result of it."


def _examples(task: Task, encoder: GridEncoder) -> str:
    shown = [
        f"Example {n}\nInput\n{encoder.to_text(pair.input)}\nOutput\n{encoder.to_text(pair.output)}"
        for n, pair in enumerate(task.train, 1)
    ]
    return "\n\n".join([*shown, f"Test\nInput\n{encoder.to_text(task.test[0])}\nOutput"])


def _numbered(grids: Iterable[Grid], encoder: GridEncoder) -> str:
    return "\n\n".join(f"Grid {n}\n{encoder.to_text(grid)}" for n, grid in enumerate(grids, 1))


VERSIONS: dict[str, tuple[str, Callable[[Task, GridEncoder], str]]] = {
    "output-from-examples-v0": (_OUTPUT_V0, _examples),
    "output-from-examples-v1": (_OUTPUT_V1, _examples),
    "input-from-inputs-v0": (_INPUTS, lambda task, text: _numbered((pair.input for pair in task.train), text)),
    "output-from-outputs-v0": (_OUTPUTS, lambda task, text: _numbered((pair.output for pair in task.train), text)),
}
"""The instruction of each version, and the function that writes the grids."""


def arc_messages(task: Task, encoder: GridEncoder, version: str) -> Messages:
    """Return the task as chat messages. If there are several test inputs, the prompt asks for the first."""
    instruction, grids = VERSIONS[version]
    user = {"role": "user", "content": f"{instruction}\n\n{grids(task, encoder)}"}
    return [user] if version == "output-from-examples-v0" else [{"role": "system", "content": _SYSTEM}, user]
