"""Answers to grids, variants undone, votes counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.data.arc.answers import by_task, parse_answer, read_references, read_tasks, score_answers, submission
from spile.data.arc.encoders import parse_encoder
from spile.data.arc.prompts import apply, draw
from spile.data.sources import open_input
from spile.spec.run import DEFAULT_ENCODER, DataSpec
from spile.spec.sample import Prediction

ENCODER = parse_encoder(DEFAULT_ENCODER)
GRIDS = st.integers(1, 30).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 9), min_size=width, max_size=width), min_size=1, max_size=30)
)


def parts_said(
    sample: int, text: str, task: str = "t", how: dict[str, object] | None = None, each: float = -1.0
) -> Prediction:
    return Prediction(sample, task, text, (5, 2), (each, each), "stop", how)


@given(GRIDS, st.integers(0, 500))
def test_an_answer_to_a_variant_is_the_tasks_own(grid: list[list[int]], variant: int) -> None:
    how = draw(7, "t", variant, 3)
    text = ENCODER.to_text(apply(grid, how))
    found = by_task([parts_said(0, text, how=how if variant else None)], ENCODER)["t"]
    assert (found.grids, found.votes, found.unreadable) == ((grid,), (1,), 0)


def test_votes_then_likelihood() -> None:
    a, b, c = ([[n]] for n in (1, 2, 3))
    given = [(a, -3.0), (b, -2.0), (b, -4.0), (c, -0.1), (a, -0.5)]
    found = by_task([parts_said(n, ENCODER.to_text(grid), each=each) for n, (grid, each) in enumerate(given)], ENCODER)[
        "t"
    ]
    assert (found.grids, found.votes) == ((a, b, c), (2, 2, 1))
    assert submission([found]) == {"t": [{"attempt_1": a, "attempt_2": b}]}


@pytest.mark.parametrize(
    "text",
    ["", "no grid", "size 1x2\n1 01\n2 01", "size 1x1\n1 a", "size 2x2\n1 00\n2 0", "1 00\n2 00"],
)
def test_what_holds_no_grid_is_counted(text: str) -> None:
    found = by_task([parts_said(0, text)], ENCODER)["t"]
    assert (found.grids, found.predictions, found.unreadable) == ((), 1, 1)
    assert submission([found]) == {"t": [{"attempt_1": [[0]], "attempt_2": [[0]]}]}


def test_a_grid_larger_than_30_is_none() -> None:
    rows = "\n".join(f"{n} {'0' * 31}" for n in range(1, 32))
    assert parse_answer(f"size 31x31\n{rows}", ENCODER) is None


def test_the_last_paragraph_that_is_a_grid() -> None:
    assert parse_answer("Sure:\n\nsize 1x1\n1 3\n\nsize 1x1\n1 4\n\nthat is it", ENCODER) == [[4]]


def test_tasks_by_their_ids_are_a_line_each(tmp_path: Path) -> None:
    task = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}
    file = tmp_path / "arc_format_train.json"
    file.write_text(json.dumps({"a": task, "b": task}, indent=1))
    assert [json.loads(line.raw)["task_id"] for line in open_input(DataSpec(dataset=str(file))).lines()] == ["a", "b"]
    assert list(read_tasks(str(file))) == ["a", "b"]
    assert read_references(str(file)) == {}
    answers = by_task([parts_said(0, "size 1x1\n1 4", "a")], ENCODER)
    score = score_answers(answers, ["b"], {"a": [[4]], "b": [[4]]}, {})
    assert (score.right, len(score.scored)) == (1, 2)
    assert score.record()["score"] == 0.5
