"""Rules for the tests as a whole."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports test modules by name, so two files with one name fail together but not alone."""
    homes = defaultdict(list)
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        homes[file.name].append(str(file))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
