"""Rules for the source as a whole: sizes of modules and functions, unique class names, the length of import chains."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import spile

SOURCE = Path(spile.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 60
MOST_MODULES = 200
LONGEST_CHAIN = 12


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
    """pytest imports test modules by name, so two files with one name fail together but not alone."""
    homes = defaultdict(list)
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        homes[file.name].append(str(file))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def _imports(file: Path, modules: set[str]) -> set[str]:
    """The modules that a module imports when it is loaded: not those within functions or for type checkers."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{name.name}" for name in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif (
                not isinstance(node, ast.FunctionDef)
                and "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", node))[:40]
            ):
                waiting.append(node)
    return found & modules


def test_there_are_not_too_many_modules_and_chains_of_imports_are_short() -> None:
    names = {".".join(("spile", *file.relative_to(SOURCE).with_suffix("").parts)): file for file in FILES}
    modules = {name.removesuffix(".__init__"): file for name, file in names.items()}
    assert len(modules) <= MOST_MODULES
    imports = {name: _imports(file, set(modules)) - {name} for name, file in modules.items()}
    longest: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in longest:
            longest[name] = [name, *max((chain(each) for each in sorted(imports[name])), key=len, default=[])]
        return longest[name]

    found = max((chain(name) for name in modules), key=len)
    assert len(found) <= LONGEST_CHAIN, found
