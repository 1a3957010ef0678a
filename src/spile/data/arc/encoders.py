"""Grid encoders: grids as text and back, composed by expressions such as ``RowNumberEncoder(MinimalGridEncoder())``.

An expression has the syntax of a Python call with strings, numbers, lists of strings and other calls as arguments. It
is parsed and never evaluated.
"""

from __future__ import annotations

import ast
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

from spile.data.arc.grids import Grid, grid_problem
from spile.errors import DataError, SpecError

_FLAG = "--grid-encoder"
_MAX_LENGTH, _MAX_DEPTH = 1000, 8
_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")


class GridEncoder(ABC):
    """Converts grids to text and back. Each encoder is a dataclass with at most one argument."""

    @abstractmethod
    def to_text(self, grid: Grid) -> str:
        """Return the grid as text, without a trailing newline."""

    @abstractmethod
    def to_grid(self, text: str) -> Grid:
        """Return the grid of such a text; raise :class:`DataError` if it is malformed."""

    def __str__(self) -> str:
        values = [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(map(_argument, values))})"

    def _unreadable(self, text: str) -> DataError:
        return DataError("the text holds no grid", expected=f"what {self} writes", found=repr(text[:60]))

    def _digits(self, rows: list[list[str]], text: str) -> Grid:
        if all(len(cell) == 1 and cell in "0123456789" for row in rows for cell in row):
            grid = [[int(cell) for cell in row] for row in rows]
            if grid_problem(grid) is None:
                return grid
        raise self._unreadable(text)


def _argument(value: object) -> str:
    if isinstance(value, tuple):
        return repr("".join(value)) if all(len(symbol) == 1 for symbol in value) else repr(list(value))
    return repr(value) if isinstance(value, str) else str(value)


@dataclass(frozen=True)
class MinimalGridEncoder(GridEncoder):
    """One digit per cell, one line per row."""

    def to_text(self, grid: Grid) -> str:
        return "\n".join([bytes(row).translate(_DIGITS).decode() for row in grid])

    def to_grid(self, text: str) -> Grid:
        return self._digits([list(line) for line in text.split("\n")], text)


@dataclass(frozen=True)
class GridWithSeparationEncoder(GridEncoder):
    """A separator between a row's cells."""

    symbol: str

    def __post_init__(self) -> None:
        if not self.symbol or re.search(r"[\d\n\r]", self.symbol):
            expected = "a separator with no digit and no newline"
            raise SpecError(f"{_FLAG}: GridWithSeparationEncoder", expected=expected, found=repr(self.symbol))

    def to_text(self, grid: Grid) -> str:
        return "\n".join([self.symbol.join(map(str, row)) for row in grid])

    def to_grid(self, text: str) -> Grid:
        return self._digits([line.split(self.symbol) for line in text.split("\n")], text)


@dataclass(frozen=True)
class RepeatNumberEncoder(GridEncoder):
    """Repeats each digit ``n`` times."""

    n: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 16:
            raise SpecError(f"{_FLAG}: RepeatNumberEncoder", expected="n from 1 to 16", found=str(self.n))

    def to_text(self, grid: Grid) -> str:
        return "\n".join(["".join([str(cell) * self.n for cell in row]) for row in grid])

    def to_grid(self, text: str) -> Grid:
        rows = [[line[i : i + self.n] for i in range(0, len(line), self.n)] for line in text.split("\n")]
        if any(cell != cell[0] * self.n for row in rows for cell in row):
            raise self._unreadable(text)
        return self._digits([[cell[0] for cell in row] for row in rows], text)


@dataclass(frozen=True)
class ReplaceNumberEncoder(GridEncoder):
    """Ten custom symbols instead of the digits: a string of ten characters or a list of ten strings."""

    symbols: tuple[str, ...] = tuple("abcdefghij")

    def __post_init__(self) -> None:
        symbols = tuple(self.symbols)
        sound = len(set(symbols)) == len(symbols) == 10 and not any(re.search(r"[\d\s]", s) or not s for s in symbols)
        prefixed = [(a, b) for a in symbols for b in symbols if a != b and b.startswith(a)]
        if not sound or prefixed:
            expected = "ten distinct symbols, with no digit or blank in them and none the beginning of another"
            raise SpecError(f"{_FLAG}: ReplaceNumberEncoder", expected=expected, found=f"{list(symbols)!r}")
        object.__setattr__(self, "symbols", symbols)

    def to_text(self, grid: Grid) -> str:
        return "\n".join(["".join([self.symbols[cell] for cell in row]) for row in grid])

    def to_grid(self, text: str) -> Grid:
        pattern = re.compile("|".join(map(re.escape, self.symbols)))
        grid = [[self.symbols.index(symbol) for symbol in pattern.findall(line)] for line in text.split("\n")]
        if grid_problem(grid) is not None or self.to_text(grid) != text:
            raise self._unreadable(text)
        return grid


