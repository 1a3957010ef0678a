"""Lines, files and requests that are refused, each with what is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spile.data.manifest import MANIFEST
from spile.data.samples import open_stream
from spile.data.split import make_streams
from spile.data.tokens import Tokenizer
from spile.errors import DataError, ModelError, SpecError
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample

Task = Callable[..., dict[str, Any]]
Write = Callable[..., str]
NONE = Ranges()


BAD = [
    ('{"text": "a"}\n{oops', r"line 2 is not JSON: found .*oops"),
    ('{"text": "a"}\n[1]', r"line 2: expected a JSON object, found '\[1\]'"),
    (
        '{"text": "a"}\n\n{"body": 1}',
        r"line 3: expected a text in 'text', found the fields body. Name its field with --column.",
    ),
    ('{"text": "a"}\n{"text": 1}', r"line 2: expected a text in 'text', found a number there"),
    ('{"body": "a"}', r"line 1: expected an ARC task .*, found the fields body. Name the text's field with --column."),
    (
        '{"id1": {"train": [], "test": []}, "id2": {"train": [], "test": []}}',
        r"line 1 is all tasks in one object, by their ids: expected one task per line. Make lines of them: spile data",
    ),
    ('{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1}', r"found the fields a, .*, h and 2 more\. Name"),
    ('{"messages": []}', r"line 1: expected a list of messages, found an empty list"),
    ('{"messages": [{"content": "x"}]}', r"line 1: expected messages like"),
    ('{"messages": [{"role": "user", "content": 5}]}', r"line 1: expected a message's content as text, found a number"),
    ('{"task_id": "q", "train": [], "test": []}', r"line 1, task q: expected an ARC task, found no train pairs"),
    ('{"train": [{"input": [[1]]}], "test": [{"input": [[1]]}]}', r"found a train pair without input and output"),
    ('{"train": [{"input": [[1]], "output": [[1, 2], [3]]}], "test": [{"input": [[1]]}]}', r"found a ragged grid"),
    (
        '{"train": [{"input": [[1]], "output": [[true]]}], "test": [{"input": [[1]]}]}',
        r"found a cell that is not a number",
    ),
    ('{"train": [{"input": [[1]], "output": [[10]]}], "test": [{"input": [[1]]}]}', r"found a cell outside 0 to 9"),
    ('{"train": [{"input": [[1]], "output": [[1]]}], "test": []}', r"found no test input"),
    ("", r"is empty: expected at least one usable row, found no row"),
    ("\n \n", r"is empty"),
]


@pytest.mark.parametrize(("content", "words"), BAD)
def test_a_bad_line_is_refused_before_anything_is_read(
    content: str, words: str, tmp_path: Path, chatml: Tokenizer
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        open_stream(DataSpec(dataset=str(file)), chatml)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_oversized_grid(jsonl: Write, task: Task, chatml: Tokenizer) -> None:
    place = jsonl([task(), task("b", test=[{"input": [[0] * 31]}])])
    with pytest.raises(DataError, match=r"line 2, task b: expected an ARC task, found a grid larger than 30×30"):
        open_stream(DataSpec(dataset=place), chatml)


def test_a_bad_line_beyond_max_samples_is_not_looked_at(jsonl: Write, chatml: Tokenizer) -> None:
    place = jsonl([{"text": "a"}, {"text": "b"}, "oops"])
    assert len(list(open_stream(DataSpec(dataset=place, max_samples=2), chatml).read(NONE))) == 2


def test_bad_requests(tmp_path: Path, jsonl: Write, task: Task, chatml: Tokenizer, with_bos: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"no such dataset: .*missing.jsonl\. Check --dataset"):
        open_stream(DataSpec(dataset=str(tmp_path / "missing.jsonl")), chatml)
    with pytest.raises(DataError, match=r"contains no dataset: expected"):
        open_stream(DataSpec(dataset=str(tmp_path)), chatml)
    with pytest.raises(SpecError, match=r"--grid-encoder: expected one of Minimal.*found Bad"):
        open_stream(DataSpec(dataset="none", prompt=PromptSpec(encoder="Bad()")), chatml)
    with pytest.raises(SpecError, match=r"--prompt-version: expected one of output-from-examples-v0, .*found 'v9'"):
        PromptSpec(version="v9")
    with pytest.raises(SpecError, match="--pack: expected plain text, found arc"):
        open_stream(DataSpec(dataset=jsonl([task()]), prompt=PromptSpec(pack=True)), chatml)
    with pytest.raises(SpecError, match="--predictions-per-task above 1: expected ARC tasks, found text"):
        open_stream(DataSpec(dataset=jsonl([{"text": "x"}]), prompt=PromptSpec(predictions_per_task=2)), chatml)
    with pytest.raises(ModelError, match="--prompt chat: expected a tokenizer with a chat template, found none"):
        open_stream(DataSpec(dataset=jsonl([{"messages": [{"role": "user", "content": "x"}]}])), with_bos)


def test_a_stream_that_changed_since_streams_json_is_named_with_both_hashes(
    tasks: str, chatml: Tokenizer, tmp_path: Path
) -> None:
    made = make_streams(tasks, tmp_path / "s", 3)
    file = tmp_path / "s" / "stream_001.jsonl"
    spec = DataSpec(dataset_dir=str(tmp_path / "s"), worker_id=1)
    open_stream(spec, chatml)
    file.write_bytes(file.read_bytes().replace(b"t", b"u", 1).replace(b"u", b"t", 1) + b"\n")
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(
        DataError, match=rf"stream_001.jsonl changed since streams.json .*{made.manifest.streams[1].sha256}.*{now}"
    ):
        open_stream(spec, chatml)
    open_stream(replace(spec, worker_id=0), chatml)
    (tmp_path / "s" / MANIFEST).write_text("{}")
    with pytest.raises(DataError, match=r"streams.json is damaged"):
        open_stream(spec, chatml)


def test_a_stream_knows_the_split_it_is_of(tasks: str, chatml: Tokenizer, tmp_path: Path) -> None:
    made = make_streams(tasks, tmp_path / "s", 3)
    opened = [open_stream(DataSpec(dataset_dir=str(tmp_path / "s"), worker_id=n), chatml) for n in range(3)]
    assert {(stream.identity.streams, stream.identity.split) for stream in opened} == {(3, made.manifest.digest())}
    assert make_streams(tasks, tmp_path / "t", 3, seed=1).manifest.digest() != made.manifest.digest()
    alone = DataSpec(dataset=str(tmp_path / "s" / "stream_001.jsonl"), worker_id=1)
    assert open_stream(alone, chatml).identity.streams == 3
    assert (
        open_stream(replace(alone, worker_id=2), chatml).identity.streams is None
    )  # written as another stream than it is
    assert open_stream(DataSpec(dataset=tasks), chatml).identity.split is None
    (tmp_path / "s" / MANIFEST).unlink()
    assert open_stream(alone, chatml).identity.streams is None


def test_a_file_that_changes_under_the_reader_is_noticed(jsonl: Write, chatml: Tokenizer) -> None:
    place = jsonl([{"text": "a"}])
    stream = open_stream(DataSpec(dataset=place), chatml)
    jsonl([{"text": "b"}])
    with pytest.raises(DataError, match="changed since it was read: expected lines 1 to 1 as they were"):
        list(stream.read(NONE))


@pytest.mark.parametrize("most", [None, 3])
def test_no_sample_is_made_of_bytes_that_were_not_hashed(jsonl: Write, chatml: Tokenizer, most: int | None) -> None:
    rows = [{"text": f"{n} " + "fox " * 100_000} for n in range(6)]  # blocks of 1 MiB: two or three rows in each
    place = jsonl(rows)
    stream = open_stream(DataSpec(dataset=place, max_samples=most), chatml)
    right = {item.index: item.tokens.tolist() for item in stream.read(NONE) if isinstance(item, Sample)}
    for edited in range(most or len(rows)):
        jsonl([{"text": "dog " + row["text"][4:]} if n == edited else row for n, row in enumerate(rows)])
        reader = stream.read(NONE)
        with pytest.raises(DataError, match="changed since it was read"):  # noqa: PT012 - all before it must be right
            for item in reader:
                assert isinstance(item, Sample)
                assert item.tokens.tolist() == right[item.index]
    jsonl([*rows, {"text": "one more"}])
    longer = stream.read(NONE)
    if most is None:
        with pytest.raises(DataError, match="has grown since it was read to its end"):
            list(longer)
    else:  # what is asked for lies in blocks that are as they were
        assert {item.index for item in longer} == set(right)
    jsonl(rows[:3])
    if most is None:
        with pytest.raises(DataError, match="changed since it was read"):
            list(stream.read(NONE))
