"""Chat templates, compiled in a sandbox: they come from the hub and are not trusted.

The same dialect that transformers renders (a test compares), but for one thing: a template that asks for today's date
always gets the same one, because a prompt must not depend on the day it was made. A template that goes on and on ends:
its loops are counted, and what it may multiply has a bound.
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

__all__ = ["TODAY", "compiled", "render"]

_MOST_STEPS = 1_000_000
"""Turns of all loops of one rendering together; a chat of a thousand messages takes some thousands."""
_LARGEST = 1 << 24
"""Characters or elements that a multiplication may make, and the largest number that may be raised to a power."""
_COUNTED = "spile_counted"
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

    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name(_COUNTED, "load"), [loop.iter], [], None, None).set_lineno(loop.lineno)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, other in ((left, right), (right, left)):
            long = isinstance(value, str | list | tuple) and isinstance(other, int) and len(value) * other > _LARGEST
            if operator == "*" and long:
                raise TemplateError("it makes a text that is too long")
        if operator == "**" and not (abs(left) <= _LARGEST and abs(right) <= 64):
            raise TemplateError("it raises a number to a power that is too large")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateError("it formats text to a width")
        return super().call_binop(context, operator, left, right)


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
    return environment.from_string(source)


def render(source: str, **variables: Any) -> str:
    """The template's text; a :class:`jinja2.TemplateError` where it does not end."""
    return compiled(source).render(**variables, **{_COUNTED: _counter(_MOST_STEPS)})
