"""A model on a mesh of devices, of this host or of all hosts of a pod, as a producer of rows.

Each tapped array is packed (its real tokens moved to the front, padding behind), cast to the stored dtype, or encoded
in one byte per number, and sent towards the host. On GPUs and TPUs it goes to pinned host memory, where NumPy sees it
without another copy. What a scan over layers gives is one array, which leaves under the next batch's program; a layer's
that stands alone leaves inside the compiled program, under the layers that follow.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from spile.errors import Failure
from spile.models.architecture import ModelConfig
from spile.models.decoder import forward, layers_needed
from spile.models.encoding import as_stored, finite_rows
from spile.models.params import LayerRun, Params, one_by_one, tap_groups
from spile.spec.phase import Phase
from spile.spec.taps import SCALED, Tap
from spile.worker.batches import Batch
from spile.worker.mesh import AXES, plan_mesh
from spile.worker.producer import OutOfDeviceMemory, RowBlock, check_tokens, pack
from spile.worker.progress import Progress

__all__ = ["DeviceProducer", "configure_jax", "put", "translated"]

_COMPILERS = max(2, (os.cpu_count() or 2) // 4)
"""Programs compiled at once, ahead of need."""


_LOOK_UP = 0.1
"""Seconds between looks at whether a wait for a program is given up."""


class _Pending(NamedTuple):
    arrays: Sequence[jax.Array]
    finite: jax.Array


def configure_jax() -> None:
    """What a run asks of JAX, where its environment does not say otherwise, before the devices are first used.

    Three quarters of a GPU's memory are not taken beforehand: on an H200 that is 1.7 s of every start. Compiled
    programs are kept over runs: a resumed worker does not compile again.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    logging.getLogger("jax._src.xla_bridge").addFilter(_one_line)
    _enable_compilation_cache()


