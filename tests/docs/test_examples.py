"""Every example runs on the demo's dataset as its docstring says; a stopped training goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spile.cli.main import main
from spile.data.lines import embedded_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    return extracted(tmp_path_factory.mktemp("demo") / "activations", "--max-samples", "8")


def extracted(root: Path, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--output", str(root), "--layers", "1", *words])
    assert ended.value.code == 0
    return str(root)


def run(folder: Path, *words: str) -> str:
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unexplained(line: str) -> float:
    return float(line.split(": ")[1].split()[0])


def test_the_sae_learns_and_continues_where_it_was_stopped(demo: str, tmp_path: Path) -> None:
    words = ("train_sae.py", demo, "--features", "128", "--batch-rows", "256", "--k", "8")
    (first,) = run(tmp_path, *words, "--steps", "20").splitlines()
    more = run(tmp_path, *words, "--steps", "100").splitlines()
    assert [line.split(":")[0] for line in (first, *more)] == ["step 20", "step 100"]
    assert unexplained(more[-1]) < unexplained(first) < 1
    (tmp_path / "sae.npz").unlink()
    assert run(tmp_path, *words, "--steps", "100").splitlines()[-1] == more[-1]


def test_the_torch_sae_learns(demo: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (line,) = run(tmp_path, "train_sae_torch.py", demo, "--steps", "40", "--workers", "1").splitlines()
    assert 0 < unexplained(line) < 1


def test_the_probe_is_better_than_a_guess(tmp_path: Path) -> None:
    tasks = [json.loads(line) for line in embedded_tasks().read_text().splitlines()]
    labelled = [{**task, "size": task["task_id"].rpartition("-")[2]} for task in tasks]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    words = ["--dataset", str(tmp_path / "labelled.jsonl"), "--keep", "size"]
    demo = extracted(tmp_path / "activations", *words, "--max-seq-length", "256")
    line = run(tmp_path, "probe.py", demo, "--label", "size", "--rows", "8000")
    right, usual = (float(part.split("%")[0].split()[-1]) for part in line.split(": ")[1:])
    assert right > usual


def test_the_notebook_goes_from_extraction_to_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib here: pip install 'spile[notebook]'")
    notebook = json.loads((EXAMPLES / "features.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"), "no outputs, no paths"
    (tmp_path / "cells.py").write_text("\n".join(cells))
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "feature.png").stat().st_size > 10_000
    _, unexplained, fires = done.stdout.splitlines()[-3:]
    assert 0 < float(unexplained.split()[0]) < 0.9
    assert "fires on" in fires


def test_the_jax_example_is_short() -> None:
    assert len((EXAMPLES / "train_sae.py").read_text().splitlines()) < 200
