"""The house rules that a reader relies on: everything in src fits a screen or two, and a name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import spile

SOURCE = Path(spile.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 60


def _name(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    assert len(FILES) > 100
    lines = {_name(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    found = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MOST_LINES_OF_A_FUNCTION:
                    found[f"{_name(file)}: {node.name}"] = count
    assert found == {}


def test_no_two_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(_name(file))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them by it: a room's tests pass alone and all of them together do not."""
    homes = defaultdict(list)
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        homes[file.name].append(str(file))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
