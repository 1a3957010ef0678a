"""Chat templates, compiled in a sandbox: they come from the hub and are not trusted.

The same dialect that transformers renders (a test compares), but for one thing: a template that asks for today's date
always gets the same one, because a prompt must not depend on the day it was made.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TODAY", "compiled"]

TODAY = datetime(2024, 7, 26)
"""The date that a template gets from ``strftime_now``."""


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained on; it renders as what is inside."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    return environment.from_string(source)
