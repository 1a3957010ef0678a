"""The index of the guides names every old spelling that the program knows."""

from __future__ import annotations

import re

from docs.pages import ROOT
from spile.cli.aliases import DROPPED, FLAGS, VARIABLES

GUIDES = ROOT / "docs" / "guides"


def test_every_old_flag_is_in_the_table() -> None:
    text = (GUIDES / "README.md").read_text(encoding="utf-8").lower().replace("_", "-")
    missing = [flag for flag in [*FLAGS, *DROPPED] if not re.search(rf"`{flag}\b", text)]
    assert missing == []


def test_every_old_flag_is_listed_next_to_ours() -> None:
    rows = [row.split(" | ") for row in (GUIDES / "README.md").read_text(encoding="utf-8").splitlines() if " | " in row]
    for old, new in FLAGS.items():
        found = [row[1] for row in rows if re.search(rf"`{old}\b", row[0].replace("_", "-").lower())]
        assert any(new.removeprefix("--") in cell for cell in found), f"{old} → {new}"


def test_every_variable_is_in_the_table_with_its_flag() -> None:
    text = (GUIDES / "README.md").read_text(encoding="utf-8")
    for name, variable in VARIABLES.items():
        assert re.search(rf"^\| `{name}` \| `{variable.flag}`", text, re.MULTILINE), name
