"""The architecture's page shows the house as it is: its rooms, their order, and a sample's way by file and function."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "spile"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def _functions(file: Path) -> set[str]:
    """``name`` and ``Class.name`` of a file."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_every_room_is_shown() -> None:
    (drawing,) = re.findall(r"```\nsrc/spile/\n(.*?)```", PAGE, re.S)
    shown, above = set(), ""
    for indent, name in re.findall(r"^( +)(\w+)/ ", drawing, re.M):
        above = name if len(indent) == 2 else above
        shown.add(name if len(indent) == 2 else f"{above}/{name}")
    rooms = {str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("__init__.py")} - {"."}
    told = {"cli/shell", "fleet/manifests", "fleet/ssh/remote"}  # in their room's own line
    assert shown == rooms - told


def test_the_order_of_imports_is_the_one_that_is_enforced() -> None:
    (drawn,) = re.findall(r"```\n(cli\n.*?)```", PAGE, re.S)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert drawn.split("\n")[:-1] == [layer.replace("spile.", "") for layer in layers]


def test_a_samples_way_exists() -> None:
    way = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.M)
    assert len(way) > 15
    missing = [(file, name) for file, name in way if name not in _functions(SOURCE / file)]
    assert missing == []
