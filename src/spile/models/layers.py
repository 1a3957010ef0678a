"""The parts of a block: norms, matrix products, activations and the MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.architecture import ModelConfig
from spile.models.attention import precision
from spile.models.params import Layer
from spile.spec.taps import Site

Hidden = Float[Array, "rows seq d_model"]
Look = Callable[[Site, Array], None]
"""A function that receives the value of each tap kind."""

_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def norm(
    x: Float[Array, "... d"], weight: Array | None, bias: Array | None, config: ModelConfig
) -> Float[Array, "... d"]:
    """Apply the family's norm in float32. Without a weight the family has no norm here, and ``x`` is returned."""
    if weight is None:
        return x
    if config.norm == "layer":
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + jnp.float32(config.norm_eps))
        out = centred * scale * weight.astype(jnp.float32)
        return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)
    return rms_norm(x, weight, config)


def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], config: ModelConfig) -> Float[Array, "... d"]:
    """Divide by the RMS and multiply by the weight, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(config.norm_eps))
    gain = weight.astype(jnp.float32)
    gain = gain + jnp.float32(1.0) if config.norm == "rms_plus_one" else gain
    return (wide * scale * gain).astype(x.dtype)


def linear(
    x: Float[Array, "... inner"], weight: Float[Array, "outer inner"], bias: Float[Array, " outer"] | None = None
) -> Float[Array, "... outer"]:
    """Return ``x·Wᵀ + b``, with the matrix in the layout of the files."""
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, weight, dimensions, precision=precision(x.dtype))
    return out if bias is None else out + bias


def activate(x: Array, config: ModelConfig) -> Array:
    """Apply the activation function of the MLP."""
    return _ACTIVATIONS[config.activation](x)


def gate(gate: Array, up: Array, config: ModelConfig) -> Array:
    """Combine the two branches of a gated MLP."""
    if config.swiglu_limit is None:
        return activate(gate, config) * up
    limit = jnp.asarray(config.swiglu_limit, gate.dtype)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    one = jnp.asarray(1.0, up.dtype)
    return (up + one) * (gate * jax.nn.sigmoid(gate * jnp.asarray(config.swiglu_alpha, gate.dtype)))


def softcap(x: Array, cap: float | None) -> Array:
    """Bound the values smoothly by ±cap."""
    return x if cap is None else jnp.tanh(x / jnp.asarray(cap, x.dtype)) * jnp.asarray(cap, x.dtype)


def mlp(x: Hidden, layer: Layer, config: ModelConfig, look: Look) -> Hidden:
    """Compute the MLP: down(activation(gate·x) · (up·x)), or down(activation(up·x)) if it is not gated."""
    up = linear(x, layer.up, layer.up_bias)
    hidden = gate(linear(x, layer.gate, layer.gate_bias), up, config) if config.gated else activate(up, config)
    look("mlp_hidden", hidden)
    return linear(hidden, layer.down, layer.down_bias)
