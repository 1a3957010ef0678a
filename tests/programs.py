"""Programs of the system that some tests run. A machine without one of them skips these tests."""

from __future__ import annotations

import shutil

import pytest


def require(*programs: str) -> None:
    """Skip the running test if one of the programs is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test if one of the programs is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")
