from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.data.convert import RowSelection
from spile.data.manifest import MANIFEST
from spile.data.sources import TextFile
from spile.data.split import make_streams
from spile.data.tables import SourceRow
from spile.errors import DataError, SpecError, UserError

Task = Callable[..., dict[str, Any]]
Write = Callable[..., str]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def ids(folder: Path) -> list[list[str]]:
    return [
        [json.loads(line)["task_id"] for line in p.read_text().splitlines()] for p in sorted(folder.glob("*.jsonl"))
    ]


@pytest.fixture
def tasks(jsonl: Write, task: Task) -> str:
    return jsonl([task(f"t{n}") for n in range(50)])


def test_streams_are_balanced_whole_and_described(tasks: str, tmp_path: Path) -> None:
    made = make_streams(tasks, tmp_path / "s", 7)
    streams = ids(tmp_path / "s")
    assert sorted(map(len, streams)) == [7] * 6 + [8]
    assert sorted(name for stream in streams for name in stream) == sorted(f"t{n}" for n in range(50))
    assert list(content(tmp_path / "s")) == [*(f"stream_{n:03d}.jsonl" for n in range(7)), MANIFEST]
    described = json.loads((tmp_path / "s" / MANIFEST).read_text())
    assert described["samples"] == 50
    assert described["seed"] == 0
    assert described["version"] == 1
    assert described["source"]["dataset"] == tasks
    for entry, names in zip(described["streams"], streams, strict=True):
        raw = (tmp_path / "s" / entry["name"]).read_bytes()
        assert (entry["samples"], entry["bytes"]) == (len(names), len(raw))
        assert entry["sha256"] == hashlib.sha256(raw).hexdigest()
    assert made.written == tuple(entry["name"] for entry in described["streams"])


def numbers(folder: Path, count: int) -> str:
    """A file of as many texts as asked for."""
    file = folder / "numbers.txt"
    file.write_text("".join(f"number {n}\n" for n in range(count)))
    return str(file)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), count=st.integers(1, 60))
