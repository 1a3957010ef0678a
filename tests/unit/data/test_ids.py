"""One rule for the ids of ARC rows, because a task's variants, so its tokens, are drawn by its id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile.data.convert import CHALLENGES, RowSelection, convert
from spile.data.split import MANIFEST, StreamsManifest, make_streams
from spile.data.stream import open_stream
from spile.data.tokens import Tokenizer
from spile.data.upload import read_manifest, upload
from spile.errors import DataError
from spile.fleet.deploy import prepare_streams
from spile.objects import open_folder
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample

Task = Callable[..., dict[str, Any]]
Write = Callable[..., str]
PROMPT = PromptSpec(predictions_per_task=4)
OLD = RowSelection(ids="number")
MADE_BY_AN_EARLIER_BUILD = [
    "2b6acbc56a3236f734990124a12d4b496adbcad59a9a018ae39396ef88814b53",
    "3de410eec6cb45ac1b3443776ad1947db0dcf6e70984822fbba4c093ff378a58",
]
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
    with pytest.raises(DataError, match=r"task id 'one' stands twice .* found rows 0 and 1"):
        convert(named, tmp_path / "other", format="arc-json")


def older(streams: Path, dataset: str, count: int) -> dict[str, bytes]:
    """Streams as earlier builds made them."""
    make_streams(dataset, streams, count, selection=OLD)
    found = {path.name: path.read_bytes() for path in streams.iterdir()}
    manifest = json.loads(found[MANIFEST])
    assert "ids" not in manifest["source"]
    assert [entry["sha256"] for entry in manifest["streams"]] == MADE_BY_AN_EARLIER_BUILD
    return found


def test_streams_that_were_begun_by_number_are_made_again_byte_for_byte(unnamed: str, tmp_path: Path) -> None:
    before = older(tmp_path / "s", unnamed, 2)
    (tmp_path / "s" / "stream_001.jsonl").unlink()
    make_streams(unnamed, tmp_path / "s", 2, only={1})
    make_streams(unnamed, tmp_path / "s", 2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
    make_streams(unnamed, tmp_path / "s", 2, overwrite=True)
    manifest = read_manifest(open_folder(str(tmp_path / "s")))
    assert isinstance(manifest, StreamsManifest)
    assert manifest.source["ids"] == "content"


def test_streams_of_a_source_that_moved_say_how_they_were_named(unnamed: str, tmp_path: Path) -> None:
    older(tmp_path / "s", unnamed, 2)
    moved = Path(unnamed).rename(tmp_path / "moved.jsonl")
    with pytest.raises(DataError, match="--ids number names tasks as they were when these were made"):
        make_streams(str(moved), tmp_path / "s", 2)
    make_streams(str(moved), tmp_path / "s", 2, selection=OLD)


def test_a_second_deploy_leaves_the_streams_of_a_running_fleet_as_they_are(unnamed: str, tmp_path: Path) -> None:
    """Workers compare their stream's hash with the one that the run was begun with."""
    before = older(tmp_path / "made", unnamed, 2)
    upload(tmp_path / "made", open_folder(str(tmp_path / "bucket")))
    said: list[str] = []
    prepare_streams(unnamed, str(tmp_path / "bucket"), 2, data=DataSpec(), log=said.append)
    assert said[-1].startswith("0 files uploaded")
    assert {path.name: path.read_bytes() for path in (tmp_path / "bucket").iterdir()} == before
    prepare_streams(unnamed, str(tmp_path / "bucket"), 3, data=DataSpec(), log=said.append)
    assert b'"task-' in (tmp_path / "bucket" / "stream_000.jsonl").read_bytes()
