"""Compare unrolled layers with scans over stacked weights: ``python -m bench.scan``.

For one model and packed sequences: the seconds to trace and to compile, the device memory, and the tokens per second
with the rows of every layer copied to the host, or with ``--one 12`` those of one layer. It uses the devices of this
machine, or, with ``--machine v5e:2x2``, the real TPU compiler (``pip install 'spile[tpu]'``), which compiles only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from typing import Any

if "--machine" in sys.argv:
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

import jax
import jax.numpy as jnp
import numpy as np
from tests.fakes.random_weights import random

from bench.shapes import _COMMON, SHAPES
from spile.compute.batches import Batch
from spile.compute.device import DeviceProducer
from spile.compute.mesh import MeshPlan, default_shape, make_mesh
from spile.models.decoder import layers_needed
from spile.models.families import read_config
from spile.models.params import LayerRun, Params, choose_runs, one_run_per_layer, param_shapes, stack_layers
from spile.planning.machines import parse_machine
from spile.planning.tpu_compiler import topology_devices
from spile.run.resolve import compute_dtype_for
from spile.spec.sample import Sample
from spile.spec.taps import select_taps

_DEPTH = 3
"""The number of batches in flight."""


def make(args: argparse.Namespace, way: str) -> DeviceProducer:
    """Return a producer with random weights, or only with shapes if there is no device."""
    config = read_config({**_COMMON, **SHAPES[args.shape]})
    devices = None if args.machine is None else topology_devices(parse_machine(args.machine))
    platform = jax.default_backend() if devices is None else "tpu"
    dtype = compute_dtype_for(platform)
    count, itemsize = len(devices or jax.devices()), jnp.dtype(dtype).itemsize
    memory = None if args.machine is None else parse_machine(args.machine).hbm_bytes
    taps = select_taps(("residual",), None if args.one is None else (args.one,), config.n_layers)
    layers = layers_needed(taps, config.n_layers)
    shape = default_shape(config, count, itemsize, memory, layers)
    mesh = make_mesh(shape, devices)
    place = MeshPlan(config, *shape).place(mesh)
    known = {"unrolled": one_run_per_layer(layers), "scan": choose_runs(config, taps, layers, itemsize)}
    runs = known[way]
    params = param_shapes(config, dtype, runs, place)
    if devices is None:
        params = together(random(config, jax.random.key(0), dtype, layers, place), params, runs)
    return DeviceProducer(
        params,
        config,
        taps,
        store_dtype="bfloat16",
        mesh=mesh,
        dtype=dtype,
        runs=runs,
    )


def together(params: Params, shapes: Params, runs: tuple[LayerRun, ...]) -> Params:
    """Return the weights as the loader would return them."""
    joined = stack_layers(params, runs, jnp.stack)
    placed_there: Params = jax.tree.map(lambda array, shape: jax.device_put(array, shape.sharding), joined, shapes)
    return placed_there


def measure(args: argparse.Namespace, way: str) -> None:
    producer = make(args, way)
    shape = (args.rows, args.length, args.rows * args.length)
    began = time.perf_counter()
    lowered = producer._trace(shape, producer.attention).lower()
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    used: Any = program.memory_analysis()
    text = f"{way:9} traced {traced - began:5.1f} s, compiled {compiled - traced:6.1f} s"
    text += f", temporaries {used.temp_size_in_bytes / 1e9:.2f} GB, outputs {used.output_size_in_bytes / 1e9:.2f} GB"
    if args.machine is None:
        text += f", {rate(producer, shape, args.batches):>12,.0f} tokens/s"
    print(text, flush=True)


def rate(producer: DeviceProducer, shape: tuple[int, int, int], batches: int) -> float:
    """Return tokens per second, with the rows of every batch copied to the host."""
    rows, length, _ = shape
    draw = np.random.default_rng(0)

    def row() -> tuple[Sample, ...]:
        tokens = draw.integers(0, 1000, (4, length // 4)).astype(np.int32)
        return tuple(Sample(n, str(n), each, np.zeros(len(each), np.uint8)) for n, each in enumerate(tokens))

    batch = Batch(tuple(tuple(row() for _ in range(rows)) for _ in range(producer.groups)), rows, length)
    for _ in range(2):
        producer.fetch(producer.start(batch))
    waiting: deque[Any] = deque()
    began = time.perf_counter()
    for _ in range(batches):
        waiting.append(producer.start(batch))
        if len(waiting) > _DEPTH:
            producer.fetch(waiting.popleft())
    for pending in waiting:
        producer.fetch(pending)
    return batches * batch.real_tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--machine")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--ways", default="unrolled,scan")
    parser.add_argument("--one", type=int, help="copy only the rows of this layer to the host")
    args = parser.parse_args()
    about = "every layer" if args.one is None else f"layer {args.one}"
    where = args.machine or jax.devices()[0].device_kind
    print(f"{where}, {args.shape}, {args.rows} × {args.length} tokens per device, {about}", flush=True)
    for way in args.ways.split(","):
        measure(args, way)


if __name__ == "__main__":
    main()
