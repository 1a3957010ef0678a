"""``spile infer`` with a real model is killed and run again; it finishes, and the score is correct."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spile.data.lines import embedded_tasks

TASKS = 12
WORDS = ("--max-seq-length", "640", "--max-new-tokens", "40", "--layers", "5", "--shard-size-gb", "0.0005")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = sorted(embedded_tasks().read_text().splitlines(), key=len)[:TASKS]
    file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def start(tasks: Path, output: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spile.cli.main", "infer", "--dataset", tasks, "--output", output, *WORDS, *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finished(tasks: Path, output: Path, *words: object) -> None:
    process = start(tasks, output, *words)
    _, errors = process.communicate(timeout=250)
    assert (process.returncode, errors) == (0, "")


def answer_tokens(root: Path) -> list[tuple[int, str, list[int]]]:
    """Return every stored answer, with duplicates."""
    lines = [line for file in root.glob("stream_0/predictions.jsonl") for line in file.read_text().splitlines()]
    return [(one["sample"], one["text"], one["tokens"]) for one in map(json.loads, lines)]


def score(root: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "spile.cli.main", "score", str(root), "--json"]
    found: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def proven(root: Path) -> None:
    command = [sys.executable, "-m", "spile.cli.main", "verify", str(root)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def kills(tasks: Path, home: Path, count: int, seed: int) -> None:
    """Kill the command at random moments, with different sizes each time, and then finish it."""
    whole = home / "whole"
    finished(tasks, whole)
    dice = random.Random(seed)
    output = home / "killed"
    for _ in range(count):
        process = start(tasks, output, "--batch-size", dice.choice([1, 2, 5]))
        began, before = time.monotonic(), len(list(output.glob("stream_0/commits/*")))
        wait = dice.uniform(0, 1.0)
        while process.poll() is None and len(list(output.glob("stream_0/commits/*"))) == before:
            assert time.monotonic() - began < 200
            time.sleep(0.01)
        time.sleep(wait)
        process.kill()
        process.communicate()
    finished(tasks, output, "--batch-size", "3")
    assert answer_tokens(output) == answer_tokens(whole)
    assert score(output) == score(whole)
    proven(output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_resumed(tasks: Path, tmp_path: Path) -> None:
    kills(tasks, tmp_path, 1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_and_resumed_twenty_times(tasks: Path, tmp_path: Path) -> None:
    kills(tasks, tmp_path, 20, seed=2)
