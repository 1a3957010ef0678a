"""The device mesh ``data × model``, and one table that maps the logical axes of tensors to it.

An axis that the mesh does not divide evenly, such as 14 heads over 16 devices, is replicated, and a message says so.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from spile.errors import SpecError
from spile.models.architecture import WEIGHTS_FRACTION, ModelConfig, Tensor
from spile.models.attention import Attention, attention_over_mesh
from spile.models.experts import Mixture, choose_mixture, mixture_over_mesh
from spile.models.params import build

AXES = ("data", "model")

RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "d_ff": "model",
    "d_model": None,
    "head_dim": None,
    "experts": None,
    "positions": None,
    "layers": None,
}
"""Logical axis → mesh axis; None means replicated."""


@dataclass(frozen=True)
class MeshPlan:
    """How a model is distributed over ``data × model`` devices. No device is needed to make it."""

    config: ModelConfig
    data: int
    model: int

    def spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """Return the partition of a tensor: each mesh axis is used at most once, and only if it divides evenly."""
        heads = {"heads": self.config.n_heads, "kv_heads": self.config.n_kv_heads}  # heads are not divided
        parts: list[str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            target = None if axis is None else RULES[axis]
            divides = size % self.model == 0 and heads.get(axis or "", size) % self.model == 0
            parts.append(target if divides and target not in parts else None)
        return PartitionSpec(*parts)

    def place(self, mesh: Mesh) -> Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding]:
        """Return the function for ``weights.load`` that maps axes and shape of a tensor to its sharding."""
        return lambda axes, shape: NamedSharding(mesh, self.spec(axes, shape))

    def notes(self) -> list[str]:
        """Return messages about axes that are replicated because they do not divide evenly."""
        sizes = {
            "heads": self.config.n_heads,
            "key/value heads": self.config.n_kv_heads,
            "MLP columns": self.config.d_ff,
            "vocabulary rows": self.config.vocab_size,
        }
        return [
            f"{size} {name} do not divide over {self.model} devices (model axis): replicated on each"
            for name, size in sizes.items()
            if size % self.model
        ]

    def attention(self, name: str, mesh: Mesh) -> str | Attention:
        """Return the attention implementation, mapped over the mesh if the compiler cannot partition it."""
        if name == "xla" or mesh.size == 1:
            return name
        heads_divide = self.config.n_heads % self.model == 0 and self.config.n_kv_heads % self.model == 0
        if self.model == 1 or not heads_divide:
            # Heads do not divide evenly: each device of a model-parallel set computes a part of the batch rows.
            return attention_over_mesh(name, mesh, AXES, None)
        return attention_over_mesh(name, mesh, "data", "model")

    def mixture(self, mesh: Mesh) -> str | Mixture:
        """Return how tokens reach their experts: each device computes its batch rows with its part of every expert."""
        name = choose_mixture(mesh.devices.flat[0].platform)
        if self.config.experts is None or mesh.size == 1:
            return name
        return mixture_over_mesh(name, mesh, replicated=self.config.experts.d_ff % self.model != 0)

    def weight_bytes(self, itemsize: int, n_layers: int | None = None, *, head: bool = False) -> int:
        """Return the bytes of weights on each device."""
        sizes: list[int] = []

        def count(_: str, tensor: Tensor) -> None:
            split = any(self.spec(tensor.axes, tensor.shape))
            sizes.append(math.prod(tensor.shape) * itemsize // (self.model if split else 1))

        build(self.config, n_layers, count, head=head)
        return sum(sizes)


def default_shape(
    config: ModelConfig,
    devices: int,
    itemsize: int,
    memory: int | None,
    n_layers: int | None = None,
    *,
    head: bool = False,
) -> tuple[int, int]:
    """Return a data-parallel mesh if the weights leave room on a device; otherwise add model parallelism.

    ``memory`` is that of a device; None means unknown, and that it is enough. ``n_layers`` are loaded; None means all.
    """
    if memory is None:
        return devices, 1
    for width in (width for width in range(1, devices) if devices % width == 0):
        plan = MeshPlan(config, devices // width, width)
        if plan.weight_bytes(itemsize, n_layers, head=head) <= WEIGHTS_FRACTION * memory:
            return plan.data, plan.model
    return 1, devices


def arrange_devices(
    config: ModelConfig,
    dtype: str,
    shape: tuple[int, int] | None,
    n_layers: int | None = None,
    *,
    head: bool = False,
    log: Callable[[str], None] = lambda _line: None,
) -> tuple[Mesh, MeshPlan]:
    """Arrange all devices for a model, in ``shape`` if it is given; log the weights that are replicated."""
    itemsize = jnp.dtype(dtype).itemsize
    shape = shape or default_shape(config, jax.device_count(), itemsize, device_memory(), n_layers, head=head)
    plan = MeshPlan(config, *shape)
    for note in plan.notes():
        log(note)
    return make_mesh(shape), plan


_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""JAX's names for the values of ``--device``."""