def test_balanced_to_one_for_every_count(
    data: st.DataObject, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    num = data.draw(st.integers(1, count))
    folder = tmp_path_factory.mktemp("s") / "s"
    made = make_streams(numbers(folder.parent, count), folder, num, seed=data.draw(st.integers(0, 5)))
    sizes = [entry.samples for entry in made.manifest.streams]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert len({name for stream in ids(folder) for name in stream}) == count


def test_same_input_and_seed_same_bytes(tasks: str, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_streams(tasks, tmp_path / name, 5, seed=seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert ids(tmp_path / "a") != ids(tmp_path / "c")


def test_some_streams_made_again_are_byte_identical(tasks: str, tmp_path: Path) -> None:
    make_streams(tasks, tmp_path / "s", 6)
    before = content(tmp_path / "s")
    for number in (2, 3):
        (tmp_path / "s" / f"stream_{number:03d}.jsonl").write_text("damaged")
    made = make_streams(tasks, tmp_path / "s", 6, only={2, 3})
    assert made.written == ("stream_002.jsonl", "stream_003.jsonl")
    assert content(tmp_path / "s") == before
    make_streams(tasks, tmp_path / "fresh", 6, only={4})
    assert content(tmp_path / "fresh") == {name: before[name] for name in ("stream_004.jsonl", MANIFEST)}


def test_streams_that_would_differ_are_refused(tasks: str, tmp_path: Path, jsonl: Write, task: Task) -> None:
    make_streams(tasks, tmp_path / "s", 6)
    before = content(tmp_path / "s")
    other = jsonl([task(f"t{n}") for n in range(51)], "other.jsonl")
    with pytest.raises(
        DataError, match=r"lists a different stream_00\d.jsonl: .*changed: expected \d samples, sha256 .*found"
    ):
        make_streams(other, tmp_path / "s", 6, only={1})
    with pytest.raises(DataError, match=r"lists other streams: expected 6 streams of seed 0, found 6 of seed 9"):
        make_streams(tasks, tmp_path / "s", 6, seed=9)
    with pytest.raises(DataError, match=r"lists other streams: expected 6 streams of seed 0, found 4 of seed 0"):
        make_streams(tasks, tmp_path / "s", 4)
    assert content(tmp_path / "s") == before
    make_streams(other, tmp_path / "s", 4, overwrite=True)
    assert list(content(tmp_path / "s")) == [*(f"stream_{n:03d}.jsonl" for n in range(4)), MANIFEST]


def test_streams_without_a_manifest_are_not_replaced_by_default(tasks: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mine = out / "stream_001.jsonl"
    mine.write_text('{"text": "mine"}\n')
    with pytest.raises(DataError, match=r"out holds streams of another split: .* found a different stream_001.jsonl"):
        make_streams(tasks, out, 3)
    with pytest.raises(DataError, match=r"out holds streams of another split: .* found a different stream_001.jsonl"):
        make_streams(tasks, out, 1)
    assert [file.name for file in out.iterdir()] == ["stream_001.jsonl"]
    assert mine.read_text() == '{"text": "mine"}\n'
    make_streams(tasks, out, 3, overwrite=True)
    (out / "streams.json").unlink()  # as a split that was cut off leaves it
    make_streams(tasks, out, 3)
    assert (out / "streams.json").is_file()


def test_a_duplicate_is_refused_and_nothing_is_left(tmp_path: Path, jsonl: Write, task: Task) -> None:
    with pytest.raises(DataError, match=r"task id 't1' occurs twice .* found rows 1 and 2"):
        make_streams(jsonl([task("t0"), task("t1"), task("t1")]), tmp_path / "s", 2)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("number", "only", "words"),
    [
        (0, None, "--num-streams: expected 1 to 10000, found 0"),
        (51, None, "--num-streams: expected at most 50, one per sample, found 51"),
        (4, {4}, "--streams: expected streams 0 to 3, found 4"),
    ],
)
def test_absurd_numbers(number: int, only: set[int] | None, words: str, tasks: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=words):
        make_streams(tasks, tmp_path / "s", number, only=only)
    assert not (tmp_path / "s").exists()


def test_lines_with_a_name_are_carried_over_as_they_are(jsonl: Write, task: Task, tmp_path: Path) -> None:
    spaced = json.dumps(task("t"), indent=None, separators=(" , ", " : "))
    make_streams(jsonl([spaced]), tmp_path / "s", 1)
    assert (tmp_path / "s" / "stream_000.jsonl").read_text() == spaced + "\n"


def test_known_test_outputs_stay_for_scoring(jsonl: Write, tmp_path: Path) -> None:
    make_streams(jsonl([{"examples": [[[[1]], [[2]]], [[[3]], [[4]]]]}]), tmp_path / "s", 1)
    (line,) = (tmp_path / "s" / "stream_000.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "task_id": "task-1df961795559",
        "train": [{"input": [[1]], "output": [[2]]}],
        "test": [{"input": [[3]], "output": [[4]]}],
    }


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"text": "x"}, {"task_id": "line-0", "text": "x"}),
        ({"id": "n", "text": "x"}, {"id": "n", "text": "x"}),
        ({"messages": [{"role": "user", "content": "x"}]}, None),
    ],
)
def test_texts_and_chats(row: dict[str, Any], line: dict[str, Any] | None, jsonl: Write, tmp_path: Path) -> None:
    make_streams(jsonl([row, {"odd": 1}]), tmp_path / "s", 1, selection=RowSelection(bad_rows="skip"))
    lines = (tmp_path / "s" / "stream_000.jsonl").read_text().splitlines()
    (made,) = [found for found in map(json.loads, lines) if isinstance(found, dict)]
    assert len(lines) == 2
    assert made == (line or {"task_id": "line-0", **row})
    assert sum(json.loads((tmp_path / "s" / MANIFEST).read_text())["rejected"].values()) == 1


def test_many_streams_need_few_open_files(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(list(Path("/proc/self/fd").iterdir())) + 20), hard))
    try:
        make_streams(numbers(tmp_path, 300), tmp_path / "s", 150)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(ids(tmp_path / "s")) == 150


def test_a_folder_that_cannot_be_written(tasks: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*found a file where a folder should be") as caught:
        make_streams(tasks, tmp_path / "file" / "s", 2)
    assert caught.value.exit_code == 2


def test_a_source_that_fails_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TextFile.rows

    def broken(self: TextFile, start: int = 0) -> Iterator[SourceRow]:
        yield from whole(self, start)
        raise DataError("the line went dead")

    monkeypatch.setattr(TextFile, "rows", broken)
    with pytest.raises(DataError, match="the line went dead"):
        make_streams(numbers(tmp_path, 100), tmp_path / "s", 3)
    assert not (tmp_path / "s").exists()


def test_real_arc_tasks(tmp_path: Path) -> None:
    """ARC-AGI's 400 public tasks, where the machine has them."""
    folder = Path(__file__).parents[3].parent / "shared" / "data" / "arc-agi"
    if not folder.is_dir():
        pytest.skip("no ARC-AGI here")
    from spile.data.convert import convert

    assert convert(str(folder), tmp_path / "t.jsonl").tally.samples == 400
    made = make_streams(str(tmp_path / "t.jsonl"), tmp_path / "s", 32)
    assert {entry.samples for entry in made.manifest.streams} == {12, 13}
    assert not made.manifest.rejected
