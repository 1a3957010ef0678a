"""ARC tasks as prompts: each version is a row of a table that turns a task into chat messages.

``docs/prompts.md`` is normative: a version's words never change once released; a better wording is a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spile.data.arc.encoders import GridEncoder
from spile.data.arc.grids import Grid, Task
from spile.spec.run import PROMPT_VERSIONS

__all__ = ["VERSIONS", "arc_messages"]

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


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _output_v0(task: Task, encoder: GridEncoder) -> Messages:
    return _user(f"{_OUTPUT_V0}\n\n{_examples(task, encoder)}")


def _output_v1(task: Task, encoder: GridEncoder) -> Messages:
    return [{"role": "system", "content": _SYSTEM}, *_user(f"{_OUTPUT_V1}\n\n{_examples(task, encoder)}")]


def _inputs_v0(task: Task, encoder: GridEncoder) -> Messages:
    grids = _numbered((pair.input for pair in task.train), encoder)
    return [{"role": "system", "content": _SYSTEM}, *_user(f"{_INPUTS}\n\n{grids}")]


def _outputs_v0(task: Task, encoder: GridEncoder) -> Messages:
    grids = _numbered((pair.output for pair in task.train), encoder)
    return [{"role": "system", "content": _SYSTEM}, *_user(f"{_OUTPUTS}\n\n{grids}")]


VERSIONS: dict[str, Callable[[Task, GridEncoder], Messages]] = dict(
    zip(PROMPT_VERSIONS, (_output_v0, _output_v1, _inputs_v0, _outputs_v0), strict=True)
)


def arc_messages(task: Task, encoder: GridEncoder, version: str) -> Messages:
    """The task as the messages of a chat that the model is to answer. Of several test inputs the first is asked."""
    return VERSIONS[version](task, encoder)
