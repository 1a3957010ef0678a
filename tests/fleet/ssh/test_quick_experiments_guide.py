"""The guide's commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spile.cli.aliases import translate
from spile.cli.program import build_app

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "quick-experiments.md"
COMMANDS = re.findall(r"^(spile (?:run|logs|collect) .*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
OLD = [
    'spile run --TPU_PREFIX=p --COMMAND="bash setup.sh" --INTERNAL_IP=true',
    "spile run --TPU_PREFIX p --no-copy -- x",
]


@pytest.mark.parametrize("line", [*COMMANDS, *OLD])
def test_the_command_is_understood(line: str) -> None:
    _, bound, _ = build_app().parse_args(translate(shlex.split(line)[1:], {}), exit_on_error=False, print_error=False)
    assert bound.arguments


def test_the_guide_has_commands() -> None:
    assert len(COMMANDS) >= 5
