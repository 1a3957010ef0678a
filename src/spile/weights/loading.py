"""Read the tensors that are needed, each device only its part, from a file's pages or a bucket's ranges."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding
from jax.typing import DTypeLike

from spile.errors import ModelError
from spile.model.params import Params, Tensor, build
from spile.weights.files import ModelFiles
from spile.weights.names import NAMES
from spile.weights.safetensors import DTYPES, Entry, read_header
from spile.weights.source import ByteSource

__all__ = ["Place", "load"]

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding]
"""From a tensor's logical axes and shape to where it goes."""

_THREADS = 8
_AFTER_LAYERS = ("final_norm", "head")
"""In every model's files, needed for generation only; a tied head may be there and is the embedding."""


def load(
    files: ModelFiles,
    dtype: DTypeLike = jnp.float32,
    n_layers: int | None = None,
    sharding: Place | None = None,
    *,
    head: bool = False,
) -> Params:
    """The weights up to layer ``n_layers`` in ``dtype``; ``sharding`` says where each goes (None: the first device).

    ``head``: the final norm and the LM head too. Every tensor of every file is checked against the config before any is
    read, those past ``n_layers`` too.
    """
    entries = _catalogue(files, head)
    wanted: list[tuple[str, Tensor]] = []
    build(files.config, n_layers, lambda name, tensor: wanted.append((name, tensor)), head=head)
    arrays: dict[str, jax.Array] = {}
    waiting: deque[tuple[str, Future[jax.Array]]] = deque()

    def settle() -> None:
        # In order and not in the threads: on a pod all hosts must run the same programs in the same order.
        name, future = waiting.popleft()
        array = future.result()
        arrays[name] = array if array.dtype == np.dtype(dtype) else _cast(array, np.dtype(dtype))

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for name, tensor in wanted:
                place = None if sharding is None else sharding(tensor.axes, tensor.shape)
                waiting.append((name, threads.submit(_place, files.source, entries[name], place)))
                if len(waiting) > 2 * _THREADS:  # no more of the unconverted at once
                    settle()
            while waiting:
                settle()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return build(files.config, n_layers, lambda name, _: arrays[name], head=head)


def _catalogue(files: ModelFiles, head: bool) -> Mapping[str, Entry]:
    """Tree name → where it lies, for the whole model; unknown, doubled, missing or misshapen tensors are errors."""
    found: dict[str, Entry] = {}
    seen: dict[str, Entry] = {}
    names = NAMES[files.config.architecture]
    wanted = _wanted(files, head)
    with ThreadPoolExecutor(_THREADS) as threads:
        headers = list(threads.map(lambda file: read_header(files.source, file), files.weight_files))
    for entry in (entry for header in headers for entry in header):
        if entry.name in seen:
            raise ModelError(
                f"{files.name} has the tensor {entry.name} twice", found=f"{seen[entry.name].file} and {entry.file}"
            )
        seen[entry.name] = entry
        name = names.match(entry.name)
        if name == "" or (name in _AFTER_LAYERS and name not in wanted):
            continue
        if name is None or name not in wanted:
            raise ModelError(
                f"{entry.file} of {files.name} has a tensor that {files.config.architecture} does not",
                found=entry.name,
                fix="this is another model than its config.json says",
            )
        if name in found:
            raise ModelError(f"{files.name} has a tensor twice", found=f"{found[name].name} and {entry.name}")
        _check(files, entry, wanted[name])
        found[name] = entry
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(
            f"{files.name} lacks {len(missing)} of its {len(wanted)} tensors",
            found=f"no {_file_name(files, missing[0])}",
        )
    return found


def _wanted(files: ModelFiles, head: bool) -> dict[str, Tensor]:
    wanted: dict[str, Tensor] = {}
    build(files.config, None, wanted.setdefault, head=head)
    return wanted


def _check(files: ModelFiles, entry: Entry, tensor: Tensor) -> None:
    if entry.shape != tensor.shape:
        raise ModelError(
            f"the tensor {entry.name} of {files.name}", expected=f"shape {tensor.shape}", found=f"{entry.shape}"
        )
    if entry.dtype not in DTYPES:
        raise ModelError(
            f"the tensor {entry.name} of {files.name}", expected=f"one of {', '.join(DTYPES)}", found=entry.dtype
        )


def _file_name(files: ModelFiles, name: str) -> str:
    """What the files would call a tree's tensor: for errors."""
    after = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
    if name in after:
        return after[name]
    layer, _, field = name.rpartition(".")
    suffixes = {field: suffix for suffix, field in NAMES[files.config.architecture].layer.items()}
    return f"model.layers.{layer}.{suffixes[field]}"


def _place(source: ByteSource, entry: Entry, place: Sharding | None) -> jax.Array:
    """Onto the devices as stored, to be converted there if need be: the host never holds a second copy.

    On a CPU a mapped file must not become the array itself, or a change on disk would change the model.
    """
    if place is None:
        whole: jax.Array = jax.device_put(_read(source, entry, ()), may_alias=False)
        return whole
    devices: set[Any] = place.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)
    return jax.make_array_from_callback(entry.shape, place, _Slices(source, entry, copy=on_cpu))


class _Slices:
    """Reads a slice once for all devices that want the same."""

    def __init__(self, source: ByteSource, entry: Entry, *, copy: bool) -> None:
        self.source, self.entry, self.copy = source, entry, copy
        self.lock = threading.Lock()
        self.read: dict[tuple[tuple[int, int], ...], npt.NDArray[Any]] = {}

    def __call__(self, index: tuple[slice, ...] | None) -> npt.NDArray[Any]:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), self.entry.shape, strict=False))
        with self.lock:
            if bounds not in self.read:
                part = _read(self.source, self.entry, bounds)
                self.read[bounds] = np.array(part) if self.copy else part
            return self.read[bounds]


def _read(source: ByteSource, entry: Entry, bounds: tuple[tuple[int, int], ...]) -> npt.NDArray[Any]:
    """A tensor's slice; only the rows it spans are touched."""
    dtype = DTYPES[entry.dtype]
    first, last = bounds[0] if bounds else (0, entry.shape[0])
    row = entry.length // max(entry.shape[0], 1)
    data = source.read(entry.file, entry.start + first * row, (last - first) * row)
    if len(data) != (last - first) * row:
        raise ModelError(f"{entry.file} ended inside {entry.name}", fix="it changed while it was read; run again")
    rows = data.view(dtype).reshape(last - first, *entry.shape[1:])
    return rows[(slice(None), *(slice(*bound) for bound in bounds[1:]))]


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return array.astype(dtype)
