"""Rows in one byte per number, as a device makes them: :mod:`spile.store.shard_format` says what they mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spile.spec.taps import SCALE_BYTES, SCALED

__all__ = ["as_stored", "encode", "finite_rows"]

_TINY = 2.0**-126


def as_stored(x: Array, dtype: str) -> Array:
    """Numbers as they leave the device: of another dtype, or encoded with their scales behind them."""
    return encode(x, dtype) if dtype in SCALED else x.astype(dtype)


def finite_rows(rows: Array) -> Array:
    """Whether each row that :func:`as_stored` gave is finite: of an encoded one its scale tells."""
    if rows.dtype == jnp.int8:
        return jnp.isfinite(jax.lax.bitcast_convert_type(rows[..., -SCALE_BYTES:], jnp.float32))
    return jnp.isfinite(rows).all(axis=-1)


def encode(x: Array, dtype: str) -> Array:
    """``[…, width]`` → ``[…, width + 4]`` bytes: the numbers, and behind them the row's scale, a float32."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = _int8_scale(largest) if dtype == "int8" else _float8_scale(largest)
    scale = jnp.where(scale < _TINY, 0.0, scale)
    part = jnp.where(scale > 0, wide / scale, 0.0)
    if dtype == "int8":
        numbers = jnp.clip(jnp.round(part), -127, 127).astype(jnp.int8)
    else:
        numbers = jax.lax.bitcast_convert_type(part.astype(jnp.float8_e4m3fn), jnp.int8)
    # Of every number: a CPU's maximum passes over a NaN.
    scale = jnp.where(jnp.isfinite(wide).all(axis=-1, keepdims=True), scale, jnp.nan)
    behind = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    return jnp.concatenate([numbers, behind], axis=-1)


def _int8_scale(largest: Array) -> Array:
    return largest / 127.0


def _float8_scale(largest: Array) -> Array:
    """The next power of two from the bits: no device's logarithm is exact."""
    bits = jax.lax.bitcast_convert_type(largest / 448.0, jnp.int32)
    exponent = jnp.maximum((bits + 0x7FFFFF) >> 23, 1)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
