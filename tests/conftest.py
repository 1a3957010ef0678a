"""Settings of all tests: checked shapes, no deadlines, shared compiled programs, and Ctrl+C that reaches processes.

Tests that do not touch the model never import jax.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# All test processes share compiled programs; most of them use the same few shapes.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Processes that tests start would otherwise compile the package each time, and each xdist worker all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
install_import_hook(
    [f"spile.models.{name}" for name in ("attention", "decoder", "experts", "generation", "params", "rope")],
    "beartype.beartype",
)
settings.register_profile("untimed", deadline=None)  # A slow machine is not a failure.
settings.register_profile("quick", deadline=None, max_examples=10)  # make test; test-all runs 100
settings.load_profile("untimed")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl+C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ON_S3_TOO = ("objects", "test_race.py")
"""The folders and files whose tests on S3 are not slow."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files whose tests all need torch if those are not selected: its import takes seconds in each worker."""
    return True if collection_path.name.startswith("test_torch_") and "not torch" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most tests on S3 slow: a request to moto takes more CPU time than everything else in a test.

    Those of the bucket client itself and of races stay.
    """
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        here = item.path.name in _ON_S3_TOO or item.path.parent.name in _ON_S3_TOO
        after_write = str(values.get("kind", "reset_after")) in ("status_after", "reset_after")
        on_s3 = any(isinstance(value, str) and value == "s3" for value in values.values())
        if on_s3 and not (here and after_write):
            item.add_marker("slow")
