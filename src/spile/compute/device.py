"""The JAX producer of ``extract``: a model on a mesh of devices, of this host or of all hosts of a pod.

Each tapped array is packed (its stored tokens first, then padding), cast to the stored dtype or encoded in one byte per
number, and sent to the host. On GPUs and TPUs it goes to pinned host memory, which NumPy sees without another copy. The
rows of a scan over layers are one array, which is sent while the next batch is computed; the rows of a single layer are
sent inside the compiled program, while the following layers are computed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from spile.compute.batches import Batch
from spile.compute.mesh import AXES, MeshPlan, arrange_devices, describe_mesh
from spile.compute.producer import DoesNotCompile, OutOfDeviceMemory, Producer, RowBlock, check_tokens, not_finite, pack
from spile.compute.progress import Progress
from spile.compute.sizes import UNRELEASED, choose_sizes
from spile.errors import Failure
from spile.models.architecture import ModelConfig
from spile.models.attention import Attention, choose
from spile.models.decoder import Edit, Steering, forward, head_needed, layers_needed
from spile.models.layers import as_stored, finite_rows, sample_means
from spile.models.model_files import ModelFiles
from spile.models.params import LayerRun, Params, choose_runs, one_run_per_layer, param_shapes, tap_groups
from spile.models.weights import load
from spile.spec.phase import Phase
from spile.spec.positions import ALL, MEAN
from spile.spec.run import RunSpec
from spile.spec.taps import SCALED, Tap

_COMPILERS = max(2, (os.cpu_count() or 2) // 4)
"""Programs that are compiled in parallel."""
_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""With cuBLAS alone, the first program of a dense model takes 3.6 s to compile on an H200 instead of 5.4 s, and it runs
at the same rate."""
_CPU_OPTIONS: dict[str, str | bool] = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
"""On a CPU, XLA computes 16-bit numbers in float32. It would convert the weights of all layers before their scan,
which takes twice the memory of the weights; without this pass it converts those of one layer at a time."""
_POLL = 0.1
"""Seconds between checks whether a wait for a program is given up."""

_BLOCK_PARTS = (64, 16, 4)
"""With ``--positions``, the rows of a batch leave the device in a block of 1/64, 1/16, 1/4 or all of the batch."""

_Shape = tuple[int, int, int]
"""Batch rows per device, their length, and the rows of the block that is sent to the host."""


class _Pending(NamedTuple):
    arrays: Sequence[jax.Array]
    finite: jax.Array


