"""Packed documents from the command line: how many windows there are shows only at the end, and is then recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from spile.proof.verification import verify
from unit.cli.refusals import lines, spile

WINDOWS = ("--pack", "--max-seq-length", "8", "--layers", "0")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return lines(tmp_path / "documents.jsonl", *({"text": "1 2 3 4 5 6 7 " * count} for count in range(1, 5)))


def test_a_packed_stream_is_complete(tmp_path: Path, documents: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert spile("extract", "--dataset", documents, "--output", output, *WINDOWS) == 0
    assert f"spile verify {output}" in capfd.readouterr().out
    (stream,) = verify(str(output)).streams
    assert stream.ok
    assert stream.expected == stream.samples > 3
    assert spile("extract", "--dataset", documents, "--output", output, *WINDOWS) == 0
    assert "nothing was left to do" in capfd.readouterr().out


@pytest.mark.slow
def test_a_part_of_one_has_no_end_yet(tmp_path: Path, documents: Path) -> None:
    output = tmp_path / "out"
    assert spile("extract", "--dataset", documents, "--output", output, *WINDOWS, "--max-samples", 2) == 0
    (stream,) = verify(str(output)).streams
    assert (stream.samples, stream.expected, stream.ok) == (2, 2, True), "as many as were asked for"
    max((output / "stream_0" / "commits").iterdir()).unlink()  # the one that says that the limit ended it
    (stream,) = verify(str(output)).streams
    assert (stream.samples, stream.expected, stream.ok) == (2, None, False)
    assert spile("extract", "--dataset", documents, "--output", output, *WINDOWS) == 0
    assert verify(str(output)).ok
