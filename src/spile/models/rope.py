"""Rotary positions: a table from the config's kind to wavelengths, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Float32, Int

from spile.models.architecture import ModelConfig, Rope

__all__ = ["Angles", "angles", "frequencies", "per_layer", "rotate"]

Vector = npt.NDArray[np.float32]
Angles = tuple[Float32[Array, "#rows seq half"], Float32[Array, "#rows seq half"]]


def _default(_rope: Rope, freq: Vector) -> Vector:
    return freq


def _linear(rope: Rope, freq: Vector) -> Vector:
    return freq / np.float32(rope.factor)


def _llama3(rope: Rope, freq: Vector) -> Vector:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    wavelength = np.float32(2 * math.pi) / freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (np.float32(rope.original_length) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * freq / np.float32(rope.factor) + blend * freq
    long, short = wavelength > rope.original_length / low, wavelength < rope.original_length / high
    return np.where(long, freq / np.float32(rope.factor), np.where(short, freq, blended)).astype(np.float32)


def _yarn(rope: Rope, freq: Vector) -> Vector:
    """A ramp over the dimensions, between the one that turns ``beta_fast`` times in a context and ``beta_slow``."""
    half = len(freq)

    def dimension(turns: float) -> float:
        return 2 * half * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    stretch = np.clip((np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    blended: Vector = (freq / np.float32(rope.factor) * stretch + freq * (1 - stretch)).astype(np.float32)
    return blended


_KINDS: Mapping[str, Callable[[Rope, Vector], Vector]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def frequencies(config: ModelConfig, rope: Rope | None = None) -> Vector:
    """Radians per position, for each pair of dimensions. In float32 throughout, as the reference computes them."""
    rope = rope or config.rope
    turned = config.rotary_dim or config.head_dim
    exponent = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
    freq = (1.0 / np.power(np.float32(rope.theta), exponent)).astype(np.float32)
    return _KINDS[rope.kind](rope, freq)


def angles(config: ModelConfig, positions: Int[Array, "rows seq"], rope: Rope | None = None) -> Angles:
    """Cosines and sines of these positions, with the rope's amplitude in them."""
    rope = rope or config.rope
    turned = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies(config, rope))
    amplitude = jnp.float32(rope.amplitude)
    return jnp.cos(turned) * amplitude, jnp.sin(turned) * amplitude


def per_layer(config: ModelConfig, positions: Int[Array, "rows seq"]) -> tuple[Angles | None, ...]:
    """Each layer's angles: a layer with a window may have a rope of its own; with learned positions there are none."""
    if config.learned_positions is not None:
        return (None,) * config.n_layers
    everywhere = angles(config, positions)
    local = everywhere if config.local_rope is None else angles(config, positions, config.local_rope)
    return tuple(everywhere if window is None else local for window in config.windows)


def rotate(
    x: Float[Array, "rows seq heads head_dim"],
    cos: Float32[Array, "#rows seq half"],
    sin: Float32[Array, "#rows seq half"],
) -> Float[Array, "rows seq heads head_dim"]:
    """Turn each pair (i, i + half) of the part that is rotated by its position's angle, in float32."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)
