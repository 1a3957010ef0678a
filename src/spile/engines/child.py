"""Start a worker that does not outlive its parent: ``python child.py PARENT CORES COMMAND…``.

The file is run by its path, so that nothing is imported before the worker itself.
"""

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1


def main(parent: int, cores: str, command: list[str]) -> None:
    """Become the command, on the given cores; the system sends it SIGTERM when the parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if os.getppid() != parent:
        sys.exit(130)
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
