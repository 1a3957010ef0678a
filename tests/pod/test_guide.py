"""The verification guide, line by line: what it says you will see is what the program prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pod.launching import clean_environment, started
from ports import free_port

GLOO = re.compile(r"Gloo|connected peer ranks")
"""What the CPU's collectives say of themselves, in one line or broken into two."""
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "verify-a-pod.md"


def expected(worker: int) -> list[str]:
    text = GUIDE.read_text(encoding="utf-8")
    block = re.search(rf"<!-- expected: worker {worker} -->\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return [general(line) for line in block[1].splitlines()]


def general(line: str) -> str:
    """A line without what differs between slices: how many, which device, which port."""
    line = re.sub(r"devices: .*", "devices: …", line)
    line = re.sub(r"difference [^)]*", "difference …", line)
    return re.sub(r"(port|of|sees|over|Forward over) \d+", r"\1 N", line)


@pytest.mark.slow
def test_the_guide_shows_what_is_printed() -> None:
    place = f"127.0.0.1:{free_port()}"
    hosts = "127.0.0.1,127.0.0.1"
    commands = [[sys.executable, "-m", "spile.cli.main", "pod", "check", "--coordinator-address", place]] * 2
    environments = [
        clean_environment(2, {"CLOUD_TPU_TASK_ID": str(number), "TPU_WORKER_HOSTNAMES": hosts, "PYTHONUTF8": "1"})
        for number in range(2)
    ]
    with started(commands, environments) as group:
        ended = group.wait(120)
    for number, end in enumerate(ended):
        assert end.code == 0, end.err
        lines = [general(line) for line in end.out.splitlines() if line != "" and not GLOO.search(line)]
        assert lines == [line for line in expected(number) if line != ""]


def test_every_failure_of_the_guide_is_one_of_the_programs() -> None:
    """Each line of the guide's table begins as some line in the code does."""
    code = "\n".join(path.read_text() for path in (Path(__file__).parents[2] / "src/spile/run/pod").glob("*.py"))
    words = (
        "workers did not come to the roll call within",
        "the workers do not agree on how many they are: expected",
        "two workers have one number: worker",
        "worker 0 is unreachable at",
        "is not this host's address",
        "workers did not come to the barrier",
        "died or was cut off: no sign of life for",
        "the topology's hosts",
    )
    guide = GUIDE.read_text(encoding="utf-8")
    for phrase in words:
        assert phrase in guide
        assert phrase in code
