"""The decoder: one pre-norm block with switches, unrolled as far as the last tapped layer and no further."""

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
from spile.spec.taps import Tap

__all__ = ["forward", "layers_needed"]

Hidden = Float[Array, "batch seq d_model"]
Angles = tuple[Float32[Array, "seq half"], Float32[Array, "seq half"]]

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
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    attention: str | Attention = "xla",
    keep: Callable[[Array], Any] = _identity,
) -> tuple[Any, ...]:
    """The taps' activations ``[batch, seq, d_model]`` in the order of ``taps``, each through ``keep`` once it exists.

    Padding stands on the right, under a causal mask, so no lengths are needed: rows past a sample's end are noise.
    """
    wanted = frozenset(taps)
    kept: dict[Tap, Any] = {}

    def tap(site: str, layer: int, value: Array) -> None:
        name = Tap(site, layer)
        if name in wanted:
            kept[name] = keep(value)

    with jax.named_scope("embed"):
        x = jnp.take(params.embed, tokens, axis=0, mode="clip")
    with jax.named_scope("rope"):
        angles = rope.angles(config, tokens.shape[1])
    attend = ATTENTIONS[attention] if isinstance(attention, str) else attention
    for index in range(layers_needed(taps, config.n_layers)):
        layer = params.layers[index]
        with jax.named_scope(f"attn.{index}"):
            normed = _rms_norm(x, layer.attn_norm, config.norm_eps)
            out = _attention(normed, layer, angles, config, attend, config.windows[index])
        tap("attn", index, out)
        if len(kept) == len(wanted):
            break
        with jax.named_scope(f"mlp.{index}"):
            x = x + out
            out = _mlp(_rms_norm(x, layer.mlp_norm, config.norm_eps), layer, config)
        tap("mlp", index, out)
        with jax.named_scope(f"residual.{index}"):
            x = x + out
        tap("residual", index, x)
    return tuple(kept[name] for name in taps)


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


def _attention(
    x: Hidden, layer: Layer, angles: Angles, config: ModelConfig, attend: Attention, window: int | None
) -> Hidden:
    """Project, norm the heads if the family does, rotate, attend, project back."""
    batch, length, _ = x.shape

    def heads(weight: Array, bias: Array | None, count: int) -> Array:
        return _linear(x, weight, bias).reshape(batch, length, count, config.head_dim)

    q = heads(layer.q, layer.q_bias, config.n_heads)
    k = heads(layer.k, layer.k_bias, config.n_kv_heads)
    v = heads(layer.v, layer.v_bias, config.n_kv_heads)
    if layer.q_norm is not None:
        q = _rms_norm(q, layer.q_norm, config.norm_eps)
        k = _rms_norm(k, layer.k_norm, config.norm_eps)
    q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
    narrow = window if window is not None and window < length else None
    out = attend(q, k, v, window=narrow)
    return _linear(out.reshape(batch, length, config.n_heads * config.head_dim), layer.o, layer.o_bias)


def _mlp(x: Hidden, layer: Layer, config: ModelConfig) -> Hidden:
    """Gated: down(activation(gate·x) · (up·x))."""
    gate = _linear(x, layer.gate, layer.gate_bias)
    up = _linear(x, layer.up, layer.up_bias)
    return _linear(_ACTIVATIONS[config.activation](gate) * up, layer.down, layer.down_bias)
