"""Settings of all tests: checked shapes, no deadlines, shared compiled programs, and Ctrl+C that reaches processes.

Tests that do not touch the model never import jax.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

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
settings.register_profile("quick", deadline=None, max_examples=30)  # make test; test-all runs the full number
settings.load_profile("untimed")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl+C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
