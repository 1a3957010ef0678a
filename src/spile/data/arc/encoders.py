r"""Grid encoders: grids as text and back, composed by expressions that are parsed and never evaluated.

The grammar of an expression:
call = NAME "(" [ argument { "," argument } ] ")"; argument = [ NAME "=" ] value;
value = call | STRING | NUMBER | "[" [ STRING { "," STRING } ] "]";
a STRING is in single or double quotes; \\, \' and \" are its only escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from spile.data.arc.grids import Grid, grid_problem
from spile.errors import DataError, SpecError

_LONGEST, _DEEPEST = 1000, 8
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d{1,9})|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<mark>[()\[\],=])|(?P<end>$))""",
    re.ASCII,
)


@dataclass(frozen=True)
class Call:
    """``Name(arguments)``, with the names of keyword arguments."""

    name: str
    arguments: tuple[tuple[str | None, Value], ...]


Value: TypeAlias = "Call | str | int | list[str]"


def parse_call(text: str) -> Call:
    """Parse an expression."""
    if len(text) > _LONGEST:
        raise SpecError("--grid-encoder", expected=f"at most {_LONGEST} characters", found=str(len(text)))
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._next, self._depth = text, 0, 0
        self._kind, self._value, self._start = "end", "", 0
        self._advance()

    def parse(self) -> Call:
        name = self._take("name", "an encoder's name")
        call = self._call(name)
        self._take("end", "the end")
        return call

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._next)
        if match is None:
            self._start = len(self._text) - len(self._text[self._next :].lstrip())
            raise self._error("a name, a string, a number or one of ( ) [ ] , =", repr(self._text[self._start]))
        self._kind = str(match.lastgroup)
        self._value, self._start, self._next = match[self._kind], match.start(self._kind), match.end()

    def _error(self, expected: str, found: str) -> SpecError:
        return SpecError(f"--grid-encoder {self._text!r}, character {self._start + 1}", expected=expected, found=found)

    def _take(self, kind: str, expected: str, value: str | None = None) -> str:
        if self._kind != kind or (value is not None and self._value != value):
            raise self._error(expected, "the end" if self._kind == "end" else repr(self._value))
        taken = self._value
        if kind != "end":
            self._advance()
        return taken

    def _is(self, mark: str) -> bool:
        return self._kind == "mark" and self._value == mark

    def _call(self, name: str) -> Call:
        self._take("mark", "'('", "(")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"at most {_DEEPEST} encoders inside each other", "more")
        arguments: list[tuple[str | None, Value]] = []
        while not self._is(")"):
            if arguments:
                self._take("mark", "',' or ')'", ",")
            arguments.append(self._argument())
        self._depth -= 1
        self._advance()
        return Call(name, tuple(arguments))

    def _argument(self) -> tuple[str | None, Value]:
        if self._kind != "name":
            return None, self._atom()
        name = self._take("name", "a name")
        if self._is("="):
            self._advance()
            return name, (self._call(self._take("name", "a name")) if self._kind == "name" else self._atom())
        return None, self._call(name)

    def _atom(self) -> Value:
        if self._kind == "number":
            return int(self._take("number", "a number"))
        if self._is("["):
            self._advance()
            strings: list[str] = []
            while not self._is("]"):
                if strings:
                    self._take("mark", "',' or ']'", ",")
                strings.append(self._string())
            self._advance()
            return strings
        return self._string()

    def _string(self) -> str:
        quoted = self._take("string", "a string, a number or an encoder")
        if re.search(r"\\[^\\'\"]", re.sub(r"\\\\", "", quoted)):
            raise self._error(r"only \\, \' and \" escaped", quoted)
        return re.sub(r"\\(.)", r"\1", quoted[1:-1])


_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")


class GridEncoder(Protocol):
    """Converts grids to text and back. ``str(encoder)`` is the expression that creates it."""

    def to_text(self, grid: Grid) -> str:
        """Return the grid as text, without a trailing newline."""

    def to_grid(self, text: str) -> Grid:
        """Return the grid of such a text; raise :class:`DataError` if it is malformed."""


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
    """Repeats each digit ``n`` times."""

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
    """Ten custom symbols instead of the digits: a string of ten characters or a list of ten strings."""

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
    """Prefixes each line of the base encoder's text with its number, from 1."""

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
    """Adds a line with the numbers of rows and columns above the grid."""

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
    """The base encoder's text in a fenced code block."""

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
"""The encoders by name, with their factory and their one argument."""

_KIND = {str: "a string", int: "a number", Call: "an encoder", list: "a list of strings"}


def parse_encoder(text: str) -> GridEncoder:
    """Return the encoder of an expression; raise :class:`SpecError` that lists the encoders if it is invalid."""
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
