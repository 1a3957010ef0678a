"""Tokenize text exactly as ``AutoTokenizer`` of transformers does, without importing transformers.

The tokenizer is built from ``tokenizer.json``; ``tokenizer_config.json`` adds the special tokens and the chat template.
ESM models have only a ``vocab.txt``.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from spile.errors import ModelError, untrusted
from spile.spec.sample import Role

_END_SEARCH = 4
"""How many tokens after an assistant's content are searched for the one that ends the message."""
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_PREPEND = {"type": "Prepend", "prepend": "▁"}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_MAX_IDS, _MAX_GROWTH = 1 << 26, 4096
"""Limits far above those of any real tokenizer."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Span:
    """Characters ``[start, stop)`` of a text that belong to one role."""

    start: int
    stop: int
    role: Role


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of a text and the role of each."""

    tokens: npt.NDArray[np.int32]
    roles: npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer: turns plain text or rendered chats into tokens and roles."""

    backend: Backend
    bos: int | None
    eos: int | None
    template: str | None
    """The Jinja source of the chat template, or None."""
    named: Mapping[str, str]
    """The special tokens by name (``bos_token``, …), as a template sees them."""
    specials: frozenset[int] = field(default_factory=frozenset)
    missing: Path | None = None
    """The model's folder if it has no tokenizer, which is enough for rows of token ids."""

    def require(self) -> None:
        """Raise :class:`ModelError` if there is no tokenizer."""
        if self.missing is not None:
            raise ModelError(
                f"no tokenizer in {self.missing}",
                expected="tokenizer.json",
                found="none",
                fix="download the complete model, save it with a fast tokenizer, or give rows with input_ids",
            )

    def encode(
        self, texts: Sequence[str], *, add_special: bool, spans: Sequence[Sequence[Span]] | None = None
    ) -> list[Encoded]:
        """Tokenize all texts at once, on all cores.

        ``add_special``: whether to add the tokenizer's own BOS and EOS, as for plain text. A rendered chat has them.
        ``spans``: for each text the characters that belong to a role.
        """
        with untrusted(ModelError, "the tokenizer of the model fails on a text"):
            if spans is None:
                plain = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
                return [self._encoded(encoding, ()) for encoding in plain]
            batch = self.backend.encode_batch(list(texts), add_special_tokens=add_special)
            return [self._encoded(*each) for each in zip(batch, spans, texts, strict=True)]

    def roles(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Return the roles that follow from the tokens alone: special, BOS and the first position."""
        known = tokens < len(self._table)  # the model's vocabulary may be larger
        roles = np.zeros(len(tokens), np.uint8)
        roles[known] = self._table[tokens[known]]
        roles[:1] |= np.uint8(Role.FIRST)
        return roles

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        return str(self.backend.decode([int(token) for token in tokens], skip_special_tokens=False))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, which together are the text of all.

        A character that consists of several tokens belongs to the last of them.
        """
        stream, found = DecodeStream(skip_special_tokens=False), list[str]()
        for token in tokens:
            found.append(stream.step(self.backend, int(token)) or "")
        return found

    @property
    def size(self) -> int:
        """Return the highest token id plus one."""
        return len(self._table)

    @cached_property
    def _table(self) -> npt.NDArray[np.uint8]:
        """Return the role of each token of the vocabulary by itself."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=-1)
        if largest >= _MAX_IDS:
            raise ModelError("the tokenizer", expected=f"token ids below {_MAX_IDS:,}", found=f"{largest:,}")
        table = np.zeros(largest + 1, dtype=np.uint8)
        table[sorted(self.specials)] = Role.SPECIAL
        if self.bos is not None:
            table[self.bos] = Role.SPECIAL | Role.BOS
        return table

    def _encoded(self, encoding: Encoding, spans: Sequence[Span], text: str = "") -> Encoded:
        ids = encoding.ids
        tokens = np.fromiter(ids, dtype=np.int32, count=len(ids))
        roles = self.roles(tokens)
        if spans and ids:
            first = _token_lookup(encoding, len(ids))
            for span in spans:
                stop = first(span.stop)
                if span.role == Role.ASSISTANT:
                    stop = self._message_end(encoding, ids, stop, span.stop, text)
                roles[first(span.start) : stop] |= np.uint8(span.role)
        return Encoded(tokens, roles)

    def _message_end(self, encoding: Encoding, ids: Sequence[int], stop: int, place: int, text: str) -> int:
        """Return the end of an assistant's message: after the special token that ends it, which the model generates.

        Only white space may be between the content, which ends at token ``stop`` and character ``place``, and that
        token. Without such a token the message ends with the content.
        """
        for token in range(stop, min(stop + _END_SEARCH, len(ids))):
            begin, _ = encoding.token_to_chars(token) or (len(text), 0)
            if text[place:begin].strip():
                break
            if ids[token] in self.specials and (ids[token] != self.bos or self.bos == self.eos):
                return token + 1
        return stop


def _token_lookup(encoding: Encoding, count: int) -> Callable[[int], int]:
    """Return a function that finds the first token at or after a character. A token belongs to the span of its start.

    Only span boundaries are looked up: a list of the offsets of all tokens took most of the tokenizer's time. Tokens
    that a post-processor added at the ends have no width and belong to no span.
    """

    def chars(token: int) -> tuple[int, int]:
        begin, end = encoding.token_to_chars(token) or (0, 0)
        return begin, end

    def empty(token: int) -> bool:
        begin, end = chars(token)
        return begin == end

    low, high = 0, count
    while low < high and empty(low):
        low += 1
    while high > low and empty(high - 1):
        high -= 1
    return lambda place: bisect_left(range(count), place, low, high, key=lambda token: chars(token)[0])


def load_tokenizer(folder: Path, *, optional: bool = False) -> Tokenizer:
    """Load the tokenizer of a model's folder from ``tokenizer.json`` and the config files next to it.

    BOS is added by the post-processor of ``tokenizer.json``. With ``optional``, a model without a tokenizer gets one
    that only accepts token ids.
    """
    # Set explicitly, so that a later fork neither warns nor turns the tokenizer's threads off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    file = folder / "tokenizer.json"
    if not file.is_file() and _read(folder / "tokenizer_config.json").get("tokenizer_class") == "EsmTokenizer":
        with untrusted(ModelError, f"{folder / 'vocab.txt'} is no vocabulary"):
            return _configure(_esm_backend((folder / "vocab.txt").read_text().split()), folder)
    if not file.is_file():
        none = Tokenizer(Backend(WordLevel()), None, None, None, {}, missing=folder)
        if not optional:
            none.require()
        return none
    with untrusted(ModelError, f"{file} is not a tokenizer"):
        backend = Backend.from_file(str(file))
    with untrusted(ModelError, f"the tokenizer's configuration in {folder} is invalid"):
        return _configure(backend, folder)


def _esm_backend(tokens: Sequence[str]) -> Backend:
    """Return the tokenizer of ESM: each token of the vocabulary, which is an amino acid, is split off by itself."""
    backend = Backend(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))  # noqa: S106 - no secret
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    ends = [(token, tokens.index(token)) for token in ("<cls>", "<eos>")]
    backend.post_processor = TemplateProcessing(single="<cls> $A <eos>", special_tokens=ends)
    return backend


def _configure(backend: Backend, folder: Path) -> Tokenizer:
    config = _read(folder / "tokenizer_config.json")
    named = {**_named(_read(folder / "special_tokens_map.json")), **_named(config)}
    backend.no_truncation()
    backend.no_padding()
    _rebuild_like_llama(backend, config, _read(folder / "config.json"))
    _add_missing_tokens(backend, config, named)
    ids = {name: backend.token_to_id(token) for name, token in named.items()}
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    special |= {number for number in ids.values() if number is not None}
    _refuse_growth(backend)
    return Tokenizer(
        backend=backend,
        bos=ids.get("bos_token"),
        eos=ids.get("eos_token"),
        template=_template(folder, config),
        named=named,
        specials=frozenset(special),
    )


def _refuse_growth(backend: Backend) -> None:
    """Refuse a tokenizer that makes a text thousands of times longer, or adds thousands of tokens."""
    for name, part in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        growth = 1
        for step in _steps(part):
            if step.get("type") == "Replace":
                pattern, content = step["pattern"].get("String"), len(step["content"])
                growth *= max(1, content + 1 if pattern is None else -(-content // max(1, len(pattern))))
        if growth > _MAX_GROWTH:
            found = f"a {name} that can make it {growth:,} times as long"
            raise ModelError("the tokenizer", expected=f"a text that grows at most {_MAX_GROWTH:,} times", found=found)
    added = 0 if backend.post_processor is None else backend.post_processor.num_special_tokens_to_add(False)
    if added > _MAX_GROWTH:
        found = f"{added:,} special tokens that are added to each text"
        raise ModelError("the tokenizer", expected=f"at most {_MAX_GROWTH:,}", found=found)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or a decoder, also of nested sequences."""
    waiting = [] if part is None else [orjson.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += [*step.get("normalizers", ()), *step.get("decoders", ())]


def _rebuild_like_llama(backend: Backend, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Mark spaces as the class LlamaTokenizer of transformers does.

    The class replaces the normalizer of ``tokenizer.json``, which prepends a space to every part of a text, by a
    pre-tokenizer that adds none in front of a space. The two differ for texts that begin with a space and after special
    tokens. For other model types than llama, transformers uses the file as it is.
    """
    if config.get("tokenizer_class") not in _LLAMA_CLASSES or model.get("model_type", "llama") != "llama":
        return
    if backend.normalizer is None or backend.pre_tokenizer is not None:
        return
    normalizer = orjson.loads(backend.normalizer.__getstate__())
    if normalizer.get("normalizers", [normalizer]) not in ([_PREPEND, _REPLACE], [_REPLACE]):
        return
    spaced = config.get("add_prefix_space") is not False
    scheme = "never" if not spaced else "always" if config.get("legacy", False) else "first"
    backend.normalizer = None
    backend.pre_tokenizer = Metaspace(replacement="▁", prepend_scheme=scheme, split=False)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise ModelError(str(file), expected="a JSON object", found=type(value).__name__)
    return value


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; a config has each as a string or as an object with ``content``."""
    found: dict[str, str] = {}
    for name in _NAMED:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add tokens of the config that ``tokenizer.json`` does not have, ordered by id."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    added: list[AddedToken] = []
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            added.append(AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in flags if flag in entry}))
            known.add(entry["content"])
    backend.add_tokens(added)  # one call, because each prepares a search for all added tokens
    for content in named.values():
        if content not in known:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
            known.add(content)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: from its own file if there is one, else the config's ``default`` template."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
