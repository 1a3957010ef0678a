"""The weights as a tree: their names, shapes and logical axes, known before any memory is.

Matrices keep the layout of the files they come from, ``[out, in]``, so that loading is a copy and nothing else.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spile.spec.architecture import ModelConfig

__all__ = ["Axes", "Layer", "Params", "Tensor", "abstract", "axes", "build", "layout", "random"]

Axes = tuple[str, ...]
"""Logical names of a tensor's dimensions; a table of the runtime maps them to the mesh."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """One layer's weights (or whatever a tree of them holds); None where the architecture has no such tensor."""

    attn_norm: Any
    q: Any
    k: Any
    v: Any
    o: Any
    mlp_norm: Any
    gate: Any
    up: Any
    down: Any
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None
    q_norm: Any = None
    k_norm: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The weights up to the last layer that is needed; the final norm and the LM head where tokens are generated."""

    embed: Any
    layers: tuple[Layer, ...]
    final_norm: Any = None
    head: Any = None
    """None, with a final norm: the head is the embedding."""


@dataclass(frozen=True)
class Tensor:
    """What is known of a weight before it is read."""

    shape: tuple[int, ...]
    axes: Axes


def layout(config: ModelConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The embedding, and one layer's tensors by field name; those that the architecture lacks are absent."""
    d, heads, keys = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    norm = Tensor((d,), ("d_model",))
    tensors = {
        "attn_norm": norm,
        "q": Tensor((heads, d), ("heads", "d_model")),
        "k": Tensor((keys, d), ("kv_heads", "d_model")),
        "v": Tensor((keys, d), ("kv_heads", "d_model")),
        "o": Tensor((d, heads), ("d_model", "heads")),
        "mlp_norm": norm,
        "gate": Tensor((config.d_ff, d), ("d_ff", "d_model")),
        "up": Tensor((config.d_ff, d), ("d_ff", "d_model")),
        "down": Tensor((d, config.d_ff), ("d_model", "d_ff")),
    }
    if config.qkv_bias:
        tensors["q_bias"] = Tensor((heads,), ("heads",))
        tensors["k_bias"] = tensors["v_bias"] = Tensor((keys,), ("kv_heads",))
    if config.o_bias:
        tensors["o_bias"] = norm
    if config.qk_norm:
        tensors["q_norm"] = tensors["k_norm"] = Tensor((config.head_dim,), ("head_dim",))
    if config.mlp_bias:
        tensors["gate_bias"] = tensors["up_bias"] = Tensor((config.d_ff,), ("d_ff",))
        tensors["down_bias"] = norm
    return Tensor((config.vocab_size, d), ("vocab", "d_model")), tensors


T = TypeVar("T")


def build(config: ModelConfig, n_layers: int | None, make: Callable[[str, Tensor], T], *, head: bool = False) -> Params:
    """A tree whose leaves are ``make(name, tensor)``; names are ``embed``, ``3.q_bias``, ``final_norm`` and ``head``.

    ``head``: with what generation needs, the final norm and, unless it is the embedding, the LM head.
    """
    embed, tensors = layout(config)
    count = config.n_layers if n_layers is None else n_layers
    if not 0 < count <= config.n_layers:
        raise ValueError(f"n_layers: expected 1 to {config.n_layers}, found {count}")
    layers = tuple(
        Layer(**{name: make(f"{index}.{name}", tensor) for name, tensor in tensors.items()}) for index in range(count)
    )
    first = make("embed", embed)
    if not head:
        return Params(embed=first, layers=layers)
    norm = make("final_norm", tensors["attn_norm"])
    return Params(embed=first, layers=layers, final_norm=norm, head=None if config.tied else make("head", embed))


def abstract(config: ModelConfig, dtype: DTypeLike, n_layers: int | None = None) -> Params:
    """Shapes and dtypes without memory: what ``jax.eval_shape`` and ahead-of-time compilation want."""
    return build(config, n_layers, lambda _, tensor: jax.ShapeDtypeStruct(tensor.shape, dtype))


def axes(config: ModelConfig, n_layers: int | None = None) -> Params:
    """The same tree with each tensor's logical axes."""
    return build(config, n_layers, lambda _, tensor: tensor.axes)


def random(
    config: ModelConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    n_layers: int | None = None,
    sharding: Callable[[Axes, tuple[int, ...]], jax.sharding.Sharding] | None = None,
    *,
    head: bool = False,
) -> Params:
    """Seeded, well-scaled weights, made on the device: for benchmarks and tests.

    A tensor's values depend on the key and on its own name only, not on how many layers are made.
    """

    def make(name: str, tensor: Tensor) -> jax.Array:
        kind = name.rpartition(".")[2]
        mean, std = (1.0, 0.1) if kind.endswith("norm") else (0.0, _std(kind, tensor))
        place = None if sharding is None else sharding(tensor.axes, tensor.shape)
        draw = _draw(tensor.shape, np.dtype(dtype), place)
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        drawn: jax.Array = draw(own, jnp.float32(mean), jnp.float32(std))
        return drawn

    return build(config, n_layers, make, head=head)


def _std(kind: str, tensor: Tensor) -> float:
    if kind == "embed":
        return 1.0
    return 0.1 if kind.endswith("bias") else float(tensor.shape[-1]) ** -0.5


@functools.cache
def _draw(shape: tuple[int, ...], dtype: np.dtype[Any], place: jax.sharding.Sharding | None) -> Any:
    """One compiled sampler a shape, shared by all layers."""

    def sample(key: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
        return (mean + std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(sample, out_shardings=place)
