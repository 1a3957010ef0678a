from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spile.data.convert import ANSWERS, CHALLENGES, DuplicateFinder, RowSelection, convert
from spile.data.sources import open_source
from spile.data.tables import Columns, Hub
from spile.errors import DataError, SpecError, StoreError

Task = Callable[..., dict[str, Any]]
Write = Callable[..., str]
G = [[1, 2], [3, 4]]
TEXT = Columns(frozenset({"text"}))


def pairs(count: int = 3, last: list[list[int]] = [[5]]) -> list[Any]:  # noqa: B006
    return [[G, G]] * (count - 1) + [[G, last]]


def content_id(n: int) -> str:
    """The id of row n below, by the rule's own words: blake2b of train and test, keys sorted."""
    sides = [{"input": G, "output": G}] * 2
    content = json.dumps({"test": [{"input": G, "output": [[n]]}], "train": sides}, separators=(",", ":"))
    return f"task-{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


SKIP = RowSelection(bad_rows="skip")


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"examples": pairs(3, [[n]]), "source": "made"} for n in range(9)]


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


@pytest.fixture(params=["jsonl", "parquet", "hub layout", "strings in parquet"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path, jsonl: Write, rows: list[dict[str, Any]]) -> str:
    """The same rows in every layout a dataset may have."""
    if request.param == "jsonl":
        return jsonl(rows)
    if request.param == "parquet":
        return parquet(tmp_path / "rows.parquet", rows)
    if request.param == "strings in parquet":
        return parquet(tmp_path / "rows.parquet", [{"examples": json.dumps(row["examples"])} for row in rows])
    pytest.importorskip("datasets")
    parquet(tmp_path / "hub" / "data" / "train-00000-of-00002.parquet", rows[:4])
    parquet(tmp_path / "hub" / "data" / "train-00001-of-00002.parquet", rows[4:])
    return str(tmp_path / "hub")


def test_a_column_of_pairs(dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "tasks.jsonl"
    done = convert(
        dataset, out, selection=RowSelection(start_index=2, end_index=8, max_samples=4, max_train_examples=1)
    )
    made = read(out)
    assert [task["task_id"] for task in made] == [content_id(n) for n in (2, 3, 4, 5)]
    assert made[0] == {"task_id": content_id(2), "train": [{"input": G, "output": G}], "test": [{"input": G}]}
    assert (done.tally.samples, done.tally.rows, dict(done.tally.rejected)) == (4, 4, {})
    assert [path.name for path in out.parent.iterdir()] == ["tasks.jsonl"]


def test_the_challenge_pair(dataset: str, tmp_path: Path) -> None:
    convert(dataset, tmp_path / "out", format="arc-json")
    tasks = json.loads((tmp_path / "out" / CHALLENGES).read_text())
    answers = json.loads((tmp_path / "out" / ANSWERS).read_text())
    assert list(tasks) == list(answers) == [content_id(n) for n in range(9)]
    assert tasks[content_id(3)] == {"train": [{"input": G, "output": G}] * 2, "test": [{"input": G}]}
    assert answers[content_id(3)] == [[[3]]]
    again = tmp_path / "again.jsonl"
    convert(str(tmp_path / "out" / CHALLENGES), again)
    straight = tmp_path / "straight.jsonl"
    convert(dataset, straight)
    assert again.read_bytes() == straight.read_bytes()


def test_held_back_outputs_on_request(jsonl: Write, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    convert(jsonl(rows), tmp_path / "t.jsonl", test_outputs=True)
    assert read(tmp_path / "t.jsonl")[4]["test"] == [{"input": G, "output": [[4]]}]


@pytest.mark.parametrize("below", ["", "training"])
def test_a_folder_of_arc_tasks(below: str, tmp_path: Path, task: Task) -> None:
    folder = tmp_path / "arc" / below
    folder.mkdir(parents=True)
    for name in ("b", "a", "c"):
        (folder / f"{name}.json").write_text(json.dumps(task(None)))
    (folder / "LICENSE").write_text("…")
    convert(str(tmp_path / "arc"), tmp_path / "t.jsonl")
    assert [row["task_id"] for row in read(tmp_path / "t.jsonl")] == ["a", "b", "c"]
    (folder / "broken.json").write_text("{")
    some = RowSelection(bad_rows="skip", split=below or None)
    done = convert(str(folder.parent if below else folder), tmp_path / "t.jsonl", selection=some)
    assert done.tally.shown == ["broken.json: a file that is not JSON"]
    with pytest.raises(DataError, match=r"nope contains no dataset: expected \*.json tasks"):
        convert(str(folder), tmp_path / "t.jsonl", selection=RowSelection(split="nope"))


BAD: list[tuple[object, str]] = [
    ("{oops", "a line that is not JSON"),
    ([1], "a row that is not an object"),
    ({"other": 1}, "no column 'examples'"),
    ({"examples": "nonsense"}, "pairs that are not JSON"),
    ({"examples": 5}, "pairs that are not a list"),
    ({"examples": [[G, G]]}, "fewer than two pairs"),
    ({"examples": [[G, G, G], [G, G]]}, "a pair of 3"),
    ({"examples": [7, [G, G]]}, "a pair that is not a list"),
    ({"examples": [[G, [[1, 2], [3]]], [G, G]]}, "a ragged grid"),
    ({"examples": [[G, [[10]]], [G, G]]}, "a cell outside 0 to 9"),
    ({"examples": [[G, [["x"]]], [G, G]]}, "a cell that is not a number"),
    ({"examples": [[G, [[True]]], [G, G]]}, "a cell that is not a number"),
    ({"examples": [[G, G], [G, [[0] * 31]]]}, "a grid larger than 30×30"),
    ({"train": [], "test": []}, "no train pairs"),
]


def test_rows_that_cannot_be_used_are_counted_by_reason(jsonl: Write, tmp_path: Path) -> None:
    done = convert(
        jsonl([row if isinstance(row, str) else json.dumps(row) for row, _ in BAD] + [{"examples": pairs()}]),
        tmp_path / "t.jsonl",
        selection=SKIP,
    )
    expected: dict[str, int] = {}
    for _, reason in BAD:
        expected[reason] = expected.get(reason, 0) + 1
    assert dict(done.tally.rejected) == expected
    assert done.tally.shown == [f"line {n}: {reason}" for n, (_, reason) in enumerate(BAD[:5], 1)]
    assert (done.tally.rows, done.tally.samples) == (len(BAD) + 1, 1)


def test_nothing_usable_leaves_nothing(jsonl: Write, tmp_path: Path) -> None:
    out = tmp_path / "new" / "t.jsonl"
    with pytest.raises(
        DataError, match=r".* has no usable rows: expected at least one task, found 2 × no column 'examples'"
    ):
        convert(jsonl([{"a": 1}, {"b": 1}]), out, selection=SKIP)
    assert not out.parent.exists()
    with pytest.raises(DataError, match=r"found no rows\. Check --column, --split"):
        convert(jsonl([{"examples": pairs()}]), out, selection=RowSelection(start_index=5))
    with pytest.raises(DataError, match=r"has no usable rows: .* found no rows"):
        convert(jsonl([]), out)


def test_a_task_id_that_stands_twice_is_refused_and_the_old_file_stays(
    jsonl: Write, task: Task, tmp_path: Path
) -> None:
    out = tmp_path / "t.jsonl"
    out.write_text("old")
    rows = [task(name) for name in ("a", "b", "c", "b", "a")]
    with pytest.raises(DataError, match=r"task id 'b' occurs twice in .*: expected each id once, found rows 1 and 3"):
        convert(jsonl(rows), out)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "t.jsonl"]


def test_unique_finds_the_first_repeat() -> None:
    names = DuplicateFinder()
    assert names.first_repeat() is None
    for row in range(5000):
        names.add(f"n{row}", row)
    assert names.first_repeat() is None
    for row, name in ((6000, "n77"), (6001, "n3"), (6002, "n77")):
        names.add(name, row)
    assert names.first_repeat() == (77, 6000)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "missing.jsonl",
            r"no such dataset: .*missing.jsonl\. Check --dataset, which is a file, a folder, or owner/name on the hub",
        ),
        ("table.xlsx", r"table.xlsx has an unknown suffix: expected .jsonl, .*found .xlsx"),
        ("empty", r"empty contains no dataset"),
    ],
)
def test_no_such_source(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "table.xlsx").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=words):
        open_source(str(tmp_path / name), column="examples")


