"""Activation rows with one byte per number, encoded on the device as :mod:`spile.store.shard_format` defines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spile.spec.taps import SCALE_BYTES, SCALED

_TINY = 2.0**-126


def as_stored(x: Array, dtype: str) -> Array:
    """Convert to the stored dtype; scaled dtypes are encoded with the scale behind the numbers."""
    return encode(x, dtype) if dtype in SCALED else x.astype(dtype)


def finite_rows(rows: Array) -> Array:
    """Return whether each row from :func:`as_stored` is finite; the scale of an encoded row is NaN if not."""
    if rows.dtype == jnp.int8:
        return jnp.isfinite(jax.lax.bitcast_convert_type(rows[..., -SCALE_BYTES:], jnp.float32))
    return jnp.isfinite(rows).all(axis=-1)


def encode(x: Array, dtype: str) -> Array:
    """Encode ``[…, width]`` as ``[…, width + 4]`` bytes: the numbers, and then the row's scale as a float32."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = _int8_scale(largest) if dtype == "int8" else _float8_scale(largest)
    scale = jnp.where(scale < _TINY, 0.0, scale)
    part = jnp.where(scale > 0, wide / scale, 0.0)
    if dtype == "int8":
        numbers = jnp.clip(jnp.round(part), -127, 127).astype(jnp.int8)
    else:
        numbers = jax.lax.bitcast_convert_type(part.astype(jnp.float8_e4m3fn), jnp.int8)
    # Check every number: the maximum on a CPU ignores NaN.
    scale = jnp.where(jnp.isfinite(wide).all(axis=-1, keepdims=True), scale, jnp.nan)
    behind = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    return jnp.concatenate([numbers, behind], axis=-1)


def _int8_scale(largest: Array) -> Array:
    return largest / 127.0


def _float8_scale(largest: Array) -> Array:
    """Compute the next power of two from the bits, because no device's logarithm is exact."""
    bits = jax.lax.bitcast_convert_type(largest / 448.0, jnp.int32)
    exponent = jnp.maximum((bits + 0x7FFFFF) >> 23, 1)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
