"""Turn rows into prompts: the text of each sample before it is tokenized, and the roles of its characters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.data.arc.encoders import parse_encoder
from spile.data.arc.grids import Task
from spile.data.arc.prompts import arc_messages, augment
from spile.data.chat import ROLES, ChatTemplate, Message, Rendered
from spile.data.rows import (
    check_length,
    parse_messages,
    parse_roles,
    parse_task,
    parse_text,
    parse_token_ids,
    row_id,
    select_kept_fields,
)
from spile.data.tokens import Span, Tokenizer
from spile.errors import DataError, ModelError
from spile.spec.run import EVERY_FIELD, DataSpec, PromptSpec

_log = logging.getLogger("spile.data")


@dataclass(frozen=True)
class Prompt:
    """A sample before it is tokenized."""

    index: int
    task_id: str
    text: str
    spans: tuple[Span, ...] | None = None
    """The characters of each role; None for plain text."""
    rendered: bool = False
    """Whether a chat template has already added the special tokens."""
    augmentation: dict[str, object] | None = None
    tokens: npt.NDArray[np.int32] | None = None
    """The tokens, if the row has token ids instead of text."""
    roles: npt.NDArray[np.int64] | None = None
    """The roles of these tokens, if the row has them."""
    kept: dict[str, object] | None = None
    """The fields of the row that are stored with the sample."""


def plain_text(messages: list[dict[str, str]]) -> Rendered:
    """Render messages for a model without a chat template: contents separated by blank lines."""
    text, spans = "", []
    for message in messages:
        text += "\n\n" if text else ""
        spans.append(Span(len(text), len(text) + len(message["content"]), ROLES[message["role"]]))
        text += message["content"]
    return Rendered(text + "\n", tuple(spans))


def _join_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Join all messages into one user message, for templates that do not accept a system message."""
    return [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]


def kept_fields(prompt: PromptSpec, data: DataSpec) -> tuple[str, ...]:
    """Return the fields of each row to store. ARC tasks have none besides those that ``--keep`` names."""
    return () if prompt.kind == "arc" and data.keep == (EVERY_FIELD,) else data.keep


@dataclass(eq=False)
class PromptBuilder:
    """Makes the prompts of a row, as the resolved prompt options say."""

    spec: PromptSpec
    seed: int
    template: ChatTemplate | None
    keep: tuple[str, ...] = ()
    vocabulary: int | None = None
    """The size of the model's vocabulary, to check rows of token ids."""
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._encoder = parse_encoder(self.spec.encoder)
        self._fold = self.spec.kind == "arc" and self.template is not None and self.template.rejects_system()

    @classmethod
    def for_tokenizer(
        cls, prompt: PromptSpec, data: DataSpec, tokenizer: Tokenizer, vocabulary: int | None = None
    ) -> PromptBuilder:
        """Return a builder for this tokenizer; chats need a chat template, rows of token ids need no tokenizer."""
        if prompt.kind != "tokens":
            tokenizer.require()
        template = ChatTemplate.of(tokenizer)
        if prompt.kind == "chat" and template is None:
            raise ModelError(
                "--prompt chat",
                expected="a tokenizer with a chat template",
                found="none",
                fix="add --template-from MODEL for the template of another model, or use --prompt text",
            )
        return cls(prompt, data.seed, template, kept_fields(prompt, data), vocabulary)

    def check(self, row: Mapping[str, Any], place: str) -> None:
        """Raise :class:`DataError` if the row cannot become samples; cheaper than making the prompts."""
        self._parse(row, place)

    def _parse(self, row: Mapping[str, Any], place: str) -> tuple[dict[str, object] | None, Any]:
        """Return the fields to keep, and the row's task, messages, text, or token ids with their roles."""
        kind, column = self.spec.kind, self.spec.column
        row_id(row, place)
        kept = select_kept_fields(row, self.keep, column, place)
        if kind == "arc":
            return kept, parse_task(row, place)
        if kind == "chat":
            return kept, parse_messages(row, place)
        if kind == "text":
            return kept, parse_text(row, column, place)
        tokens = parse_token_ids(row, column, self.vocabulary, place)
        return kept, (tokens, parse_roles(row, len(tokens), place))

    def build(self, row: Mapping[str, Any], wanted: Sequence[int], place: str, name: str) -> Iterator[Prompt]:
        """Yield the prompts of a row for the samples with these numbers. ``name`` is the id of a row without one."""
        kept, content = self._parse(row, place)
        if self.spec.kind == "arc":
            for index in wanted:
                yield self._arc(content, index, place, kept)
            return
        (index,), name = wanted, row_id(row) or name
        if self.spec.kind == "text":
            yield Prompt(index, name, content, kept=kept)
        elif self.spec.kind == "tokens":
            yield Prompt(index, name, "", tokens=content[0], roles=content[1], kept=kept)
        else:
            rendered = self._render(content, place)
            yield Prompt(index, name, rendered.text, rendered.spans, rendered=True, kept=kept)

    def _arc(self, task: Task, index: int, place: str, kept: dict[str, object] | None) -> Prompt:
        variant = index % self.spec.predictions_per_task
        changed, augmentation = augment(task, self.seed, variant)
        messages = arc_messages(changed, self._encoder, self.spec.version)
        messages = _join_messages(messages) if self._fold else messages
        rendered = plain_text(messages) if self.template is None else self._render(messages, place)
        templated = self.template is not None
        return Prompt(index, task.task_id, rendered.text, rendered.spans, templated, augmentation, kept=kept)

    def _render(self, messages: Sequence[Message], place: str) -> Rendered:
        assert self.template is not None  # noqa: S101  for the type checker: a chat was refused without one
        try:
            rendered = self.template.render(messages)
        except DataError as error:
            raise DataError(f"{place}: {error.problem}", found=error.found) from error
        check_length(len(rendered.text), "characters", place)
        if rendered.spans is None:
            if not self._warned:
                _log.warning("the chat template changes its messages: the tokens of %s and others have no role", place)
                self._warned = True
            return Rendered(rendered.text, ())
        return rendered


def pack(
    documents: Iterable[tuple[str, npt.NDArray[np.int32]]], length: int, tokenizer: Tokenizer
) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    """Concatenate documents (name, tokens) and cut them into sequences of ``length`` tokens; the last may be shorter.

    A sequence is named ``document@offset``: the document and the token at which it begins. Empty documents are ignored.
    """
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    after = [] if before or tokenizer.eos is None else [tokenizer.eos]
    filled, name = 0, ""
    parts: list[npt.NDArray[np.int32]] = []
    for document, content in documents:
        if not len(content):
            continue
        tokens = np.concatenate([np.array(before, np.int32), content, np.array(after, np.int32)])
        place = 0
        while place < len(tokens):
            if not filled:
                name = f"{document}@{place}"
            piece = tokens[place : place + length - filled]
            parts.append(piece)
            filled += len(piece)
            place += len(piece)
            if filled == length:
                yield name, np.concatenate(parts)
                filled, parts = 0, []
    if filled:
        yield name, np.concatenate(parts)
