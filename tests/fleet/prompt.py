"""Run ``spile`` commands in this process, which avoids starting Python for each."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest

from fleet.cloud_world import World
from spile.cli.main import main
from spile.fleet.install import build_wheel

__all__ = ["Prompt", "prompt_of"]

Prompt = Callable[..., tuple[int, str]]
"""Words in, (exit code, what was printed) out."""
_build_wheel_once = functools.cache(build_wheel)


def prompt_of(world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Prompt:
    for name in [name for name in os.environ if name.startswith("SPILE_")]:
        monkeypatch.delenv(name)
    for name, value in world.environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(world.folder)
    monkeypatch.setattr("spile.fleet.deploy.build_wheel", _build_wheel_once)  # its compression takes half a second

    def spile(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        output = capfd.readouterr()
        return int(ended.value.code or 0), output.out + output.err

    return spile
