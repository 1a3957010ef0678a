"""Datasets that ``spile extract`` cannot use: a one-line error, exit code 2, and no file is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spile.data.tables import Hub
from unit.cli.refusals import Refuse, lines

GRID = [[1, 2], [3, 4]]
TASK = {"task_id": "a", "train": [{"input": GRID, "output": GRID}], "test": [{"input": GRID}]}


def test_a_mistyped_path_is_not_looked_for_on_the_hub(
    refused: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unasked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(Hub, "pinned", unasked)
    monkeypatch.setattr(Hub, "rows", unasked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("./texts", "../texts", "data/texts", "data/x.jsonl", "x.csv", "./data/x.parquet"):
        assert refused("--dataset", name).startswith(f"no such dataset: {name}")


def test_no_such_dataset(refused: Refuse, fresh: Path) -> None:
    line = refused("--dataset", "nowhere.jsonl", "--output", fresh)
    assert (
        line == "no such dataset: nowhere.jsonl. Check --dataset, which is a file, a folder, or owner/name on the hub."
    )


def test_no_such_stream(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    line = refused("--model", "embedded", "--dataset-dir", tmp_path, "--worker-id", 5, "--output", fresh)
    assert line.startswith(f"no such dataset: {tmp_path}/stream_005.jsonl")


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_dataset(refused: Refuse, tmp_path: Path, fresh: Path, text: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    line = refused("--dataset", data, "--output", fresh)
    assert line == f"{data} is empty: expected at least one usable row, found no row"


def task(**changes: Any) -> dict[str, Any]:
    return {**TASK, **changes}


def pair(grid: Any) -> list[Any]:
    return [{"input": GRID, "output": grid}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{no json", "line 3"),
        ("[1, 2]", "line 3"),
        ('{"text": "truncated', "line 3"),
        ('"\\ud800"', "line 3"),
        (task(train=[]), "no train pairs"),
        (task(train=None), "no train pairs"),
        (task(test=[]), "no test input"),
        (task(train=pair([[1, 2], [3]])), "a ragged grid"),
        (task(train=pair([[1] * 31] * 2)), "a grid larger than 30×30"),
        (task(train=pair([[1]] * 31)), "a grid larger than 30×30"),
        (task(train=pair([[11]])), "a cell outside 0 to 9"),
        (task(train=pair([])), "a grid that is not a list of rows"),
        (task(train=pair([["a"]])), "a cell that is not a number"),
    ],
)
def test_a_bad_line_is_named_by_its_number(refused: Refuse, tmp_path: Path, fresh: Path, row: Any, words: str) -> None:
    data = lines(tmp_path / "data.jsonl", TASK, "", row, TASK)
    line = refused("--dataset", data, "--output", fresh)
    assert f"{data} line 3" in line
    assert words in line


def test_bytes_that_are_no_text(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n')
    assert f"{data} line 2" in refused("--dataset", data, "--output", fresh)


def test_a_line_of_another_kind(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    data = lines(tmp_path / "data.jsonl", {"text": "fine"}, {"texts": "not"})
    line = refused("--dataset", data, "--output", fresh)
    assert f"{data} line 2" in line
    assert "text" in line
