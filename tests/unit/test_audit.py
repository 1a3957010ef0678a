"""``scripts/audit.py`` with given answers of pip-audit, which needs a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FINE = {"name": "jax", "version": "1", "vulns": []}
HOLE = {"name": "urllib3", "version": "2", "vulns": [{"id": "PYSEC-1"}]}
SKIPPED = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited"}


def audit(folder: Path, output: str, code: int = 0) -> tuple[int, str]:
    """With a pip-audit that says this."""
    (folder / "pip_audit").mkdir(exist_ok=True)
    (folder / "pip_audit" / "__init__.py").touch()
    (folder / "pip_audit" / "__main__.py").write_text(f"import sys; print({output!r}); sys.exit({code})")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "audit.py")],
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        ([FINE], 0, "audit: 1 of 1 packages looked up, 0 known holes"),
        ([FINE, HOLE, SKIPPED], 1, "audit: urllib3 2 has PYSEC-1\naudit: 2 of 3 packages looked up, 1 known holes"),
        ([SKIPPED, SKIPPED], 0, "audit: left out, the database of known holes has nothing about any of 2 packages"),
    ],
)
def test_a_hole_fails_and_nothing_else_does(tmp_path: Path, found: list[Any], code: int, line: str) -> None:
    assert audit(tmp_path, json.dumps({"dependencies": found, "fixes": []}), code) == (code, f"{line}\n")


def test_a_missing_network_is_reported(tmp_path: Path) -> None:
    assert audit(tmp_path, "ERROR: connection refused", 1) == (
        0,
        "audit: left out, the database of known holes does not answer\n",
    )
