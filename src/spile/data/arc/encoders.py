"""Grids to text and back: encoders composed by name, each exactly reversible.

``GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))`` is parsed by the small grammar in
:mod:`spile.data.arc.grammar`; nothing is ever evaluated. ``docs/prompts.md`` shows what each writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spile.data.arc.grammar import Call, Value, parse_call
from spile.data.arc.grids import Grid, grid_problem
from spile.errors import DataError, SpecError

__all__ = [
    "ENCODERS",
    "GridCodeBlockEncoder",
    "GridEncoder",
    "GridShapeEncoder",
    "GridWithSeparationEncoder",
    "MinimalGridEncoder",
    "RepeatNumberEncoder",
    "ReplaceNumberEncoder",
    "RowNumberEncoder",
    "parse_encoder",
]

_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")


class GridEncoder(Protocol):
    """Writes grids and reads them back. ``str(encoder)`` is the expression that makes it."""

    def to_text(self, grid: Grid) -> str:
        """The grid as text, without a newline at its end."""

    def to_grid(self, text: str) -> Grid:
        """The grid of such a text, or a :class:`DataError`."""


def _unreadable(encoder: object, text: str) -> DataError:
    return DataError("the text holds no grid", expected=f"what {encoder} writes", found=repr(text[:60]))


def _checked(encoder: object, grid: Grid, text: str) -> Grid:
    if grid_problem(grid) is not None:
        raise _unreadable(encoder, text)
    return grid


def _digits(encoder: object, rows: list[list[str]], text: str) -> Grid:
    if not all(len(cell) == 1 and cell in "0123456789" for row in rows for cell in row):
        raise _unreadable(encoder, text)
    return _checked(encoder, [[int(cell) for cell in row] for row in rows], text)


@dataclass(frozen=True)
class MinimalGridEncoder:
    """One digit per cell, one line per row."""

    def to_text(self, grid: Grid) -> str:
        """``012⏎345``."""
        return "\n".join([bytes(row).translate(_DIGITS).decode() for row in grid])

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`."""
        return _digits(self, [list(line) for line in text.split("\n")], text)

    def __str__(self) -> str:
        return "MinimalGridEncoder()"


