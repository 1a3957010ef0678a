"""The guide's examples run as they stand there, one after the other, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from producing import produce
from spile.objects import open_folder
from spile.status.snapshot import State

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "reading.md").read_text()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    produce(open_folder(str(tmp_path / "activations")), 30)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/guides/reading.md", "exec"), names)
    assert "('residual.0', 'attn.1', 'residual.1')" in capsys.readouterr().out


def test_every_state_is_explained() -> None:
    assert {state.value for state in State} - {"working"} == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