def _one_line(record: logging.LogRecord) -> bool:
    """JAX's own logs without tracebacks: an image for GPUs on a machine without is worth a line."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]}", ()
        record.exc_info = record.exc_text = None
    return True


def _enable_compilation_cache() -> None:
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is not None:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spile" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to costs compilations, not the run
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class DeviceProducer:
    """A model, its weights in place, and one compiled program per batch shape.

    ``params`` may be shapes alone at first: programs are compiled from them beside the reading of the weights.
    """

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
        block: int = 0,
        progress: Progress | None = None,
        runs: Sequence[LayerRun] | None = None,
    ) -> None:
        self.params, self.config, self.taps = params, config, taps
        self.runs = one_by_one(layers_needed(taps, config.n_layers)) if runs is None else runs
        """How the layers of ``params`` are stacked."""
        self._tap_groups = tap_groups(taps, self.runs)
        self._store_dtype = store_dtype
        self.mesh, self.attention, self.dtype = mesh, attention, dtype
        plan = plan_mesh(config, (mesh.shape["data"], mesh.shape["model"]))
        self.attend = plan.attention(attention, mesh, config)
        self.mixture = plan.mixture(mesh.devices.flat[0].platform, mesh, config)
        self._progress = progress or Progress()
        self._compilers = ThreadPoolExecutor(_COMPILERS, "spile-compile")
        self._programs: dict[tuple[int, int], Future[Callable[..., Any]]] = {}
        self._proven: set[tuple[int, int]] = set()
        self._awaited: dict[tuple[int, int], float] = {}
        """When the loop came to a shape's first batch."""
        self._pool: Future[None] = Future()
        self._pool.set_result(None)
        self._lock = threading.Lock()
        # The devices of one model-parallel set compute the same sequences; each then keeps a group of its own of them.
        self.rows_sharding = NamedSharding(mesh, PartitionSpec("data"))
        self.groups_sharding = NamedSharding(mesh, PartitionSpec(AXES))
        platform = mesh.devices.flat[0].platform
        self.away_sharding = NamedSharding(mesh, PartitionSpec(None, AXES))
        """Of what leaves: ``[taps of a group, groups, rows, width]``."""
        if platform in ("gpu", "tpu"):
            self.away_sharding = self.away_sharding.with_memory_kind("pinned_host")
        self._block = block if self.away_sharding.memory_kind == "pinned_host" else 0

    @property
    def groups(self) -> int:
        """One per device, of all hosts."""
        return self.mesh.size

    @property
    def owned(self) -> Sequence[int]:
        """Those on this process's devices, by the sharding's own index map."""
        places = self.groups_sharding.addressable_devices_indices_map((self.groups,)).values()
        return sorted(index[0].start or 0 for index in places if index is not None)

    def describe(self) -> str:
        """``8 × NVIDIA H200, mesh 4 × 2, bfloat16, cudnn attention``."""
        devices = self.mesh.devices.flatten()
        data, model = self.mesh.devices.shape
        mesh = f"mesh {data} × {model}, " if model > 1 else ""
        return f"{len(devices)} × {devices[0].device_kind}, {mesh}{self.dtype}, {self.attention} attention"

    def close(self) -> None:
        """Compile nothing more: who ends early does not wait for programs that nobody will run."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    # -- programs -------------------------------------------------------------------------------------------------

    def prepare(self, shape: tuple[int, int]) -> None:
        """Compile for this shape in the background, once."""
        self._program(shape)

    def reserve(self, size: int) -> None:
        """Take this much pinned memory per device in the background: no call that starts a batch waits for the pool.

        In one piece: the pool grows by doubling, and each growth stops whoever asks for a block. As a program's output:
        a plain ``device_put`` keeps the interpreter's lock for as long as the system takes to pin the pages.
        """
        if self.away_sharding.memory_kind == "pinned_host":
            self._pool = self._compilers.submit(self._take, size)

    def _take(self, size: int) -> None:
        with self._progress.timeline.span("pinned memory"):
            for device in self.mesh.local_devices:
                away = SingleDeviceSharding(device, memory_kind="pinned_host")
                try:
                    take = jax.jit(lambda: jnp.zeros(size, jnp.uint8), out_shardings=away).lower().compile()
                    jax.block_until_ready(take())
                except jax.errors.JaxRuntimeError as error:  # a smaller pool costs speed and not the run
                    self._progress.log(f"no {size:,} bytes of pinned memory at once: {str(error)[:100]}")

    def _program(self, shape: tuple[int, int]) -> Future[Callable[..., Any]]:
        with self._lock:
            if shape not in self._programs:
                self._programs[shape] = self._compilers.submit(self.compile, shape)
            return self._programs[shape]

    def await_program(self, batch: Batch, given_up: Callable[[], bool]) -> None:
        """A compilation takes up to minutes, and a signal must not wait for it."""
        shape = batch.shape
        program = self._program(shape)
        waiting: list[Future[Any]] = [work for work in (program, self._pool) if not work.done()]
        if shape in self._proven or not waiting:
            return
        self._awaited.setdefault(shape, time.perf_counter())
        self._progress.phase(Phase.COMPILING, f"for {shape[0]} × {shape[1]} tokens")
        while waiting and not given_up():
            waiting = list(wait(waiting, timeout=_LOOK_UP).not_done)

    def compile(self, shape: tuple[int, int]) -> jax.stages.Compiled:
        """The program for a batch of this shape: rows per device, and their length."""
        with self._progress.timeline.span(f"compile {shape[0]} × {shape[1]}"):
            return self._lower(shape).compile()

    def _lower(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        rows, length = shape
        batch = jax.ShapeDtypeStruct((self.groups * rows, 3, length), jnp.int32, sharding=self.rows_sharding)
        index = jax.ShapeDtypeStruct((self.groups, self._rows(shape)), jnp.int32, sharding=self.groups_sharding)
        return jax.jit(self._step).lower(self.params, batch, index)

    def _rows(self, shape: tuple[int, int]) -> int:
        """Rows of a block as it leaves the device: the same for every shape, so that pinned memory is used again.

        Blocks of many sizes fragment the pool of pinned memory, and growing it stops the device for seconds.
        """
        return max(self._block, shape[0] * shape[1])

    def _step(self, params: Params, batch: jax.Array, index: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The whole of what a device does with a batch."""
        alone = [self.taps[group[0]] for group in self._tap_groups if len(group) == 1]
        coming = set(alone)

        def keep(tap: Tap, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            coming.discard(tap)
            kind = tap.stored_as(self._store_dtype, x.shape[-1])
            x = x if kind in SCALED else x.astype(kind)  # before it is moved, where that makes it smaller
            x = jax.lax.with_sharding_constraint(x.reshape(self.groups, -1, x.shape[-1]), self.groups_sharding)
            x = as_stored(jax.vmap(lambda rows, places: rows[places])(x, index), kind)
            finite = finite_rows(x).all(axis=1)
            if tap not in alone:
                return x, finite
            # Nothing of this program is left to hide the last transfer: start() sends it, under the next program.
            return jax.device_put(x[None], self.away_sharding) if coming else x[None], finite[None]

        rows = (batch[:, part] for part in range(3))
        kept = forward(
            params,
            *rows,
            config=self.config,
            taps=self.taps,
            attention=self.attend,
            mixture=self.mixture,
            keep=keep,
            runs=self.runs,
        )
        finite = jnp.concatenate([finite for _, finite in kept])
        finite = jax.lax.with_sharding_constraint(finite, NamedSharding(self.mesh, PartitionSpec(None, AXES)))
        return tuple(array for array, _ in kept), finite

    # -- batches --------------------------------------------------------------------------------------------------

    def start(self, batch: Batch) -> _Pending:
        """Send a batch to the devices. A shape's first batch is waited for, so that too little memory shows here."""
        check_tokens(batch.samples, self.config.vocab_size)
        shape = batch.shape
        program = self._wait_for(shape)
        packed = pack(batch, self._rows(shape))
        try:
            arrays, finite = program(
                self.params, put(packed.rows, self.rows_sharding), put(packed.places, self.groups_sharding)
            )
            arrays = [array if self._is_away(array) else jax.device_put(array, self.away_sharding) for array in arrays]
            if shape not in self._proven:
                jax.block_until_ready(arrays)
                self._proven.add(shape)
        except jax.errors.JaxRuntimeError as error:
            raise self._translated(error, shape) from error
        return _Pending(arrays, finite)

    def _is_away(self, array: jax.Array) -> bool:
        """A device_put that has nothing to do costs 0.1 ms of the interpreter's time all the same."""
        return array.sharding.is_equivalent_to(self.away_sharding, array.ndim)

    def _wait_for(self, shape: tuple[int, int]) -> Callable[..., Any]:
        if shape in self._proven:
            return self._program(shape).result()
        began = self._awaited.setdefault(shape, time.perf_counter())
        try:
            program = self._program(shape).result()
        except jax.errors.JaxRuntimeError as error:
            raise self._translated(error, shape) from error
        self._progress.compiled(time.perf_counter() - began)
        self._progress.phase(Phase.RUNNING)
        return program

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """Wait, and look at the rows where they are. No copy is made of pinned memory, nor on a CPU."""
        assert isinstance(pending, _Pending)  # noqa: S101 - the pipeline hands back what start gave it
        try:
            finite = np.concatenate([np.asarray(part.data) for part in pending.finite.addressable_shards], axis=1)
            stacks = [_blocks(array) for array in pending.arrays]
        except jax.errors.JaxRuntimeError as error:
            raise translated(error) from error
        if not finite.all():
            self._refuse(finite)
        blocks = dict(zip(self._arriving(), (blocks for stack in stacks for blocks in stack), strict=True))
        return [blocks[number] for number in range(len(self.taps))]

    def _arriving(self) -> list[int]:
        """The taps' numbers, in the order in which they come from the device."""
        return [number for group in self._tap_groups for number in group]

    def _refuse(self, finite: np.ndarray[Any, Any]) -> None:
        found = sorted(number for number, good in zip(self._arriving(), finite, strict=True) if not good.all())
        bad = ", ".join(str(self.taps[number]) for number in found)
        fix = "--store-dtype bfloat16 holds larger values" if self._store_dtype == "float16" else None
        raise Failure(f"NaN or infinity at {bad}", expected="finite activations", fix=fix)

    def _translated(self, error: jax.errors.JaxRuntimeError, shape: tuple[int, int]) -> Failure:
        """Too little memory is the pipeline's to cope with, but not on a pod: the other hosts may not have seen it."""
        failure = translated(error)
        if not isinstance(failure, OutOfDeviceMemory) or self.groups_sharding.is_fully_addressable:
            return failure
        tokens = shape[0] * shape[1]
        return Failure(
            f"a device's memory ran out at {shape[0]} × {shape[1]} tokens per device",
            fix=f"use --batch-tokens {tokens // 2} or less, or more model parallelism with --mesh-shape",
        )


def put(array: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
    """Onto the devices; on a pod, each process puts its own part of what all of them hold."""
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(array, sharding)
        return placed
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _blocks(array: jax.Array) -> list[list[RowBlock]]:
    """What this process holds of an array, by the array's own index map: for each of its taps, a block per group."""
    parts = [
        (part.index[1].start or 0, np.asarray(part.data)) for part in array.addressable_shards if not part.replica_id
    ]
    return [
        [
            RowBlock(first + g, data[tap, g])
            for first, data in sorted(parts, key=itemgetter(0))
            for g in range(data.shape[1])
        ]
        for tap in range(array.shape[0])
    ]


def translated(error: jax.errors.JaxRuntimeError) -> Failure:
    """An error of the device's runtime, as ours."""
    text = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in text:
        return OutOfDeviceMemory("the device's memory ran out")
    return Failure(f"the device failed: {text[:300]}")
