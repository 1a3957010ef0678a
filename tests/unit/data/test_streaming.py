"""A large dataset is read during the run: its rows are hashed part by part, and an edit of any of them is found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spile.data import lines as lines_module
from spile.data import samples as stream_module
from spile.data.lines import Line, LineSource, hash_lines
from spile.data.samples import SampleReader, SampleStream, open_stream
from spile.data.tokens import Tokenizer
from spile.errors import DataError, SpecError
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Part, Sample, Skip

ROWS = [{"text": f"number {n} " + "fox " * (n % 7), "label": n} for n in range(100)]
NONE = Ranges()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of more than 300 bytes are large, and parts have at most eight rows."""
    monkeypatch.setattr(stream_module, "HEAD_BYTES", 300)
    monkeypatch.setattr(lines_module, "_PART_ROWS", 8)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> DataSpec:
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(list(rows)), path, row_group_size=10)
    elif path.suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
    elif path.suffix == ".txt":
        path.write_text("".join(f"{row['text']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(dataset=str(path))


def texts(items: list[Sample | Skip], tokenizer: Tokenizer) -> dict[int, str]:
    return {item.index: tokenizer.decode(item.tokens.tolist()) for item in items if isinstance(item, Sample)}


def read_all(stream: SampleStream, done: Ranges = NONE, parts: Sequence[Part] = (), end: int | None = None) -> Any:
    reader = stream.read(done, parts, end)
    return list(reader), reader


KINDS = ["x.jsonl", "x.csv", "x.txt", "x.parquet"]


@pytest.mark.parametrize("name", KINDS)
def test_a_streamed_dataset_gives_what_a_whole_one_gives(name: str, tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / name, ROWS)
    whole, streamed = open_stream(spec, chatml, read_all=True), open_stream(spec, chatml)
    assert (whole.identity.lines, whole.identity.samples, whole.identity.head) == (100, 100, None)
    assert (streamed.identity.lines, streamed.identity.samples) == (None, None)
    assert streamed.identity.head is not None
    assert 1 < streamed.identity.head < 50, "only the first rows are read before the run"
    items, reader = read_all(streamed)
    assert texts(items, chatml) == texts(list(whole.read(NONE)), chatml)
    assert reader.total == 100
    assert [part.first for part in reader.parts] == list(range(0, 100, 8))
    again, _ = read_all(streamed, Ranges([(0, 41)]), reader.parts, 100)
    assert [item.index for item in again] == list(range(41, 100))


def test_the_end_is_known_if_all_samples_are_done(tmp_path: Path, chatml: Tokenizer) -> None:
    """As after a kill between the last sample and the commit that records the end."""
    stream = open_stream(write(tmp_path / "x.jsonl", ROWS), chatml)
    _, reader = read_all(stream)
    items, again = read_all(stream, Ranges([(0, 100)]), reader.parts)
    assert (items, again.total) == ([], 100)


def test_a_pod_reads_a_file_as_a_whole(tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / "x.jsonl", ROWS)
    assert open_stream(spec, chatml, pod=True).identity.lines == 100
    one = open_stream(spec, chatml)
    stored = one.identity
    assert open_stream(spec, chatml, stored=stored).identity == one.identity
    with pytest.raises(SpecError, match="expected one host, as when the run began, found a pod"):
        open_stream(spec, chatml, stored=stored, pod=True)


def test_the_number_of_samples_is_not_known_before_the_last_row(tmp_path: Path, chatml: Tokenizer) -> None:
    reader: SampleReader = open_stream(write(tmp_path / "x.jsonl", ROWS), chatml).read(NONE)
    next(reader)
    assert reader.total is None
    limited = DataSpec(dataset=str(tmp_path / "x.jsonl"), max_samples=12)
    items, reader = read_all(open_stream(limited, chatml))
    assert (len(items), reader.total) == (12, None)


@pytest.mark.parametrize("name", KINDS)
def test_every_edit_between_two_runs_is_found(name: str, tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / name, ROWS)
    items, reader = read_all(open_stream(spec, chatml))
    right = texts(items, chatml)
    for edited in (0, 7, 8, 50, 99):
        write(tmp_path / name, [{**row, "text": "dog"} if n == edited else row for n, row in enumerate(ROWS)])
        stream = open_stream(spec, chatml)
        for done in (NONE, Ranges([(0, 90)]), Ranges([(0, 100)])):
            seen: list[Sample | Skip] = []
            with pytest.raises(DataError, match=r"changed since it was read: expected \w+s [\d,]+ to"):
                seen.extend(stream.read(done, reader.parts, 100))
            assert texts(seen, chatml).items() <= right.items(), "nothing is made of the edit"
        with pytest.raises(DataError, match="changed since it was read"):
            stream.check_unchanged(reader.parts, 100)
    for rows, words in ((ROWS[:-1], "changed since"), ([*ROWS, ROWS[0]], "has grown since it was read to its end")):
        stream = open_stream(write(tmp_path / name, rows), chatml)
        with pytest.raises(DataError, match=words):
            stream.check_unchanged(reader.parts, 100)
    write(tmp_path / name, ROWS)
    open_stream(spec, chatml).check_unchanged(reader.parts, 100)


def test_rows_that_no_run_has_read_may_change(tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / "x.jsonl", ROWS)
    _, reader = read_all(open_stream(spec, chatml))
    write(tmp_path / "x.jsonl", [*ROWS[:80], {"text": "new"}])
    items, again = read_all(open_stream(spec, chatml), Ranges([(0, 80)]), reader.parts[:10])
    assert texts(items, chatml) == {80: "new"}
    assert again.total == 81


def test_an_edit_of_the_first_rows_changes_the_identity(tmp_path: Path, chatml: Tokenizer) -> None:
    one = open_stream(write(tmp_path / "x.jsonl", ROWS), chatml)
    assert open_stream(write(tmp_path / "x.jsonl", [*ROWS, ROWS[0]]), chatml).identity.sha256 == one.identity.sha256
    assert (
        open_stream(write(tmp_path / "x.jsonl", [{"text": "dog"}, *ROWS[1:]]), chatml).identity.sha256
        != one.identity.sha256
    )


def test_an_edit_while_a_file_is_read_is_found(
    tmp_path: Path, chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_CHUNK", 512)
    spec = write(tmp_path / "x.jsonl", ROWS)
    lines = LineSource(spec.dataset).lines()
    next(lines)
    with (tmp_path / "x.jsonl").open("r+b") as file:
        file.seek(3000)
        file.write(b"dog" * 1000)
    with pytest.raises(DataError, match="changed since it was read"):
        list(lines)


def test_a_bad_row_far_from_the_first_ones(tmp_path: Path, chatml: Tokenizer) -> None:
    rows: list[dict[str, Any]] = [*ROWS[:60], {"text": 7}, *ROWS[60:]]
    spec = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=r"x.jsonl line 61: expected a text in 'text', found a number there"):
        list(open_stream(spec, chatml).read(NONE))
    skipping = DataSpec(dataset=spec.dataset, bad_rows="skip")
    items, reader = read_all(open_stream(skipping, chatml))
    assert [item.index for item in items if isinstance(item, Skip)] == [60]
    assert reader.total == 101


def test_packed_documents_of_a_streamed_dataset(tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / "x.jsonl", ROWS)
    packed = DataSpec(dataset=spec.dataset, prompt=PromptSpec(pack=True), max_seq_length=9)
    whole, streamed = open_stream(packed, chatml, read_all=True), open_stream(packed, chatml)
    items, reader = read_all(streamed)
    assert texts(items, chatml) == texts(list(whole.read(NONE)), chatml)
    again, _ = read_all(streamed, Ranges([(0, 5)]), reader.parts, reader.total)
    assert [item.index for item in again] == list(range(5, len(items)))


def test_the_hash_of_a_part_depends_on_every_row() -> None:
    rows = [Line(n, n + 1, b'{"text": "%d"}' % n) for n in range(3)]
    assert len({hash_lines(rows), hash_lines(rows[:2]), hash_lines(rows[::-1])}) == 3


@pytest.mark.parametrize("name", KINDS)
def test_streams_that_read_rows_in_turn_share_the_dataset(name: str, tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / name, ROWS)
    one = {
        item.task_id: item for item in open_stream(spec, chatml, read_all=True).read(NONE) if isinstance(item, Sample)
    }
    seen: list[str] = []
    for number in range(3):
        own = replace(spec, worker_id=number, of_streams=3)
        stream = open_stream(own, chatml)
        assert (stream.identity.streams, stream.identity.split, stream.identity.lines) == (3, "rows in turn", None)
        items, reader = read_all(stream)
        samples = [item for item in items if isinstance(item, Sample)]
        assert [item.index for item in samples] == list(range(len(ROWS[number::3])))
        assert [item.task_id for item in samples] == [f"line-{row}" for row in range(number, 100, 3)]
        assert all((item.tokens == one[item.task_id].tokens).all() for item in samples)
        assert all(item.kept == one[item.task_id].kept for item in samples)
        seen += [item.task_id for item in samples]
        assert reader.total == len(samples)
        again, _ = read_all(stream, Ranges([(0, 11)]), reader.parts, reader.total)
        assert [item.index for item in again] == list(range(11, len(samples)))
        for edited, words in ((60 + number, "changed since"), (None, "has grown since|changed since")):
            rows = [{**row, "text": "dog"} if n == edited else row for n, row in enumerate(ROWS)]
            write(tmp_path / name, rows if edited is not None else [*ROWS, *ROWS[:3]])
            with pytest.raises(DataError, match=words):
                open_stream(own, chatml).check_unchanged(reader.parts, reader.total)
        write(tmp_path / name, ROWS)
    assert sorted(seen) == sorted(one), "each row is in one stream"


def test_another_number_of_streams_in_turn_is_another_stream(tmp_path: Path, chatml: Tokenizer) -> None:
    spec = write(tmp_path / "x.jsonl", [ROWS[0]] * 100)
    compared = [
        replace(found.identity, head=6).compared()
        for found in (open_stream(replace(spec, of_streams=count), chatml) for count in (2, 3))
    ]
    assert compared[0] != compared[1]


def test_a_bad_row_belongs_to_one_stream(tmp_path: Path, chatml: Tokenizer) -> None:
    rows: list[dict[str, Any]] = [*ROWS[:60], {"text": 7}, *ROWS[60:]]
    spec = replace(write(tmp_path / "x.jsonl", rows), bad_rows="skip", of_streams=2)
    skipped = []
    for number in range(2):
        items, reader = read_all(open_stream(replace(spec, worker_id=number), chatml))
        skipped.append([(item.index, item.task_id) for item in items if isinstance(item, Skip)])
        assert reader.total == (51, 50)[number]
    assert skipped == [[(30, "line-60")], []]
