"""Turn rows into prompts: the text of each sample before it is tokenized, and the roles of its characters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.data.arc.encoders import parse_encoder
from spile.data.arc.prompts import arc_messages, augment
from spile.data.chat import ROLES, ChatTemplate, Message, Rendered
from spile.data.rows import chat_of, kept_of, refuse_huge, roles_of, row_id, task_of, text_of, tokens_of
from spile.data.tokens import Span, Tokenizer
from spile.errors import DataError, ModelError
from spile.spec.run import EVERY_FIELD, DataSpec, PromptSpec

_log = logging.getLogger("spile.data")


@dataclass(frozen=True)
class Draft:
    """A sample before it is tokenized."""

    index: int
    task_id: str
    text: str
    place: str
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


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Join all messages into one user message, for templates that do not accept a system message."""
    return [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]


def kept_fields(prompt: PromptSpec, data: DataSpec) -> tuple[str, ...]:
    """Return the fields of each row to store. ARC tasks have none besides those that ``--keep`` names."""
    return () if prompt.kind == "arc" and data.keep == (EVERY_FIELD,) else data.keep


@dataclass(eq=False)
class Drafter:
    """Makes the drafts of a row, as the resolved prompt says."""

    prompt: PromptSpec
    seed: int
    template: ChatTemplate | None
    keep: tuple[str, ...] = ()
    vocabulary: int | None = None
    """The size of the model's vocabulary, to check rows of token ids."""
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._encoder = parse_encoder(self.prompt.encoder)
        arc = self.prompt.kind == "arc" and self.template is not None
        self._fold = arc and self.template is not None and self.template.folds_system()

    @classmethod
    def of(cls, prompt: PromptSpec, data: DataSpec, tokenizer: Tokenizer, vocabulary: int | None = None) -> Drafter:
        """Return a drafter for this tokenizer; chats need a chat template, rows of token ids need no tokenizer."""
        if prompt.kind != "tokens":
            tokenizer.refuse_none()
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
        """Raise :class:`DataError` if the row cannot become samples; cheaper than making the drafts."""
        kind, column = self.prompt.kind, self.prompt.column
        kept_of(row, self.keep, column, place)
        if kind == "arc":
            task_of(row, place)
        elif kind == "chat":
            chat_of(row, place)
        elif kind == "tokens":
            tokens_of(row, column, self.vocabulary, place)
        else:
            text_of(row, column, place)

    def drafts(
        self, row: Mapping[str, Any], line: int, place: str, wanted: Callable[[int], bool], number: int | None = None
    ) -> Iterator[Draft]:
        """Yield the row's drafts in order, except those that are not ``wanted``.

        ``number`` names a row without an id: its number in the dataset, if ``line`` is not that.
        """
        if self.prompt.kind == "arc":
            yield from self._arc(row, line, place, wanted)
            return
        name = row_id(row) or f"line-{line if number is None else number}"
        kept = kept_of(row, self.keep, self.prompt.column, place)
        if self.prompt.kind == "text":
            yield Draft(line, name, text_of(row, self.prompt.column, place), place, kept=kept)
        elif self.prompt.kind == "tokens":
            tokens = tokens_of(row, self.prompt.column, self.vocabulary, place)
            roles = roles_of(row, len(tokens), place)
            yield Draft(line, name, "", place, tokens=tokens, roles=roles, kept=kept)
        else:
            rendered = self._render(chat_of(row, place), place)
            yield Draft(line, name, rendered.text, place, rendered.spans, rendered=True, kept=kept)

    def _arc(self, row: Mapping[str, Any], line: int, place: str, wanted: Callable[[int], bool]) -> Iterator[Draft]:
        task, kept = task_of(row, place), kept_of(row, self.keep, self.prompt.column, place)
        count = self.prompt.predictions_per_task
        for variant in range(count):
            index = line * count + variant
            if not wanted(index):
                continue
            changed, how = augment(task, self.seed, variant)
            messages = arc_messages(changed, self._encoder, self.prompt.version)
            messages = _fold_system(messages) if self._fold else messages
            rendered = plain_text(messages) if self.template is None else self._render(messages, place)
            record = how.record() if variant else None
            templated = self.template is not None
            yield Draft(index, task.task_id, rendered.text, place, rendered.spans, templated, record, kept=kept)

    def _render(self, messages: list[Message] | list[dict[str, Any]] | list[dict[str, str]], place: str) -> Rendered:
        assert self.template is not None  # noqa: S101  for the type checker: a chat was refused without one
        try:
            rendered = self.template.render(messages)
        except DataError as error:
            raise DataError(f"{place}: {error.problem}", found=error.found) from error
        refuse_huge(len(rendered.text), "characters", place)
        if rendered.spans is None:
            if not self._warned:
                _log.warning("the chat template changes its messages: the tokens of %s and others have no part", place)
                self._warned = True
            return Rendered(rendered.text, ())
        return rendered


@dataclass(frozen=True, eq=False)
class Document:
    """The tokens of a text, without special tokens around them."""

    name: str
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackedWindow:
    """A full sequence of tokens from one or more documents; the last one may be shorter."""

    index: int
    name: str
    """``document@offset``: the document and token at which it begins."""
    tokens: npt.NDArray[np.int32]


def pack(documents: Iterable[Document], length: int, tokenizer: Tokenizer) -> Iterator[PackedWindow]:
    """Concatenate documents and cut them into sequences of ``length`` tokens. Empty documents are ignored."""
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    after = [] if before or tokenizer.eos is None else [tokenizer.eos]
    index, held, name = 0, 0, ""
    parts: list[npt.NDArray[np.int32]] = []
    for document in documents:
        if not len(document.tokens):
            continue
        tokens = np.concatenate([np.array(before, np.int32), document.tokens, np.array(after, np.int32)])
        place = 0
        while place < len(tokens):
            if not held:
                name = f"{document.name}@{place}"
            piece = tokens[place : place + length - held]
            parts.append(piece)
            held += len(piece)
            place += len(piece)
            if held == length:
                yield PackedWindow(index, name, np.concatenate(parts))
                index, held, parts = index + 1, 0, []
    if held:
        yield PackedWindow(index, name, np.concatenate(parts))
