"""The effects of a user's terminal, variables and folders on a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unit.cli.refusals import SMALL, lines, spile


@pytest.mark.parametrize("flag", ["--max-samples", "--seed"])
def test_a_fraction_is_not_a_whole_number(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert spile("extract", "--output", tmp_path / "out", flag, "1.5") == 2
    assert f'{flag}: unable to convert "1.5" into int' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_ascii_terminal_gets_question_marks_and_the_right_exit_code(tmp_path: Path) -> None:
    data = lines(tmp_path / "data.jsonl", {"text": "a b c"})
    words = ["extract", "--dataset", str(data), "--output", str(tmp_path / "out"), *SMALL]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for command in (words, ["verify", str(tmp_path / "out")]):
        ended = subprocess.run(
            [sys.executable, "-m", "spile.cli.main", *command], env=plain, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
    assert "? proven" in ended.stdout


def test_a_checkpoint_folder_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = lines(tmp_path / "data.jsonl", {"text": "a b c"})
    (tmp_path / "file").write_text("in the way")
    words = ("--dataset", data, "--output", tmp_path / "out", *SMALL, "--checkpoint-dir", tmp_path / "file")
    assert spile("extract", *words) == 0
    output = capfd.readouterr()
    assert "could not write to --checkpoint-dir" in output.out + output.err
    assert spile("verify", tmp_path / "out") == 0


_SHIFTED = """
import sys, time
right, off = time.time, float(sys.argv[1])
time.time = lambda: right() + off
from spile.cli.main import main
main(sys.argv[2:])
"""
_YEAR = 365 * 86400


@pytest.mark.slow
def test_a_clock_that_is_years_off_changes_nothing_that_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One worker's clock is ahead, another one's is behind, and the monitor's is correct."""
    data = lines(tmp_path / "data.jsonl", *({"text": f"a b {number}"} for number in range(4)))
    out = tmp_path / "out"
    words = ["extract", "--dataset", str(data), "--output", str(out), *SMALL]
    for off, more in ((9 * _YEAR, ["--max-samples", "2"]), (-9 * _YEAR, [])):
        ended = subprocess.run(
            [sys.executable, "-c", _SHIFTED, str(off), *words, *more], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
    assert spile("monitor", out, "--once") == 0
    assert spile("verify", out, "--gc") == 0
    output = capfd.readouterr().out
    assert "proven: 4 samples in 1 stream, each exactly once" in output
