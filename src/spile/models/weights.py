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
from jax.sharding import Sharding
from jax.typing import DTypeLike

from spile.errors import ModelError
from spile.models.architecture import Tensor, layer_tensors, model_tensors
from spile.models.families import FAMILIES
from spile.models.families.base import Match, Order
from spile.models.model_files import ModelFiles
from spile.models.params import LayerRun, Params, build, stacked
from spile.models.safetensors_files import DTYPES, ByteSource, Change, Entry, Piece, PieceStack, aligned, read_header

_THREADS = 8
_COMPARED = 64 << 20
"""How many bytes of two tensors are compared at a time."""
_ALL_EXPERTS = -1
"""The place of a file's tensor that holds all of a tensor of the model, instead of one expert's part."""


def catalogue(files: ModelFiles, *, head: bool = False) -> Mapping[str, Piece]:
    """Return the place of each tensor of the model in the files; without ``head`` the LM head may be missing."""
    names, wanted = FAMILIES[files.config.architecture].names, _wanted(files)
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
                fix="check that config.json and the weights belong to the same model",
            )
        for name, piece in _pieces(files, entry, match, wanted, changes.get(entry.name)):
            stacked = found.setdefault(name, {})
            place = _ALL_EXPERTS if match.expert is None else match.expert
            if place in stacked:
                twice = f"{stacked[place].entries[0].name} and {entry.name}"
                raise ModelError(f"{files.name} has a tensor twice", found=twice)
            stacked[place] = piece
    if files.untied and "embed" in found:
        found["head"] = {_ALL_EXPERTS: replace(found["embed"][_ALL_EXPERTS], changes=(changes[names.head],))}
    missing = [
        name
        for name, tensor in wanted.items()
        if not _complete(found.get(name, {}), tensor) and (head or name not in ("head", "head_bias"))
    ]
    if missing:
        raise ModelError(
            f"{files.name} has only {len(wanted) - len(missing)} of its {len(wanted)} tensors",
            found=f"no {names.file_name(missing[0])}",
        )
    if head and copy is not None:
        _refuse_another_head(files, copy, found["embed"][_ALL_EXPERTS].entries[0])
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
    """Return whether the tensor is a copy of the embedding that the files contain although the head is tied."""
    return match.names == ("head",) and (files.config.tied or files.untied)


def _refuse_another_head(files: ModelFiles, copy: Entry, embedding: Entry) -> None:
    """Refuse a tied head whose tensor differs from the embedding: config.json and transformers 5 disagree about it."""
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
        found="different numbers",
        fix="set tie_word_embeddings to false in config.json to use the head, or remove the tensor from the file",
    )


def _ranges(length: int) -> Iterator[tuple[int, int]]:
    for at in range(0, length, _COMPARED):
        yield at, min(_COMPARED, length - at)


def _complete(stacked: Mapping[int, Piece], tensor: Tensor) -> bool:
    """Return whether all parts of a tensor were found: it as a whole, or one part per expert."""
    return set(stacked) == {_ALL_EXPERTS} or (len(tensor.shape) == 3 and set(stacked) == set(range(tensor.shape[0])))


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
    files: ModelFiles, entry: Entry, match: Match, wanted: Mapping[str, Tensor], change: Change | None
) -> Iterator[tuple[str, Piece]]:
    """Return the tensors of the model that a file's tensor contains, after a check of its shape and dtype."""
    shapes = [wanted[name].shape[1:] if match.expert is not None else wanted[name].shape for name in match.names]
    expected = _file_shape(shapes, match.order)
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
    firsts = accumulate((shape[0] for shape in shapes), initial=0)
    for place, (name, first, shape) in enumerate(zip(match.names, firsts, shapes, strict=False)):
        groups = (files.config.n_heads, len(shapes), place)
        yield name, Piece((entry,), shape, match.order, first, groups, (change,))


def _joined(stacked: Mapping[int, Piece], tensor: Tensor) -> Piece:
    if _ALL_EXPERTS in stacked:
        return stacked[_ALL_EXPERTS]
    parts = [stacked[place] for place in sorted(stacked)]
    entries = tuple(entry for part in parts for entry in part.entries)
    changes = tuple(change for part in parts for change in part.changes)
    return Piece(entries, tensor.shape, parts[0].order, changes=changes)


Place = Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding]
"""A function from a tensor's logical axes and shape to its sharding."""

_MOST_WAITING = 2 << 30
"""The most numbers that are read but not yet on their devices, besides the tensor that was read last."""


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the tree: its tensor, and the names of the tensors that it is made of."""

    names: tuple[str, ...]
    tensor: Tensor

    @classmethod
    def joined(cls, leaves: Sequence[_Leaf]) -> _Leaf:
        names = tuple(name for leaf in leaves for name in leaf.names)
        return cls(names, leaves[0].tensor.stacked(len(leaves)))

    def piece(self, pieces: Mapping[str, Piece]) -> Piece | PieceStack:
        own = tuple(pieces[name] for name in self.names)
        return own[0] if len(own) == 1 else PieceStack(own)


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
    pieces = catalogue(files, head=head)
    tree = build(files.config, n_layers, lambda name, tensor: _Leaf((name,), tensor), head=head)
    if runs:
        tree = stacked(tree, runs, _Leaf.joined)
    leaves, structure = jax.tree.flatten(tree)
    arrays: list[jax.Array] = []
    waiting: deque[tuple[int, Future[jax.Array]]] = deque()

    def settle() -> None:
        # In order, in this thread: on a pod all hosts must run the same programs in the same order.
        array = waiting.popleft()[1].result()
        arrays.append(array if array.dtype == np.dtype(dtype) else _cast(array, np.dtype(dtype)))

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for leaf in leaves:
                place = None if sharding is None else sharding(leaf.tensor.axes, leaf.tensor.shape)
                piece = leaf.piece(pieces)
                waiting.append((leaf.tensor.size, threads.submit(_place, files.source, piece, place)))
                # Limit the number of unconverted tensors.
                while len(waiting) > 2 * _THREADS or sum(size for size, _ in waiting) > _MOST_WAITING:
                    settle()
            while waiting:
                settle()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    loaded: Params = jax.tree.unflatten(structure, arrays)
    return loaded


def _place(source: ByteSource, piece: Piece | PieceStack, place: Sharding | None) -> jax.Array:
    """Copy a tensor to the devices as it is stored; the dtype is converted there, without a second copy on the host.

    On a CPU a mapped file must not become the array itself, or a change on disk would change the model.
    """
    if place is None:
        whole: jax.Array = jax.device_put(piece.read(source), may_alias=False)
        return whole
    devices: set[Any] = place.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)
    return jax.make_array_from_callback(piece.shape, place, _Slices(source, piece, copy=on_cpu))


class _Slices:
    """Reads each slice once for all devices that need it."""

    def __init__(self, source: ByteSource, piece: Piece | PieceStack, *, copy: bool) -> None:
        self.source, self.piece, self.copy = source, piece, copy
        self.lock = threading.Lock()
        self.read: dict[tuple[tuple[int, int], ...], npt.NDArray[Any]] = {}

    def __call__(self, index: tuple[slice, ...] | None) -> npt.NDArray[Any]:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), self.piece.shape, strict=False))
        with self.lock:
            if bounds not in self.read:
                part = self.piece.read(self.source, bounds)
                if self.copy and not part.flags.writeable:
                    mapped, part = part, aligned(part.shape, part.dtype)
                    part[:] = mapped
                self.read[bounds] = part
            return self.read[bounds]


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return array.astype(dtype)
