"""The tables of docs/taps.md and docs/models.md are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spile.models.families import FAMILIES, read_config
from spile.spec.taps import TAP_KINDS

ROOT = Path(__file__).parents[2]


def test_the_page_describes_every_tap_with_its_shape() -> None:
    titles, _, *rows = [line for line in (ROOT / "docs" / "taps.md").read_text().splitlines() if line.startswith("|")]
    assert titles == "| tap | shape of a row | what it is | TransformerLens | nnsight | Hugging Face |"
    found = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    names = {"d_mid": "d_model", "top": "k"}
    assert [(name, shape) for name, shape, *_ in found] == [
        (f"`{name}.L`" if spec.layered else f"`{name}`", " × ".join(names.get(size, size) for size in spec.shape))
        for name, spec in TAP_KINDS.items()
    ]
    assert all(len(row) == 6 and all(row) for row in found)


def test_the_families_are_as_the_script_writes_them() -> None:
    script = ROOT / "scripts" / "make_model_tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FAMILIES)
def test_the_example_of_every_family_is_a_config_of_it(name: str) -> None:
    assert read_config({"model_type": name, **FAMILIES[name].example[1]}).architecture == name
