"""Which tokens end an answer: the model's own, and those that a user names."""

from __future__ import annotations

import json
from dataclasses import replace

from spile import weights
from spile.data.tokens import Tokenizer
from spile.errors import ModelError, SpecError, untrusted
from spile.spec.run import GenerationSpec
from spile.weights.files import GENERATION

__all__ = ["with_stops"]


def with_stops(generation: GenerationSpec, files: weights.ModelFiles, tokenizer: Tokenizer) -> GenerationSpec:
    """The settings with every stop token as its number; an error where there is none: each answer would run on."""
    tokens = {*_own(files, tokenizer), *(_number(text, tokenizer) for text in generation.stop)}
    if not tokens:
        raise ModelError(
            f"{files.name} names no token that ends an answer",
            expected="eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
            found="neither",
            fix="name one with --stop, such as --stop '<|im_end|>'",
        )
    return replace(generation, stop_tokens=tuple(sorted(tokens)))


def _own(files: weights.ModelFiles, tokenizer: Tokenizer) -> set[int]:
    found = set() if tokenizer.eos is None else {tokenizer.eos}
    file = files.tokenizer_folder / GENERATION
    if file.is_file():
        with untrusted(ModelError, f"{GENERATION} of {files.name} cannot be read", fix="download the model again"):
            named = dict(json.loads(file.read_bytes())).get("eos_token_id")
        found |= {token for token in (named if isinstance(named, list) else [named]) if type(token) is int}
    return found


def _number(text: str, tokenizer: Tokenizer) -> int:
    known: int | None = tokenizer.backend.token_to_id(text)
    if known is not None:
        return known
    made = tokenizer.encode([text], add_special=False)[0].tokens
    if len(made) != 1:
        raise SpecError("--stop", expected="the text of one token", found=f"{text!r}, which is {len(made)} tokens")
    return int(made[0])
