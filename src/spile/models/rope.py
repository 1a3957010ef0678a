"""Rotary positions: the frequencies of each kind of scaling, and the rotation of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Float32, Int

from spile.models.architecture import ModelConfig, Rope

Vector = npt.NDArray[np.float32]
Angles = tuple[Float32[Array, "rows seq half"], Float32[Array, "rows seq half"]]


def _default(_rope: Rope, freq: Vector) -> Vector:
    return freq


def _linear(rope: Rope, freq: Vector) -> Vector:
    return freq / np.float32(rope.factor)


def _llama3(rope: Rope, freq: Vector) -> Vector:
    """Stretch long wavelengths, keep short ones, and blend those in between."""
    wavelength = np.float32(2 * math.pi) / freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (np.float32(rope.original_length) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * freq / np.float32(rope.factor) + blend * freq
    long, short = wavelength > rope.original_length / low, wavelength < rope.original_length / high
    return np.where(long, freq / np.float32(rope.factor), np.where(short, freq, blended)).astype(np.float32)


def _yarn(rope: Rope, freq: Vector) -> Vector:
    """Blend over the dimensions between those that turn ``beta_fast`` and ``beta_slow`` times in the context."""
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


def frequencies(config: ModelConfig, rope: Rope, *, long: bool = False) -> Vector:
    """Return the radians per position for each rotated pair, computed in float32 as the reference does.

    ``long``: those of samples beyond the original length (longrope).
    """
    rotated = config.rotary_dim or config.head_dim
    exponent = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    power = np.power(np.float32(rope.theta), exponent)
    if rope.kind == "longrope":  # rounded in the reference's order
        factors = np.asarray(rope.long_factors if long else rope.short_factors, np.float32)
        scaled: Vector = (1.0 / (factors * power)).astype(np.float32)
        return scaled
    return _KINDS[rope.kind](rope, (1.0 / power).astype(np.float32))


def angles(
    config: ModelConfig, positions: Int[Array, "rows seq"], rope: Rope, lengths: Int[Array, "rows seq"] | None
) -> Angles:
    """Return the cosines and sines of these positions, times the rope's amplitude.

    ``lengths``: for longrope, the length of each token's sample; None: none is longer than the original context.
    """
    freq = jnp.asarray(frequencies(config, rope))
    if rope.kind == "longrope" and lengths is not None:
        long = jnp.asarray(frequencies(config, rope, long=True))
        freq = jnp.where(lengths[..., None] > rope.original_length, long, freq)
    radians = positions.astype(jnp.float32)[..., None] * freq
    amplitude = jnp.float32(rope.amplitude)
    return jnp.cos(radians) * amplitude, jnp.sin(radians) * amplitude


def sample_lengths(positions: Int[Array, "rows seq"], segments: Int[Array, "rows seq"]) -> Int[Array, "rows seq"]:
    """Return the length of the sample that each token belongs to."""
    seq = positions.shape[1]
    last = jnp.concatenate([segments[:, 1:] != segments[:, :-1], jnp.ones_like(segments[:, :1], bool)], axis=1)
    place = jnp.arange(seq, dtype=jnp.int32)[None]
    end = jax.lax.cummin(jnp.where(last, place, jnp.int32(seq)), axis=1, reverse=True)
    lengths: Array = jnp.take_along_axis(positions, end, axis=1) + 1
    return lengths


def per_layer(
    config: ModelConfig, positions: Int[Array, "rows seq"], lengths: Int[Array, "rows seq"] | None = None
) -> tuple[Angles | None, ...]:
    """Return the angles of each layer; None for a layer without rotary positions.

    Layers with an attention window may have a rope of their own. ``lengths``: see :func:`angles`.
    """
    if config.learned_positions is not None:
        return (None,) * config.n_layers
    everywhere = angles(config, positions, config.rope, lengths)
    local = everywhere if config.local_rope is None else angles(config, positions, config.local_rope, lengths)
    chosen = (everywhere if window is None else local for window in config.windows)
    return tuple(None if layer in config.no_rope else each for layer, each in enumerate(chosen))


def rotate(
    x: Float[Array, "rows seq heads head_dim"],
    cos: Float32[Array, "rows seq half"],
    sin: Float32[Array, "rows seq half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "rows seq heads head_dim"]:
    """Rotate the first dimensions of each head by its position's angle, in float32.

    The pairs are (i, i + half), or (2i, 2i + 1) if ``interleaved``.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    part, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = jnp.stack(pair, axis=-1).reshape(part.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([rotated, rest], axis=-1).astype(x.dtype)
