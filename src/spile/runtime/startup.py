"""The model on its devices: weights, the first program and pinned memory, one beside the other."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp

from spile.errors import SpileError
from spile.model.attention import choose
from spile.model.decoder import head_needed, layers_needed
from spile.model.params import build
from spile.planning.batches import batches
from spile.planning.ranges import Ranges
from spile.runtime.device import DeviceProducer
from spile.runtime.mesh import default_shape, device_memory, make_mesh, plan_mesh
from spile.runtime.parts import Parts, bytes_per_token, sizes_for
from spile.runtime.progress import Progress
from spile.runtime.sizing import IN_HAND
from spile.spec.sample import Sample
from spile.spec.tensors import Tensor
from spile.weights.loading import load

__all__ = ["make_producer"]


def make_producer(parts: Parts, progress: Progress, done: Ranges) -> DeviceProducer:
    """The model on all devices, those of a pod's other hosts included.

    Beside the reading of the weights, its first program is compiled and its pinned memory taken.
    """
    config, dtype = parts.files.config, parts.spec.dtype
    layers = layers_needed(parts.taps, config.n_layers)
    head = head_needed(parts.taps)
    shape = parts.spec.mesh_shape or default_shape(
        config, jax.device_count(), jnp.dtype(dtype).itemsize, device_memory(), layers, head=head
    )
    mesh, plan = make_mesh(shape), plan_mesh(config, shape)
    for note in plan.notes(config):
        progress.log(note)
    place, sizes = plan.place(mesh), sizes_for(parts)
    producer = DeviceProducer(
        build(config, layers, lambda _, tensor: _shape_of(tensor, dtype, place), head=head),
        config,
        parts.taps,
        store_dtype=parts.spec.store_dtype,
        mesh=mesh,
        attention=choose(config, mesh.devices.flat[0].platform, dtype),
        dtype=dtype,
        block=sizes.batch_tokens,
        progress=progress,
    )
    with progress.timeline.span("first samples"):
        # Before the weights and not beside them: their transfers keep the interpreter's lock; the compiler needs none.
        _prepare_first(parts, producer, done)
    producer.reserve(((sizes.in_flight or 1) + IN_HAND) * sizes.batch_tokens * bytes_per_token(parts))
    try:
        with progress.timeline.span("weights"):
            producer.params = load(parts.files, dtype, layers, place, head=head)
    except BaseException:
        producer.close()
        raise
    return producer


def _shape_of(tensor: Tensor, dtype: str, place: Any) -> Any:
    return jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(dtype), sharding=place(tensor.axes, tensor.shape))


def _prepare_first(parts: Parts, producer: DeviceProducer, done: Ranges) -> None:
    """Compile for the stream's first batch, which a look at its first samples tells the shape of."""
    plan = sizes_for(parts).batch_plan(producer.groups)
    if parts.samples.prompt.pack:  # every window but the last is full
        length = plan.row_length(plan.longest)
        producer.prepare((plan.rows(length), length))
        return
    items = parts.samples.read(done)
    with suppress(SpileError):  # the run itself will meet it, and tell
        first = next(batches((item for item in items if isinstance(item, Sample)), plan), None)
        if first is not None:
            producer.prepare(first.shape)
