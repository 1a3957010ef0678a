"""The limits of this machine, measured plainly: compute, the way off the device, the host's copy, the sink.

Each is what the hardware gives to a loop that does nothing else; the run is judged against the slowest of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spile.models.decoder import Drawn, as_it_is, hidden, layers_needed
from spile.models.tensors import flops_per_token
from spile.objects.crc import ChunkedCrc
from spile.worker.batches import Batch
from spile.worker.device import DeviceProducer
from spile.worker.producer import pack

__all__ = ["Limits", "bare_forward", "device_to_host", "host_copy", "matmul", "sequential_write"]

_PIECE = 4 << 20
"""Bytes a write."""
_COMPILERS = max(2, (os.cpu_count() or 2) // 4)


@dataclass(frozen=True)
class Limits:
    """Rates in FLOP/s, tokens/s and bytes/s."""

    matmul_flops: float
    forward_flops: float
    """Model FLOPs of the bare forward, without the LM head, attention counted."""
    forward_tokens: float
    device_to_host: float | None
    """None where rows are on the host already."""
    host_copy: float
    """Copy, checksum and write together, in threads: they share the host's memory."""
    sink: float
    """Written and made durable, as many files at once as the run has lanes."""
    one_file: float
    """Written in sequence into one file and made durable."""

    def tokens(self, bytes_per_token: int) -> dict[str, float]:
        """Each limit as real tokens per second."""
        rates = {
            "model": self.forward_tokens,
            "host copy": self.host_copy / bytes_per_token,
            "sink": self.sink / bytes_per_token,
        }
        if self.device_to_host is not None:
            rates["device to host"] = self.device_to_host / bytes_per_token
        return rates


def _best(run: Callable[[], object], repeat: int = 3) -> float:
    """The shortest time of several: what the hardware can do, not what else it did meanwhile."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def matmul(size: int, dtype: str, times: int = 8) -> float:
    """FLOP/s of square products one after another, on all local devices together."""
    key = jax.random.key(0)

    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(times):
            a = jnp.matmul(a, b, precision=jax.lax.Precision.DEFAULT)
        return a

    a = jax.random.normal(key, (size, size), jnp.dtype(dtype)) / size**0.5
    step = jax.jit(chain)
    jax.block_until_ready(step(a, a))
    seconds = _best(lambda: jax.block_until_ready(step(a, a)))
    return jax.local_device_count() * times * 2 * size**3 / seconds


def bare_forward(producer: DeviceProducer, batches: Sequence[Batch]) -> tuple[float, float]:
    """Real tokens/s and model FLOP/s of these batches up to the last tapped layer, nothing kept but one number."""
    config, layers = producer.config, layers_needed(producer.taps, producer.config.n_layers)

    def step(params: Any, batch: jax.Array) -> jax.Array:
        # The largest value: a sum could be moved inside the products, and the products away.
        tokens, positions, segments = (batch[:, part] for part in range(3))
        nothing, attend, mix = Drawn((), as_it_is), producer.attend, producer.mixture
        x = hidden(params, tokens, positions, segments, config, producer.runs, attend, mix, nothing)
        return jnp.max(jnp.abs(x))

    inputs = [jax.device_put(pack(batch).rows, producer.rows_sharding) for batch in batches]
    shapes = {array.shape: array for array in inputs}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        compiled = pool.map(lambda array: jax.jit(step).lower(producer.params, array).compile(), shapes.values())
        programs = dict(zip(shapes, compiled, strict=True))

    def run() -> None:
        jax.block_until_ready([programs[array.shape](producer.params, array) for array in inputs])

    run()
    seconds = _best(run, 2)
    lengths = [len(sample) for batch in batches for sample in batch.samples]
    flops = sum(flops_per_token(config, length, layers - 1) * length for length in lengths)
    return sum(lengths) / seconds, flops / seconds


def device_to_host(producer: DeviceProducer, size: int = 1 << 29) -> float | None:
    """Bytes/s into pinned host memory, from all local devices together."""
    if producer.away_sharding.memory_kind != "pinned_host":
        return None
    rows = producer.groups
    array = jax.device_put(jnp.ones((rows, size // 2), jnp.bfloat16), producer.rows_sharding)
    away = producer.rows_sharding.with_memory_kind("pinned_host")
    step = jax.jit(lambda x: jax.device_put(x * 1, away))
    jax.block_until_ready(step(array))
    seconds = _best(lambda: jax.block_until_ready([step(array) for _ in range(4)]))
    return 4 * rows * size / seconds


def host_copy(folder: Path, files: int, size: int) -> float:
    """Bytes/s of checksum and write into new files of this folder, a thread each, from memory that no cache holds."""
    source = np.resize(np.random.default_rng(0).integers(0, 256, 16 * _PIECE, np.uint8), files * size)

    def write(number: int, handle: int) -> None:
        own, crc = source[number * size : (number + 1) * size].data, ChunkedCrc()
        for start in range(0, size, _PIECE):
            piece = own[start : start + _PIECE]
            crc.extend(piece)
            os.pwrite(handle, piece, start)

    return files * size / _side_by_side(folder, files, write)


def sequential_write(folder: Path, files: int, size: int) -> float:
    """Bytes/s written in sequence into new files, a thread each, and synced once, at the end."""
    source = np.random.default_rng(0).integers(0, 256, 4 * _PIECE, np.uint8)

    def write(_: int, handle: int) -> None:
        for start in range(0, size, source.nbytes):
            os.pwrite(handle, source.data, start)
        os.fsync(handle)

    return files * size / _side_by_side(folder, files, write)


def _side_by_side(folder: Path, files: int, write: Callable[[int, int], None], repeat: int = 3) -> float:
    """The shortest time of several; making the files and taking them away again is not part of it."""
    times = []
    for _ in range(repeat):
        with ExitStack() as stack, ThreadPoolExecutor(files) as pool:
            handles = [stack.enter_context(tempfile.TemporaryFile(dir=folder)).fileno() for _ in range(files)]
            began = time.perf_counter()
            list(pool.map(write, range(files), handles))
            times.append(time.perf_counter() - began)
    return min(times)
