"""Chats to text with the model's own template, and which characters of it are whose words.

The template is rendered in a sandbox. Where each message's content stands in the result is not
searched for (a message may say ``user``, as a header does) but derived: the template is rendered once more with marks
in place of the contents, and the text must be exactly what lies between the marks with the contents put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spile.data.tokens import Span, Tokenizer
from spile.errors import DataError, ModelError
from spile.spec.sample import Role

__all__ = ["ROLES", "ChatTemplate", "Message", "Rendered"]

Message = Mapping[str, Any]

ROLES: dict[str, Role] = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
"""A message's role → its bit. Others (``tool``) have none."""

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True)
class Rendered:
    """A chat as text, and the spans of its contents; None where they could not be told."""

    text: str
    spans: tuple[Span, ...] | None


@dataclass(eq=False)
class ChatTemplate:
    """A tokenizer's chat template."""

    source: str
    named: Mapping[str, str]
    _skeletons: dict[tuple[tuple[str, ...], bool], list[str] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The tokenizer's template, if it has one."""
        return None if tokenizer.template is None else cls(tokenizer.template, tokenizer.named)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """The chat as the model reads it. One that ends with a user's words gets the header of the answer to come."""
        answer = messages[-1].get("role") != "assistant"
        text = self._render(messages, answer)
        return Rendered(text, self._spans(messages, answer, text))

    def _render(self, messages: Sequence[Message], answer: bool) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        from spile.data.sandbox import render

        try:
            return render(
                self.source,
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=answer,
                **self.named,
            )
        except TemplateSyntaxError as error:
            raise ModelError("the model's chat template cannot be read", found=str(error)) from error
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError("the model's chat template refuses these messages", found=str(error)) from error
        except Exception as error:  # a template is a program: 1/0, endless recursion, anything
            found = f"{type(error).__name__}: {error}"
            raise DataError("the model's chat template fails on these messages", found=found) from error

    def folds_system(self) -> bool:
        """Whether system messages are refused or dropped, so that their words must go before the user's."""
        try:
            text = self._render([{"role": "system", "content": _OPEN}, {"role": "user", "content": _CLOSE}], True)
        except DataError:
            return True
        return _OPEN not in text

    def _spans(self, messages: Sequence[Message], answer: bool, text: str) -> tuple[Span, ...] | None:
        plain = all(set(message) == {"role", "content"} and isinstance(message["content"], str) for message in messages)
        if plain:
            names = tuple(str(message["role"]) for message in messages)
            if (names, answer) not in self._skeletons:
                if len(self._skeletons) >= 256:
                    self._skeletons.clear()
                self._skeletons[names, answer] = self._skeleton(names, answer)
            pieces = self._skeletons[names, answer]
            for trimmed in (False, True):
                contents = [m["content"].strip() if trimmed else m["content"] for m in messages]
                spans = None if pieces is None else _fit(pieces, contents, names, text)
                if spans is not None:
                    return spans
        for trimmed in (False, True):
            spans = self._marked(messages, answer, text, trimmed)
            if spans is not None:
                return spans
        return None

    def _skeleton(self, names: Sequence[str], answer: bool) -> list[str] | None:
        """The template's own text before, between and after the contents; None if it does not keep their order."""
        marks = [{"role": name, "content": f"{_OPEN}{n}{_CLOSE}"} for n, name in enumerate(names)]
        parts = _MARK.split(self._render(marks, answer))
        in_order = [int(number) for number in parts[1::2]] == list(range(len(names)))
        return parts[::2] if in_order else None

    def _marked(self, messages: Sequence[Message], answer: bool, text: str, trimmed: bool) -> tuple[Span, ...] | None:
        """Marks around each content: for templates that look into what they are given."""
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
    """Spans from text split at numbered marks, even ones opening and odd ones closing."""
    place, opened = 0, {}
    for text, mark in zip(parts[::2], [*parts[1::2], None], strict=True):
        place += len(text)
        number = -1 if mark is None else int(mark)
        if number >= 0 and number % 2 == 0:
            opened[number // 2] = place
        elif number >= 0 and number // 2 in opened:
            role = ROLES.get(owners[number // 2])
            if role is not None:
                yield Span(opened.pop(number // 2), place, role)


def _fit(pieces: Sequence[str], contents: Sequence[str], names: Sequence[str], text: str) -> tuple[Span, ...] | None:
    """The spans, if the text is exactly the pieces with the contents between them."""
    place, spans = len(pieces[0]), []
    for content, name, piece in zip(contents, names, pieces[1:], strict=True):
        if name in ROLES and content:
            spans.append(Span(place, place + len(content), ROLES[name]))
        place += len(content) + len(piece)
    whole = "".join([pieces[0], *(part for pair in zip(contents, pieces[1:], strict=True) for part in pair)])
    return tuple(spans) if whole == text else None
