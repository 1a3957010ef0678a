"""Every tensor of a model's files against its config: unknown, doubled, missing or misshapen ones are errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import numpy as np

from spile.errors import ModelError
from spile.spec.tensors import Tensor, layer_tensors, model_tensors
from spile.weights.files import ModelFiles
from spile.weights.names import NAMES, Match
from spile.weights.pieces import Change, Piece
from spile.weights.safetensors import DTYPES, Entry, read_header

__all__ = ["catalogue"]

_THREADS = 8
_COMPARED = 64 << 20
"""Bytes of two tensors that are compared at a time."""


def catalogue(files: ModelFiles, *, head: bool = False) -> Mapping[str, Piece]:
    """Tree name → where it lies, for the whole model; without ``head`` the LM head may be missing."""
    names, wanted = NAMES[files.config.architecture], _wanted(files)
    found: dict[str, dict[int, Piece]] = {}
    copy: Entry | None = None
    entries = list(_entries(files))
    changes: Mapping[str, Change] = {}
    if files.adapter is not None:
        shapes = {entry.name: entry.shape for entry in entries}
        changes = files.adapter.changes(shapes | ({names.head: wanted["head"].shape} if files.untied else {}))
    for entry in entries:
        match = names.match(entry.name)
        if match is not None and not match.names:
            continue
        if match is not None and _is_copy(files, match):
            copy = entry
            continue
        if match is None or any(name not in wanted for name in match.names):
            raise ModelError(
                f"{entry.file} of {files.name} has a tensor that {files.config.architecture} does not",
                found=entry.name,
                fix="this is another model than its config.json says",
            )
        for name, piece in _pieces(files, entry, match, wanted, changes.get(entry.name)):
            stacked = found.setdefault(name, {})
            if (match.expert or 0) in stacked:
                twice = f"{stacked[match.expert or 0].entries[0].name} and {entry.name}"
                raise ModelError(f"{files.name} has a tensor twice", found=twice)
            stacked[match.expert or 0] = piece
    if files.untied and "embed" in found:
        found["head"] = {0: replace(found["embed"][0], changes=(changes[names.head],))}
    missing = [
        name
        for name, tensor in wanted.items()
        if set(found.get(name, ())) != set(range(_stack(tensor))) and (head or name != "head")
    ]
    if missing:
        raise ModelError(
            f"{files.name} lacks {len(missing)} of its {len(wanted)} tensors",
            found=f"no {names.file_name(missing[0])}",
        )
    if head and copy is not None:
        _refuse_another_head(files, copy, found["embed"][0].entries[0])
    return {name: _joined(stacked, wanted[name]) for name, stacked in found.items()}


def _wanted(files: ModelFiles) -> dict[str, Tensor]:
    config = files.config
    layers = {
        f"{layer}.{name}": tensor
        for layer in range(config.n_layers)
        for name, tensor in layer_tensors(config, layer).items()
    }
    return {**model_tensors(config, head=True), **layers}


def _entries(files: ModelFiles) -> Iterator[Entry]:
    seen: dict[str, Entry] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        headers = list(threads.map(lambda file: read_header(files.source, file), files.weight_files))
    for entry in (entry for header in headers for entry in header):
        if entry.name in seen:
            both = f"{seen[entry.name].file} and {entry.file}"
            raise ModelError(f"{files.name} has the tensor {entry.name} twice", found=both)
        seen[entry.name] = entry
        yield entry


def _is_copy(files: ModelFiles, match: Match) -> bool:
    """A head that is the embedding may be written all the same."""
    return match.names == ("head",) and (files.config.tied or files.untied)


def _refuse_another_head(files: ModelFiles, copy: Entry, embedding: Entry) -> None:
    """Which of the two counts, config.json says one way and transformers 5 the other: logits of neither are made."""
    if (copy.shape, copy.dtype) == (embedding.shape, embedding.dtype) and all(
        np.array_equal(
            files.source.read(copy.file, copy.start + at, length),
            files.source.read(embedding.file, embedding.start + at, length),
        )
        for at, length in _ranges(copy.length)
    ):
        return
    raise ModelError(
        f"{files.name} has a head of its own, though config.json says tie_word_embeddings",
        expected=f"{copy.name} equal to {embedding.name}",
        found="other numbers",
        fix="say tie_word_embeddings: false in config.json where the head counts, or take the tensor out where not",
    )


def _ranges(length: int) -> Iterator[tuple[int, int]]:
    for at in range(0, length, _COMPARED):
        yield at, min(_COMPARED, length - at)


def _stack(tensor: Tensor) -> int:
    return tensor.shape[0] if len(tensor.shape) == 3 else 1


def _pieces(
    files: ModelFiles, entry: Entry, match: Match, wanted: Mapping[str, Tensor], change: Change | None
) -> Iterator[tuple[str, Piece]]:
    """The tree's tensors that a file's tensor holds, its shape and dtype checked."""
    shapes = [wanted[name].shape[1:] if match.expert is not None else wanted[name].shape for name in match.names]
    outer = [shape[0] for shape in shapes]
    expected = (sum(outer), *shapes[0][1:])
    expected = expected[::-1] if match.order == "columns" else expected
    if match.expert is not None and len(wanted[match.names[0]].shape) != 3:
        expected = ()
    if entry.shape != expected:
        raise ModelError(
            f"the tensor {entry.name} of {files.name}", expected=f"shape {expected}", found=f"{entry.shape}"
        )
    if entry.dtype not in DTYPES:
        raise ModelError(
            f"the tensor {entry.name} of {files.name}", expected=f"one of {', '.join(DTYPES)}", found=entry.dtype
        )
    firsts = accumulate(outer, initial=0)
    for place, (name, first, shape) in enumerate(zip(match.names, firsts, shapes, strict=False)):
        groups = (files.config.n_heads, len(shapes), place)
        yield name, Piece((entry,), shape, match.order, first, groups, (change,))


def _joined(stacked: Mapping[int, Piece], tensor: Tensor) -> Piece:
    parts = [stacked[place] for place in sorted(stacked)]
    if len(tensor.shape) != 3:
        return parts[0]
    entries = tuple(entry for part in parts for entry in part.entries)
    changes = tuple(change for part in parts for change in part.changes)
    return Piece(entries, tensor.shape, parts[0].order, changes=changes)
