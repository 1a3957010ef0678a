"""verify compares the merged answers of several streams with their commits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import spile as package
from spile.compute import answers
from spile.data.split import make_streams
from unit.cli.refusals import lines, spile

GRID = {"input": [[1, 2], [3, 4]], "output": [[4, 3], [2, 1]]}
FLAGS = ("--layers", "0", "--max-seq-length", "400", "--max-new-tokens", "2", "--batch-size", "2", "--capture", "none")
MERGED = ("predictions.jsonl", "submission.json")


def infer(folder: Path, number: int, *more: object) -> int:
    root = folder / "out"
    words = ("--dataset-dir", folder / "streams", "--worker-id", number, "--output", root, "--output-dir", root)
    return spile("infer", *words, *FLAGS, *more)


def prepare(folder: Path, streams: int) -> None:
    rows = [{"task_id": f"task-{n}", "train": [GRID], "test": [GRID]} for n in range(2 * streams + 1)]
    make_streams(str(lines(folder / "tasks.jsonl", *rows)), folder / "streams", streams, seed=None)


def damaged(root: Path) -> list[str]:
    return sorted(problem.where.rpartition("/")[2] for problem in package.verify(root).all_problems)


@pytest.mark.parametrize("streams", [2, 3])
def test_merged_answers_of_streams(tmp_path: Path, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, streams)
    root = tmp_path / "out"
    for number in range(streams - 1):
        assert infer(tmp_path, number) == 0
    report = package.verify(root)
    assert [problem.text for problem in report.all_problems] == [
        f"stream {streams - 1} was never begun (1 of {streams})"
    ]
    assert any(text.startswith("predictions.jsonl") and "not complete" in text for text in report.unchecked)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the last commit, before the merge
        patch.setattr(answers, "read_all_answers", killed)
        assert infer(tmp_path, streams - 1) == 130
    assert damaged(root) == sorted(MERGED), "the merged answers lack those of the last stream"
    assert infer(tmp_path, streams - 1) == 0
    report = package.verify(root)
    assert report.ok
    assert not any("predictions" in text or "submission" in text for text in report.unchecked)
    listed = [json.loads(line)["task_id"] for line in (root / MERGED[0]).read_text().splitlines()]
    assert listed == [f"task-{n}" for n in range(2 * streams + 1)], "in the order of the data"
    for name in MERGED:
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(root, copy)
        rows = (copy / name).read_text()
        (copy / name).write_text(rows.replace("task-1", "task-0"))
        assert damaged(copy) == [name]


def test_merged_answers_of_a_limited_run(tmp_path: Path) -> None:
    prepare(tmp_path, 2)
    root = tmp_path / "out"
    for number in range(2):
        assert infer(tmp_path, number, "--max-samples", 3) == 0
    assert package.verify(root).ok
    assert len((root / MERGED[0]).read_text().splitlines()) == 3
    before = {name: (root / name).read_bytes() for name in MERGED}
    for number in range(2):
        assert infer(tmp_path, number) == 0
    assert package.verify(root).ok
    assert len((root / MERGED[0]).read_text().splitlines()) == 5
    for name, content in before.items():
        (root / name).write_bytes(content)
    assert damaged(root) == sorted(MERGED)
