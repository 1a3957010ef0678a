"""The exit codes are one table, and 2 is only said if nothing was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.pages import ROOT
from spile import errors
from spile.errors import ExitCode
from spile.objects.folder import Unwritable
from unit.cli.refusals import SMALL, lines, listing, spile

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SpileError)]


def test_every_error_ends_with_a_code_of_the_table() -> None:
    assert {kind.exit_code for kind in (*KINDS, Unwritable)} <= set(ExitCode)
    assert [code.value for code in ExitCode] == [0, 1, 2, 3, 4, 130, 143]


def test_the_documentation_has_the_table_once() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    assert all(row in pages[ROOT / "docs" / "cli.md"] for row in rows)
    assert [path.name for path, text in pages.items() if "\n| 130 |" in text] == ["cli.md"]


def test_a_bad_row_behind_the_checked_ones_is_a_failure_once_something_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spile.data.samples.HEAD_ROWS", 8)
    data = lines(tmp_path / "rows.jsonl", *({"text": f"the number {n}"} for n in range(30)), "{")
    words = ("extract", "--dataset", data, "--output", tmp_path / "out", *SMALL)
    assert spile(*words) == ExitCode.FAILED
    assert "rows.jsonl line 31 is not JSON" in capfd.readouterr().err
    codes = [spile(*words) for _ in range(3)]
    assert codes[-1] == ExitCode.REFUSED, "nothing is left that could be written before it"
    before = {name: content for name, content in listing(tmp_path / "out").items() if "progress" not in name}
    assert spile(*words) == ExitCode.REFUSED
    assert before == {name: content for name, content in listing(tmp_path / "out").items() if "progress" not in name}


def test_a_bad_row_among_the_checked_ones_changes_nothing(tmp_path: Path) -> None:
    data = lines(tmp_path / "rows.jsonl", {"text": "one"}, "{")
    assert spile("extract", "--dataset", data, "--output", tmp_path / "out", *SMALL) == ExitCode.REFUSED
    assert not (tmp_path / "out").exists()
