"""Tests here do not depend on the machine's environment."""

from __future__ import annotations

import os

import pytest

from spile.cli.aliases import VARIABLES


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES, "TPU_WORKER_ID", *(name for name in os.environ if name.startswith("SPILE_"))]:
        monkeypatch.delenv(name, raising=False)
