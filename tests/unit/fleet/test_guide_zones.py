"""The commands of the guides name zones that have their machine type, by Google's table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.fakes.cloud_zones import TYPES

from spile.fleet.cloud_tpu import DEFAULT_TYPES
from spile.planning.machines import parse_machine

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
COMMANDS = [
    command
    for page in sorted(GUIDES.glob("*.md"))
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for command in block.replace("\\\n", " ").splitlines()
    if re.match(r"spile (deploy|tpu create) .*--zones [a-z]+-", command)
]


def test_commands_are_found() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_the_zones_of_a_command_have_its_type(command: str) -> None:
    zones = re.findall(r"--zones (\S+)", command)[0].split(",")
    asked = re.findall(r"--tpu-type (\S+)", command)
    names = [parse_machine(asked[0]).name] if asked else DEFAULT_TYPES
    assert any(all(name in TYPES.get(zone, ()) for zone in zones) for name in names), command
