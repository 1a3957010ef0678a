"""The inputs of ``--dataset`` besides JSONL: Parquet, the hub, rows of tokens; and the fields of ``--keep``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.data.convert import RowSelection
from spile.data.samples import open_stream
from spile.data.sources import estimate_rows, open_input, open_source
from spile.data.split import make_streams
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import DataError, ModelError, SpecError
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Role, Sample, Skip

Write = Callable[..., str]
Task = Callable[..., dict[str, Any]]
ROWS = [{"id": f"r{n}", "text": f"number {n}", "label": n % 2, "source": {"site": "a" * n}} for n in range(7)]


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


def read(spec: DataSpec, tokenizer: Tokenizer, vocabulary: int | None = None) -> list[Sample]:
    found = list(open_stream(spec, tokenizer, vocabulary).read(Ranges()))
    assert all(isinstance(item, Sample) for item in found)
    return [item for item in found if isinstance(item, Sample)]


def same(one: list[Sample], other: list[Sample]) -> bool:
    return [(s.index, s.task_id, s.tokens.tolist(), s.kept) for s in one] == [
        (s.index, s.task_id, s.tokens.tolist(), s.kept) for s in other
    ]


KEEP = ("label", "source")


def test_parquet_gives_what_lines_give(tmp_path: Path, jsonl: Write, chatml: Tokenizer) -> None:
    table = DataSpec(dataset=parquet(tmp_path / "x.parquet", ROWS), keep=KEEP)
    lines = DataSpec(dataset=jsonl(ROWS), keep=KEEP)
    assert same(read(table, chatml), read(lines, chatml))
    one, again, other = (open_stream(spec, chatml) for spec in (table, table, replace(table, keep=())))
    assert one.identity == again.identity
    assert one.identity.sha256 != other.identity.sha256, "only the columns that are used are hashed"
    assert [item.index for item in one.read(Ranges([(0, 5)]))] == [5, 6]
    parquet(tmp_path / "x.parquet", ROWS[:-1])
    with pytest.raises(DataError, match="changed since it was read: expected rows 0 to 6 as they were"):
        list(one.read(Ranges()))


TEXTS = ["The cat sat, on the mat.", 'She said "no"\nand left.', "Zwölf Boxkämpfer"]


def written(kind: str, folder: Path) -> str:
    """The same three texts in a file of each kind that users have."""
    file = folder / f"prompts.{kind}"
    match kind:
        case "csv" | "tsv":
            with file.open("w", newline="", encoding="utf-8-sig") as target:  # as spreadsheets write it
                table = csv.writer(target, delimiter="," if kind == "csv" else "\t")
                table.writerows([["n", "prompt"], *([n, text] for n, text in enumerate(TEXTS))])
        case "json":
            file.write_text(json.dumps(TEXTS))
        case "objects.json":
            file.write_text(json.dumps([{"prompt": text, "n": n} for n, text in enumerate(TEXTS)], indent=1))
        case "txt":
            file.write_bytes("\r\n\r\n".join(text.replace("\n", " ") for text in TEXTS).encode())
        case "folder":
            for number, text in enumerate(TEXTS):
                (file / f"part{number}").mkdir(parents=True)
                (file / f"part{number}" / "a.txt").write_text(text)
    return str(file)


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "objects.json", "txt", "folder"])
def test_files_as_users_have_them(kind: str, tmp_path: Path, jsonl: Write, chatml: Tokenizer) -> None:
    texts = [text.replace("\n", " ") for text in TEXTS] if kind == "txt" else TEXTS
    prompt = PromptSpec(column="prompt")
    lines = read(DataSpec(dataset=jsonl([{"prompt": text} for text in texts]), prompt=prompt), chatml)
    found = read(DataSpec(dataset=written(kind, tmp_path), prompt=prompt), chatml)
    assert [sample.tokens.tolist() for sample in found] == [sample.tokens.tolist() for sample in lines]
    assert len({sample.task_id for sample in found}) == 3


@pytest.mark.parametrize("kind", ["json", "txt", "folder"])
def test_texts_without_a_field_can_be_split(kind: str, tmp_path: Path, chatml: Tokenizer) -> None:
    dataset = written(kind, tmp_path)
    make_streams(dataset, tmp_path / "streams", 1)
    found = read(DataSpec(dataset_dir=str(tmp_path / "streams")), chatml)
    whole = read(DataSpec(dataset=dataset), chatml)
    assert [sample.tokens.tolist() for sample in found] == [sample.tokens.tolist() for sample in whole]


def test_only_line_ends_separate_the_lines_of_a_text_file(tmp_path: Path, chatml: Tokenizer) -> None:
    (tmp_path / "x.txt").write_text("one\x0ctwo\u2028three\nfour\x0cfive\u2028six")
    assert len(read(DataSpec(dataset=str(tmp_path / "x.txt")), chatml)) == 2


def test_a_column_of_a_csv_file_is_kept_with_the_text(tmp_path: Path, chatml: Tokenizer) -> None:
    spec = DataSpec(dataset=written("csv", tmp_path), prompt=PromptSpec(column="prompt"), keep=("n",))
    assert [sample.kept for sample in read(spec, chatml)] == [{"n": "0"}, {"n": "1"}, {"n": "2"}]


@pytest.mark.parametrize(
    ("name", "content", "output"),
    [
        ("x.csv", "text,label\na,1\nb\n", "line 3: expected a usable row, found 1 cell, but the header has 2. .*skip"),
        ("x.csv", 'text,label\n"a\nb",1\n\n"c\nd",1,2\n', "line 5: expected a usable row, found 3 cells"),
        ("x.csv", 'text,label\na,1\n"b,2\nc,3\n', "line 3: a quote is never closed. Close it"),
        ("x.csv", "text,text\na,b\n", "has two columns named 'text'. Rename"),
        ("x.csv", "prompt\na\n", "has no column that could be used.*found prompt.*--column"),
        ("x.csv", "", "x.csv is empty: expected at least one usable row"),
        ("x.json", "[1, 2]", "row 0: expected a usable row, found an element that is neither"),
        ("x.json", "3", "expected a list of rows"),
        ("x.txt", b"good\n\xff\xfe\n", "x.txt line 2: expected a usable row, found a line that is not UTF-8 text"),
        ("x.xlsx", "", "x.xlsx has an unknown suffix"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(
    name: str, content: str | bytes, output: str, tmp_path: Path, chatml: Tokenizer
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=output) as error:
        read(DataSpec(dataset=str(tmp_path / name)), chatml)
    assert "\n" not in str(error.value)


def test_rows_of_a_split_in_a_folder_as_the_hub_lays_it_out(tmp_path: Path, chatml: Tokenizer) -> None:
    pytest.importorskip("datasets")
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        parquet(tmp_path / "hub" / f"{split}.parquet", rows)
    whole = DataSpec(dataset=str(tmp_path / "hub"), keep=("label",))
    assert [s.task_id for s in read(whole, chatml)] == [row["id"] for row in ROWS]
    assert [s.task_id for s in read(replace(whole, split="test"), chatml)] == ["r0", "r1"]
    part = open_stream(replace(whole, split="train[2:5]"), chatml)
    assert (part.identity.lines, part.identity.data) == (3, f"{tmp_path / 'hub'}:train[2:5]")
    assert [(s.index, s.task_id) for s in part.read(Ranges()) if isinstance(s, Sample)] == [
        (0, "r2"),
        (1, "r3"),
        (2, "r4"),
    ]
    with pytest.raises(DataError, match=r"Bad split: nope.*Check --split"):
        open_stream(replace(whole, split="nope"), chatml)


@pytest.mark.parametrize("out", [0, 2])
def test_the_hub_is_read_once_and_tried_again_while_it_is_out(
    out: int, monkeypatch: pytest.MonkeyPatch, chatml: Tokenizer
) -> None:
    datasets = pytest.importorskip("datasets")
    from spile.data import tables as hub

    calls: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split))
        if len(calls) <= out:
            raise ConnectionError("no route")
        assert streaming
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "_check_connection", lambda: None)
    monkeypatch.setattr(hub, "resolve_commit", lambda *_: None)
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "60")
    spec = DataSpec(dataset="someone/reviews", split="train[:3]", config_name="plain", keep=("label",))
    stream = open_stream(spec, chatml)
    assert [(s.task_id, s.kept) for s in stream.read(Ranges()) if isinstance(s, Sample)] == [
        ("r0", {"label": 0}),
        ("r1", {"label": 1}),
        ("r2", {"label": 0}),
    ]
    assert calls == [("someone/reviews", "plain", "train")] * (out + 1)


BAD_TABLES = [
    ({"split": "test"}, SpecError, r"--split: expected train, the only split of a file, found test"),
    ({"split": "train[:10%]"}, SpecError, r"--split: expected a split, or rows of one: train, train\[:1000\]"),
    ({"keep": ("nope",)}, DataError, r"expected the columns of --keep: nope, found no nope, but id, text"),
]


@pytest.mark.parametrize(("changes", "error", "words"), BAD_TABLES)
def test_bad_requests_of_a_table(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path, chatml: Tokenizer
) -> None:
    spec = DataSpec(dataset=parquet(tmp_path / "x.parquet", ROWS))
    with pytest.raises(error, match=words) as caught:
        open_stream(replace(spec, **changes), chatml)
    assert "\n" not in str(caught.value)


def test_what_is_no_table(tmp_path: Path, jsonl: Write, monkeypatch: pytest.MonkeyPatch, chatml: Tokenizer) -> None:
    for flag, more in (("--split", {"split": "train"}), ("--config-name", {"config_name": "x"})):
        with pytest.raises(
            SpecError, match=rf"{flag}: expected a dataset of the hub, or a folder of one, found .*jsonl"
        ):
            open_input(DataSpec(dataset=jsonl(ROWS), **more))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"no such dataset: data/tasks\."):  # a folder that is here: no name of the hub
        open_input(DataSpec(dataset="data/tasks"))
    raw = parquet(tmp_path / "raw.parquet", [{"text": b"bytes", "id": "a"}])
    with pytest.raises(DataError, match=r"row 0: expected columns that JSON can hold, found text \(bytes\)"):
        open_stream(DataSpec(dataset=raw), chatml)


@pytest.mark.parametrize(
    ("module", "words"), [("pyarrow.parquet", "Parquet needs pyarrow"), ("datasets", "of the hub need")]
)
def test_without_the_extra_one_line_names_it(
    module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatml: Tokenizer
) -> None:
    place = parquet(tmp_path / "x.parquet", ROWS)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{words}.*\. Run: pip install 'spile\[data\]'"):
        open_stream(DataSpec(dataset=place if module != "datasets" else "someone/something"), chatml)


def test_the_number_of_rows_of_parquet_has_the_same_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = parquet(tmp_path / "x.parquet", ROWS)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not at all")
    assert estimate_rows(DataSpec(dataset=place)) == len(ROWS)
    with pytest.raises(DataError, match=r"bad.parquet is not a Parquet file: found "):
        estimate_rows(DataSpec(dataset=str(tmp_path / "bad.parquet")))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"Parquet needs pyarrow\. Run: pip install 'spile\[data\]'"):
        estimate_rows(DataSpec(dataset=place))


def test_parquet_in_a_bucket(cloud_url: str, tmp_path: Path, chatml: Tokenizer) -> None:
    from spile.objects import open_folder

    place = Path(parquet(tmp_path / "x.parquet", ROWS))
    open_folder(cloud_url).put("data/x.parquet", place.read_bytes())
    found = read(DataSpec(dataset=f"{cloud_url}/data/x.parquet", keep=KEEP), chatml)
    assert same(found, read(DataSpec(dataset=str(place), keep=KEEP), chatml))
    with pytest.raises(DataError, match="no such dataset"):
        open_stream(DataSpec(dataset=f"{cloud_url}/none.parquet"), chatml)


def test_token_ids_are_used_as_they_are(jsonl: Write, chatml: Tokenizer) -> None:
    rows = [
        {"input_ids": [5, 1, 7], "id": "a"},
        {"input_ids": [0, 0, 9, 8], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": []},
        {"input_ids": list(range(10))},
    ]
    stream = open_stream(DataSpec(dataset=jsonl(rows), max_seq_length=6), chatml, 1000)
    assert (stream.prompt.kind, stream.prompt.column) == ("tokens", "input_ids")
    first, masked, empty, long = stream.read(Ranges())
    assert isinstance(first, Sample)
    assert isinstance(masked, Sample)
    assert isinstance(long, Sample)
    assert first.tokens.dtype == np.int32
    assert (first.task_id, first.tokens.tolist()) == ("a", [5, 1, 7])
    assert first.preview == chatml.decode([5, 1, 7])
    assert first.roles[0] & Role.FIRST
    assert (masked.task_id, masked.tokens.tolist()) == ("line-1", [9, 8]), "padding is no token"
    assert isinstance(empty, Skip)
    assert (long.tokens.tolist(), long.truncated) == ([0, 1, 2, 3, 4, 5], 4)


def test_a_text_next_to_tokens_is_used_unless_tokens_are_requested(jsonl: Write, chatml: Tokenizer) -> None:
    place = jsonl([{"text": "hello", "input_ids": [3], "ids": [4]}])
    assert open_stream(DataSpec(dataset=place), chatml).prompt.kind == "text"
    for prompt, wanted in ((PromptSpec(kind="tokens"), [3]), (PromptSpec(column="ids"), [4])):
        (sample,) = read(DataSpec(dataset=place, prompt=prompt), chatml)
        assert sample.tokens.tolist() == wanted


OK = {"input_ids": [1]}
BAD_TOKENS = [
    ([OK, {"input_ids": [1, 50]}], r"line 2: expected token ids from 0 to 49, the model's vocabulary, found 50"),
    ([{"input_ids": [-1]}], r"line 1: expected token ids from 0 to 49.*found -1. Tokenize with this model's own"),
    ([OK, {"input_ids": "1 2"}], r"line 2: expected a list of token ids in 'input_ids', found a string there"),
    ([OK, {"input_ids": [1.5]}], r"line 2: expected a list of token ids"),
    ([OK, {"input_ids": [[1], [1, 2]]}], r"line 2: expected a list of token ids"),
    ([OK, {"text": "x"}], r"line 2: expected a list of token ids in 'input_ids', found the fields text"),
    ([{"input_ids": [1, 2], "attention_mask": [1]}], r"line 1: expected 2 numbers in 'attention_mask', one per token"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "words"), BAD_TOKENS)
def test_bad_tokens_are_refused_before_anything_is_read(
    rows: list[dict[str, Any]], words: str, jsonl: Write, chatml: Tokenizer
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        open_stream(DataSpec(dataset=jsonl(rows)), chatml, 50)
    assert "\n" not in str(caught.value)


def test_rows_of_tokens_need_no_tokenizer(tmp_path: Path, jsonl: Write) -> None:
    none = load_tokenizer(tmp_path, optional=True)
    (sample,) = read(DataSpec(dataset=jsonl([{"input_ids": [5, 6]}])), none, 10)
    assert (sample.tokens.tolist(), sample.roles.tolist(), sample.preview) == ([5, 6], [Role.FIRST, 0], "")
    with pytest.raises(ModelError, match=r"no tokenizer in .*give rows with input_ids"):
        open_stream(DataSpec(dataset=jsonl(ROWS)), none)
    with pytest.raises(ModelError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_every_variant_of_a_task_keeps_its_rows_fields(jsonl: Write, task: Task, chatml: Tokenizer) -> None:
    rows = [task("a", label=1), task("b", label="two")]
    spec = DataSpec(dataset=jsonl(rows), prompt=PromptSpec(predictions_per_task=2), keep=("label",))
    assert [s.kept for s in read(spec, chatml)] == [{"label": 1}] * 2 + [{"label": "two"}] * 2
    chat = jsonl([{"messages": [{"role": "user", "content": "x"}], "label": None}])
    assert [s.kept for s in read(DataSpec(dataset=chat, keep=("label",)), chatml)] == [{"label": None}]
    assert [s.kept for s in read(DataSpec(dataset=chat), chatml)] == [None]


BAD_KEEPS = [
    ([{"text": "a", "label": 1}, {"text": "b"}], r"line 2: expected the fields of --keep: label, found no label, but"),
    ([{"text": "a", "label": "x" * 3000}], r"line 1: expected at most 1,024 bytes to --keep of a row, found 3,012"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "words"), BAD_KEEPS)
def test_a_row_that_cannot_be_kept_is_refused_before_anything_is_read(
    rows: list[dict[str, Any]], words: str, jsonl: Write, chatml: Tokenizer
) -> None:
    with pytest.raises(DataError, match=words):
        open_stream(DataSpec(dataset=jsonl(rows), keep=("label",)), chatml)


def test_a_task_without_its_kept_field_is_found_though_tasks_are_checked_fast(
    jsonl: Write, task: Task, chatml: Tokenizer
) -> None:
    with pytest.raises(DataError, match="line 2: expected the fields of --keep"):
        open_stream(DataSpec(dataset=jsonl([task("a", label=1), task("b")]), keep=("label",)), chatml)


def test_absurd_keeps() -> None:
    with pytest.raises(SpecError, match="--keep: expected names of fields, each once, found a,a"):
        DataSpec(keep=("a", "a"))
    with pytest.raises(SpecError, match="--keep: expected one sample per row, found --pack"):
        DataSpec(keep=("a",), prompt=PromptSpec(pack=True))


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("stream_*.jsonl")):
        yield from map(json.loads, file.read_text().splitlines())


def test_streams_of_a_table_keep_what_extract_will_keep(tmp_path: Path, jsonl: Write, task: Task) -> None:
    place = parquet(tmp_path / "x.parquet", ROWS)
    make_streams(place, tmp_path / "s", 2, selection=RowSelection(keep=("label",)))
    assert sorted((row["id"], row["label"]) for row in rows_of(tmp_path / "s")) == [(r["id"], r["label"]) for r in ROWS]
    assert not any("source" in row for row in rows_of(tmp_path / "s"))
    cut = jsonl([task("a", label=7)], "tasks.jsonl")
    make_streams(cut, tmp_path / "t", 1, selection=RowSelection(max_train_examples=1, keep=("label",)))
    assert [row["label"] for row in rows_of(tmp_path / "t")] == [7]
    make_streams(jsonl([{"input_ids": [1, 2]}], "ids.jsonl"), tmp_path / "i", 1)
    assert [row["input_ids"] for row in rows_of(tmp_path / "i")] == [[1, 2]]


def test_repeated_values_of_a_parquet_file_are_not_multiplied(tmp_path: Path) -> None:
    """A file of a kilobyte whose rows are 300 times the same text of a megabyte."""
    import pyarrow

    from spile.data.tables import Columns, Parquet

    path = parquet(tmp_path / "x.parquet", [{"text": "word " * 200_000}] * 300)
    before, most = pyarrow.total_allocated_bytes(), 0
    for row in Parquet(path, Columns(frozenset({"text"}))).rows():
        assert len(row.data["text"]) == 1_000_000
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < 50e6


@pytest.mark.parametrize("start", [0, 3])
def test_a_huge_row_of_a_parquet_file_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    from spile.data import tables

    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 1000)
    path = parquet(
        tmp_path / "x.parquet", [{"text": f"{number} " + "x" * 300} for number in range(7)] + [{"text": "y" * 2000}]
    )
    rows = tables.Parquet(path, tables.Columns(frozenset({"text"}))).rows(start)
    assert [next(rows).data["text"][0] for _ in range(start, 7)] == [str(number) for number in range(start, 7)]
    with pytest.raises(DataError, match="row 7: expected at most 0 MiB in a row, found more"):
        next(rows)


@pytest.mark.parametrize("row", [{"text": "x" * 101}, {"input_ids": [1] * 101}])
def test_a_huge_sample_is_refused(
    jsonl: Write, chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    """A tokenizer needs several hundred bytes for each token, so a text of gigabytes would end the worker."""
    from spile.data import rows

    monkeypatch.setattr(rows, "MAX_SAMPLE_LENGTH", 100)
    spec = DataSpec(dataset=jsonl([{name: value[:100] for name, value in row.items()}, row]))
    with pytest.raises(DataError, match=r"line 2: expected at most 100 (characters|token ids) in a sample, found 101"):
        open_stream(spec, chatml)
    skipping = open_stream(replace(spec, bad_rows="skip"), chatml)
    assert [type(each).__name__ for each in skipping.read(Ranges())] == ["Sample", "Skip"]


@pytest.mark.parametrize("shape", ["texts", "tasks", "tasks in a linked folder", "hub", "hub in a linked folder"])
def test_a_link_does_not_bring_in_data_from_outside(shape: str, tmp_path: Path) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    (data / "part").mkdir(parents=True)
    outside.mkdir()
    name = {"texts": "one.txt", "hub": "one.jsonl"}.get(shape.partition(" ")[0], "one.json")
    content = b'{"train": [], "test": []}' if name == "one.json" else b'{"text": "mine"}\n'
    (data / "part" / name).write_bytes(content)
    (outside / f"secret{name}").write_bytes(content)
    (data / "part" / f"again{name}").symlink_to(name)  # A link to a file of the folder brings in nothing.
    if name != "one.json":  # A hidden folder of tasks is read, too.
        (data / ".hidden").symlink_to(outside)
    assert open_source(str(data), column="text").count() in (2, None)
    link = data / ("linked" if "linked" in shape else f"part/two{name}")
    link.symlink_to(outside if "linked" in shape else outside / f"secret{name}")
    with pytest.raises(DataError, match=r"is a symbolic link out of .*data: found .*outside.*Name that file"):
        open_source(str(data), column="text")
    link.unlink()
    (tmp_path / "named").symlink_to(data)
    assert open_source(str(tmp_path / "named"), column="text").count() in (2, None)