def select_device(device: str) -> str:
    """Initialise JAX on the devices that ``--device`` names, and return their platform: cpu, gpu or tpu.

    Raises:
        SpecError: This machine has no such device, or this process already uses another one.
    """
    before: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    if device != "auto":  # JAX has no fallback for a platform that is named
        jax.config.update("jax_platforms", device if device == "cpu" else f"{device},cpu")
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        jax.config.update("jax_platforms", before)
        raise _device_error(device, str(error)) from error
    if platform == _PLATFORMS.get(device, platform):
        return platform
    jax.config.update("jax_platforms", before)
    raise _device_error(device, f"this process already runs JAX on {platform}; start another one")


def _device_error(device: str, why: str) -> SpecError:
    if device == "cuda":
        plugin = any("cuda" in each.name for each in entry_points(group="jax_plugins"))
        return gpu_error("" if plugin else "JAX has no CUDA plugin", "run: pip install 'spile[cuda]'", why)
    if device == "tpu" and find_spec("libtpu") is None:
        return SpecError("--device tpu: libtpu is not installed", fix="run: pip install 'spile[tpu]'")
    if device == "tpu" and not _has_device_file("accel[0-9]*", "vfio/[0-9]*"):
        fix = "run this command on a TPU VM, or use another --device"
        return SpecError("--device tpu: this machine has no TPU: no /dev/accel0 and no /dev/vfio/0", fix=fix)
    fix = "end other processes that use the device" if device == "tpu" else "check the variable JAX_PLATFORMS"
    return SpecError(f"--device {device}: {why}", fix=fix)


def _has_device_file(*patterns: str) -> bool:
    return any(any(Path("/dev").glob(pattern)) for pattern in patterns)


def gpu_error(missing: str, install: str, why: str) -> SpecError:
    """Return the error for a GPU that cannot be used.

    Args:
        missing: What the framework lacks; empty if nothing.
        install: How to install that.
        why: What the framework said, if nothing else explains it.
    """
    cpu = "or use --device cpu"
    if missing:
        return SpecError(f"--device cuda: {missing}", fix=f"{install}, {cpu}")
    if not _has_device_file("nvidia[0-9]*", "dxg"):
        return SpecError(
            "--device cuda: this machine has no NVIDIA GPU, or its driver is not loaded: no /dev/nvidia0",
            fix=f"check that nvidia-smi lists the GPU, start a container with --gpus all, {cpu}",
        )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return SpecError(f"--device cuda: the NVIDIA driver was not found: {error}", fix=f"install the driver, {cpu}")
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        why = f"{why} (CUDA_VISIBLE_DEVICES={hidden})"
    return SpecError(
        f"--device cuda: CUDA did not start: {why}",
        fix=f"compare the driver's version (nvidia-smi) with the CUDA libraries (pip list), {cpu}",
    )


def device_memory() -> int | None:
    """Return the memory of a device in bytes; None if it is unknown, as for a CPU."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return None if limit is None else int(limit)


def make_mesh(shape: tuple[int, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange the devices in this shape, with neighbours of the chip network along ``model``."""
    from jax.experimental import mesh_utils

    devices = list(jax.devices()) if devices is None else list(devices)
    if math.prod(shape) != len(devices):
        raise SpecError(
            "--mesh-shape",
            expected=f"DATA,MODEL whose product is the number of devices, {len(devices)}",
            found=f"{shape[0]},{shape[1]} ({math.prod(shape)})",
        )
    if devices[0].platform != "tpu":
        # By process, so that a model-parallel set stays on one host if it fits.
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        return Mesh(np.array(ordered).reshape(shape), AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1 and shape[0] % slices == 0:
        inner = (shape[0] // slices, shape[1])
        hybrid = mesh_utils.create_hybrid_device_mesh(inner, (slices, 1), devices, allow_split_physical_axes=True)
        return Mesh(hybrid, AXES)
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES)


def describe_mesh(mesh: Mesh) -> str:
    """Return ``8 × NVIDIA H200, mesh 4 × 2``."""
    data, model = mesh.devices.shape
    devices = f"{mesh.size} × {mesh.devices.flat[0].device_kind}"
    return f"{devices}, mesh {data} × {model}" if model > 1 else devices
