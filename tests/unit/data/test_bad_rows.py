"""Unusable rows: an error that names them, or recorded as skipped, for every kind of input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spile.data.convert import RowSelection, convert
from spile.data.samples import open_stream
from spile.data.split import make_streams
from spile.data.tokens import Tokenizer
from spile.errors import DataError, SpecError
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample, Skip

GOOD: list[dict[str, Any]] = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
LINES = [json.dumps(GOOD[0]), "{broken", json.dumps(GOOD[1]), json.dumps({"text": 7}), json.dumps(GOOD[2])]


@pytest.fixture
def bad_file(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(LINES) + "\n")
    return str(file)


def test_by_default_a_bad_row_is_an_error_that_names_file_line_and_reason(bad_file: str, chatml: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl line 2 is not JSON: found"):
        open_stream(DataSpec(dataset=bad_file), chatml)
    selection = RowSelection(column="text")
    with pytest.raises(DataError, match=r"rows.jsonl line 2: expected a usable row, found a line that is not JSON"):
        make_streams(bad_file, Path(bad_file).parent / "streams", 1, selection=selection)
    with pytest.raises(DataError, match=r"rows.jsonl line 1: expected a usable row"):
        convert(bad_file, Path(bad_file).parent / "tasks.jsonl")


def test_skipped_rows_are_recorded_and_the_others_keep_their_numbers(bad_file: str, chatml: Tokenizer) -> None:
    stream = open_stream(DataSpec(dataset=bad_file, bad_rows="skip"), chatml)
    found = list(stream.read(Ranges()))
    assert [type(item) for item in found] == [Sample, Skip, Sample, Skip, Sample]
    assert [item.index for item in found] == [0, 1, 2, 3, 4]
    skips = [item for item in found if isinstance(item, Skip)]
    assert {item.reason for item in skips} == {"bad row"}
    assert [str(item.detail["error"]).partition(".jsonl ")[2][:6] for item in skips] == ["line 2", "line 4"]
    assert [item.index for item in stream.read(Ranges([(0, 3)]))] == [3, 4]
    assert not any("--bad-rows" in str(item.detail["error"]) for item in skips), "the row is skipped already"


def test_streams_keep_a_place_for_each_skipped_row(bad_file: str, tmp_path: Path, chatml: Tokenizer) -> None:
    selection = RowSelection(column="text", bad_rows="skip")
    made = make_streams(bad_file, tmp_path / "s", 1, selection=selection)
    assert (made.tally.samples, sum(made.tally.rejected.values())) == (3, 2)
    spec = DataSpec(dataset_dir=str(tmp_path / "s"), bad_rows="skip")
    found = list(open_stream(spec, chatml).read(Ranges()))
    assert sum(isinstance(item, Sample) for item in found) == 3
    errors = sorted(str(item.detail["error"]) for item in found if isinstance(item, Skip))
    assert len(errors) == 2
    assert any("from rows.jsonl line 2: a line that is not JSON" in error for error in errors), errors
    with pytest.raises(DataError, match=r"from rows.jsonl line 2"):
        open_stream(DataSpec(dataset_dir=str(tmp_path / "s")), chatml)


def test_a_file_without_a_usable_row(tmp_path: Path, chatml: Tokenizer) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("nothing\nhere\n")
    with pytest.raises(DataError, match="expected at least one usable row, found 2 rows that cannot be used"):
        open_stream(DataSpec(dataset=str(file), bad_rows="skip"), chatml)


def test_packed_documents_have_no_place_for_a_skipped_row() -> None:
    with pytest.raises(SpecError, match="--bad-rows skip"):
        DataSpec(bad_rows="skip", prompt=PromptSpec(kind="text", pack=True))
