"""``make bench``: run every benchmark that needs no accelerator, one after another, each in its own process."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

BENCHES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "start": ((), None),
    "cpu": (("--shape", "qwen2.5-0.5b", "--samples", "4", "--turns", "1"), "torch"),
    "generation": (("embedded", "--model", "embedded", "--prompts", "16", "--new", "64", "--longest", "1300"), "torch"),
    "data": ((), None),
    "memory": ((), None),
    "ledger": ((), None),
    "scale": ((), None),
    "overlap": ((), None),
    "host": ((), None),
    "reading": ((), None),
    "sae": ((), None),
    "stored": ((), None),
    "engines": ((), None),
}
"""The arguments of each module, and the package that it needs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", choices=[[], *BENCHES], help="the benchmarks to run (default: all)")
    wanted = parser.parse_args().only or list(BENCHES)
    failed = []
    for name in wanted:
        words, package = BENCHES[name]
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name:16} left out: no {package} here (pip install 'torch==2.13.0')", flush=True)
            continue
        if subprocess.run([sys.executable, "-m", f"bench.{name}", *words], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
