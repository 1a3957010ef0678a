"""Generated samples that need no download: ARC tasks and short texts, identical in every run."""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["arc_tasks", "write_texts"]

_WORDS = ("light", "water", "three", "under", "carry", "stone", "seven", "north", "paper", "green")


def arc_tasks(count: int) -> list[dict[str, object]]:
    """Return tasks of the sizes of ARC tasks."""
    draw = random.Random(0)

    def grid(rows: int, columns: int) -> list[list[int]]:
        return [[draw.randrange(10) for _ in range(columns)] for _ in range(rows)]

    tasks: list[dict[str, object]] = []
    for number in range(count):
        rows, columns = draw.randint(3, 20), draw.randint(3, 20)
        pairs = [{"input": grid(rows, columns), "output": grid(rows, columns)} for _ in range(draw.randint(2, 4))]
        tasks.append({"task_id": f"made-up-{number}", "train": pairs, "test": pairs[:1]})
    return tasks


def write_texts(file: Path, samples: int) -> None:
    """Write a JSONL file with this many texts of four to eight words."""
    with file.open("w") as out:
        for number in range(samples):
            words = (_WORDS[(number // 10**place) % 10] for place in range(4 + number % 5))
            out.write(json.dumps({"task_id": f"sample-{number}", "text": " ".join(words)}) + "\n")
