"""The checks before the work: a slice and its hosts, and the program of a run on the devices that will run it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spile.compute.batches import Batch
from spile.compute.device import DeviceProducer, configure_jax, place_model
from spile.compute.generator import GenerationPrograms, Generator, SlotPlan
from spile.compute.length import room_here, with_length
from spile.compute.mesh import MeshPlan, arrange_devices, describe_mesh, make_mesh
from spile.compute.producer import DoesNotCompile, OutOfDeviceMemory
from spile.compute.progress import Progress
from spile.errors import PodError, UnsupportedModel, UserError
from spile.models import model_files
from spile.models.model_files import ModelFiles
from spile.models.params import LayerRun, Params, one_run_per_layer, param_shapes
from spile.models.weights import Place, load
from spile.run.pod.pod import BARRIERS, WorkerGroup, check_same_command, log_devices
from spile.run.pod.rollcall import Log
from spile.run.resolve import (
    compute_dtype_for,
    prompt_tokenizer,
    read_steering,
    tap_rows_of,
    use_device,
)
from spile.spec.positions import ALL
from spile.spec.run import EMBEDDED, GenerationSpec, RunSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap, row_bytes

_CHECK_TOKENS = 64
_TOLERANCE = 0.02
"""More than the rounding of bfloat16; a wrong collective differs by far more."""
_PROGRAM_TOKENS = 512
"""The length of the batch that tests a run's program: the blocks of a kernel are not larger for longer ones."""
_ANSWER_TOKENS = 4
CHECKED_PLATFORMS = ("tpu",)
"""Where a worker checks the program before it claims a stream. Elsewhere it compiles for every device that JAX sees."""


def check_pod(hosts: WorkerGroup, log: Log, spec: RunSpec | None = None) -> None:
    """Check barriers, devices, a forward pass over all devices against one on this host, and the program of a run."""
    if not hosts.name:
        log("One host: nothing between hosts is tested. On every host: spile run --tpu-prefix NAME -- spile pod check")
    log_devices(hosts, log)
    for name in BARRIERS[1:]:
        if name == "extraction_start":
            _check_forward(hosts, log)
            if spec is not None:
                check_program(spec, hosts, log)
        hosts.barrier(name)
        log(f"✓ Passed '{name}' barrier")
    log(f"✓ {hosts.name or 'This process'}: all checks passed")