def configure_jax(device: str = "auto") -> None:
    """Configure JAX before the devices are first used, unless the environment says otherwise.

    GPU memory is not preallocated, which would take 1.7 s of every start on an H200. Compiled programs are cached on
    disk, so that a resumed worker does not compile again.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":  # before anything else initialises a GPU
        jax.config.update("jax_platforms", "cpu")
    logging.getLogger("jax._src.xla_bridge").addFilter(_one_line)
    _enable_compilation_cache()


def _one_line(record: logging.LogRecord) -> bool:
    """Reduce a traceback in JAX's log to one line, such as for a GPU image on a machine without a GPU."""
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
    except OSError:  # a home folder that cannot be written to only costs compilations
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class DeviceProducer(Producer):
    """A model on its devices, and one compiled program per batch shape.

    ``params`` may be shapes at first: programs are compiled from them while the weights are read.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        taps: tuple[Tap, ...],
        *,
        store_dtype: str,
        mesh: Mesh,
        dtype: str,
        attention: str | None = None,
        block: int = 0,
        positions: str = ALL,
        progress: Progress | None = None,
        runs: Sequence[LayerRun] | None = None,
        edits: Sequence[tuple[Tap, Edit]] = (),
        options: dict[str, str | bool] | None = None,
    ) -> None:
        self.params, self.config, self.taps, self._edits = params, config, taps, edits
        self.runs = one_run_per_layer(layers_needed(taps, config.n_layers)) if runs is None else runs
        """How the layers of ``params`` are stacked."""
        self._options = options
        self._tap_groups = tap_groups(taps, self.runs)
        self._order = [number for group in self._tap_groups for number in group]
        """The numbers of the taps in the order in which they arrive from the device."""
        self._store_dtype = store_dtype
        first: jax.Device = mesh.devices.flat[0]
        self.attention = attention or choose(config, first.platform, first.device_kind, dtype, taps)
        self.mesh, self.dtype = mesh, dtype
        self.groups = mesh.size
        self._plan = MeshPlan(config, *mesh.devices.shape)
        self.mixture = self._plan.mixture(mesh)
        self._progress = progress or Progress()
        self._compilers = ThreadPoolExecutor(_COMPILERS, "spile-compile")
        self._programs: dict[_Shape, Future[Callable[..., Any]]] = {}
        self._computed: set[_Shape] = set()
        """Shapes of which a batch was computed: it fits into the device memory."""
        self._compiled: set[_Shape] = set()
        """Shapes whose program was waited for."""
        self._pool: Future[None] = Future()
        self._pool.set_result(None)
        self._lock = threading.Lock()
        # The devices of one model-parallel set compute the same batch rows; each then sends a group of its own.
        self.rows_sharding = NamedSharding(mesh, PartitionSpec("data"))
        self.groups_sharding = NamedSharding(mesh, PartitionSpec(AXES))
        self.host_sharding = NamedSharding(mesh, PartitionSpec(None, AXES))
        """The sharding of rows that are sent to the host: ``[taps of a group, groups, rows, width]``."""
        if first.platform in ("gpu", "tpu"):
            self.host_sharding = self.host_sharding.with_memory_kind("pinned_host")
        self._positions = positions
        self._block = block if self.host_sharding.memory_kind == "pinned_host" else 0

    @property
    def owned(self) -> Sequence[int]:  # type: ignore[override]
        """The groups on the devices of this process, from the index map of the sharding."""
        places = self.groups_sharding.addressable_devices_indices_map((self.groups,)).values()
        return sorted(index[0].start or 0 for index in places if index is not None)

    @property
    def attend(self) -> str | Attention:
        """The implementation of attention on the mesh."""
        return self._plan.attention(self.attention, self.mesh)

    def describe(self) -> str:
        return f"{describe_mesh(self.mesh)}, {self.dtype}, {self.attention} attention"

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)

    # -- programs -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        self._program(self._shape(batch))

    def reserve(self, size: int) -> None:
        """Allocate the pool of pinned memory per device in the background, so that no batch waits for it.

        It is allocated in one piece, because the pool grows by doubling and each growth blocks the caller, and as the
        output of a program, because ``device_put`` would hold the interpreter lock while pages are pinned.
        """
        if self.host_sharding.memory_kind == "pinned_host":
            self._pool = self._compilers.submit(self._reserve, size)

    def _reserve(self, size: int) -> None:
        with self._progress.span("pinned memory"):
            for device in self.mesh.local_devices:
                pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
                try:
                    program = jax.jit(lambda: jnp.zeros(size, jnp.uint8), out_shardings=pinned).lower().compile()
                    jax.block_until_ready(program())
                except jax.errors.JaxRuntimeError as error:  # a smaller pool only costs speed
                    self._progress.log(f"could not allocate {size:,} bytes of pinned memory: {str(error)[:100]}")

    def _shape(self, batch: Batch) -> _Shape:
        """Return what the program of a batch depends on.

        Without ``--positions`` the block is the same for every batch, so that memory is reused: blocks of many sizes
        fragment the pool of pinned memory, and growing it stops the device for seconds. With ``--positions`` only the
        selected rows leave the device, in the smallest of a few block sizes that holds them.
        """
        rows, length = batch.shape
        block = max(self._block, rows * length)
        if self._positions != ALL:
            stored = max(map(batch.stored_rows_of, range(len(batch.groups))), default=0)
            block = min((block // part for part in _BLOCK_PARTS if block // part >= stored), default=block)
        return rows, length, max(1, block)

    def _program(self, shape: _Shape) -> Future[Callable[..., Any]]:
        with self._lock:
            if shape not in self._programs:
                self._programs[shape] = self._compilers.submit(self.compile, shape)
            return self._programs[shape]

    def await_program(self, batch: Batch, cancelled: Callable[[], bool]) -> None:
        shape = self._shape(batch)
        if shape in self._compiled:
            return
        began = time.perf_counter()
        futures: tuple[Future[Any], ...] = (self._program(shape), self._pool)
        if not all(future.done() for future in futures):
            self._progress.phase(Phase.COMPILING, f"for {shape[0]} × {shape[1]} tokens")
        while wait(futures, timeout=_POLL).not_done:
            if cancelled():
                return
        self._compiled.add(shape)
        self._progress.compiled(time.perf_counter() - began)
        self._progress.phase(Phase.RUNNING)

    def compile(self, shape: _Shape) -> jax.stages.Compiled:
        """Compile the program for batches of this shape: rows per device, their length, and stored rows."""
        with self._progress.span(f"compile {shape[0]} × {shape[1]}"):
            return compile_with_fallback(self.attention, lambda name: self._compile(shape, name), self._use_xla)

    def _compile(self, shape: _Shape, attention: str) -> jax.stages.Compiled:
        traced = self._trace(shape, attention)
        try:
            return compile_traced(traced, self.mesh, self._options or self._default_options())
        except OutOfDeviceMemory as error:
            raise self._out_of_memory(error, shape) from error.__cause__

    def _use_xla(self, why: str) -> None:
        """Use XLA's attention from now on; programs are compiled in parallel, and only the first one logs it."""
        with self._lock:
            if self.attention != "xla":
                self.attention = "xla"
                self._progress.log(why)

    def _default_options(self) -> dict[str, str | bool] | None:
        platform = self.mesh.devices.flat[0].platform
        if platform == "gpu" and self.config.experts is None:
            return _GPU_OPTIONS
        return _CPU_OPTIONS if platform == "cpu" and jnp.dtype(self.dtype).itemsize < 4 else None

    def _trace(self, shape: _Shape, attention: str) -> jax.stages.Traced:
        rows, length, block = shape
        batch = jax.ShapeDtypeStruct((self.groups * rows, 3, length), jnp.int32, sharding=self.rows_sharding)
        index = jax.ShapeDtypeStruct((self.groups, block), jnp.int32, sharding=self.groups_sharding)
        step = partial(self._step, self._plan.attention(attention, self.mesh))
        return jax.jit(step).trace(self.params, batch, index)

    def _step(
        self, attend: str | Attention, params: Params, batch: jax.Array, index: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Compute a batch: this is the compiled program."""
        info = batch.reshape(self.groups, -1, 3, batch.shape[-1]).swapaxes(1, 2).reshape(self.groups, 3, -1)
        single = [self.taps[group[0]] for group in self._tap_groups if len(group) == 1]
        remaining = set(single)

        def keep(tap: Tap, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            remaining.discard(tap)
            kind = tap.stored_as(self._store_dtype, x.shape[-1])
            mean = self._positions == MEAN
            x = x if mean or kind in SCALED else x.astype(kind)  # before it is moved, because that makes it smaller
            x = jax.lax.with_sharding_constraint(x.reshape(self.groups, -1, x.shape[-1]), self.groups_sharding)
            if mean:
                x = jax.vmap(sample_means)(x, info[:, 1], info[:, 2], index)
            else:
                x = jax.vmap(lambda rows, places: rows[places])(x, index)
            x = as_stored(x, kind)
            finite = finite_rows(x).all(axis=1)
            if tap not in single:
                return x, finite
            # No computation of this program is left to overlap the last transfer: start() sends it during the next.
            return jax.device_put(x[None], self.host_sharding) if remaining else x[None], finite[None]

        rows = (batch[:, part] for part in range(3))
        kept = forward(
            params,
            *rows,
            config=self.config,
            taps=self.taps,
            attention=attend,
            mixture=self.mixture,
            keep=keep,
            runs=self.runs,
            edits=self._edits,
        )
        finite = jnp.concatenate([finite for _, finite in kept])
        finite = jax.lax.with_sharding_constraint(finite, NamedSharding(self.mesh, PartitionSpec(None, AXES)))
        return tuple(array for array, _ in kept), finite

    # -- batches --------------------------------------------------------------------------------------------------

    def start(self, batch: Batch) -> _Pending:
        """Start a batch. The first batch of a shape is waited for, so that lack of memory is noticed here."""
        check_tokens(batch.samples, self.config.vocab_size)
        self.await_program(batch, lambda: False)
        shape = self._shape(batch)
        rows, places = pack(batch, shape[2])
        try:
            program = self._program(shape).result()
            arrays, finite = program(self.params, put(rows, self.rows_sharding), put(places, self.groups_sharding))
            arrays = [array if self._is_sent(array) else jax.device_put(array, self.host_sharding) for array in arrays]
            if shape not in self._computed:
                jax.block_until_ready(arrays)
                self._computed.add(shape)
        except jax.errors.JaxRuntimeError as error:
            raise self._out_of_memory(convert_error(error), shape) from error
        return _Pending(arrays, finite)

    def _is_sent(self, array: jax.Array) -> bool:
        """Return whether no transfer is needed; a needless device_put would cost 0.1 ms."""
        return array.sharding.is_equivalent_to(self.host_sharding, array.ndim)

    def fetch(self, pending: _Pending) -> Sequence[Sequence[RowBlock]]:
        try:
            finite = np.concatenate([np.asarray(part.data) for part in pending.finite.addressable_shards], axis=1)
            stacks = [_blocks(array) for array in pending.arrays]
        except jax.errors.JaxRuntimeError as error:
            raise convert_error(error) from error
        if not finite.all():
            self._refuse_infinite(finite)
        blocks = dict(zip(self._order, (blocks for stack in stacks for blocks in stack), strict=True))
        return [blocks[number] for number in range(len(self.taps))]

    def _refuse_infinite(self, finite: np.ndarray[Any, Any]) -> None:
        found = sorted(number for number, good in zip(self._order, finite, strict=True) if not good.all())
        raise not_finite([self.taps[number] for number in found], self._store_dtype)

    def _out_of_memory(self, failure: Failure, shape: _Shape) -> Failure:
        """Return the failure. On a pod, lack of memory ends the run: the other hosts may not have noticed it."""
        if not isinstance(failure, OutOfDeviceMemory) or self.groups_sharding.is_fully_addressable:
            return failure
        tokens = shape[0] * shape[1]
        return Failure(
            f"a device's memory ran out at {shape[0]} × {shape[1]} tokens per device",
            fix=f"use --batch-tokens {tokens // 2} or less, or more model parallelism with --mesh-shape",
        )


def put(array: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
    """Put an array on the devices; on a pod, each process puts its own part."""
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(array, sharding)
        return placed
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_steering(steering: Steering | None, mesh: Mesh) -> Steering | None:
    """Put the vectors on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed: Steering | None = jax.tree.map(lambda value: put(value, everywhere), steering)
    return placed


def _blocks(array: jax.Array) -> list[list[RowBlock]]:
    """Return what this process holds of an array: for each of its taps, a block per group."""
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


def convert_error(error: Exception, kind: type[Failure] = Failure, what: str = "the device failed") -> Failure:
    """Convert an error of the JAX runtime or of a compiler to one line; dumps of programs after it are left out."""
    text = " ".join(str(error).split("\n\n")[0].split())
    if "RESOURCE_EXHAUSTED" in text and "memory space vmem" not in text:  # vmem: a kernel's own memory
        return OutOfDeviceMemory("the device's memory ran out")
    return kind(f"{what}: {text[:300] or type(error).__name__}")


def compile_traced(
    traced: jax.stages.Traced, mesh: Mesh, options: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """Compile a program. Compilers of kernels raise errors of other classes than XLA's; all become one line."""
    try:
        compiled: jax.stages.Compiled = traced.lower().compile(options)
    except Exception as error:
        device = mesh.devices.flat[0].device_kind
        raise convert_error(error, DoesNotCompile, f"the program does not compile for {device}") from error
    return compiled


_Program = TypeVar("_Program")


def compile_with_fallback(
    attention: str, compile_for: Callable[[str], _Program], use_xla: Callable[[str], None]
) -> _Program:
    """Compile a program with an implementation of attention; if a kernel does not compile, with XLA's attention."""
    try:
        return compile_for(attention)
    except OutOfDeviceMemory:
        raise
    except Exception as error:
        if attention in ("xla", "blocked"):
            raise
        program = compile_for("xla")  # raises an error of its own if the kernel is not at fault
        use_xla(f"{error}. Attention is computed by XLA instead of the {attention} kernel, which is slower")
        return program


def place_model(
    files: ModelFiles,
    taps: tuple[Tap, ...],
    spec: RunSpec,
    row_bytes: int,
    progress: Progress,
    prepare: Callable[[DeviceProducer], None],
    steering: Steering | None = None,
    read: Callable[..., Params] | None = None,
) -> DeviceProducer:
    """Load a model onto all devices, including those of the other hosts of a pod.

    While the weights are read, the first program is compiled and the pinned memory is allocated. ``prepare`` calls
    :meth:`DeviceProducer.prepare` for the first batch. ``row_bytes`` is what one token takes in a shard.
    ``read`` returns the weights instead of :func:`load`.
    """
    config, dtype = files.config, spec.dtype
    layers, head = layers_needed(taps, config.n_layers), head_needed(taps)
    mesh, plan = arrange_devices(config, dtype, spec.mesh_shape, layers, head=head, log=progress.log)
    place, sizes = plan.place(mesh), choose_sizes(spec, row_bytes)
    runs = choose_runs(config, taps, layers, jnp.dtype(dtype).itemsize)
    steering = place_steering(steering, mesh)
    producer = DeviceProducer(
        replace(param_shapes(config, dtype, runs, place, head=head), steering=steering),
        config,
        taps,
        store_dtype=spec.store_dtype,
        mesh=mesh,
        dtype=dtype,
        block=sizes.batch_tokens,
        positions=spec.positions,
        progress=progress,
        runs=runs,
    )
    with progress.span("first samples"):
        # Before the weights are read: their transfers hold the interpreter lock, which tokenizing needs.
        prepare(producer)
    if spec.positions == ALL:
        producer.reserve(((sizes.in_flight or 1) + UNRELEASED) * sizes.batch_tokens * row_bytes)
    try:
        with progress.span("weights"):
            weights = (read or load)(files, dtype, layers, place, head=head, runs=runs)
            producer.params = replace(weights, steering=steering)
    except BaseException:
        producer.close()
        raise
    return producer
