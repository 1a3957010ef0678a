"""The parts of a block: norms, matrix products, activations and the MLP; and the encoding of rows on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.architecture import ModelConfig
from spile.models.attention import precision
from spile.models.params import Layer
from spile.spec.taps import SCALE_BYTES, SCALED, STORED_TYPES

Hidden = Float[Array, "rows seq d_model"]
Hook = Callable[[str, Array], Array]
"""A function that receives the value of each tap kind and returns the value that the model continues with."""

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


def mlp(x: Hidden, layer: Layer, config: ModelConfig, hook: Hook) -> Hidden:
    """Compute the MLP: down(activation(gate·x) · (up·x)), or down(activation(up·x)) if it is not gated."""
    up = linear(x, layer.up, layer.up_bias)
    hidden = gate(linear(x, layer.gate, layer.gate_bias), up, config) if config.gated else activate(up, config)
    return linear(hook("mlp_hidden", hidden), layer.down, layer.down_bias)


# -- rows with one byte per number, as spile.store.shard defines them --------------------------------------------------

_TINY = 2.0**-126
_LIMIT = 248 * 2.0**120


def as_stored(x: Array, dtype: str) -> Array:
    """Convert to the stored dtype; scaled dtypes are encoded, with the scale after the numbers."""
    return encode(x, dtype) if dtype in SCALED else x.astype(dtype)


def sample_means(x: Array, positions: Array, segments: Array, last: Array) -> Array:
    """Return the mean row of each sample, in float32.

    Args:
        x: Rows ``[tokens, width]``, sample after sample, with padding anywhere between them.
        positions: The position of each token in its sample.
        segments: 0 for padding.
        last: The places of the last tokens of the samples, in order; other places may follow.

    """
    real = segments > 0
    owner = jnp.where(real, jnp.cumsum(real & (positions == 0)) - 1, len(last))  # a sum beyond the end is dropped
    sums = jax.ops.segment_sum(x.astype(jnp.float32), owner, num_segments=len(last))
    return sums / (positions[last][:, None] + 1)


def finite_rows(rows: Array) -> Array:
    """Return whether each row from :func:`as_stored` is finite; the scale of an encoded row is NaN if not."""
    if rows.dtype == jnp.int8:
        return jnp.isfinite(jax.lax.bitcast_convert_type(rows[..., -SCALE_BYTES:], jnp.float32))
    return jnp.isfinite(rows).all(axis=-1)


def encode(x: Array, dtype: str) -> Array:
    """Encode ``[…, width]`` as ``[…, width + 4]`` bytes: the numbers, and then the row's scale as a float32."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / STORED_TYPES[dtype].largest
    scale = scale if dtype == "int8" else _power_of_two(scale)
    scale = jnp.where(scale < _TINY, 0.0, scale)
    part = jnp.where(scale > 0, wide / scale, 0.0)
    if dtype == "int8":
        numbers = jnp.clip(jnp.round(part), -127, 127).astype(jnp.int8)
    else:
        numbers = jax.lax.bitcast_convert_type(part.astype(jnp.float8_e4m3fn), jnp.int8)
    # Check every number: the maximum on a CPU ignores NaN.
    scale = jnp.where((jnp.abs(wide) < _LIMIT).all(axis=-1, keepdims=True), scale, jnp.nan)
    behind = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    return jnp.concatenate([numbers, behind], axis=-1)


def _power_of_two(scale: Array) -> Array:
    """Compute the next power of two from the bits, because no device's logarithm is exact."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    exponent = jnp.maximum((bits + 0x7FFFFF) >> 23, 1)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
