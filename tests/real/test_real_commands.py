"""A real trained model through the commands: extract, verify, infer and score. ``make real`` makes the model first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spile

MODEL = Path(os.environ.get("SPILE_REAL_MODEL", Path(__file__).parents[2] / "build" / "real" / "smollm2"))
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Water boils at 100 degrees Celsius at sea level. On a mountain it boils at a lower temperature, because",
    "1, 2, 4, 8, 16, 32, 64,",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model in {MODEL}; make real makes it"),
]


def run(*words: str) -> str:
    """Run a command of spile and return what it prints."""
    command = [sys.executable, "-c", "import sys; from spile.cli.main import main; sys.exit(main())", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a few texts."""
    file = tmp_path_factory.mktemp("real") / "texts.jsonl"
    file.write_text("".join(json.dumps({"task_id": str(n), "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extract_and_verify(texts: Path, tmp_path: Path, dtype: str) -> None:
    root = str(tmp_path / "out")
    run("extract", "--model", str(MODEL), "--dataset", str(texts), "--dtype", dtype, "--output", root)
    shown = run("verify", root, "--recompute", str(len(TEXTS)))
    assert f"{dtype} rows of this model differ from float32 by" in shown
    assert "proven: 4 samples" in shown
    dataset = spile.open(root)
    assert len(dataset.taps) == 30
    norms = [abs(dataset.sample(0, 0).rows(tap).astype("float32")).max() for tap in ("residual.0", "residual.15")]
    assert norms[1] > 10 * norms[0]  # an attention sink: single values far above all others


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_greedy_answers_are_those_of_generate(texts: Path, tmp_path: Path, backend: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    root = str(tmp_path / "out")
    run("infer", "--model", str(MODEL), "--dataset", str(texts), "--output", root, "--max-new-tokens", "24",
        "--layers", "29", "--dtype", "float32", "--backend", backend)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    (file,) = Path(root).glob("*/predictions.jsonl")
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(answers) == len(TEXTS)
    for answer in answers:
        tokens = spile.open(root).sample(0, answer["sample"]).tokens[: -len(answer["tokens"])]
        ids = torch.from_numpy(tokens.astype("int64"))[None]
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert answer["tokens"] == found[0, len(tokens) :].tolist()


def test_infer_and_score(tmp_path: Path) -> None:
    grid = [[1, 2], [3, 4]]
    pair = {"input": grid, "output": grid}
    tasks = [{"task_id": str(n), "train": [pair, pair], "test": [pair]} for n in range(2)]
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    root = str(tmp_path / "out")
    run("infer", "--model", str(MODEL), "--dataset", str(data), "--output", root, "--max-new-tokens", "12",
        "--predictions-per-task", "1", "--layers", "29", "--dtype", "float32")  # fmt: skip
    assert "proven: 2 samples" in run("verify", root, "--recompute", "2")
    scored = json.loads(run("score", root, "--json"))
    assert scored
    (file,) = Path(root).glob("*/predictions.jsonl")
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(answers) == 2
    assert all(re.search(r"\d", json.dumps(answer["text"])) for answer in answers)
