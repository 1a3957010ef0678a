"""``spile import``: the old guides' pickles become a dataset like any other, checked and exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import DataError
from spile.objects import Folder
from spile.reading.export.blocks import Seen, nobody
from spile.reading.export.pickles import read_pickle
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import PromptSpec, StoreDtype
from spile.spec.sample import Role, Sample, Skip
from spile.spec.taps import Tap
from spile.store.shard_format import as_stored
from spile.store.stream import StreamStore, join_run, join_stream

__all__ = ["import_pickles", "pickle_files"]

UNKNOWN_TOKEN = -1
"""The pickles hold no token ids."""


def pickle_files(source: str) -> list[Path]:
    """The pickles that a user means: a file, or all of a folder in their order."""
    path = Path(source).expanduser()
    found = [path] if path.is_file() else sorted(path.glob("**/*.pkl.gz")) + sorted(path.glob("**/*.pkl"))
    if not found:
        raise DataError(f"no pickle at {source}", expected="shard_0001.pkl.gz or a folder of such files")
    return found


def import_pickles(
    source: str,
    root: Folder,
    *,
    worker_id: int = 0,
    site: str = "residual",
    model: str = "unknown",
    store_dtype: StoreDtype = "bfloat16",
    seen: Seen = nobody,
) -> StreamStore:
    """One stream of a dataset from pickles. What an earlier import committed is not written again.

    Two passes: the first finds the layers, the width and each sample once; the second writes one shard per file.
    """
    files = pickle_files(source)
    digest, layers, width = hashlib.sha256(), None, None
    indices: dict[int, str] = {}
    for path in files:
        digest.update(path.read_bytes())
        content = read_pickle(path)
        layers = tuple(sorted(content)) if layers is None else layers
        if tuple(sorted(content)) != layers:
            raise DataError(str(path), expected=f"the layers {list(layers)} of {files[0]}", found=sorted(content))
        for index, rows in _samples(content, path):
            if index in indices:
                raise DataError(f"sample {index} is there twice", found=f"{indices[index]} and {path}")
            indices[index] = str(path)
            width = rows.shape[1] if width is None else width
            if rows.shape[1] != width:
                raise DataError(f"{path}, sample {index}", expected=f"rows of {width}", found=rows.shape[1])
    assert layers is not None  # noqa: S101  for the type checker: there is at least one file, and it has layers
    total = max(indices, default=-1) + 1
    run = _identity(model, width or 0, max(layers) + 1, store_dtype)
    identity = StreamIdentity(source, digest.hexdigest(), total, total, tuple(Tap(site, layer) for layer in layers))
    join_run(root, run)
    store = join_stream(root, worker_id, identity, run)
    for done, path in enumerate(files, 1):
        _store(store, read_pickle(path), path, layers)
        seen(done, len(files))
    left = Ranges([(0, total)]) - store.ledger.done
    if left:
        store.commit([], [Skip(index, str(index), "not in the pickles") for index in left])
    store.finish()
    return store


def _samples(content: dict[int, list[dict[str, Any]]], path: Path) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Index and rows of the first layer's samples, after all layers were seen to have the same ones."""
    first, *others = content.values()
    wanted = [(int(sample["sample_idx"]), sample["activation"].shape) for sample in first]
    for layer, samples in zip(list(content)[1:], others, strict=True):
        if [(int(sample["sample_idx"]), sample["activation"].shape) for sample in samples] != wanted:
            raise DataError(f"{path}, layer {layer}", expected=f"the samples of layer {next(iter(content))}")
    for sample in first:
        yield int(sample["sample_idx"]), sample["activation"]


def _store(
    store: StreamStore,
    content: dict[int, list[dict[str, Any]]],
    path: Path,
    layers: tuple[int, ...],
) -> None:
    """One file's samples that are not done yet, as one shard."""
    chosen = [place for place, (index, _) in enumerate(_samples(content, path)) if index not in store.ledger.done]
    if not chosen:
        return
    builder = store.begin([_sample(content[layers[0]][place]) for place in chosen])
    kinds = store.record.identity.rows(store.run)
    for tap, layer in enumerate(layers):
        rows = np.concatenate([content[layer][place]["activation"] for place in chosen])
        builder.write(tap, 0, as_stored(rows, kinds[tap].dtype))
    store.commit([builder.finish()])


def _sample(source: dict[str, Any]) -> Sample:
    length, index = len(source["activation"]), int(source["sample_idx"])
    roles = np.zeros(length, np.uint8)
    roles[:1] = Role.FIRST
    preview = str(source.get("text_preview") or "")
    return Sample(index, str(index), np.full(length, UNKNOWN_TOKEN, np.int32), roles, preview)


def _identity(model: str, width: int, layers: int, store_dtype: str) -> RunIdentity:
    return RunIdentity(
        model=model,
        revision=None,
        architecture="unknown",
        d_model=width,
        n_layers=layers,
        weights="unknown",
        tokenizer="unknown",
        prompt=PromptSpec(kind="text"),
        seed=0,
        max_seq_length=1 << 20,
        long="truncate",
        dtype="float32",
        store_dtype=store_dtype,
    )
