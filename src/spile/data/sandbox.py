"""Chat templates, compiled in a sandbox: they come from the hub and are not trusted.

The same dialect that transformers renders (a test compares), but for one thing: a template that asks for today's date
always gets the same one, because a prompt must not depend on the day it was made. A template that goes on and on ends:
its loops are counted, and what it may multiply, put together or give out has a bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["TODAY", "compiled", "render"]

_MOST_STEPS = 1_000_000
"""Turns of all loops of one rendering together; a chat of a thousand messages takes some thousands."""
_LARGEST = 1 << 24
"""Characters or elements of what a template makes, and the largest number that may be raised to a power."""
_COUNTED, _JOINED = "spile_counted", "spile_joined"
_SIZED = (str, list, tuple)
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")

TODAY = datetime(2024, 7, 26)
"""The date that a template gets from ``strftime_now``."""


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained on; it renders as what is inside."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox whose loops are counted. Jinja bounds ``range`` alone, and three inside one another are 10¹⁵ turns."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Joins().visit(super()._parse(source, name, filename))
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name(_COUNTED, "load"), [loop.iter], [], None, None).set_lineno(loop.lineno)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, _SIZED) and isinstance(other, int):
                _refuse_long(len(value) * other)
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _refuse_long(len(left) + len(right))
        if operator == "**" and not (abs(left) <= _LARGEST and abs(right) <= 64):
            raise TemplateError("it raises a number to a power that is too large")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateError("it formats text to a width")
        return super().call_binop(context, operator, left, right)


class _Joins(NodeTransformer):
    """``a ~ b`` as a call that can be refused: twenty lines that double a text fill any memory."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor finds it by this name
        parts = [self.visit(part) for part in node.nodes]
        return nodes.Call(nodes.Name(_JOINED, "load"), parts, [], None, None).set_lineno(node.lineno)


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _refuse_long(sum(map(len, texts)))
    return "".join(texts)


def _refuse_long(size: int) -> None:
    if size > _LARGEST:
        raise TemplateError("it makes a text that is too long")


def _counter(most: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    left = most

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        nonlocal left
        for item in items:
            left -= 1
            if left < 0:
                raise TemplateError(f"its loops did not end within {most} turns")
            yield item

    return counted


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _today(form: str) -> str:
    return TODAY.strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Jinja's own escapes what HTML does not like; a prompt has no HTML."""
    chosen = {key: more[key] for key in ("separators", "sort_keys") if key in more}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **chosen)


@lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    """The template, ready to render; :class:`jinja2.TemplateSyntaxError` if it is none."""
    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    environment.globals[_COUNTED] = iter
    environment.globals[_JOINED] = _joined
    return environment.from_string(source)


def render(source: str, **variables: Any) -> str:
    """The template's text; a :class:`jinja2.TemplateError` where it does not end."""
    pieces, size = [], 0
    for piece in compiled(source).generate(**variables, **{_COUNTED: _counter(_MOST_STEPS)}):
        pieces.append(piece)
        size += len(piece)
        _refuse_long(size)
    return "".join(pieces)
