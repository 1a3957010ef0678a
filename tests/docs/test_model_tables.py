"""The tables of docs/taps.md and docs/models.md are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spile.models.families import FAMILIES, read_config

ROOT = Path(__file__).parents[2]


def test_they_are_as_the_script_writes_them() -> None:
    script = ROOT / "scripts" / "make_model_tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FAMILIES)
def test_the_example_of_every_family_is_a_config_of_it(name: str) -> None:
    assert read_config({"model_type": name, **FAMILIES[name].example[1]}).architecture == name