@dataclass(frozen=True)
class RowNumberEncoder(GridEncoder):
    """Prefixes each line of the base encoder's text with its number, from 1."""

    base: GridEncoder

    def to_text(self, grid: Grid) -> str:
        return "\n".join([f"{n} {line}" for n, line in enumerate(self.base.to_text(grid).split("\n"), 1)])

    def to_grid(self, text: str) -> Grid:
        lines = text.split("\n")
        if any(not line.startswith(f"{n} ") for n, line in enumerate(lines, 1)):
            raise self._unreadable(text)
        return self.base.to_grid("\n".join([line.partition(" ")[2] for line in lines]))


@dataclass(frozen=True)
class GridShapeEncoder(GridEncoder):
    """Adds a line with the numbers of rows and columns above the grid."""

    base: GridEncoder

    def to_text(self, grid: Grid) -> str:
        return f"size {len(grid)}x{len(grid[0])}\n{self.base.to_text(grid)}"

    def to_grid(self, text: str) -> Grid:
        header, _, body = text.partition("\n")
        grid = self.base.to_grid(body)
        if header != f"size {len(grid)}x{len(grid[0])}":
            raise self._unreadable(text)
        return grid


@dataclass(frozen=True)
class GridCodeBlockEncoder(GridEncoder):
    """The base encoder's text in a fenced code block."""

    base: GridEncoder

    def to_text(self, grid: Grid) -> str:
        return f"```grid\n{self.base.to_text(grid)}\n```"

    def to_grid(self, text: str) -> Grid:
        if not (text.startswith("```grid\n") and text.endswith("\n```") and len(text) > 12):
            raise self._unreadable(text)
        return self.base.to_grid(text[8:-4])


ENCODERS: dict[str, Callable[..., GridEncoder]] = {kind.__name__: kind for kind in GridEncoder.__subclasses__()}
_ARGUMENTS: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("a string", (str,)),
    "int": ("a number", (int,)),
    "tuple[str, ...]": ("a string or a list of strings", (str, tuple)),
    "GridEncoder": ("an encoder", (GridEncoder,)),
}
"""How an argument is described, and the types of its value, by its annotation."""


def parse_encoder(text: str) -> GridEncoder:
    """Return the encoder of an expression; raise :class:`SpecError` that lists the encoders if it is invalid."""
    if len(text) > _MAX_LENGTH:
        raise SpecError(_FLAG, expected=f"at most {_MAX_LENGTH} characters", found=str(len(text)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an unknown escape in a string is only a warning
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        found = error.msg if isinstance(error, SyntaxError) else "an expression that cannot be parsed"
        expected = "an expression such as RowNumberEncoder(MinimalGridEncoder())"
        raise SpecError(f"{_FLAG} {text!r}", expected=expected, found=found) from error
    return _build(call, text.strip(), 1)


def _build(call: ast.expr, text: str, depth: int) -> GridEncoder:
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
    if not isinstance(call, ast.Call) or name not in ENCODERS:
        found = name or f"{ast.get_source_segment(text, call)!r}"
        raise SpecError(_FLAG, expected=f"one of {', '.join(ENCODERS)}, with parentheses", found=found)
    if depth > _MAX_DEPTH:
        raise SpecError(_FLAG, expected=f"at most {_MAX_DEPTH} encoders inside each other", found="more")
    accepted = fields(ENCODERS[name])  # type: ignore[arg-type]
    parameter = accepted[0] if accepted else None
    described, kinds = _ARGUMENTS[str(parameter.type)] if parameter else ("", ())
    given = [(None, value) for value in call.args] + [(each.arg, each.value) for each in call.keywords]
    values = [_value(value, text, depth) for _, value in given]
    named = [each for each, _ in given if each is not None and (parameter is None or each != parameter.name)]
    missing = parameter is not None and parameter.default is MISSING and not given
    if named or missing or len(given) > len(accepted) or not all(isinstance(value, kinds) for value in values):
        shown = ", ".join(str(ast.get_source_segment(text, each)) for each in (*call.args, *call.keywords))
        expected = f"{parameter.name}: {described}" if parameter else "nothing"
        raise SpecError(f"{_FLAG}: {name}", expected=expected, found=shown or "nothing")
    return ENCODERS[name](*values)


def _value(node: ast.expr, text: str, depth: int) -> object:
    """Return the value of an argument; None if it has a kind that no encoder accepts."""
    if isinstance(node, ast.Call):
        return _build(node, text, depth + 1)
    if isinstance(node, ast.List):
        values = [_value(each, text, depth) for each in node.elts]
        return tuple(values) if all(isinstance(each, str) for each in values) else None
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (str, int) else None
