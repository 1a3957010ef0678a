"""Compare the time of ``spile --help`` with that of a bare interpreter: ``python -m bench.start``."""

from __future__ import annotations

import subprocess
import sys
import time


def seconds(*words: str, repeat: int = 7) -> float:
    """Return the shortest time of several new processes."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    bare = seconds("-c", "pass")
    print(f"spile --help     {seconds('-m', 'spile.cli.main', '--help'):.2f} s (a bare interpreter {bare:.2f} s)")


if __name__ == "__main__":
    main()
