"""Read the tensors that are needed, each device only its part, from a file's pages or a bucket's ranges."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding
from jax.typing import DTypeLike

from spile.model.params import Params, build, stacked
from spile.model.runs import LayerRun
from spile.spec.tensors import Tensor
from spile.weights.catalogue import catalogue
from spile.weights.files import ModelFiles
from spile.weights.pieces import Piece, PieceStack
from spile.weights.source import ByteSource

__all__ = ["Place", "load"]

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding]
"""From a tensor's logical axes and shape to where it goes."""

_THREADS = 8
_MOST_WAITING = 2 << 30
"""Numbers that are read and not yet on their devices, beyond the tensor that is read last."""


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the tree: the tensor it will be, and what it is made of."""

    names: tuple[str, ...]
    tensor: Tensor

    @classmethod
    def joined(cls, leaves: Sequence[_Leaf]) -> _Leaf:
        """The same leaf of several layers."""
        names = tuple(name for leaf in leaves for name in leaf.names)
        return cls(names, leaves[0].tensor.stacked(len(leaves)))

    def piece(self, pieces: Mapping[str, Piece]) -> Piece | PieceStack:
        """Where it lies in the files."""
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
    """The weights up to layer ``n_layers`` in ``dtype``; ``sharding`` says where each goes (None: the first device).

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
        # In order and not in the threads: on a pod all hosts must run the same programs in the same order.
        array = waiting.popleft()[1].result()
        arrays.append(array if array.dtype == np.dtype(dtype) else _cast(array, np.dtype(dtype)))

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for leaf in leaves:
                place = None if sharding is None else sharding(leaf.tensor.axes, leaf.tensor.shape)
                piece = leaf.piece(pieces)
                waiting.append((leaf.tensor.size, threads.submit(_place, files.source, piece, place)))
                # no more of the unconverted at once
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
    """Onto the devices as stored, to be converted there if need be: the host never holds a second copy.

    On a CPU a mapped file must not become the array itself, or a change on disk would change the model.
    """
    if place is None:
        whole: jax.Array = jax.device_put(piece.read(source), may_alias=False)
        return whole
    devices: set[Any] = place.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)
    return jax.make_array_from_callback(piece.shape, place, _Slices(source, piece, copy=on_cpu))


class _Slices:
    """Reads a slice once for all devices that want the same."""

    def __init__(self, source: ByteSource, piece: Piece | PieceStack, *, copy: bool) -> None:
        self.source, self.piece, self.copy = source, piece, copy
        self.lock = threading.Lock()
        self.read: dict[tuple[tuple[int, int], ...], npt.NDArray[Any]] = {}

    def __call__(self, index: tuple[slice, ...] | None) -> npt.NDArray[Any]:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), self.piece.shape, strict=False))
        with self.lock:
            if bounds not in self.read:
                part = self.piece.read(self.source, bounds)
                self.read[bounds] = np.array(part) if self.copy and not part.flags.owndata else part
            return self.read[bounds]


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return array.astype(dtype)
