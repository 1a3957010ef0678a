"""Measure every figure of docs/performance.md that needs an accelerator: ``python -m bench.gpu TASKS.jsonl``.

1. 0.5B shape, all 24 layers, to a RAM disk, compared with a simple transformers loop.
2. 0.5B and 7B shapes, one layer, to a RAM disk, compared with the forward pass alone, and that with matrix products.
3. 0.5B shape, all layers, to a local disk, synced.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from bench.limits import bench
from bench.shapes import make_model
from spile.spec.run import DataSpec, RunSpec


def spec(model: Path, tasks: str, output: str, layers: tuple[int, ...] | None, **more: Any) -> RunSpec:
    return RunSpec(model=str(model), data=DataSpec(dataset=tasks), output=output, layers=layers, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks")
    parser.add_argument("--ram", default="/dev/shm/spile-bench")
    parser.add_argument("--disk", default="/var/tmp/spile-bench")
    parser.add_argument("--only", default="all,one,disk,seven")
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = set(args.only.split(","))
    results: dict[str, Any] = {}
    ram = Path(args.ram)
    small = make_model("qwen2.5-0.5b", ram / "qwen2.5-0.5b")
    more = {} if args.batch_tokens is None else {"batch_tokens": args.batch_tokens}

    def save() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1))

    def measure(name: str, run: RunSpec, tokens: int) -> None:
        began = time.perf_counter()
        result = bench(run, tokens=tokens, compare=name.startswith("0.5b all layers, RAM"))
        results[name] = result.record()
        save()
        print(f"\n== {name} ({time.perf_counter() - began:.0f} s)\n{json.dumps(results[name], indent=1)}", flush=True)

    if "all" in wanted:
        measure("0.5b all layers, RAM", spec(small, args.tasks, args.ram, None, **more), args.tokens)
    if "one" in wanted:
        measure("0.5b layer 12, RAM", spec(small, args.tasks, args.ram, (12,), **more), 3 * args.tokens)
    if "disk" in wanted:
        measure("0.5b all layers, disk", spec(small, args.tasks, args.disk, None, **more), args.tokens // 8)
    if "seven" in wanted:
        large = make_model("qwen2.5-7b", ram / "qwen2.5-7b")
        measure("7b last layer, RAM", spec(large, args.tasks, args.ram, (27,), **more), args.tokens // 3)
    shutil.rmtree(ram, ignore_errors=True)


if __name__ == "__main__":
    main()
