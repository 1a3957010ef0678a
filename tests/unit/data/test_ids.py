"""One rule for the ids of ARC rows, because a task's variants, so its tokens, are drawn by its id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile.data.convert import CHALLENGES, RowSelection, convert
from spile.data.samples import open_stream
from spile.data.split import make_streams
from spile.data.tokens import Tokenizer
from spile.errors import DataError
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample, Skip

Task = Callable[..., dict[str, Any]]
Write = Callable[..., str]
PROMPT = PromptSpec(predictions_per_task=4)
"""The sha256 of the two streams below, as they were before there was one rule."""


def tokens(dataset: str | Path, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Each task's variants."""
    found: dict[str, list[list[int]]] = {}
    for item in open_stream(DataSpec(dataset=str(dataset), prompt=PROMPT), tokenizer).read(Ranges()):
        assert isinstance(item, Sample)
        found.setdefault(item.task_id, []).append(item.tokens.tolist())
    return found


@pytest.fixture
def unnamed(jsonl: Write, task: Task) -> str:
    return jsonl([task(None, test=[{"input": [[n, 9 - n]], "output": [[n]]}]) for n in range(6)])


def test_a_task_gives_the_same_tokens_from_its_source_a_stream_and_a_converted_file(
    unnamed: str, chatml: Tokenizer, tmp_path: Path
) -> None:
    source = tokens(unnamed, chatml)
    assert len(source) == 6
    make_streams(unnamed, tmp_path / "streams", 2)
    streams = [tokens(tmp_path / "streams" / f"stream_00{n}.jsonl", chatml) for n in range(2)]
    assert streams[0] | streams[1] == source
    convert(unnamed, tmp_path / "tasks.jsonl")
    assert tokens(tmp_path / "tasks.jsonl", chatml) == source
    convert(unnamed, tmp_path / "pair", format="arc-json")
    convert(str(tmp_path / "pair" / CHALLENGES), tmp_path / "again.jsonl")
    assert tokens(tmp_path / "again.jsonl", chatml) == source


def test_what_is_taken_of_a_task_does_not_change_its_id(unnamed: str, tmp_path: Path) -> None:
    convert(unnamed, tmp_path / "whole.jsonl")
    convert(unnamed, tmp_path / "short.jsonl", selection=RowSelection(max_train_examples=1))
    names = [
        [json.loads(line)["task_id"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "short")
    ]
    assert names[0] == names[1]


def test_equal_tasks_without_ids_are_one_task_and_ids_that_stand_twice_are_refused(
    jsonl: Write, task: Task, tmp_path: Path, chatml: Tokenizer
) -> None:
    twins = jsonl([task(None), task(None)])
    make_streams(twins, tmp_path / "s", 2)
    first, second = (tokens(tmp_path / "s" / f"stream_00{n}.jsonl", chatml) for n in range(2))
    assert first == second
    done = convert(twins, tmp_path / "pair", format="arc-json")
    assert (done.tally.samples, dict(done.tally.rejected)) == (1, {"the same task as an earlier row": 1})
    named = jsonl([task("one"), task("one")])
    with pytest.raises(DataError, match=r"task id 'one' occurs twice .* found rows 0 and 1"):
        convert(named, tmp_path / "other", format="arc-json")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("7", "7"), ("7.5", "7.5"), ("7.0", "7.0"), ("-0.25", "-0.25"), ("true", "true"), ("false", "false"),
        ("9223372036854775808", "9223372036854775808"), ("18446744073709551615", "18446744073709551615"),
        ('"a b"', "a b"), ("null", "line-0"), ('""', "line-0"),
    ],
)  # fmt: skip
def test_an_id_is_written_as_in_json(value: str, name: str, tmp_path: Path, chatml: Tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "one", "id": {value}}}\n')
    (item,) = open_stream(DataSpec(dataset=str(tmp_path / "rows.jsonl")), chatml).read(Ranges())
    assert item.task_id == name


@pytest.mark.parametrize(
    "value", ["123456789012345678901234567890", "1e300", "9007199254740993.0", "[1, 2]", '{"a": 1}']
)
@pytest.mark.parametrize("field", ["id", "task_id"])
def test_an_id_that_cannot_be_kept_is_an_error_and_not_the_number_of_the_line(
    value: str, field: str, tmp_path: Path, chatml: Tokenizer
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "one", "id": "a"}}\n{{"text": "two", "{field}": {value}}}\n')
    with pytest.raises(DataError, match=rf"line 2, its {field}: expected a text, or a number .*Write the ids as texts"):
        open_stream(DataSpec(dataset=str(file)), chatml)
    kept, skipped = open_stream(DataSpec(dataset=str(file), bad_rows="skip"), chatml).read(Ranges())
    assert kept.task_id == "a"
    assert isinstance(skipped, Skip)
    assert skipped.reason == "bad row"
    done = make_streams(str(file), tmp_path / "streams", 1, selection=RowSelection(bad_rows="skip"))
    assert done.tally.samples == 1
    (reason,) = done.tally.rejected
    assert reason.startswith(f"{field}: expected a text")
