"""Compile the worker's program ahead of time with the real TPU compiler, on a machine without a TPU.

``libtpu`` (``pip install 'spile[tpu]'``) runs in a process of its own: it needs its own environment, writes much to the
standard error, and would otherwise take the lock of a running worker.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spile.errors import Failure, SpecError, SpileError
from spile.models.architecture import ModelConfig
from spile.planning.machines import Machine, parse_machine
from spile.spec.positions import ALL
from spile.spec.taps import Tap

if TYPE_CHECKING:
    from spile.compute.device import DeviceProducer

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # for arrays on the host; the compiler is selected by name
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_MOST_COMPILATIONS = 6
_FULL_FRACTION = 0.9
"""A batch that uses this fraction of the memory is large enough."""
_NEAR_FACTOR = 1.15
"""A batch within this factor of one that does not fit is large enough."""


@dataclass(frozen=True)
class Program:
    """The program to compile: a model, its taps, a padded length, and a machine."""

    config: ModelConfig
    taps: tuple[Tap, ...]
    machine: str
    length: int
    dtype: str = "bfloat16"
    store_dtype: str = "bfloat16"
    mesh_shape: tuple[int, int] | None = None
    positions: str = ALL


@dataclass(frozen=True)
class Fit:
    """The compiler's result for one batch size. Bytes are per device."""

    rows: int
    """Sequences per device."""
    length: int
    mesh: tuple[int, int]
    memory: int
    """The memory of a device."""
    fits: bool
    weights: int = 0
    peak: int = 0
    """The peak, including weights and the rows of earlier batches that are still being sent."""
    temporary: int = 0
    host: int = 0
    """Rows in the memory of the host."""
    seconds: float = 0.0
    """How long the compiler took."""
    why: str = ""
    """The compiler's message if it does not fit."""

    @property
    def tokens(self) -> int:
        """Tokens per step and device: the unit of ``--batch-tokens``."""
        return self.rows * self.length


def available() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def search(program: Program, rows: int, *, find_largest: bool = True) -> Iterator[Fit]:
    """Compile for ``rows`` sequences per device; then search for the largest number that fits, if it is wanted."""
    if not available():
        raise SpecError("the TPU compiler", expected="libtpu", found="none", fix="run: pip install 'spile[tpu]'")
    if find_largest:
        yield from _bisect(functools.partial(_compile, program), rows)
    else:
        yield _compile(program, rows)


