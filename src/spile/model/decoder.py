"""The decoder: one pre-norm block with switches, unrolled as far as the last tapped layer and no further.

A batch is rows of one length; a row holds one sample or several, each a segment with positions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from spile.model import rope
from spile.model.attention import ATTENTIONS, Attention, precision
from spile.model.params import Layer, Params
from spile.spec.architecture import ModelConfig
from spile.spec.taps import Site, Tap

__all__ = ["Angles", "Attend", "Hidden", "Look", "block", "forward", "layers_needed"]

Hidden = Float[Array, "rows seq d_model"]
Angles = tuple[Float32[Array, "#rows seq half"], Float32[Array, "#rows seq half"]]
Attend = Callable[[Array, Array, Array], Array]
"""A layer's attention: rotated queries, rotated keys and values in, what the heads saw out."""
Look = Callable[[Site, Array], None]
"""Hears of each site's value as it exists."""

_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def _identity(x: Array) -> Array:
    return x


def layers_needed(taps: tuple[Tap, ...], n_layers: int) -> int:
    """How many layers of ``n_layers`` must be computed, and loaded, for these taps: at least one."""
    depths = (tap.layer if tap.layer is not None else 0 if tap.site == "embed" else n_layers - 1 for tap in taps)
    return max(depths) + 1


def forward(
    params: Params,
    tokens: Int[Array, "rows seq"],
    positions: Int[Array, "rows seq"] | None = None,
    segments: Int[Array, "rows seq"] | None = None,
    *,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    attention: str | Attention = "xla",
    keep: Callable[[Array], Any] = _identity,
) -> tuple[Any, ...]:
    """The taps' activations ``[rows, seq, d_model]`` in the order of ``taps``, each through ``keep`` once it exists.

    ``positions`` are those within a token's own sample, ``segments`` say which tokens of a row are one sample. Without
    them each row is one sample from position 0, padded on the right, where a causal mask hides the padding.
    """
    wanted = frozenset(taps)
    kept: dict[Tap, Any] = {}
    with jax.named_scope("embed"):
        x = jnp.take(params.embed, tokens, axis=0, mode="clip")
    with jax.named_scope("rope"):
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
        angles = rope.angles(config, places)
    inner = ATTENTIONS[attention] if isinstance(attention, str) else attention
    for index in range(layers_needed(taps, config.n_layers)):

        def look(site: Site, value: Array, index: int = index) -> None:
            if (tap := Tap(site, index)) in wanted:
                kept[tap] = keep(value)

        window = config.windows[index]
        narrow = window if window is not None and window < tokens.shape[1] else None

        def attend(q: Array, k: Array, v: Array, window: int | None = narrow) -> Array:
            return inner(q, k, v, segments, window=window)

        with jax.named_scope(f"layer.{index}"):
            x = block(x, params.layers[index], angles, config, attend, look)
    return tuple(kept[name] for name in taps)


def block(x: Hidden, layer: Layer, angles: Angles, config: ModelConfig, attend: Attend, look: Look) -> Hidden:
    """One layer. What nobody looks at is dropped by the compiler, the last layer's MLP too."""
    with jax.named_scope("attn"):
        out = _attention(_rms_norm(x, layer.attn_norm, config.norm_eps), layer, angles, config, attend)
    look("attn", out)
    with jax.named_scope("mlp"):
        x = x + out
        out = _mlp(_rms_norm(x, layer.mlp_norm, config.norm_eps), layer, config)
    look("mlp", out)
    with jax.named_scope("residual"):
        x = x + out
    look("residual", x)
    return x


def _rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """Divide by the RMS and multiply by the weight, in float32 whatever ``x`` is."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def _linear(
    x: Float[Array, "... inner"], weight: Float[Array, "outer inner"], bias: Float[Array, " outer"] | None
) -> Float[Array, "... outer"]:
    """``x·Wᵀ + b``, with the matrix as the file holds it."""
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, weight, dimensions, precision=precision(x.dtype))
    return out if bias is None else out + bias


def _attention(x: Hidden, layer: Layer, angles: Angles, config: ModelConfig, attend: Attend) -> Hidden:
    """Project, norm the heads if the family does, rotate, attend, project back."""
    rows, length, _ = x.shape

    def heads(weight: Array, bias: Array | None, count: int) -> Array:
        return _linear(x, weight, bias).reshape(rows, length, count, config.head_dim)

    q = heads(layer.q, layer.q_bias, config.n_heads)
    k = heads(layer.k, layer.k_bias, config.n_kv_heads)
    v = heads(layer.v, layer.v_bias, config.n_kv_heads)
    if layer.q_norm is not None:
        q = _rms_norm(q, layer.q_norm, config.norm_eps)
        k = _rms_norm(k, layer.k_norm, config.norm_eps)
    out = attend(rope.rotate(q, *angles), rope.rotate(k, *angles), v)
    return _linear(out.reshape(rows, length, config.n_heads * config.head_dim), layer.o, layer.o_bias)


def _mlp(x: Hidden, layer: Layer, config: ModelConfig) -> Hidden:
    """Gated: down(activation(gate·x) · (up·x))."""
    gate = _linear(x, layer.gate, layer.gate_bias)
    up = _linear(x, layer.up, layer.up_bias)
    return _linear(_ACTIVATIONS[config.activation](gate) * up, layer.down, layer.down_bias)