def test_bad_files(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(DataError, match=r"x.parquet is not a Parquet file: found "):
        convert(str(tmp_path / "x.parquet"), tmp_path / "t.jsonl")
    with pytest.raises(
        DataError,
        match=r"no column that could be used: expected one of input_ids, messages, nope.*found examples, source",
    ):
        convert(parquet(tmp_path / "y.parquet", rows), tmp_path / "t.jsonl", selection=RowSelection(column="nope"))
    (tmp_path / "z.json").write_text("[1]")
    with pytest.raises(DataError, match=r"z.json row 0: expected a usable row"):
        convert(str(tmp_path / "z.json"), tmp_path / "t.jsonl")
    pytest.importorskip("datasets")
    parquet(tmp_path / "hub" / "train.parquet", rows)
    with pytest.raises(DataError, match=r"Bad split: nope\. Available splits: \['train'\]\. Check --split"):
        convert(str(tmp_path / "hub"), tmp_path / "t.jsonl", selection=RowSelection(split="nope"))
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"start_index": -1}, "--start-index: expected 0 or more, found -1"),
        ({"start_index": 5, "end_index": 5}, "--end-index: expected more than --start-index 5, found 5"),
        ({"max_samples": 0}, "--max-samples: expected 1 or more, found 0"),
        ({"max_train_examples": 0}, "--max-train-examples: expected 1 or more, found 0"),
    ],
)
def test_absurd_selections(values: dict[str, int], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        RowSelection(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("HF_ENDPOINT", "http://127.0.0.1:9"), pytest.param("HF_HUB_OFFLINE", "1", marks=pytest.mark.slow)],
)
def test_without_a_network_one_line_says_so_and_what_to_do(setting: str, value: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {
        setting: value,
        "HF_HOME": str(tmp_path),
        "SPILE_RETRY_SECONDS": "0.1",
    }
    command = [
        sys.executable,
        "-m",
        "spile.cli.main",
        "data",
        "convert",
        "--dataset",
        "someone/something",
        "--output",
        str(tmp_path / "o/t.jsonl"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    *output, error = done.stderr.splitlines()
    assert ["the hub does not give someone/something" in line for line in output] == [True] * (setting == "HF_ENDPOINT")
    assert error.startswith("spile: the hub cannot be reached for someone/something: found ")
    assert error.endswith("name the folder or file: --dataset DIR")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("module", "words"), [("pyarrow.parquet", "Parquet needs pyarrow"), ("datasets", "datasets of the hub need")]
)
def test_without_the_extra_one_line_names_it(
    module: str, words: str, tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = parquet(tmp_path / "x.parquet", rows)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{words}.*\. Run: pip install 'spile\[data\]'"):
        convert(place if module != "datasets" else str(tmp_path), tmp_path / "t.jsonl")


class Outage(Exception):
    """As the hub's library raises it, with the reply."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Server Error")
        self.response = SimpleNamespace(status_code=status)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.parametrize("trouble", [Outage(503), Outage(429), ConnectionError("no route")], ids=str)
@pytest.mark.usefixtures("reachable")
def test_a_hub_that_is_out_is_tried_again_and_then_gives_its_rows(
    trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    answers: list[object] = [trouble, trouble, datasets.Dataset.from_list([{"text": "a"}]).to_iterable_dataset()]

    def load(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "30")
    assert [row.data for row in Hub("me/rows", "train", None, TEXT).rows()] == [{"text": "a"}]


def flickering(rows: list[dict[str, str]], *outages: tuple[int, Exception]) -> Callable[..., object]:
    """A hub whose dataset breaks off at some rows, once each."""
    import datasets

    left = dict(outages)

    def generate() -> Iterator[dict[str, str]]:
        for number, row in enumerate(rows):
            if number in left:
                raise left.pop(number)
            yield row

    return lambda *_, **__: datasets.IterableDataset.from_generator(generate)


@pytest.mark.usefixtures("reachable")
def test_a_hub_that_goes_out_in_the_middle_gives_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"text": str(number)} for number in range(10)]
    load = flickering(rows, (4, Outage(503)), (7, ConnectionError("reset")), (9, Outage(429)))
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "30")
    found = list(Hub("me/rows", "train", None, TEXT).rows(2))
    assert [(row.number, row.data) for row in found] == list(enumerate(rows))[2:]


@pytest.mark.usefixtures("reachable")
def test_a_hub_that_stays_out_in_the_middle_is_a_failure_and_not_a_short_dataset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    class Broken(Exception):
        response = SimpleNamespace(status_code=503)

    def generate() -> Iterator[dict[str, str]]:
        yield {"text": "0"}
        raise Broken("503 Server Error")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(generate))
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.2")
    rows = Hub("me/rows", "train", None, TEXT).rows()
    assert next(rows).data == {"text": "0"}
    with pytest.raises(StoreError, match="the hub cannot be reached for me/rows") as caught:
        next(rows)
    assert caught.value.exit_code == 1


@pytest.mark.usefixtures("reachable")
def test_a_refusal_of_the_hub_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[int] = []

    def load(*_: object, **__: object) -> object:
        asked.append(1)
        raise Outage(403)

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(StoreError, match="me/rows cannot be read: found Outage: 403"):
        next(Hub("me/rows", "train", None, TEXT).rows())
    assert len(asked) == 1