def _bisect(compile_for: Callable[[int], Fit], rows: int) -> Iterator[Fit]:
    """Search between a batch that fits and one that does not. The first guess is derived from the unused memory."""
    low: Fit | None = None
    too_many: int | None = None
    for _ in range(_MOST_COMPILATIONS):
        fit = compile_for(rows)
        yield fit
        if fit.fits:
            low = fit
            if fit.peak >= _FULL_FRACTION * fit.memory:
                return
        else:
            too_many = rows
        if low is not None and too_many is not None:
            if too_many <= low.rows + 1 or too_many <= low.rows * _NEAR_FACTOR:
                return
            rows = max(low.rows + 1, round((low.rows * too_many) ** 0.5))
        elif low is not None:
            grown = low.rows * (low.memory - low.weights) / max(low.peak - low.weights, 1)
            rows = max(low.rows + 1, int(min(grown * 0.97, low.rows * 16)))
        elif rows == 1:
            return
        else:
            rows = max(1, rows // 4)


def largest(fits: list[Fit]) -> Fit | None:
    return max((fit for fit in fits if fit.fits), key=lambda fit: fit.rows, default=None)


def _compile(program: Program, rows: int) -> Fit:
    """Call :func:`compile_rows` in a new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "spile.planning.tpu_compiler"],
        input=pickle.dumps((program, rows)),
        capture_output=True,
        env={**environment, **ENVIRONMENT},
        check=False,
    )
    if done.returncode:
        raise Failure("the TPU compiler ended", found=_last_words(done.stderr.decode(errors="replace")))
    found: Fit | SpileError = pickle.loads(done.stdout)  # noqa: S301 - from our own process
    if isinstance(found, SpileError):
        raise found
    return found


def _last_words(log: str) -> str:
    """Return the line of the compiler's log that says why its process ended: the last fatal one, or the last one."""
    lines = [line.strip() for line in log.split("\n") if line.strip() and "report a bug" not in line]
    fatal = [line for line in lines if re.match(r"F\d{4} |.*(Error|Exception): ", line)]
    return (fatal or lines or ["no message"])[-1][:300]


# -- in the compiler's process ----------------------------------------------------------------------------------------


def make_producer(program: Program) -> DeviceProducer:
    """Return the worker's own producer on the devices of a machine that is not here: it can only compile."""
    import jax.numpy as jnp

    from spile.compute.device import DeviceProducer
    from spile.compute.mesh import MeshPlan, default_shape, make_mesh
    from spile.models.decoder import head_needed, layers_needed
    from spile.models.params import choose_runs, param_shapes

    machine, config = parse_machine(program.machine), program.config
    devices = topology_devices(machine)
    layers, head = layers_needed(program.taps, config.n_layers), head_needed(program.taps)
    itemsize = jnp.dtype(program.dtype).itemsize
    shape = program.mesh_shape or default_shape(
        config, len(devices), itemsize, machine.hbm_per_device, layers, head=head
    )
    mesh, plan = make_mesh(shape, devices), MeshPlan(config, *shape)
    runs = choose_runs(config, program.taps, layers, itemsize)
    return DeviceProducer(
        param_shapes(config, program.dtype, runs, plan.place(mesh), head=head),
        config,
        program.taps,
        store_dtype=program.store_dtype,
        mesh=mesh,
        dtype=program.dtype,
        positions=program.positions,
        runs=runs,
    )


def compile_rows(program: Program, rows: int) -> Fit:
    """Compile the worker's own program for this many rows per device."""
    import jax

    from spile.compute.batches import AHEAD
    from spile.compute.producer import OutOfDeviceMemory

    producer, memory = make_producer(program), parse_machine(program.machine).hbm_per_device
    parts = (
        (math.prod(leaf.sharding.shard_shape(leaf.shape)), leaf.dtype) for leaf in jax.tree.leaves(producer.params)
    )
    weights = sum(size * dtype.itemsize for size, dtype in parts)
    no_fit = Fit(rows, program.length, producer.mesh.devices.shape, memory, False, weights)
    began = time.perf_counter()
    try:
        compiled = producer.compile((rows, program.length, rows * program.length))
    except OutOfDeviceMemory as error:
        why = " ".join(str(error.__cause__).split())[:300]
        return dataclasses.replace(no_fit, seconds=time.perf_counter() - began, why=why)
    used: Any = compiled.memory_analysis()
    output = used.output_size_in_bytes  # stays on the device and is sent while the next programs run
    peak = used.peak_memory_in_bytes + used.generated_code_size_in_bytes + (AHEAD - 1) * output
    return dataclasses.replace(
        no_fit,
        fits=peak <= memory,
        peak=peak,
        temporary=used.temp_size_in_bytes,
        host=used.host_output_size_in_bytes + output,
        seconds=time.perf_counter() - began,
    )


def topology_devices(machine: Machine) -> list[Any]:
    """Return the devices of a machine as JAX's compiler describes them."""
    from jax.experimental import topologies

    if not machine.topology:
        raise SpecError("--topology", expected="a TPU", found=machine.name)
    more: dict[str, Any] = {"chip_config_name": "megacore"} if machine.generation == "v4" else {}
    if machine.hosts == 1 and machine.chips in (1, 8):
        # The compiler assumes hosts of 2 × 2 chips; these are one host of another shape.
        more["chips_per_host_bounds"] = (*machine.shape, 1)
    description = topologies.get_topology_desc(platform="tpu", topology_name=machine.topology, **more)
    return list(description.devices)


def _main() -> None:
    # Redirect what the compiler prints: the standard output is for the result.
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    program, rows = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own process
    found: Fit | SpileError
    try:
        found = compile_rows(program, rows)
    except SpileError as error:
        found = error
    with result:
        pickle.dump(found, result)


if __name__ == "__main__":
    # Import this module under its own name, so that both processes pickle the same classes.
    from spile.planning.tpu_compiler import _main as main

    main()
