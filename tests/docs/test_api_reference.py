"""docs/reference/api.md is what the public names say of themselves."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from docs.pages import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api_reference", ROOT / "scripts" / "make_api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date(script: ModuleType) -> None:
    assert script.OUTPUT.read_text(encoding="utf-8") == script.reference(), "run scripts/make_api_reference.py"


def test_every_public_name_says_what_it_is(script: ModuleType) -> None:
    page = script.reference()
    for heading in ("## extract", "## open", "## verify", "## Dataset", "## RunSpec", "## errors", "### shuffled"):
        assert f"\n{heading}\n" in page
