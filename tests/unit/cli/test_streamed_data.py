"""``spile extract`` on a dataset that is too large to be read before the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spile.data import lines as lines_module
from spile.data import samples as stream_module
from spile.proof.verification import verify
from unit.cli.refusals import lines, spile

ROWS = [{"text": "1 2 3 " * (1 + n % 5)} for n in range(60)]
SMALL = ("--layers", "0", "--batch-size", "1", "--batch-tokens", "64", "--shard-size-gb", "0.00001")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stream_module, "HEAD_BYTES", 300)
    monkeypatch.setattr(lines_module, "_PART_ROWS", 8)
    return lines(tmp_path / "texts.jsonl", *ROWS)


def run(output: Path, data: Path, *more: object) -> int:
    return spile("extract", "--dataset", data, "--output", output, *SMALL, *more)


def test_a_streamed_dataset_is_resumed_completed_and_proven(
    tmp_path: Path, large: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(output, large, "--max-samples", 30) == 0
    assert verify(str(output)).ok
    stream = json.loads((output / "stream_0" / "stream.json").read_text())
    assert (stream["lines"], stream["samples"]) == (None, None)
    assert 0 < stream["head"] < 30
    assert run(output, large) == 0
    (report,) = verify(str(output)).streams
    assert (report.samples, report.expected, report.ok) == (60, 60, True)
    capfd.readouterr()
    assert run(output, large) == 0
    assert "nothing was left to do" in capfd.readouterr().out
    commits = [json.loads(file.read_text()) for file in sorted((output / "stream_0" / "commits").iterdir())]
    parts = [part for commit in commits for part in commit.get("parts", [])]
    assert [part[0] for part in parts] == list(range(0, 60, 8)), "each row is hashed once"


@pytest.mark.parametrize("samples", [20, 60])
def test_an_edit_between_two_commands_is_one_line(
    tmp_path: Path, large: Path, samples: int, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(output, large, "--max-samples", samples) == 0
    before = verify(str(output)).streams[0].samples
    lines(large, *ROWS[:17], {"text": "dog"}, *ROWS[18:])
    assert run(output, large) == 2
    said = capfd.readouterr().err
    assert "texts.jsonl changed since it was read: expected lines 17 to 24 as they were" in said
    assert verify(str(output)).streams[0].samples == before
    lines(large, *ROWS)
    assert run(output, large) == 0
    assert verify(str(output)).ok


def test_a_ledger_without_the_hashes_of_its_rows_is_not_proven(tmp_path: Path, large: Path) -> None:
    from spile.objects.crc import crc32c, to_hex

    output = tmp_path / "out"
    assert run(output, large) == 0
    first = output / "stream_0" / "commits" / "0001.json"
    body = first.read_bytes()[:-22]
    record = json.loads(body + b"}")
    del record["parts"]
    body = json.dumps(record, separators=(",", ":")).encode()[:-1]
    first.write_bytes(body + f',"crc32c":"{to_hex(crc32c(body))}"}}\n'.encode())
    report = verify(str(output))
    assert "hashes of all rows" in report.streams[0].problems[0].text


def test_verify_shows_rows_that_were_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = lines(tmp_path / "texts.jsonl", *ROWS[:3], "{broken", *ROWS[3:6], {"text": 7})
    output = tmp_path / "out"
    assert run(output, data, "--bad-rows", "skip") == 0
    assert "2 skipped (bad row)" in capfd.readouterr().out
    assert spile("verify", output) == 0
    text = capfd.readouterr().out
    assert "skipped: 2 (bad row)" in text
    assert "texts.jsonl line 4 is no" in text or "texts.jsonl line 4 is not" in text
    assert "texts.jsonl line 8: expected a text in 'text', found a number there" in text
    assert "proven: 6 samples" in text
