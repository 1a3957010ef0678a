"""The entry point. It handles Ctrl+C from the start and imports everything else after that."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from spile.errors import Interrupted
from spile.run.signals import INTERRUPTED, exit_handler, handle_signals, interruptible


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``spile`` and exit with its :class:`~spile.errors.ExitCode`."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Runs last.
    try:
        with interruptible():
            from spile.cli.program import run

            code = run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        code = Interrupted.exit_code
        with handle_signals(exit_handler(code), signal.SIGINT):  # For a second Ctrl+C.
            sys.stderr.write(f"{INTERRUPTED}\n")  # One write: print would make two.
    atexit.register(signal.signal, signal.SIGINT, exit_handler(code))  # Runs first, before exit handlers of libraries.
    sys.exit(code)


def run_process() -> None:
    """Run ``spile`` as a process of its own, which ends without the last steps of the interpreter.

    In these steps the interpreter ends daemon threads. A thread that is inside a C++ library at that moment ends the
    whole process with SIGABRT, although the command succeeded.
    """
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    atexit.register(leave)  # Runs last: after the executors' threads have ended and libraries have cleaned up.
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        raise


if __name__ == "__main__":
    run_process()
