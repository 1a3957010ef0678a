"""Every example runs on the demo's dataset as its docstring says; a stopped training goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spile.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TUTORIAL = EXAMPLES.parent / "docs" / "tutorial.ipynb"


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


@pytest.mark.slow
def test_the_sae_learns_and_continues_where_it_was_stopped(demo: str, tmp_path: Path) -> None:
    words = ("train_sae.py", demo, "--features", "128", "--batch-rows", "256", "--k", "8")
    (first,) = run(tmp_path, *words, "--steps", "20").splitlines()
    more = run(tmp_path, *words, "--steps", "100").splitlines()
    assert [line.split(":")[0] for line in (first, *more)] == ["step 20", "step 100"]
    assert unexplained(more[-1]) < unexplained(first) < 1
    (tmp_path / "sae.npz").unlink()
    assert run(tmp_path, *words, "--steps", "100").splitlines()[-1] == more[-1]


@pytest.mark.torch
def test_the_torch_sae_learns(demo: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (line,) = run(tmp_path, "train_sae_torch.py", demo, "--steps", "40", "--workers", "1").splitlines()
    assert 0 < unexplained(line) < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "taps"),
    [
        ("sae.py", ["residual.1"]),
        ("crosscoder.py", ["residual.1", "residual.4"]),
    ],
)
def test_the_short_sae_and_the_crosscoder_learn(program: str, taps: list[str], tmp_path: Path) -> None:
    root = extracted(tmp_path / "activations", "--max-samples", "4", "--taps", "residual.1", "residual.4")
    (first,) = run(tmp_path, program, root, *taps, "--steps", "1").splitlines()
    (last,) = run(tmp_path, program, root, *taps, "--steps", "60").splitlines()
    assert unexplained(last) < 0.9 * unexplained(first)


def learns(folder: Path, *words: str) -> None:
    (line,) = run(folder, *words, "--steps", "60").splitlines()
    assert 0 < unexplained(line) < 0.8, words[0]


@pytest.mark.slow
def test_a_crosscoder_of_two_models_and_a_temporal_sae_learn(demo: str, tmp_path: Path) -> None:
    extracted(tmp_path / "b", "--dataset", f"spile:{demo}", "--store-dtype", "float32")
    learns(tmp_path, "crosscoder_models.py", f"{demo}:residual.1", "b:residual.1")
    learns(tmp_path, "temporal_sae.py", demo, "residual.1")


@pytest.mark.slow
def test_an_sae_learns_without_storing(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text(
        "\n".join(f"The number {number} follows {number - 1}." for number in range(300))
    )
    learns(tmp_path, "sae_stream.py", "texts.txt", "residual.1")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]


@pytest.mark.slow
def test_the_probe_is_better_than_a_guess(tmp_path: Path) -> None:
    words = ["apple", "river", "seven", "green", "paper"]
    rows = [f"{word} {other} {place},{place % 2}" for place in range(4) for word in words for other in words]
    rows = [row.replace(",", " yes," if row.endswith("1") else " no,") for row in rows]
    (tmp_path / "texts.csv").write_text("review,label\n" + "\n".join(rows))
    line = run(tmp_path, "probe.py", "texts.csv", "--column", "review")
    correct, guess = (float(part.split("%")[0].split()[-1]) for part in line.split(": ")[1:])
    assert correct > guess + 20
    lines = run(tmp_path, "probe_layers.py", "texts.csv", "--column", "review").splitlines()
    best = {name: max(float(line.split(f"{name} ")[1].split("%")[0]) for line in lines) for name in ("mean", "max")}
    assert lines[0].startswith("residual.0: last-content ")
    assert min(best.values()) > guess + 20


@pytest.mark.slow
def test_training_data_for_a_draft_model(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="datasets needs torch to open what speculators reads")
    hub = pytest.importorskip("datasets")
    (tmp_path / "texts.txt").write_text("The cat sat on\nOne, two, three,\n")
    assert "2 samples" in run(tmp_path, "eagle3.py", "texts.txt", "--max-new-tokens", "4")
    table = hub.load_from_disk(str(tmp_path / "eagle3" / "draft")).with_format("numpy")
    assert [0 < sum(row["loss_mask"]) < row["seq_len"] for row in table] == [True, True]


def test_the_steered_model_prefers_other_tokens(tmp_path: Path) -> None:
    lines = run(tmp_path, "steer.py", "The cat", "--scale", "40").splitlines()
    assert [line.split(":")[0] for line in lines] == ["plain", "steered"]
    assert lines[0].split(": ")[1] != lines[1].split(": ")[1]
    assert (tmp_path / "steering.safetensors").is_file()


def test_the_new_examples_are_short_and_no_example_imports_a_private_module() -> None:
    sae = ("sae", "sae_stream", "temporal_sae", "crosscoder", "crosscoder_models")
    for name in (f"{each}.py" for each in ("probe", "probe_layers", "eagle3", "steer", *sae)):
        assert len((EXAMPLES / name).read_text().splitlines()) < 40, name
    notebooks = [*EXAMPLES.glob("*.ipynb"), TUTORIAL]
    texts = {file.name: file.read_text() for file in EXAMPLES.glob("*.py")}
    texts |= {file.name: "\n".join(code_cells(file)) for file in notebooks}
    for name, text in texts.items():
        assert not re.search(r"^\s*(from|import) spile\.", text, re.MULTILINE), name


def code_cells(notebook: Path) -> list[str]:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "no outputs, no paths"
    return ["".join(cell["source"]) for cell in cells]


def run_cells(cells: list[str], folder: Path) -> list[str]:
    """Run the cells of a notebook as one program and return the lines that it prints."""
    (folder / "cells.py").write_text("\n".join(cells))
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_notebook_goes_from_extraction_to_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib here: pip install 'spile[notebook]'")
    _, unexplained, fires = run_cells(code_cells(EXAMPLES / "features.ipynb"), tmp_path)[-3:]
    assert (tmp_path / "feature.png").stat().st_size > 10_000
    assert 0 < float(unexplained.split()[0]) < 0.9
    assert "fires on" in fires


@pytest.mark.slow
def test_the_tutorial_answers_its_question(tmp_path: Path) -> None:
    """The cell above can be read from layer 4 on. The last cell draws the plot and is left out without matplotlib."""
    *cells, plot = code_cells(TUTORIAL)
    plots = importlib.util.find_spec("matplotlib") is not None
    lines = run_cells([*cells, plot] if plots else cells, tmp_path)
    assert "matplotlib" in plot
    assert (tmp_path / "probe_by_layer.svg").exists() == plots
    table = {line.split("  ")[0]: [float(cell) for cell in re.findall(r"([\d.]+)%", line)] for line in lines[-8:]}
    _, above, output = table["a guess"]
    assert table["residual.0"][2] > output + 30
    assert table["residual.3"][1] < above + 10 < above + 20 < table["residual.4"][1]


def test_the_jax_example_is_short() -> None:
    assert len((EXAMPLES / "train_sae.py").read_text().splitlines()) < 200
