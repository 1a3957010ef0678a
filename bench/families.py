"""Compare every model family with the torch loop: ``python -m bench.families [--device cuda] [--shapes A,B]``.

Each run is a separate process, and its whole wall time counts (see :mod:`bench.race`): spile with programs that a first
run of the same command cached, then the length-sorted loop in PyTorch with the same tokens and threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.shapes import FAMILIES


def race(shape: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the wall seconds of each contender."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "race.json"
        words = [
            sys.executable, "-m", "bench.race", "--shape", shape, "--device", args.device, "--dtype", args.dtype,
            "--count", str(args.count), "--variants", "1", "--budgets", str(args.budget), "--ram", args.ram,
            "--only", "cold,warm,torch", "--json", str(report),
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True)
        if not report.is_file():
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
            return {}
        found = json.loads(report.read_text())
    if args.verbose:
        print(done.stdout)
    return {result["name"]: result["wall"] for result in found if result["tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(name for name in FAMILIES if name.startswith("small")))
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", type=int, default=48, help="tasks")
    parser.add_argument("--budget", type=int, default=4096, help="tokens per batch of the torch loop")
    parser.add_argument("--ram", default="/dev/shm")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {}
    print("| shape | spile, nothing cached | spile, programs cached | torch loop | torch / spile |", flush=True)
    print("|---|---|---|---|---|", flush=True)
    for shape in args.shapes.split(","):
        rows[shape] = walls = list(race(shape, args).values())
        if len(walls) == 3:
            cold, warm, torch = walls
            print(f"| {shape} | {cold:.1f} s | {warm:.1f} s | {torch:.1f} s | {torch / warm:.2f} |", flush=True)
        else:
            print(f"| {shape} | failed | | | |", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
