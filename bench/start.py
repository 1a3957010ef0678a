"""Measure how long commands and imports take to start: ``python -m bench.start``.

Each is a new process, run several times; the least CPU time and the least wall time are printed. CPU time is the
reliable figure on a machine that other programs use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_WHAT = {
    "a bare interpreter": ("-c", "pass"),
    "spile --version": ("-m", "spile.cli.main", "--version"),
    "spile --help": ("-m", "spile.cli.main", "--help"),
    "spile extract --help": ("-m", "spile.cli.main", "extract", "--help"),
    "import numpy": ("-c", "import numpy"),
    "import jax": ("-c", "import jax"),
    "import spile": ("-c", "import spile"),
    "what spile extract imports, without jax": ("-c", "import numpy, spile.cli.extract, spile.data.samples"),
    "what spile extract imports": ("-c", "import spile.cli.extract, spile.run.worker"),
}


def seconds(*words: str, repeat: int = 5) -> tuple[float, float]:
    """Return the least CPU time and the least wall time of several new processes."""
    cpu, wall = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
        cpu.append(used.ru_utime + used.ru_stime)
        wall.append(time.perf_counter() - began)
    return min(cpu), min(wall)


def main() -> None:
    for name, words in _WHAT.items():
        cpu, wall = seconds(*words)
        print(f"{name:<40} {cpu:.2f} CPU s   {wall:.2f} s", flush=True)


if __name__ == "__main__":
    main()
