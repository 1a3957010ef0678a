"""Tests here do not depend on the machine's environment; fixtures for tests of bad input."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from backends import cloud_url, clouds, shared_clouds
from spile.cli.aliases import VARIABLES
from unit.cli.refusals import SMALL, Refuse, lines, listing, spile

__all__ = ["cloud_url", "clouds", "shared_clouds"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES, "TPU_WORKER_ID", *(name for name in os.environ if name.startswith("SPILE_"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Return the one-line error of ``spile extract``, and check that it changed no file."""

    def run(*words: object, code: int = 2) -> str:
        before = listing(tmp_path)
        capfd.readouterr()
        found = spile("extract", *words)
        errors = capfd.readouterr().err
        assert found == code, errors
        assert len(errors.splitlines()) == 1, errors
        assert listing(tmp_path) == before
        return errors.removeprefix("spile: ").strip()

    return run


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """An output folder that does not exist and must not be created by a refused command."""
    return tmp_path / "fresh"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return lines(tmp_path / "texts.jsonl", {"text": "1 2 3"}, {"text": "a b c d"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the embedded model."""
    folder = tmp_path_factory.mktemp("made")
    data = lines(folder / "texts.jsonl", {"text": "1 2 3"}, {"text": "a b c d"})
    assert spile("extract", "--dataset", data, "--output", folder / "out", *SMALL) == 0
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(made / "out", tmp_path / "out"))
