"""The model on its devices: weights, the first program and pinned memory, one beside the other."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spile.data.stream import SampleReader
from spile.models.attention import choose
from spile.models.decoder import head_needed, layers_needed
from spile.models.model_files import ModelFiles
from spile.models.params import choose_runs, placed
from spile.models.weights import load
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.worker.batches import batches
from spile.worker.device import DeviceProducer
from spile.worker.mesh import default_shape, device_memory, make_mesh, plan_mesh
from spile.worker.parts import Parts, bytes_per_token, sizes_for
from spile.worker.progress import Progress
from spile.worker.sizing import IN_HAND, choose_sizes

__all__ = ["make_producer", "place_model"]


def make_producer(parts: Parts, progress: Progress, reader: SampleReader) -> DeviceProducer:
    """The model on all devices, compiled for the stream's first batch, while its samples are tokenized."""

    def prepare(producer: DeviceProducer) -> None:
        _prepare_first(parts, producer, reader)

    return place_model(parts.files, parts.taps, parts.spec, bytes_per_token(parts), progress, prepare)


def place_model(
    files: ModelFiles,
    taps: tuple[Tap, ...],
    spec: ExtractSpec,
    row_bytes: int,
    progress: Progress,
    prepare: Callable[[DeviceProducer], None],
) -> DeviceProducer:
    """The model on all devices, those of a pod's other hosts included.

    Beside the reading of the weights, its first program is compiled (``prepare`` asks for it) and its pinned memory
    taken.
    """
    config, dtype = files.config, spec.dtype
    layers = layers_needed(taps, config.n_layers)
    head = head_needed(taps)
    shape = spec.mesh_shape or default_shape(
        config, jax.device_count(), jnp.dtype(dtype).itemsize, device_memory(), layers, head=head
    )
    mesh, plan = make_mesh(shape), plan_mesh(config, shape)
    for note in plan.notes(config):
        progress.log(note)
    place, sizes = plan.place(mesh), choose_sizes(spec, row_bytes)
    runs = choose_runs(config, taps, layers, jnp.dtype(dtype).itemsize)
    producer = DeviceProducer(
        placed(config, dtype, runs, place, head=head),
        config,
        taps,
        store_dtype=spec.store_dtype,
        mesh=mesh,
        attention=choose(config, mesh.devices.flat[0].platform, dtype),
        dtype=dtype,
        block=sizes.batch_tokens,
        progress=progress,
        runs=runs,
    )
    with progress.timeline.span("first samples"):
        # Before the weights and not beside them: their transfers keep the interpreter's lock; the compiler needs none.
        prepare(producer)
    producer.reserve(((sizes.in_flight or 1) + IN_HAND) * sizes.batch_tokens * row_bytes)
    try:
        with progress.timeline.span("weights"):
            producer.params = load(files, dtype, layers, place, head=head, runs=runs)
    except BaseException:
        producer.close()
        raise
    return producer


def _prepare_first(parts: Parts, producer: DeviceProducer, reader: SampleReader) -> None:
    """Compile for the stream's first batch, which a look at its first samples tells the shape of."""
    plan = sizes_for(parts).batch_plan(producer.groups)
    if parts.samples.prompt.pack:  # every window but the last is full
        length = plan.row_length(plan.longest)
        producer.prepare((plan.rows(length), length))
        return
    first = next(batches((item for item in reader.look() if isinstance(item, Sample)), plan), None)
    if first is not None:
        producer.prepare(first.shape)
