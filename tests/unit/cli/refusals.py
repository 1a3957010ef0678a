"""What the tests of bad input share: a command that must end with one line, and small datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile.cli.main import main

__all__ = ["SMALL", "Refuse", "lines", "listing", "spile"]

SMALL = ("--layers", "0", "--max-seq-length", "64")

Refuse = Callable[..., str]


def listing(folder: Path) -> dict[str, bytes | None]:
    """Everything below, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def spile(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def lines(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file
