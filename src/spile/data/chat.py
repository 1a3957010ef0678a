"""Chat templates, compiled in a sandbox: they come from the hub and are not trusted.

The same dialect that transformers renders (a test compares), but for one thing: a template that asks for today's date
always gets the same one, because a prompt must not depend on the day it was made. A template that goes on and on ends:
its loops are counted, and so is all that it makes, each thing and their sum; what a call would make is reckoned before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from spile.data.tokens import Span, Tokenizer
from spile.errors import DataError, ModelError
from spile.spec.sample import Role

__all__ = [
    "ROLES",
    "TODAY",
    "ChatTemplate",
    "Message",
    "Rendered",
    "compiled",
    "render",
]


_MOST_STEPS = 1_000_000
"""Turns of all loops of one rendering together; a chat of a thousand messages takes some thousands."""
_LARGEST = 1 << 24
"""Characters or elements of what a template makes, and the largest number that may be raised to a power."""
_MOST_MADE = 1 << 26
"""The same of all that one rendering makes together, whether it is kept or not: four times what it may give out."""
_MOST_PARTS = 1 << 20
"""Lists, dicts and texts inside one another that may become text: each may hold the one before twice."""
_COUNTED, _JOINED, _CUT = "spile_counted", "spile_joined", "spile_cut"
_SIZED = (str, bytes, list, tuple)
_REPEATING = frozenset({"replace", "indent", "wordwrap", "expandtabs", "translate"})
"""Methods and filters that may put something at every place of a text."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)|\{[^{}]*:[^{}]*(\d{5,}|\{)")
"""A width of five digits, or one that is an argument, as ``%`` and as ``str.format`` have it."""

TODAY = datetime(2024, 7, 26)
"""The date that a template gets from ``strftime_now``."""


_made: ContextVar[list[int]] = ContextVar("_made")
"""The sizes of all that the rendering in hand has made, summed up in one place."""


def _counted(value: Any) -> Any:
    """What was made, after it was counted."""
    if isinstance(value, _SIZED):
        _refuse_long(len(value))
        made = _made.get([0])
        made[0] += len(value)
        if made[0] > _MOST_MADE:
            raise TemplateError("it makes too many texts")
    return value


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
        tree: nodes.Template = _Calls().visit(super()._parse(source, name, filename))
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name(_COUNTED, "load"), [loop.iter], [], None, None).set_lineno(loop.lineno)
        for block in tree.find_all(nodes.AssignBlock):
            if block.filter is None:
                block.filter = nodes.Filter(None, "string", [], [], None, None)
                block.filter.set_lineno(block.lineno)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, _SIZED) and isinstance(other, int):
                _refuse_long(len(value) * other)
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _refuse_long(len(left) + len(right))
        if operator == "**" and not (abs(left) <= _LARGEST and abs(right) <= 64):
            raise TemplateError("it raises a number to a power that is too large")
        if operator == "%" and isinstance(left, str):
            _refuse_wide(left)
            parts = [*right.values()] if isinstance(right, Mapping) else right if isinstance(right, tuple) else [right]
            _refuse_long(left.count("%") * max((len(str(_weigh(part))) for part in parts), default=0))
        return _counted(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **more: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # jinja wraps str.format
        if isinstance(owner, str):
            _reckon(getattr(function, "__name__", ""), owner, args, more)
        return _counted(super().call(context, function, *args, **more))


class _Calls(NodeTransformer):
    """``a ~ b`` and ``a[1:]`` as calls that are counted: twenty lines that double a text fill any memory."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor finds it by this name
        parts = [self.visit(part) for part in node.nodes]
        return nodes.Call(nodes.Name(_JOINED, "load"), parts, [], None, None).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return nodes.Call(nodes.Name(_CUT, "load"), [node.node, *ends], [], None, None).set_lineno(node.lineno)


def _joined(*parts: Any) -> str:
    texts = [str(_weigh(part)) for part in parts]
    _refuse_long(sum(map(len, texts)))
    return "".join(texts)


def _cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return value[start:stop:step]


def _reckon(name: str, first: Any, rest: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    """Refuse a method of texts, or a filter, that would make too much of what it is called on."""
    given = (*rest, *more.values())
    if any(isinstance(each, int) and abs(each) > _LARGEST for each in given):
        raise TemplateError("it formats text to a width")
    if name in _REPEATING:
        longest = max((len(each) for each in given if isinstance(each, str)), default=1)
        count = max((each for each in given if isinstance(each, int)), default=1)
        _refuse_long(len(first if isinstance(first, _SIZED) else str(first)) * max(longest, count))
    if name in ("format", "format_map"):
        _refuse_wide(str(first))
        _refuse_long(str(first).count("{") * sum(len(str(_weigh(each))) for each in given))
    if name in ("join", "sum"):
        # ", ".join(parts), or parts|join(", "): whichever is a list, or else each letter of a text
        parts, between = (first, given) if isinstance(first, list | tuple) else (given[0] if given else "", (first,))
        each_gets = sum(len(each) for each in between if isinstance(each, str))
        if isinstance(parts, _SIZED):
            _refuse_long(each_gets * len(parts) + sum(len(part) for part in parts if isinstance(part, _SIZED)))


def _refuse_wide(form: str) -> None:
    if _WIDE.search(form):
        raise TemplateError("it formats text to a width")


def _weigh(value: Any) -> Any:
    """What is about to become text, if it is not of too many parts."""
    left, waiting = _MOST_PARTS, [value]
    while waiting:
        each = waiting.pop()
        left -= 1
        if left < 0:
            raise TemplateError("it makes a text that is too long")
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return value


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


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is refused where it would make too much, and counted where it does not."""

    @wraps(function)  # with what jinja notes on it: whether the first argument is the context or the environment
    def bounded(*args: Any, **more: Any) -> Any:
        place = int(hasattr(function, "jinja_pass_arg"))
        if name == "join" and not isinstance(args[place], _SIZED):
            args = (*args[:place], list(args[place]), *args[place + 1 :])
        _reckon(name, _weigh(args[place]), args[place + 1 :], more)
        return _counted(function(*args, **more))

    return bounded


@lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    """The template, ready to render; :class:`jinja2.TemplateSyntaxError` if it is none."""
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_weigh
    )
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _bounded(name, filter_) for name, filter_ in environment.filters.items()}
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    environment.globals[_COUNTED] = iter
    environment.globals[_JOINED] = _joined
    environment.globals[_CUT] = _cut
    return environment.from_string(source)


def render(source: str, **variables: Any) -> str:
    """The template's text; a :class:`jinja2.TemplateError` where it does not end."""
    pieces, size = [], 0
    before = _made.set([0])
    try:
        for piece in compiled(source).generate(**variables, **{_COUNTED: _counter(_MOST_STEPS)}):
            pieces.append(piece)
            size += len(piece)
            _refuse_long(size)
    finally:
        _made.reset(before)
    return "".join(pieces)


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

        from spile.data.chat import render

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
