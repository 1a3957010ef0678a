"""Load weights: check all tensors of the files against the config, then read the needed ones onto the devices."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from spile.errors import ModelError
from spile.models.architecture import Tensor
from spile.models.families import FAMILIES
from spile.models.families.base import FileTensor, Order
from spile.models.model_files import ModelFiles
from spile.models.params import LayerRun, Params, build, stack_layers
from spile.models.safetensors_files import (
    DTYPES,
    Bounds,
    Change,
    Entry,
    Piece,
    Stack,
    Values,
    read_bytes,
    read_header,
)
from spile.objects import Folder

_THREADS = 8
_COMPARE_BYTES = 64 << 20
"""How many bytes of two tensors are compared at a time."""
_MAX_WAITING = 2 << 30
"""The most numbers that are read but not yet on their devices, besides the tensor that was read last."""

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding]
"""A function from a tensor's logical axes and shape to its sharding."""
_Experts = dict[int | None, Piece]
"""A tensor of the model: one piece per expert, or a single piece at None."""


def locate_tensors(files: ModelFiles, *, head: bool = False) -> Mapping[str, Piece | Stack]:
    """Return the place of each tensor of the model in the files; without ``head`` the LM head may be missing."""
    names, wanted = FAMILIES[files.config.architecture].names, dict[str, Tensor]()
    build(files.config, None, wanted.__setitem__, head=True)
    found: dict[str, _Experts] = {}
    head_name = f"{names.head}.weight"
    head_copy: Entry | None = None
    with ThreadPoolExecutor(_THREADS) as threads:
        headers = threads.map(lambda file: read_header(files.folder, file), files.weight_files)
        entries = [entry for header in headers for entry in header]
    changes: Mapping[str, Change] = {}
    if files.adapter is not None:
        shapes = {entry.name: entry.shape for entry in entries}
        changes = files.adapter.changes(shapes | ({head_name: wanted["head"].shape} if files.untied else {}))
    for entry in entries:
        match = names.match(entry.name)
        if match is not None and not match.names:
            continue
        if match is not None and match.names == ("head",) and (files.config.tied or files.untied):
            head_copy = entry  # of the embedding
            continue
        if match is None or any(name not in wanted for name in match.names):
            raise ModelError(
                f"{entry.file} of {files.name} has a tensor that {files.config.architecture} does not",
                found=entry.name,
                fix="check that config.json and the weights belong to the same model",
            )
        for name, piece in _pieces(files, entry, match, wanted, changes.get(entry.name)):
            before = found.setdefault(name, {}).setdefault(match.expert, piece)
            if before is not piece:
                both = " and ".join(f"{each.name} in {each.file}" for each in (before.entry, entry))
                raise ModelError(f"{files.name} has a tensor twice", found=both)
    if files.untied and "embed" in found:
        found["head"] = {None: replace(found["embed"][None], change=changes[head_name])}
    optional = () if head else ("head", "head_bias")
    missing = [name for name in wanted if name not in optional and not _complete(found.get(name, {}), wanted[name])]
    if missing:
        raise ModelError(
            f"{files.name} has only {len(wanted) - len(missing)} of its {len(wanted)} tensors",
            found=f"no {names.file_name(missing[0])}",
        )
    if head and head_copy is not None:
        _check_tied_head(files, head_copy, found["embed"][None].entry)
    return {
        name: pieces[None] if None in pieces else Stack(tuple(pieces[expert] for expert in range(len(pieces))))
        for name, pieces in found.items()
    }


def _check_tied_head(files: ModelFiles, head_copy: Entry, embedding: Entry) -> None:
    """Refuse a tied head whose tensor differs from the embedding: config.json and transformers 5 disagree about it."""

    def part(entry: Entry, at: int) -> npt.NDArray[np.uint8]:
        return read_bytes(files.folder, entry.file, entry.start + at, min(_COMPARE_BYTES, entry.length - at))

    if (head_copy.shape, head_copy.code) == (embedding.shape, embedding.code) and all(
        np.array_equal(part(head_copy, at), part(embedding, at)) for at in range(0, head_copy.length, _COMPARE_BYTES)
    ):
        return
    raise ModelError(
        f"{files.name} has a head of its own, though config.json says tie_word_embeddings",
        expected=f"{head_copy.name} equal to {embedding.name}",
        found="different numbers",
        fix="set tie_word_embeddings to false in config.json to use the head, or remove the tensor from the file",
    )


