"""Measure what ``spile verify`` costs: ``python -m bench.verify [--model FOLDER] [--samples N] [--turns N]``.

Extracts texts, verifies the dataset, and verifies it with every sample recomputed, each as a command of its own and
turn about. Prints the CPU seconds and the wall time of each, and their ratio to the extraction.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.proof import write_texts

_SPILE = (sys.executable, "-m", "spile.cli.main")


def timed(*words: str) -> tuple[float, float]:
    """Run a command and return its CPU seconds and its wall time."""
    began = time.perf_counter()
    child = subprocess.Popen([*_SPILE, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"spile {' '.join(words)} ended with status {status}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


def main() -> None:
    """Print one line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="build/real/smollm2")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--characters", type=int, default=1200, help="characters of each text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--more", nargs="*", default=[], help="flags of spile extract, without dashes: dtype=bfloat16")
    args = parser.parse_args()
    more = [word for flag in args.more for word in f"--{flag}".split("=")]
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts.jsonl")
        write_texts(texts, args.samples, args.characters, 0)
        for turn in range(args.turns):
            root = str(Path(folder, f"run-{turn}"))
            words = ("--model", args.model, "--dataset", str(texts), "--output", root, *more)
            commands = {
                "extract": ("extract", *words),
                "verify": ("verify", root),
                f"verify --recompute {args.samples}": ("verify", root, "--recompute", str(args.samples)),
            }
            for name, command in commands.items():
                found.setdefault(name, []).append(timed(*command))
                print(f"turn {turn}: {name}: {found[name][-1][0]:.1f} s CPU, {found[name][-1][1]:.1f} s", flush=True)
    print(f"{'median':24}{'CPU':>10}{'ratio':>8}{'wall':>10}{'ratio':>8}")
    base = [statistics.median(each) for each in zip(*found["extract"], strict=True)]
    for name, times in found.items():
        cpu, wall = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{name:24}{cpu:9.1f}s{cpu / base[0]:8.2f}{wall:9.1f}s{wall / base[1]:8.2f}")


if __name__ == "__main__":
    main()
