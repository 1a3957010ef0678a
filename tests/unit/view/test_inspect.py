"""``spile inspect``: the facts in the terminal, and a page with plots, which is an export of ``spile view``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spile.cli.main import main
from viewing import HOSTILE, make_root
from world import TAPS


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_the_terminal_shows_facts_and_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_root(tmp_path / "root", text=HOSTILE)
    assert run("inspect", root) == 0
    shown = capsys.readouterr().out
    assert "30 samples (0 skipped)" in shown
    assert all(str(tap) in shown for tap in TAPS)
    assert run("inspect", root, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 30
    assert facts["taps"]["attn.1"]["count"] == facts["tokens"]


def test_a_page_is_one_file_that_starts_with_the_chosen_tap(tmp_path: Path) -> None:
    root, page = make_root(tmp_path / "root"), tmp_path / "report.html"
    assert run("inspect", root, "--html", str(page), "--tap", "attn.1", "--samples", "2") == 0
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    found = json.loads(data)
    assert found["start"] == "#/layers/0?tap=attn.1"
    assert sum(key.startswith("sample?") for key in found["answers"]) == 2
    assert not [key for key, answer in found["answers"].items() if "error" in answer]
    assert run("inspect", root, "--html", str(tmp_path / "none" / "x.html")) == 2
    assert run("inspect", root, "--tap", "mlp.9") == 2
    assert run("view", root, "--export", str(page)) == 0
    assert page.read_text().count("</script>") == 2
