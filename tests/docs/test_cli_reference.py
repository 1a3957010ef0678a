"""docs/cli.md is what the program says of itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from spile.cli.program import COMMANDS, Command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_reference", ROOT / "scripts" / "make_cli_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_current(script: ModuleType) -> None:
    current = script.reference()
    assert PAGE.read_text(encoding="utf-8") == current, "run: python scripts/make_cli_reference.py"
    assert current == script.reference()


@each_command
def test_every_command_is_in_it(command: Command) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"## `spile {command.name}`\n" in text
    assert f"| [`spile {command.name}`](#spile-{command.name.replace(' ', '-')}) | {command.help} |\n" in text


@each_command
def test_every_command_and_flag_says_what_it_does(command: Command, script: ModuleType) -> None:
    function = script.application(command).default_command
    assert (function.__doc__ or "").strip(), f"spile {command.name} has no docstring"
    assert command.help.endswith(".")
    for argument in script.flags(command):
        assert (argument.parameter.help or "").strip(), f"spile {command.name} {argument.names[0]} has no help"
