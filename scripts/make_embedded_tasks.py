"""Makes the tasks that ship inside the package: rules of our own, drawn on random grids, the same bytes each time.

python scripts/make_embedded_tasks.py [OUTPUT]
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Grid = list[list[int]]
OUTPUT = Path(__file__).parent.parent / "src" / "spile" / "data" / "embedded" / "tasks.jsonl"
SIZES = {"small": (3, 6), "medium": (6, 10), "large": (10, 15)}


class Draw:
    """Random numbers from ``random()`` alone: the one method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, odds: float) -> bool:
        """True that often."""
        return self._random() < odds

    def colors(self, count: int) -> list[int]:
        """Distinct colours, never 0."""
        left = list(range(1, 10))
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(count)]


def blank(rows: int, columns: int) -> Grid:
    """All zeros."""
    return [[0] * columns for _ in range(rows)]


def speckled(draw: Draw, size: tuple[int, int], density: float = 0.35, kinds: int = 3) -> Grid:
    """A grid with scattered cells of a few colours."""
    colors = draw.colors(kinds)
    rows, columns = draw.number(*size), draw.number(*size)
    grid = [
        [colors[draw.number(0, kinds - 1)] if draw.chance(density) else 0 for _ in range(columns)] for _ in range(rows)
    ]
    grid[draw.number(0, rows - 1)][draw.number(0, columns - 1)] = colors[0]
    return grid


def boxed(draw: Draw, size: tuple[int, int]) -> Grid:
    """A grid with one filled rectangle, and a few stray cells in it."""
    rows, columns = max(4, draw.number(*size)), max(4, draw.number(*size))
    color, stray = draw.colors(2)
    grid = blank(rows, columns)
    top, left = draw.number(0, rows - 3), draw.number(0, columns - 3)
    bottom, right = draw.number(top + 2, rows - 1), draw.number(left + 2, columns - 1)
    for row in range(top, bottom + 1):
        for column in range(left, right + 1):
            grid[row][column] = stray if draw.chance(0.15) else color
    grid[top][left] = grid[bottom][right] = color
    return grid


def turned(grid: Grid) -> Grid:
    """A quarter turn."""
    return [list(column) for column in zip(*grid, strict=True)][::-1]


def fallen(grid: Grid) -> Grid:
    """Coloured cells drop to the bottom of their columns."""
    columns = [
        [0] * (len(column) - sum(map(bool, column))) + [c for c in column if c] for column in zip(*grid, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def cropped(grid: Grid) -> Grid:
    """The smallest part that holds every coloured cell."""
    rows = [n for n, row in enumerate(grid) if any(row)]
    columns = [n for n, column in enumerate(zip(*grid, strict=True)) if any(column)]
    return [row[columns[0] : columns[-1] + 1] for row in grid[rows[0] : rows[-1] + 1]]


def commonest(grid: Grid) -> int:
    """The most frequent colour but 0; of equals, the lowest."""
    counts = Counter(cell for row in grid for cell in row if cell)
    return min(counts, key=lambda color: (-counts[color], color))


def outlined(grid: Grid) -> Grid:
    """Empty cells beside the commonest colour take colour 8."""
    color, rows, columns = commonest(grid), len(grid), len(grid[0])
    result = [row[:] for row in grid]
    for row in range(rows):
        for column in range(columns):
            around = [(row + a, column + b) for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))]
            near = any(0 <= r < rows and 0 <= c < columns and grid[r][c] == color for r, c in around)
            result[row][column] = 8 if near and not grid[row][column] else grid[row][column]
    return result


def crossed(grid: Grid) -> Grid:
    """Each cell of the commonest colour in the first coloured row draws its column."""
    row = next(row for row in grid if any(row))
    return [[cell or row[n] for n, cell in enumerate(line)] for line in grid]


def framed(grid: Grid) -> Grid:
    """A frame of the commonest colour over the grid's edge."""
    color, last = commonest(grid), len(grid) - 1
    return [
        [color if r in (0, last) or c in (0, len(row) - 1) else cell for c, cell in enumerate(row)]
        for r, row in enumerate(grid)
    ]


def counted(grid: Grid) -> Grid:
    """A bar for each colour, the longest first."""
    counts = Counter(cell for row in grid for cell in row if cell)
    bars = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    width = min(30, bars[0][1])
    return [[color if n < count else 0 for n in range(width)] for color, count in bars]


def kaleidoscope(grid: Grid) -> Grid:
    """The grid and its mirror images in four quarters."""
    half = [row + row[::-1] for row in grid]
    return half + half[::-1]


RULES: dict[str, tuple[Callable[[Draw, tuple[int, int]], Grid], Callable[[Grid], Grid]]] = {
    "mirror": (speckled, lambda grid: [row[::-1] for row in grid]),
    "upside-down": (speckled, lambda grid: grid[::-1]),
    "transpose": (speckled, lambda grid: [list(column) for column in zip(*grid, strict=True)]),
    "turn": (speckled, turned),
    "swap-colors": (speckled, lambda grid: [[(10 - cell) % 10 for cell in row] for row in grid]),
    "double": (speckled, lambda grid: [[cell for cell in row for _ in (0, 1)] for row in grid for _ in (0, 1)]),
    "kaleidoscope": (speckled, kaleidoscope),
    "fall": (speckled, fallen),
    "crop": (boxed, cropped),
    "clean": (boxed, lambda grid: [[commonest(grid) if cell else 0 for cell in row] for row in grid]),
    "outline": (boxed, outlined),
    "columns": (lambda draw, size: speckled(draw, size, 0.12), crossed),
    "frame": (speckled, framed),
    "count": (lambda draw, size: speckled(draw, size, 0.2), counted),
    "keep-commonest": (speckled, lambda grid: [[c if c == commonest(grid) else 0 for c in row] for row in grid]),
    "shift": (speckled, lambda grid: [[row[-1], *row[:-1]] for row in grid]),
}
"""What a rule is drawn on, and what it does."""


def task(name: str, size: str, seed: int) -> dict[str, object]:
    """One puzzle: three to five examples and a test."""
    draw = Draw(seed)
    draws, rule = RULES[name]
    grids = [draws(draw, SIZES[size]) for _ in range(draw.number(4, 6 if size == "small" else 4))]
    if seed == 7:  # one of the embedded tasks shows the largest grid that there may be
        grids.append(draws(draw, (30, 30)))
    pairs = [{"input": grid, "output": rule(grid)} for grid in grids]
    return {"task_id": f"{name}-{size}", "train": pairs[:-1], "test": [pairs[-1]]}


def main(output: Path) -> None:
    """Write all tasks, sizes mixed."""
    names = [(name, size) for name in RULES for size in SIZES]
    tasks = [task(name, size, seed) for seed, (name, size) in enumerate(names)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