def _complete(pieces: _Experts, tensor: Tensor) -> bool:
    return set(pieces) == {None} or (len(tensor.shape) == 3 and set(pieces) == set(range(tensor.shape[0])))


def _file_shape(shapes: Sequence[tuple[int, ...]], order: Order) -> tuple[int, ...]:
    """Return the shape of a file's tensor that holds tensors of these shapes."""
    first, *inner = shapes[0]
    if order == "interleaved":
        return (first, *inner[1:], len(shapes) * inner[0])
    if order == "columns" and len(inner) == 2:
        return (first, *inner[::-1])
    rows = (sum(shape[0] for shape in shapes), *inner)
    return rows[::-1] if order == "columns" else rows


def _pieces(
    files: ModelFiles, entry: Entry, match: FileTensor, wanted: Mapping[str, Tensor], change: Change | None
) -> Iterator[tuple[str, Piece]]:
    """Return the tensors of the model that a file's tensor contains, after a check of its shape and dtype."""
    shapes = [wanted[name].shape[1:] if match.expert is not None else wanted[name].shape for name in match.names]
    expected = _file_shape(shapes, match.order)
    if entry.shape != expected:
        raise ModelError(
            f"the tensor {entry.name} of {files.name}", expected=f"shape {expected}", found=f"{entry.shape}"
        )
    if entry.code not in DTYPES:
        raise ModelError(
            f"the tensor {entry.name} of {files.name}", expected=f"one of {', '.join(DTYPES)}", found=entry.code
        )
    firsts = accumulate((shape[0] for shape in shapes), initial=0)
    for place, (name, first, shape) in enumerate(zip(match.names, firsts, shapes, strict=False)):
        yield name, Piece(entry, shape, match.order, first, (files.config.n_heads, len(shapes), place), change)


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the tree: its tensor in the model and in the files."""

    tensor: Tensor
    source: Piece | Stack

    @classmethod
    def stack(cls, leaves: Sequence[_Leaf]) -> _Leaf:
        return cls(leaves[0].tensor.stacked(len(leaves)), Stack(tuple(leaf.source for leaf in leaves)))


def load(
    files: ModelFiles,
    dtype: DTypeLike = jnp.float32,
    n_layers: int | None = None,
    sharding: Place | None = None,
    *,
    head: bool = False,
    runs: Sequence[LayerRun] = (),
) -> Params:
    """Load the weights up to layer ``n_layers`` in ``dtype``, with ``sharding`` (None: on the first device).

    ``head``: the final norm and the LM head too. ``runs``: how layers are stacked, if they are. Every tensor of every
    file is checked against the config before any is read, those past ``n_layers`` too.
    """
    pieces = locate_tensors(files, head=head)
    tree = build(files.config, n_layers, lambda name, tensor: _Leaf(tensor, pieces[name]), head=head)
    if runs:
        tree = stack_layers(tree, runs, _Leaf.stack)
    leaves, structure = jax.tree.flatten(tree)
    arrays: list[jax.Array] = []
    waiting: deque[tuple[int, Future[jax.Array]]] = deque()

    def finish_first() -> None:
        # In order, in this thread: on a pod all hosts must run the same programs in the same order.
        array = waiting.popleft()[1].result()
        arrays.append(array if array.dtype == np.dtype(dtype) else _cast(array, np.dtype(dtype)))

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for leaf in leaves:
                place = sharding(leaf.tensor.axes, leaf.tensor.shape) if sharding else _first_device()
                waiting.append((leaf.tensor.size, threads.submit(_place, files.folder, leaf.source, place)))
                # Limit the number of unconverted tensors.
                while len(waiting) > 2 * _THREADS or sum(size for size, _ in waiting) > _MAX_WAITING:
                    finish_first()
            while waiting:
                finish_first()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    loaded: Params = jax.tree.unflatten(structure, arrays)
    return loaded


def _first_device() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def _place(folder: Folder, source: Piece | Stack, place: Sharding) -> jax.Array:
    """Copy a tensor to the devices as it is stored; the dtype is converted there, without a second copy on the host."""
    lock = threading.Lock()
    parts: dict[Bounds, Values] = {}

    def read(index: tuple[slice, ...] | None) -> Values:
        """Read each slice once for all devices that need it."""
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), source.shape, strict=False))
        with lock:
            if bounds not in parts:
                parts[bounds] = source.read(folder, bounds)
            return parts[bounds]

    return jax.make_array_from_callback(source.shape, place, read)


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return array.astype(dtype)
