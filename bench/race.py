"""Compare the complete command with the torch loop, each in its own process: ``python -m bench.race [TASKS]``.

Only the page cache is warm: imports, weights, tokenization, compilation, pinned memory and writing are all included.
The runs are: ``spile extract`` without cached programs and again with them, the torch loop at several token budgets, a
simple transformers loop (with fewer prompts, so only its rate is comparable), and one layer over many more tokens.

TASKS is a JSONL file of ARC tasks or a folder with one JSON file per task; without it, tasks are generated. ``--texts``
generates texts of 50 to 500 tokens instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.made_up import arc_tasks
from bench.shapes import SHAPES, make_model

_LIMIT = 170
"""The time limit of one contender in seconds."""


_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "race-bytecode"))}
"""Compile the bytecode first, as for installed programs; otherwise every start compiles hundreds of files."""


@dataclass
class Result:
    """The measurements of one process."""

    name: str
    wall: float
    tokens: int = 0
    steady: float = 0.0
    """Tokens per second without the start-up."""
    notes: list[str] = field(default_factory=list)


def texts(count: int) -> list[dict[str, object]]:
    """Return texts of 50 to 500 tokens: digits and spaces, two tokens each."""
    draw = random.Random(0)
    return [{"text": " ".join(draw.choices("0123456789", k=draw.randint(25, 250)))} for _ in range(count)]


def write_tasks(source: str | None, count: int, target: Path, *, as_texts: bool = False) -> Path:
    """Write a JSONL file with ``count`` tasks or texts."""
    if as_texts:
        tasks = texts(count)
    elif source is None or not Path(source).exists():
        tasks = arc_tasks(count)
    elif Path(source).is_dir():
        files = sorted(Path(source).rglob("*.json"))[:count]
        tasks = [{"task_id": file.stem, **json.loads(file.read_text())} for file in files]
    else:
        tasks = [json.loads(line) for line in Path(source).read_text().splitlines()[:count]]
    target.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return target


def process(name: str, words: list[str], **environment: str) -> tuple[Result, str]:
    """Run the command; return its seconds and output."""
    began = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = used.ru_utime + used.ru_stime
    try:
        done = subprocess.run(
            [sys.executable, *words], check=False, text=True, capture_output=True, timeout=_LIMIT,
            env={**os.environ, **_BYTECODE, **environment},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Result(name, float(_LIMIT), notes=["did not end in time"]), ""
    result = Result(name, time.perf_counter() - began)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result.notes.append(f"{used.ru_utime + used.ru_stime - before:.0f} s of the processor")
    if done.returncode:
        result.notes.append(f"exit {done.returncode}: {done.stderr[-600:]}")
    return result, done.stdout + done.stderr


class Race:
    """All contenders on one model and one set of tasks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.home = Path(args.ram) / "spile-race"
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.model = args.model or make_model(args.shape, self.home / "model")
        self.tasks = write_tasks(args.tasks, args.count, self.home / "tasks.jsonl", as_texts=args.texts)
        self.results: list[Result] = []
        process("bytecode", ["-c", "import jax, spile.cli.main, spile.run.worker"])
        process("bytecode", ["-c", "import torch, transformers; from transformers import AutoModel, Qwen2Model"])
        self._touch(args.touch << 30)

    def _touch(self, size: int) -> None:
        """Write this many bytes once and remove them, because the first use of a virtual machine's memory is slow."""
        piece = bytes(64 << 20)

        def write(number: int) -> None:
            with (self.home / f"touch-{number}").open("wb", buffering=0) as file:
                for _ in range(size // 8 // len(piece)):
                    file.write(piece)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        for file in self.home.glob("touch-*"):
            file.unlink()

    def spile(self, name: str, cache: str, variants: int, *more: str) -> Result:
        """Run the spile command."""
        words = [
            "-m", "spile.cli.main", "extract", "--model", str(self.model), "--dataset", str(self.tasks),
            "--predictions-per-task", str(variants), "--output", str(self.home / "out"), "--verbose", *more,
        ]  # fmt: skip
        result, text = process(name, words, JAX_COMPILATION_CACHE_DIR=str(self.home / cache))
        tokens = re.search(r"^\s*tokens\s+([\d,]+)", text, re.M)
        wall = re.search(r"^\s*wall time\s+(.*)", text, re.M)
        spans = re.findall(r"^ *\d+\.\d+ to *\d+\.\d+ s .*", text, re.M)
        programs = sum("compile " in line for line in spans)
        result.tokens = int(tokens[1].replace(",", "")) if tokens else 0
        if wall is not None:
            run = dict(re.findall(r"(start|run|compile|end) ([\d.]+ s|\d+ min[ \d s]*)", wall[1]))
            seconds = sum(map(_seconds, (run.get("run", ""), run.get("end", ""))))
            result.steady = result.tokens / seconds if seconds else 0.0
            result.notes += [f"wall time {wall[1]}", f"{programs} programs", *spans]
        for line in re.findall(r"^\s*(?:speed|limited by|memory)\s+.*", text, re.M):
            result.notes.append(" ".join(line.split()))
        if not tokens:
            result.notes.append(text[-800:])
        return self._done(result)

    def torch(self, name: str, variants: int, *more: str) -> Result:
        """Run the torch loop."""
        words = ["-m", "bench.torch_loop", str(self.model), str(self.tasks), str(self.home / "out")]
        words += ["--variants", str(variants), "--device", self.args.device, "--dtype", self.args.dtype, *more]
        result, text = process(name, words)
        last = [line for line in text.splitlines() if line.startswith("{")]
        if last:
            about = json.loads(last[-1])
            result.tokens, result.steady = about["tokens"], about["tokens_per_second"]
            result.notes.append(f"start {about['start']:.1f} s, loop {about['loop']:.1f} s")
            result.notes.append(f"{about['padding']:.1%} padding")
        return self._done(result)

    def _done(self, result: Result) -> Result:
        shutil.rmtree(self.home / "out", ignore_errors=True)
        self.results.append(result)
        print(f"{result.name:34} {result.wall:7.1f} s  {result.tokens:>10,} tokens  {result.steady:>10,.0f} tokens/s")
        for note in result.notes:
            print(f"      {note}")
        sys.stdout.flush()
        return result


def _seconds(text: str) -> float:
    """``4.1 s`` or ``1 min 12 s``."""
    minutes = re.search(r"(\d+) min", text)
    rest = re.search(r"([\d.]+) s", text)
    return 60 * (int(minutes[1]) if minutes else 0) + (float(rest[1]) if rest else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="?")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--model", type=Path, help="a folder with a real model, instead of random weights of a shape")
    parser.add_argument("--count", type=int, default=400, help="tasks")
    parser.add_argument("--texts", action="store_true", help="texts instead of tasks")
    parser.add_argument("--variants", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budgets", default="32768,65536", help="token budgets of the torch loop")
    parser.add_argument("--ram", default="/dev/shm")
    parser.add_argument("--only", default="cold,warm,torch,naive,layer")
    parser.add_argument("--touch", type=int, default=0, help="GiB of the RAM disk to write once beforehand")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    race = Race(args)
    wanted = set(args.only.split(","))
    try:
        if "cold" in wanted:
            race.spile("spile, nothing cached", "cache", args.variants)
        if "warm" in wanted:
            race.spile("spile, programs cached", "cache", args.variants)
        for budget in args.budgets.split(",") if "torch" in wanted else ():
            race.torch(f"torch loop, budget {budget}", args.variants, "--budget", budget)
        if "layer" in wanted:
            variants = args.variants * (4 if args.device == "cuda" else 1)
            race.spile("spile, layer 12, nothing cached", "cache-2", variants, "--layers", "12")
            if args.device == "cpu":
                race.torch("torch loop, layer 12", variants, "--budget", args.budgets.split(",")[0], "--layer", "12")
        if "naive" in wanted:
            race.torch("the loop people write", args.variants, "--naive", "--samples", "96")
    finally:
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(result) for result in race.results], indent=1))
        shutil.rmtree(race.home, ignore_errors=True)


if __name__ == "__main__":
    main()
