"""The entry point. It handles Ctrl+C from the start and imports everything else after that."""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Sequence

from spile.errors import Interrupted
from spile.worker.signals import INTERRUPTED, exit_handler, handled, interruptible


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``spile`` and exit with its code: 0 done, 1 a failure, 2 a user's mistake, 3 fenced, 130 interrupted."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Runs last.
    try:
        with interruptible():
            from spile.cli.program import run

            code = run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        code = Interrupted.exit_code
        with handled(exit_handler(code), signal.SIGINT):  # For a second Ctrl+C.
            print(INTERRUPTED, file=sys.stderr)
    atexit.register(signal.signal, signal.SIGINT, exit_handler(code))  # Runs first, before exit handlers of libraries.
    sys.exit(code)


if __name__ == "__main__":
    main()
