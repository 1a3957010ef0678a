r"""The grammar of encoder expressions. A parser of its own: a spec's string is never evaluated.

call = NAME "(" [ argument { "," argument } ] ")"; argument = [ NAME "=" ] value;
value = call | STRING | NUMBER | "[" [ STRING { "," STRING } ] "]";
a STRING stands in single or double quotes, and \\, \' and \" are its only escapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from spile.errors import SpecError

__all__ = ["Call", "Value", "parse_call"]

_LONGEST, _DEEPEST = 1000, 8
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d{1,9})|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<mark>[()\[\],=])|(?P<end>$))""",
    re.ASCII,
)


@dataclass(frozen=True)
class Call:
    """``Name(arguments)``, with the arguments' names where they were given."""

    name: str
    arguments: tuple[tuple[str | None, Value], ...]


Value: TypeAlias = "Call | str | int | list[str]"


def parse_call(text: str) -> Call:
    """The expression as a tree."""
    if len(text) > _LONGEST:
        raise SpecError("--grid-encoder", expected=f"at most {_LONGEST} characters", found=str(len(text)))
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._next, self._depth = text, 0, 0
        self._kind, self._value, self._start = "end", "", 0
        self._advance()

    def whole(self) -> Call:
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
