"""Run ``spile`` commands in this process, which avoids starting Python for each."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from fleet.cloud_world import World
from spile.cli.main import main

__all__ = ["Prompt", "prompt_of"]

Prompt = Callable[..., tuple[int, str]]
"""Words in, (exit code, what was printed) out."""


def prompt_of(world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Prompt:
    for name in [name for name in os.environ if name.startswith("SPILE_")]:
        monkeypatch.delenv(name)
    for name, value in world.environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(world.folder)

    def spile(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        output = capfd.readouterr()
        return int(ended.value.code or 0), output.out + output.err

    return spile
