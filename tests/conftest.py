"""What every test has: shapes of the model room checked where it runs, no deadlines, and Ctrl+C that reaches processes.

Tests that do not touch the model never import jax.
"""

from __future__ import annotations

import signal

from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook(
    [
        f"spile.models.{name}"
        for name in ("attention", "decoder", "encoding", "experts", "generation", "params", "rope")
    ],
    "beartype.beartype",
)
settings.register_profile("untimed", deadline=None)  # A slow machine is not a failure.
settings.load_profile("untimed")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl+C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
