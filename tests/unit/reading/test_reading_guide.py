"""The guide's examples run as they stand there, one after the other, and its tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spile.objects import open_folder
from spile.store.snapshot import State
from world import produce

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "reading.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(folder: Path, *blocks: str) -> str:
    """In a process of its own: a loader's workers are forked from it."""
    produce(open_folder(str(folder / "activations")), 30)
    (folder / "example.py").write_text("\n".join(blocks))
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_run(tmp_path: Path) -> None:
    output = run(tmp_path, *(block for block in BLOCKS if "torch" not in block and "jax" not in block))
    assert "('residual.0', 'attn.1', 'residual.1')" in output


@pytest.mark.torch
def test_a_loader_gives_each_row_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (block,) = (block for block in BLOCKS if "torch" in block)
    first = 'import spile\ndataset, counted = spile.open("activations"), 0\n'
    counting = block.rstrip() + "\n    counted += len(batch)\n"
    output = run(tmp_path, first, counting, "print(counted, sum(stream.tokens for stream in dataset.streams))")
    counted, wanted = map(int, output.split())
    assert counted == wanted > 0


def test_the_jax_example_runs(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "dataset.jax" in block)
    run(tmp_path, 'import spile\ndataset = spile.open("activations")\n', block)


def test_every_state_is_explained() -> None:
    assert {state.value for state in State} - {"working"} == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
