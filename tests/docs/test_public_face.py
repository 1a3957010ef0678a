"""The public names and the cost of importing them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import spile

HEAVY = ("jax", "jaxlib", "transformers", "torch", "numpy", "obstore", "datasets")


def test_the_public_names_are_these() -> None:
    """A change here is a change for every user: say so in CHANGELOG.md."""
    specs = ["BackfillSpec", "DataSpec", "GenerationSpec", "PromptSpec", "RunSpec"]
    results = ["Activations", "Dataset", "JointDataset", "Model", "Report", "Role", "RowBatch", "Summary"]
    results += ["ActivationStream", "ShuffledReaders"]
    runs = ["add_taps", "extract", "infer", "load", "plan", "stream", "tap"]
    reads = ["compare", "export", "inspect", "open", "push", "score", "verify"]
    assert sorted(spile.__all__) == sorted([*specs, *results, *runs, *reads, "__version__", "errors"])
    assert dir(spile) == sorted(spile.__all__)
    for name in spile.__all__:
        assert getattr(spile, name) is not None
    assert not hasattr(spile, "something_else")


@pytest.mark.parametrize(
    "statement",
    [
        "import spile",
        "import spile; spile.RunSpec, spile.DataSpec, spile.PromptSpec",
        "import spile; spile.tap, spile.extract, spile.verify, spile.Role",
        "import spile.cli.main",
        "from spile.cli.main import main; main(['--help'])",
        "from spile.cli.main import main; main(['extract', '--help'])",
        "from spile.cli.main import main; main(['tpu', '--help'])",
    ],
)
def test_it_imports_nothing_heavy(statement: str) -> None:
    code = f"""
import atexit, sys
heavy = {HEAVY!r}
atexit.register(lambda: sys.stderr.write(" ".join(name for name in heavy if name in sys.modules)))
{statement}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_reading_needs_no_jax() -> None:
    code = "import sys, spile; spile.open; assert 'jax' not in sys.modules, 'jax'"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_no_package_hides_a_function() -> None:
    """Importing a module of a package sets the package as an attribute of ``spile``."""
    packages = {file.parent.name for file in Path(spile.__file__).parent.glob("*/__init__.py")}
    assert packages.isdisjoint(spile.__all__)
