"""Chats as text: render them with the model's own template, and find which characters belong to which role."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spile.data.tokens import Span, Tokenizer
from spile.errors import DataError, ModelError
from spile.spec.sample import Role

Message = Mapping[str, Any]

ROLES: dict[str, Role] = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
"""The role of each kind of message. Others, such as ``tool``, have none."""

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}(\\d{{1,9}}){_CLOSE}", re.ASCII)


@dataclass(frozen=True)
class Rendered:
    """A chat as text, and the spans of its contents; None if the template changes the contents."""

    text: str
    spans: tuple[Span, ...] | None


_TODAY = datetime(2024, 7, 26)
"""The date that ``strftime_now`` returns: a prompt must not depend on the day on which it was rendered."""
_MAX_MESSAGE = 500
"""Characters of the message of an error, which a template can make as long as a text."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Serialise without the HTML escapes of Jinja's own filter."""
    options = {key: more[key] for key in ("separators", "sort_keys") if key in more}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Generation(Extension):
    """``{% generation %}`` marks the text that a model is trained on; it renders as its contents."""

    tags = {"generation"}  # noqa: RUF012  declared like this in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    """Return a template in the dialect and the sandbox of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals.pop("lipsum")
    environment.filters.pop("random")  # a prompt must be the same each time it is rendered
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(source)


def _render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the rendered text.

    Raises:
        ModelError: The template has a syntax error.
        DataError: The template refuses the messages or fails on them.

    """
    try:
        return _compile(source).render(variables)
    except TemplateSyntaxError as error:
        raise ModelError("the model's chat template cannot be read", found=str(error)[:_MAX_MESSAGE]) from None
    except (TemplateError, TypeError, ValueError) as error:
        problem, found = "the model's chat template refuses these messages", str(error)
    except Exception as error:  # noqa: BLE001  a template is a program and can raise anything
        problem, found = "the model's chat template fails on these messages", f"{type(error).__name__}: {error}"
    raise DataError(problem, found=found[:_MAX_MESSAGE])


@dataclass(eq=False)
class ChatTemplate:
    """A tokenizer's chat template."""

    source: str
    named: Mapping[str, str]
    _trims: bool = False
    """Whether the template removed the white space around the contents of the last chat."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the tokenizer's template, or None if it has none."""
        return None if tokenizer.template is None else cls(tokenizer.template, tokenizer.named)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render a chat as the model reads it; a chat that ends with a user's message gets the header of the answer."""
        answer = messages[-1].get("role") != "assistant"
        text = self._render(messages, answer)
        return Rendered(text, self._spans(messages, answer, text))

    def _render(self, messages: Sequence[Message], answer: bool) -> str:
        variables = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": answer}
        return _render(self.source, {**variables, **self.named})

    def rejects_system(self) -> bool:
        """Return whether the template refuses or drops system messages, so that they must be joined to the user's."""
        try:
            text = self._render([{"role": "system", "content": _OPEN}, {"role": "user", "content": _CLOSE}], True)
        except DataError:
            return True
        return _OPEN not in text

    def _spans(self, messages: Sequence[Message], answer: bool, text: str) -> tuple[Span, ...] | None:
        """Find the spans of the contents, as they are or without the white space around them."""
        for trimmed in (self._trims, not self._trims):
            spans = self._marked(messages, answer, text, trimmed)
            if spans is not None:
                self._trims = trimmed
                return spans
        return None

    def _marked(self, messages: Sequence[Message], answer: bool, text: str, trimmed: bool) -> tuple[Span, ...] | None:
        """Find the spans by rendering the chat again with marks around each content."""
        owners: list[str] = []

        def wrap(value: str, owner: str) -> str:
            owners.append(owner)
            first = 2 * len(owners) - 2
            inside = value.strip() if trimmed else value
            return f"{_OPEN}{first}{_CLOSE}{inside}{_OPEN}{first + 1}{_CLOSE}"

        marked = [_wrapped(message, wrap) for message in messages]
        try:
            parts = _MARK.split(self._render(marked, answer))
        except DataError:
            return None
        if "".join(parts[::2]) != text:
            return None
        return tuple(_between(parts, owners))


def _wrapped(message: Message, wrap: Any) -> dict[str, Any]:
    content, owner = message.get("content"), str(message.get("role"))
    if isinstance(content, str):
        return {**message, "content": wrap(content, owner)}
    if isinstance(content, list):
        parts = [
            {**part, "text": wrap(part["text"], owner)}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return {**message, "content": parts}
    return dict(message)


def _between(parts: Sequence[str], owners: Sequence[str]) -> Iterator[Span]:
    """Yield spans from text that was split at numbered marks: even numbers open a span, odd ones close it."""
    place, opened = 0, {}
    for text, mark in zip(parts[::2], [*parts[1::2], None], strict=True):
        place += len(text)
        number = -1 if mark is None else int(mark)
        if number >= 0 and number % 2 == 0:
            opened[number // 2] = place
        elif number >= 0 and number // 2 in opened and number // 2 < len(owners):  # a template can write marks too
            begin, role = opened.pop(number // 2), ROLES.get(owners[number // 2])
            if role is not None and begin < place:
                yield Span(begin, place, role)