@dataclass(frozen=True)
class GridWithSeparationEncoder:
    """A separator between a row's cells."""

    symbol: str = "|"

    def __post_init__(self) -> None:
        if not self.symbol or re.search(r"[\d\n\r]", self.symbol):
            raise SpecError(
                "--grid-encoder: GridWithSeparationEncoder",
                expected="a separator with no digit and no newline",
                found=repr(self.symbol),
            )

    def to_text(self, grid: Grid) -> str:
        """``0|1|2⏎3|4|5``."""
        return "\n".join([self.symbol.join(map(str, row)) for row in grid])

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`."""
        return _digits(self, [line.split(self.symbol) for line in text.split("\n")], text)

    def __str__(self) -> str:
        return f"GridWithSeparationEncoder({_quoted(self.symbol)})"


@dataclass(frozen=True)
class RepeatNumberEncoder:
    """Each digit ``n`` times."""

    n: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 16:
            raise SpecError("--grid-encoder: RepeatNumberEncoder", expected="n from 1 to 16", found=str(self.n))

    def to_text(self, grid: Grid) -> str:
        """``000111222⏎333444555``."""
        return "\n".join(["".join([str(cell) * self.n for cell in row]) for row in grid])

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`."""
        rows = [[line[i : i + self.n] for i in range(0, len(line), self.n)] for line in text.split("\n")]
        if any(cell != cell[0] * self.n for row in rows for cell in row):
            raise _unreadable(self, text)
        return _digits(self, [[cell[0] for cell in row] for row in rows], text)

    def __str__(self) -> str:
        return f"RepeatNumberEncoder({self.n})"


@dataclass(frozen=True)
class ReplaceNumberEncoder:
    """Ten symbols of one's own instead of the digits: a string of ten characters or a list of ten strings."""

    symbols: tuple[str, ...] = tuple("abcdefghij")
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        symbols = tuple(self.symbols)
        sound = len(set(symbols)) == len(symbols) == 10 and not any(re.search(r"[\d\s]", s) or not s for s in symbols)
        prefixed = [(a, b) for a in symbols for b in symbols if a != b and b.startswith(a)]
        if not sound or prefixed:
            raise SpecError(
                "--grid-encoder: ReplaceNumberEncoder",
                expected="ten distinct symbols, with no digit or blank in them and none the beginning of another",
                found=f"{list(symbols)!r}",
            )
        object.__setattr__(self, "symbols", symbols)
        object.__setattr__(self, "_numbers", {symbol: number for number, symbol in enumerate(symbols)})
        object.__setattr__(self, "_pattern", re.compile("|".join(map(re.escape, symbols))))

    def to_text(self, grid: Grid) -> str:
        """``abc⏎def``."""
        return "\n".join(["".join([self.symbols[cell] for cell in row]) for row in grid])

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`."""
        grid = [[self._numbers[symbol] for symbol in self._pattern.findall(line)] for line in text.split("\n")]
        if grid_problem(grid) is not None or self.to_text(grid) != text:
            raise _unreadable(self, text)
        return grid

    def __str__(self) -> str:
        if all(len(symbol) == 1 for symbol in self.symbols):
            return f"ReplaceNumberEncoder({_quoted(''.join(self.symbols))})"
        return f"ReplaceNumberEncoder([{', '.join(map(_quoted, self.symbols))}])"


@dataclass(frozen=True)
class RowNumberEncoder:
    """Each line of the base's text after its number, from 1."""

    base: GridEncoder

    def to_text(self, grid: Grid) -> str:
        """``1 012⏎2 345``."""
        return "\n".join([f"{n} {line}" for n, line in enumerate(self.base.to_text(grid).split("\n"), 1)])

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`."""
        lines = text.split("\n")
        if any(not line.startswith(f"{n} ") for n, line in enumerate(lines, 1)):
            raise _unreadable(self, text)
        return self.base.to_grid("\n".join([line.partition(" ")[2] for line in lines]))

    def __str__(self) -> str:
        return f"RowNumberEncoder({self.base})"


@dataclass(frozen=True)
class GridShapeEncoder:
    """The grid's rows and columns in a line above it."""

    base: GridEncoder

    def to_text(self, grid: Grid) -> str:
        """``size 2x3⏎012⏎345``."""
        return f"size {len(grid)}x{len(grid[0])}\n{self.base.to_text(grid)}"

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`; the size must be the grid's."""
        header, _, body = text.partition("\n")
        grid = self.base.to_grid(body)
        if header != f"size {len(grid)}x{len(grid[0])}":
            raise _unreadable(self, text)
        return grid

    def __str__(self) -> str:
        return f"GridShapeEncoder({self.base})"


@dataclass(frozen=True)
class GridCodeBlockEncoder:
    """The base's text fenced as a block of code."""

    base: GridEncoder

    def to_text(self, grid: Grid) -> str:
        """````` ```grid⏎012⏎345⏎``` `````."""
        return f"```grid\n{self.base.to_text(grid)}\n```"

    def to_grid(self, text: str) -> Grid:
        """The inverse of :meth:`to_text`."""
        if not (text.startswith("```grid\n") and text.endswith("\n```") and len(text) > 12):
            raise _unreadable(self, text)
        return self.base.to_grid(text[8:-4])

    def __str__(self) -> str:
        return f"GridCodeBlockEncoder({self.base})"


@dataclass(frozen=True)
class _Entry:
    make: Callable[..., GridEncoder]
    parameter: str | None = None
    kinds: tuple[type, ...] = ()
    required: bool = False


ENCODERS: dict[str, _Entry] = {
    "MinimalGridEncoder": _Entry(MinimalGridEncoder),
    "GridWithSeparationEncoder": _Entry(GridWithSeparationEncoder, "symbol", (str,), required=True),
    "GridCodeBlockEncoder": _Entry(GridCodeBlockEncoder, "base", (Call,), required=True),
    "GridShapeEncoder": _Entry(GridShapeEncoder, "base", (Call,), required=True),
    "RowNumberEncoder": _Entry(RowNumberEncoder, "base", (Call,), required=True),
    "RepeatNumberEncoder": _Entry(RepeatNumberEncoder, "n", (int,)),
    "ReplaceNumberEncoder": _Entry(ReplaceNumberEncoder, "symbols", (str, list)),
}
"""Every encoder's name, what makes it, and the one argument that it takes."""

_KIND = {str: "a string", int: "a number", Call: "an encoder", list: "a list of strings"}


def parse_encoder(text: str) -> GridEncoder:
    """An expression as an encoder, or a :class:`SpecError` that says what was wrong and which encoders there are."""
    return _build(parse_call(text))


def _build(call: Call) -> GridEncoder:
    entry = ENCODERS.get(call.name)
    if entry is None:
        raise SpecError("--grid-encoder", expected=f"one of {', '.join(ENCODERS)}", found=call.name)
    takes = "nothing" if entry.parameter is None else f"{entry.parameter}: {' or '.join(_KIND[k] for k in entry.kinds)}"
    arguments = [(name or entry.parameter, value) for name, value in call.arguments]
    wrong = [value for name, value in arguments if name != entry.parameter or type(value) not in entry.kinds]
    if wrong or len(arguments) > 1 or (entry.required and not arguments):
        found = ", ".join(_shown(name, value) for name, value in call.arguments) or "nothing"
        raise SpecError(f"--grid-encoder: {call.name}", expected=takes, found=found)
    values = [_build(value) if isinstance(value, Call) else _frozen(value) for _, value in arguments]
    return entry.make(*values)


def _frozen(value: Value) -> object:
    return tuple(value) if isinstance(value, list) else value


def _shown(name: str | None, value: Value) -> str:
    shown = value.name + "(…)" if isinstance(value, Call) else repr(value)
    return f"{name}={shown}" if name else shown


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
