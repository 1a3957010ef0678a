"""Compare runs and start-up times with an older checkout: ``python -m bench.before --old PATH``.

PATH is a checkout of the same repository (``git worktree add PATH COMMIT``). Both versions run in this interpreter and
take turns, each measurement in its own process. Measured are the start-up (``import spile``, ``spile --help``) and
complete runs of ``spile extract`` with cached programs: one with many small samples, which is dominated by bookkeeping,
and one with ARC prompts and a model of eight layers, which is dominated by the model. Wall and CPU seconds are the
minimum over the turns; peak memory is the median. The kernel provides all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import SCRATCH
from bench.made_up import arc_tasks, write_texts

__all__ = ["Turn", "main", "turn"]

MUST = 1.05
"""The largest accepted ratio to the older figure. Two runs of the same code differ by less."""
_SPILE = ("-m", "spile.cli.main")


@dataclass(frozen=True)
class Case:
    """One command that both checkouts run."""

    name: str
    words: tuple[str, ...]
    now: tuple[str, ...] = ()
    """Additional arguments for this checkout: flags that the older one does not have."""

    @property
    def writes(self) -> bool:
        """Whether the command creates a dataset."""
        return "extract" in self.words


@dataclass(frozen=True)
class Turn:
    """The measurements of one process."""

    wall: float
    cpu: float
    peak: int
    """The peak memory in bytes. It includes the memory that this process held when it forked, which is small."""


def turn(checkout: Path, words: tuple[str, ...], cache: Path) -> Turn:
    """Run the command with ``spile`` of that checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    with tempfile.TemporaryFile() as message:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, *words], env=environment, stdout=message, stderr=message)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            message.seek(0)
            text = message.read().decode(errors="replace")[-600:]
            raise SystemExit(f"{checkout}: python {' '.join(words)} ended with {child.returncode}: {text}")
    return Turn(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


class Sides:
    """Both checkouts, and the files that they share."""

    def __init__(self, old: Path, home: Path, turns: int) -> None:
        self.checkouts = {"before": old, "now": Path(__file__).parents[1]}
        self.home, self.turns = home, turns

    def compare(self, case: Case) -> tuple[Turn, Turn]:
        """Return the figures before and now. The first turn fills caches and is discarded."""
        found: dict[str, list[Turn]] = {side: [] for side in self.checkouts}
        for number in range(self.turns + 1):
            # Alternate the order, so that neither always runs second.
            for side in list(self.checkouts)[:: 1 if number % 2 else -1]:
                output = self.home / f"{side}-output"
                words = (*case.words, *(case.now if side == "now" else ()))
                words += ("--output", str(output)) if case.writes else ()
                took = turn(self.checkouts[side], words, self.home / f"{side}-programs")
                shutil.rmtree(output, ignore_errors=True)
                if number:
                    found[side].append(took)
        return _summed_up(found["before"]), _summed_up(found["now"])

    def model(self, shape: str) -> str:
        """Create the model in a separate process, because a forked process would inherit this one's memory."""
        folder = str(self.home / shape)
        subprocess.run([sys.executable, "-m", "bench.shapes", shape, folder], check=True, stdout=subprocess.DEVNULL)
        return folder


def _summed_up(turns: list[Turn]) -> Turn:
    return Turn(
        min(each.wall for each in turns),
        min(each.cpu for each in turns),
        int(statistics.median(each.peak for each in turns)),
    )


def _cases(sides: Sides, samples: int, prompts: int) -> list[Case]:
    texts, tasks = sides.home / "texts.jsonl", sides.home / "tasks.jsonl"
    write_texts(texts, samples)
    tasks.write_text("".join(json.dumps(task) + "\n" for task in arc_tasks(prompts)))
    small = (*_SPILE, "extract", "--model", sides.model("speck"), "--dataset", str(texts))
    arc = (*_SPILE, "extract", "--model", sides.model("small"), "--dataset", str(tasks))
    plain = ("--no-statistics",)
    return [
        Case("import spile", ("-c", "import spile")),
        Case("spile --help", (*_SPILE, "--help")),
        Case(f"{samples:,} small samples, d 16", small),
        Case("small samples, now without statistics", small, plain),
        Case(f"{prompts} ARC prompts, 8 layers, d 256", arc),
        Case("ARC prompts, now without statistics", arc, plain),
    ]


def _figures(before: float, now: float, unit: str) -> tuple[str, bool]:
    ratio = now / before
    return f"{before:.2f} → {now:.2f} {unit} ({ratio:.2f})", ratio <= MUST


def main(arguments: list[str] | None = None) -> int:
    """Print the figures of each case; return 1 if one is worse than before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=48)
    args = parser.parse_args(arguments)
    old = args.old.resolve()
    if not (old / "src/spile").is_dir():
        parser.error(f"--old: expected a checkout with src/spile, found {old}")
    commit = subprocess.run(["git", "-C", str(old), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    SCRATCH.mkdir(exist_ok=True)
    table = Table("", "wall", "CPU", "peak of memory", title=f"{commit.stdout.strip() or old} → this checkout (ratio)")
    worse = []
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        sides = Sides(old, Path(name).resolve(), args.turns)
        for case in _cases(sides, args.samples, args.prompts):
            before, now = sides.compare(case)
            rows = [_figures(before.wall, now.wall, "s"), _figures(before.cpu, now.cpu, "s")]
            if case.writes:
                rows.append(_figures(before.peak / 1e6, now.peak / 1e6, "MB"))
            table.add_row(case.name, *(text for text, _ in rows))
            worse += [case.name for _, well in rows if not well]
    Console().print(table)
    print(f"must hold: at most {MUST} times as much: {'NO: ' + ', '.join(dict.fromkeys(worse)) if worse else 'yes'}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
