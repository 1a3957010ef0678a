"""The tables of docs/taps.md and docs/models.md are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spile.models.families import ARCHITECTURES, EXAMPLES
from spile.models.weight_names import NAMES

ROOT = Path(__file__).parents[2]


def test_they_are_as_the_script_writes_them() -> None:
    script = ROOT / "scripts" / "make_model_tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_family_has_names_and_an_example() -> None:
    assert set(ARCHITECTURES) == set(NAMES) == set(EXAMPLES)
