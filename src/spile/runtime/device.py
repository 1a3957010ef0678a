"""A model on this host's devices, as a producer of rows.

Each tapped array is packed (its real tokens moved to the front, padding behind), cast to the stored dtype and sent
towards the host inside the compiled program, the moment its layer has made it. On GPUs and TPUs it goes to
pinned host memory, where NumPy sees it without another copy; the transfer hides under the layers that follow.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spile.errors import Failure
from spile.model.decoder import forward
from spile.model.params import Params
from spile.plan.batches import Batch
from spile.runtime.producer import Block, OutOfDeviceMemory, pack
from spile.runtime.progress import Progress
from spile.spec.architecture import ModelConfig
from spile.spec.taps import Tap

__all__ = ["DeviceProducer", "compute_dtype_for", "enable_compilation_cache", "local_mesh"]

_COMPILERS = 2
"""Programs compiled at once, ahead of need."""


class _Pending(NamedTuple):
    arrays: Sequence[jax.Array]
    finite: jax.Array


def enable_compilation_cache() -> None:
    """Keep compiled programs over runs: a resumed worker does not compile again."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "spile" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def local_mesh() -> Mesh:
    """All of this host's devices, data parallel."""
    devices = np.array(jax.local_devices())
    return Mesh(devices.reshape(len(devices), 1), ("data", "model"))


def compute_dtype_for(platform: str) -> str:
    """float32 on a CPU, where bf16 has no units and is slower; bfloat16 elsewhere."""
    return "float32" if platform == "cpu" else "bfloat16"


class DeviceProducer:
    """A model, its weights in place, and one compiled program a batch shape."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        taps: tuple[Tap, ...],
        *,
        store_dtype: str,
        mesh: Mesh,
        attention: str,
        dtype: str,
        progress: Progress | None = None,
    ) -> None:
        self._params, self._config, self._taps = params, config, taps
        self._store_dtype = jnp.dtype(store_dtype)
        self._mesh, self._attention, self._dtype = mesh, attention, dtype
        self._progress = progress or Progress()
        self._compilers = ThreadPoolExecutor(_COMPILERS, "spile-compile")
        self._programs: dict[tuple[int, int], Future[Callable[..., Any]]] = {}
        self._proven: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        platform = mesh.devices.flat[0].platform
        self._away = NamedSharding(
            mesh, PartitionSpec("data"), memory_kind="pinned_host" if platform in ("gpu", "tpu") else None
        )

    @property
    def groups(self) -> int:
        """One a data-parallel device."""
        return int(self._mesh.shape["data"])

    @property
    def owned(self) -> Sequence[int]:
        """All of them: this host is the only one."""
        return range(self.groups)

    def describe(self) -> str:
        """``2 × NVIDIA H200, bfloat16, cudnn attention``."""
        devices = self._mesh.devices.flatten()
        return f"{len(devices)} × {devices[0].device_kind}, {self._dtype}, {self._attention} attention"

    # -- programs -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Compile for this shape in the background, once."""
        self._program((batch.rows, batch.length))

    def _program(self, shape: tuple[int, int]) -> Future[Callable[..., Any]]:
        with self._lock:
            if shape not in self._programs:
                self._programs[shape] = self._compilers.submit(self._compile, shape)
            return self._programs[shape]

    def _compile(self, shape: tuple[int, int]) -> Callable[..., Any]:
        rows, length = shape
        tokens = jax.ShapeDtypeStruct((self.groups * rows, length), jnp.int32, sharding=self._rows)
        index = jax.ShapeDtypeStruct((self.groups, rows * length), jnp.int32, sharding=self._rows)
        return jax.jit(self._step).lower(self._params, tokens, index).compile()

    def _step(self, params: Params, tokens: jax.Array, index: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The whole of what a device does with a batch."""

        def keep(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = x.astype(self._store_dtype).reshape(self.groups, -1, x.shape[-1])
            x = jax.vmap(lambda rows, places: rows[places])(x, index)
            return jax.device_put(x, self._away), jnp.isfinite(x).all()

        kept = forward(params, tokens, config=self._config, taps=self._taps, attention=self._attention, keep=keep)
        return tuple(array for array, _ in kept), jnp.stack([finite for _, finite in kept])

    # -- batches --------------------------------------------------------------------------------------------------

    def start(self, batch: Batch) -> _Pending:
        """Send a batch to the devices. A shape's first batch is waited for, so that too little memory shows here."""
        shape = (batch.rows, batch.length)
        program = self._wait_for(shape)
        packed = pack(batch)
        try:
            arrays, finite = program(
                self._params, jax.device_put(packed.tokens, self._rows), jax.device_put(packed.places, self._rows)
            )
            if shape not in self._proven:
                jax.block_until_ready(arrays)
                self._proven.add(shape)
        except jax.errors.JaxRuntimeError as error:
            raise _translated(error) from error
        return _Pending(arrays, finite)

    def _wait_for(self, shape: tuple[int, int]) -> Callable[..., Any]:
        if shape in self._proven:
            return self._program(shape).result()
        began = time.perf_counter()
        self._progress.phase(f"compiling for {shape[0]} × {shape[1]} tokens")
        try:
            program = self._program(shape).result()
        except jax.errors.JaxRuntimeError as error:
            raise _translated(error) from error
        self._progress.compiled(time.perf_counter() - began)
        self._progress.phase("running")
        return program

    def fetch(self, pending: object) -> Sequence[Sequence[Block]]:
        """Wait, and look at the rows where they are. No copy is made of pinned memory, nor on a CPU."""
        assert isinstance(pending, _Pending)  # noqa: S101 - the pipeline hands back what start gave it
        try:
            finite = np.asarray(pending.finite)
            blocks = [_blocks(array) for array in pending.arrays]
        except jax.errors.JaxRuntimeError as error:
            raise _translated(error) from error
        if not finite.all():
            self._refuse(finite)
        return blocks

    def _refuse(self, finite: np.ndarray[Any, Any]) -> None:
        bad = ", ".join(str(tap) for tap, good in zip(self._taps, finite, strict=True) if not good)
        fix = "--store-dtype bfloat16 holds larger values" if self._store_dtype == jnp.float16 else None
        raise Failure(f"NaN or infinity at {bad}", expected="finite activations", fix=fix)


def _blocks(array: jax.Array) -> list[Block]:
    """What this process holds of an array, by the array's own index map."""
    parts = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    blocks = []
    for part in parts:
        first = part.index[0].start or 0
        data = np.asarray(part.data)
        blocks += [Block(first + g, data[g]) for g in range(data.shape[0])]
    return sorted(blocks, key=lambda block: block.group)


def _translated(error: jax.errors.JaxRuntimeError) -> Failure:
    """An error of the device's runtime, as ours."""
    text = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in text:
        return OutOfDeviceMemory("the device's memory ran out")
    return Failure(f"the device failed: {text[:300]}")
