"""Chats as text: render them with the model's own template, and find which characters belong to which role."""

from __future__ import annotations

import atexit
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spile.data import template_child
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


class TemplateProcess:
    """A child process that renders templates, started at first use and again after a template has ended it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, source: str, **variables: Any) -> str:
        """Return the rendered text.

        Raises:
            ModelError: The template has a syntax error.
            DataError: The template refuses the messages, fails on them or exceeds the limits on time and memory.

        """
        request = json.dumps({"source": source, "variables": variables}).encode() + b"\n"
        with self._lock:
            answer = self._ask(request)
        if "text" in answer:
            return answer["text"]
        if answer["error"] == "syntax":
            raise ModelError("the model's chat template cannot be read", found=answer["message"])
        raise DataError(f"the model's chat template {answer['error']} these messages", found=answer["message"])

    def _ask(self, request: bytes) -> dict[str, str]:
        if self._child is None:
            self._child = self._start()
        reply = b""
        if self._child.stdin is not None and self._child.stdout is not None:
            try:
                self._child.stdin.write(request)
                self._child.stdin.flush()
                reply = self._child.stdout.readline()
            except BrokenPipeError:
                pass  # the child has ended; the missing reply is handled below
        if reply.endswith(b"\n"):
            answer: dict[str, str] = json.loads(reply)
            return answer
        self.close()
        limits = f"{template_child.CPU_SECONDS} s of CPU time or {template_child.MEMORY_BYTES >> 20} MiB of memory"
        return {"error": template_child.FAILS, "message": f"it exceeds the limit of {limits}"}

    def _start(self) -> subprocess.Popen[bytes]:
        program = str(Path(template_child.__file__))
        # -P: the program's own folder is not searched for modules.
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


_PROCESS = TemplateProcess()
atexit.register(_PROCESS.close)


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
        return _PROCESS.render(
            self.source,
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=answer,
            **self.named,
        )

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
