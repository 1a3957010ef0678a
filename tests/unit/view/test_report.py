"""``spile inspect``: the facts in the terminal, and one page that shows hostile text and runs none of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spile.cli.main import main
from spile.objects import open_folder
from spile.store.stream import join_run, join_stream
from world import TAPS, rows_of, run_identity, sample_of, stream_identity

HOSTILE = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">\"'></svg></p>&amp;"


@pytest.fixture
def root(tmp_path: Path) -> str:
    folder, run = open_folder(str(tmp_path / "root")), run_identity(model=HOSTILE)
    join_run(folder, run)
    store = join_stream(folder, 0, stream_identity(30), run)
    store.statistics = True
    for first in range(0, 30, 10):
        samples = [replace(sample_of(n), task_id=HOSTILE, preview=HOSTILE) for n in range(first, first + 10)]
        builder = store.begin(samples)
        for tap in range(len(TAPS)):
            builder.write(tap, 0, np.concatenate([rows_of(sample, tap) for sample in samples]))
        store.commit([builder.finish()])
    store.finish()
    return str(tmp_path / "root")


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_the_terminal_shows_facts_and_norms(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", root) == 0
    shown = capsys.readouterr().out
    assert "30 samples (0 skipped)" in shown
    assert all(str(tap) in shown for tap in TAPS)
    assert run("inspect", root, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 30
    assert facts["taps"]["attn.1"]["count"] == facts["tokens"]


def test_a_page_is_one_file_without_scripts(root: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run("inspect", root, "--html", str(page)) == 0
    text = page.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert not re.search(r"(src|href)\s*=", re.sub(r"&[a-z#0-9]+;", "", text).replace("img src=x onerror=", ""))
    assert "&lt;script&gt;document.title=" in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") >= 6
    assert run("inspect", root, "--html", str(tmp_path / "none" / "x.html")) == 2
    assert run("inspect", root, "--tap", "mlp.9") == 2


def test_a_real_browser_runs_nothing_of_it(root: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium here")
    page = tmp_path / "report.html"
    assert run("inspect", root, "--html", str(page)) == 0
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [chromium, *flags, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "<title>ran" not in done.stdout
    assert "<title>Activations in" in done.stdout
    assert "<script" not in done.stdout
    assert "<img" not in done.stdout
    assert done.stdout.count("<circle") > 100
