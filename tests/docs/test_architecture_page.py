"""The architecture page matches the source: its packages, their order, and the functions of the walk-throughs."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "spile"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_STEPS = 15


def _definitions(file: Path) -> dict[str, int]:
    """``name`` and ``Class.name`` of a file, with their line numbers."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}": each.lineno for each in node.body if isinstance(each, ast.FunctionDef)
            }
    return found


def test_every_package_is_listed() -> None:
    (drawing,) = re.findall(r"```\nsrc/spile/\n(.*?)```", PAGE, re.DOTALL)
    shown, above = set(), ""
    for indent, name in re.findall(r"^( +)(\w+)/ ", drawing, re.MULTILINE):
        above = name if len(indent) == 2 else above
        shown.add(name if len(indent) == 2 else f"{above}/{name}")
    assert shown == {str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("__init__.py")} - {"."}


def test_the_order_of_imports_is_the_one_that_is_enforced() -> None:
    (drawn,) = re.findall(r"```\n(cli\n.*?)```", PAGE, re.DOTALL)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert drawn.split("\n")[:-1] == [layer.replace("spile.", "") for layer in layers]


@pytest.mark.parametrize(
    "title", ["One sample, step by step", "One answer, step by step", "A fleet worker, step by step"]
)
def test_the_steps_of_a_walk_through_exist(title: str) -> None:
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    steps = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./src/spile/([\w/]+\.py)\)", section, re.MULTILINE)
    assert 3 <= len(steps) <= MOST_STEPS
    assert [(file, name) for name, file in steps if name not in _definitions(SOURCE / file)] == []
