"""The recipes in docs/guides for extending spile, followed on a copy of the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]


def copied_source(folder: Path) -> Path:
    """A copy of the package that a test may change."""
    source = folder / "src"
    shutil.copytree(ROOT / "src" / "spile", source / "spile", ignore=shutil.ignore_patterns("__pycache__"))
    return source


def code_blocks(page: str) -> list[str]:
    """The Python blocks of a guide."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "guides" / page).read_text(), re.DOTALL | re.MULTILINE)


def insert(file: Path, anchor: str, text: str, *, before: bool) -> None:
    """Put ``text`` before or after the one line that contains ``anchor``, with that line's indentation."""
    lines = file.read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines) if anchor in line]
    indent = re.match(" *", lines[place])[0]  # type: ignore[index]
    added = [indent + line if line else line for line in text.rstrip().splitlines()]
    place += 0 if before else 1
    file.write_text("\n".join([*lines[:place], *added, *lines[place:]]) + "\n")


def test_a_tap_is_added_as_the_guide_says(tmp_path: Path) -> None:
    source = copied_source(tmp_path)
    entry, call = code_blocks("add-a-tap.md")
    insert(source / "spile" / "spec" / "taps.py", '"embed": TapKind(', entry, before=True)
    insert(source / "spile" / "models" / "decoder.py", 'hook("attn", added)', call, before=False)
    command = [sys.executable, "-m", "spile.cli.main", "extract", "--taps", "attn", "attn_weighted", "--layers", "1"]
    command += ["--max-samples", "2", "--store-dtype", "float32", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    (shard,) = (tmp_path / "out").rglob("*.safetensors")
    rows = load_file(shard)
    np.testing.assert_array_equal(rows["attn_weighted.1"], 2 * rows["attn.1"])
