"""Documents cut into full windows, with the rule for BOS made explicit.

If the tokenizer has a BOS token, each document begins with one; else, if it has an EOS token, each ends with one; else
documents simply follow each other. Windows are cut wherever they are full: nothing is put at a window's start. The last
one may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spile.data.tokens import Tokenizer

__all__ = ["Document", "PackedWindow", "pack"]


@dataclass(frozen=True, eq=False)
class Document:
    """A text's tokens, without special ones around them."""

    name: str
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackedWindow:
    """A full window of tokens, or the last one."""

    index: int
    name: str
    """``document@offset``: which document it begins in, and at which of its tokens."""
    tokens: npt.NDArray[np.int32]


def pack(documents: Iterable[Document], length: int, tokenizer: Tokenizer) -> Iterator[PackedWindow]:
    """The windows of all documents, one after another. A document without a token is no document."""
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