def _check_forward(hosts: WorkerGroup, log: Log) -> None:
    """Compare the embedded model on the whole mesh with the same model on one device."""
    files = model_files.find(EMBEDDED)
    taps = (Tap("residual", files.config.n_layers - 1),)
    dtype = compute_dtype_for(jax.default_backend())

    def rows(devices: list[jax.Device], shape: tuple[int, int]) -> list[Any]:
        """Return the rows that each device computes for the same sample."""
        mesh = make_mesh(shape, devices)
        params = load(files, dtype, None, MeshPlan(files.config, *shape).place(mesh))
        progress = Progress(log=log)
        producer = DeviceProducer(
            params, files.config, taps, store_dtype="float32", mesh=mesh, dtype=dtype, progress=progress
        )
        batch = _batch(producer, _sample(files, _CHECK_TOKENS))
        return [block.rows.astype(np.float64) for block in producer.fetch(producer.start(batch))[0]]

    count = jax.device_count()
    # Both axes of the mesh, if possible, so that collectives are tested too.
    together = rows(jax.devices(), (count // 2, 2) if count % 2 == 0 else (count, 1))
    (reference,) = rows(jax.local_devices()[:1], (1, 1))
    worst = max(float(np.abs(each - reference).max()) for each in together) / float(np.sqrt(np.mean(reference**2)))
    if worst > _TOLERANCE:
        raise PodError(
            f"{hosts.name or 'this process'}: the forward over all devices",
            expected=f"rows as one device computes them, to {_TOLERANCE:g} of their size",
            found=f"{worst:.3g}",
            fix="recreate this slice; one of its chips or links is broken",
        )
    log(f"✓ Forward over {count} devices agrees with one device (largest difference {worst:.1e})")


def _sample(files: ModelFiles, length: int) -> Sample:
    tokens = np.arange(length, dtype=np.int32) % files.config.vocab_size
    return Sample(0, "check", tokens, np.zeros(length, np.uint8))


def _batch(producer: DeviceProducer, sample: Sample) -> Batch:
    return Batch((((sample,),),) * producer.groups, 1, len(sample))


# -- the program of a run ----------------------------------------------------------------------------------------------


def check_before_work(spec: RunSpec, hosts: WorkerGroup, log: Log) -> None:
    """Check the program of a run where compiling may fail, before its model is fetched and a stream is claimed."""
    configure_jax(spec.device)
    if spec.backend != "torch" and jax.default_backend() in CHECKED_PLATFORMS:
        check_program(spec, hosts, log)


def check_program(spec: RunSpec, hosts: WorkerGroup, log: Log) -> None:
    """Compile the programs of a run and run them on one small batch, with the devices of the run.

    The weights are zeros: only the config and the tokenizer of the model are fetched.

    Raises:
        UserError: A program does not compile or does not fit, so that each worker of this run would fail.

    """
    configure_jax(spec.device)
    check_same_command(hosts.begin_run(), spec)
    began = time.perf_counter()
    try:
        files = model_files.find(spec.model, spec.revision, weights=False)
        platform = use_device(spec.device, "jax")
        known = files.config.learned_positions
        spec = with_length(spec, None, files.config, (), 0, lambda: room_here("jax"), known)
        if spec.dtype == "auto":
            spec = replace(spec, dtype=compute_dtype_for(platform))  # type: ignore[arg-type]
        progress = Progress(log=log if hosts.first else lambda _line: None)
        if spec.generation is None:
            devices = _run_extraction(spec, files, progress)
        else:
            devices = _run_generation(spec, replace(spec.generation, max_new_tokens=_ANSWER_TOKENS), files, progress)
    except UnsupportedModel:
        log(f"{spec.model} runs in PyTorch: there is no program to compile")
        return
    except (DoesNotCompile, OutOfDeviceMemory) as error:
        raise UserError(
            f"{hosts.name or 'this worker'} cannot run {spec.model}: {error}",
            fix="another machine or other flags are needed; docs/tpu.md lists what compiles for each TPU",
        ) from error
    if hosts.first:
        log(f"✓ The program of {spec.model} compiles and runs on {devices} ({time.perf_counter() - began:.0f} s)")


def _run_extraction(spec: RunSpec, files: ModelFiles, progress: Progress) -> str:
    taps, length = spec.selected_taps(files.config.n_layers), min(_PROGRAM_TOKENS, spec.data.longest)
    sample = _sample(files, length)
    if spec.positions != ALL:
        sample = replace(sample, positions=np.array([length - 1], np.int32))
    steering = read_steering(spec.steer, files.config)
    rows = row_bytes(tap_rows_of(files, taps, spec.store_dtype, "jax"))
    spec = replace(spec, batch_tokens=length, batch_size=None)
    producer = place_model(files, taps, spec, rows, progress, lambda _: None, steering, read=_zero_weights)
    try:
        producer.fetch(producer.start(_batch(producer, sample)))
        return producer.describe()
    finally:
        producer.close()


def _run_generation(spec: RunSpec, generation: GenerationSpec, files: ModelFiles, progress: Progress) -> str:
    config = files.config
    length = min(_PROGRAM_TOKENS // 2, spec.data.longest)
    mesh, layout = arrange_devices(config, spec.dtype, spec.mesh_shape)
    programs = GenerationPrograms(
        _zero_weights(files, spec.dtype, None, layout.place(mesh), head=True),
        config,
        () if generation.capture == "none" else spec.selected_taps(config.n_layers),
        mesh=mesh,
        plan=SlotPlan(slots=2, capacity=2 * length, chunk=length, rows=1, stride=_ANSWER_TOKENS),
        generation=generation,
        seed=spec.data.seed,
        dtype=spec.dtype,
        store_dtype=spec.store_dtype,
        log=progress.log,
    )
    tokenizer = prompt_tokenizer(files, spec.data.prompt, optional=True)
    generator = Generator(programs, tokenizer, progress, spec.positions)
    try:
        for _ in generator.answers(iter([_sample(files, length)])):
            pass
        return describe_mesh(mesh)
    finally:
        generator.close()


def _zero_weights(
    files: ModelFiles,
    dtype: DTypeLike,
    n_layers: int | None,
    sharding: Place,
    *,
    head: bool = False,
    runs: Sequence[LayerRun] = (),
) -> Params:
    """Return zeros in the place of what :func:`spile.models.weights.load` would read."""
    runs = runs or one_run_per_layer(n_layers or files.config.n_layers)
    shapes = param_shapes(files.config, dtype, runs, sharding, head=head)
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    make = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), out_shardings=places)
    zeros: Params = make()
    return zeros
