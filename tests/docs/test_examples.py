"""Every example runs on the demo's dataset as its docstring says; a stopped training goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spile.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("demo") / "activations"
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--output", str(root), "--max-samples", "8", "--layers", "1"])
    assert ended.value.code == 0
    return str(root)


def run(folder: Path, *words: str) -> str:
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unexplained(line: str) -> float:
    return float(line.split(": ")[1].split()[0])


def test_the_sae_learns_and_goes_on_where_it_was_stopped(demo: str, tmp_path: Path) -> None:
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


def test_the_probe_is_better_than_a_guess(demo: str, tmp_path: Path) -> None:
    line = run(tmp_path, "probe.py", demo, "--rows", "2000")
    right, usual = (float(part.split("%")[0].split()[-1]) for part in line.split(": ")[1:])
    assert right > usual


def test_the_jax_example_is_short() -> None:
    assert len((EXAMPLES / "train_sae.py").read_text().splitlines()) < 200
