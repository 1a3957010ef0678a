"""The table of config fields is the one that the installed transformers declares."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from spile.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

TABLE = json.loads((ROOT / "src/spile/models/families/config_fields.json").read_text())


def test_every_family_is_in_the_table() -> None:
    assert set(TABLE["classes"]) == {family.model_types[0] for family in FAMILIES.values()}


@pytest.mark.parametrize("name", TABLE["classes"])
def test_the_fields_are_those_of_the_installed_transformers(name: str) -> None:
    from make_config_fields import describe

    if version("transformers") != TABLE["transformers"]:
        pytest.skip(f"the table was made with transformers {TABLE['transformers']}")
    assert json.loads(json.dumps(describe(name))) == TABLE["classes"][name]
