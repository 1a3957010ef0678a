"""docs/guides/add-an-engine.md, followed: an engine is one module and one line of the registry."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from spile.cli.main import main
from spile.engines import registry as engines
from spile.objects import open_folder
from spile.proof.verification import verify

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "add-an-engine.md"


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the guide's module to a folder on the path, and add its line to the registry."""
    text = GUIDE.read_text()
    module = re.search(r"```python\n(\"\"\"The toy engine.*?)```", text, re.DOTALL)
    entry = re.search(r'^ +"(toy)": "([\w.:]+)",$', text, re.MULTILINE)
    assert module is not None
    assert entry is not None
    name = entry[2].partition(":")[0]
    (tmp_path / "toy_engines").mkdir()
    (tmp_path / "toy_engines" / "toy.py").write_text(module[1])
    monkeypatch.syspath_prepend(tmp_path / "toy_engines")
    monkeypatch.setitem(engines.SUPERVISED, entry[1], entry[2].replace(name, "toy"))
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    return tmp_path


def test_the_guides_engine_runs_a_dataset(guide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "embedded", "--layers", "0", "--max-seq-length", "64"]
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--engine", "toy", *words, "--num-streams", "2", "--output", f"{guide}/out"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, out + err
    assert "streams      2 of 2 done" in out
    report = verify(open_folder(f"{guide}/out"))
    assert report.ok, [problem.line() for problem in report.all_problems]


def test_an_engine_refuses_what_it_cannot_do(guide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["extract", "--engine", "toy", "--hosts-per-worker", "2", "--model", "embedded", "--output", f"{guide}/out"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "spile: --hosts-per-worker: expected 1 with --engine toy, found 2\n"
