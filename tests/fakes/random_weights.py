"""Trees of weights without a model: shapes, logical axes, and seeded random weights, for tests and benchmarks."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spile.models.architecture import Axes, ModelConfig, Tensor
from spile.models.params import Params, build


def abstract(config: ModelConfig, dtype: DTypeLike, n_layers: int | None = None, *, head: bool = False) -> Params:
    """Return shapes and dtypes without allocating memory, for ``jax.eval_shape`` and ahead-of-time compilation."""
    return build(config, n_layers, lambda _, tensor: jax.ShapeDtypeStruct(tensor.shape, dtype), head=head)


def axes(config: ModelConfig, n_layers: int | None = None, *, head: bool = False) -> Params:
    return build(config, n_layers, lambda _, tensor: tensor.axes, head=head)


def random(
    config: ModelConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    n_layers: int | None = None,
    sharding: Callable[[Axes, tuple[int, ...]], jax.sharding.Sharding] | None = None,
    *,
    head: bool = False,
) -> Params:
    """Make seeded random weights on the device.

    A tensor's values depend on the key and on its own name only, not on how many layers are made.
    """

    def make(name: str, tensor: Tensor) -> jax.Array:
        kind = name.rpartition(".")[2]
        mean = 1.0 if kind.endswith("norm") and config.norm != "rms_plus_one" else 0.0
        std = 0.1 if kind.endswith("norm") else _std(kind, tensor)
        place = None if sharding is None else sharding(tensor.axes, tensor.shape)
        draw = _draw(tensor.shape, np.dtype(dtype), place)
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        drawn: jax.Array = draw(own, jnp.float32(mean), jnp.float32(std))
        return drawn

    return build(config, n_layers, make, head=head)


def _std(kind: str, tensor: Tensor) -> float:
    if kind in ("embed", "positions"):
        return 1.0
    return 0.1 if kind.endswith("bias") else float(tensor.shape[-1]) ** -0.5


@functools.cache
def _draw(shape: tuple[int, ...], dtype: np.dtype[Any], place: jax.sharding.Sharding | None) -> Any:
    """Return a compiled sampler for a shape, shared by all layers."""

    def sample(key: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
        return (mean + std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(sample, out_shardings=place)
