"""The decoder: one block with switches, unrolled as far as the last tapped layer and no further.

A batch is rows of one length; a row holds one sample or several, each a segment with positions of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spile.model import rope
from spile.model.attention import ATTENTIONS, Attention
from spile.model.experts import MIXTURES, Mixture, routed_mlp
from spile.model.layers import Hidden, Look, linear, mlp, norm, rms_norm
from spile.model.logits import look_after_layers
from spile.model.params import Layer, Params
from spile.model.rope import Angles
from spile.spec.architecture import ModelConfig
from spile.spec.taps import Site, Tap

__all__ = ["Attend", "Drawn", "Keep", "as_it_is", "block", "embed", "forward", "head_needed", "layers_needed"]

Attend = Callable[[Array, Array, Array], Array]
"""A layer's attention: rotated queries, rotated keys and values in, what the heads saw out."""
Keep = Callable[[Tap, Array], Any]

_AFTER_LAYERS = frozenset({"final_norm", "loss", "logits_ids", "logits"})


def as_it_is(_tap: Tap, x: Array) -> Array:
    """Keeps a tap's value unchanged."""
    return x


class Drawn:
    """What the taps gave, each through ``keep`` once it exists."""

    def __init__(self, taps: tuple[Tap, ...], keep: Keep) -> None:
        self._taps, self._keep = taps, keep
        self._kept: dict[Tap, Any] = {}

    def at(self, layer: int | None) -> Look:
        """Hears of the sites of one layer, or of those that the model has once."""

        def look(site: Site, value: Array) -> None:
            for tap in self._taps:
                if (tap.site, tap.layer) == (site, layer) and tap not in self._kept:
                    self._kept[tap] = self._keep(tap, _row(value, tap))

        return look

    def all(self) -> tuple[Any, ...]:
        """In the order of the taps."""
        return tuple(self._kept[tap] for tap in self._taps)


def _row(value: Array, tap: Tap) -> Array:
    """A site's value as the tap's rows: of heads the chosen ones, side by side."""
    if value.ndim == 3:
        return value
    chosen = value if tap.heads is None else value[:, :, jnp.asarray(tap.heads)]
    return chosen.reshape(*value.shape[:2], -1)


def head_needed(taps: tuple[Tap, ...]) -> bool:
    """Whether the final norm and the LM head must be loaded for these taps."""
    return any(tap.site in _AFTER_LAYERS for tap in taps)


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
    mixture: str | Mixture = "blocks",
    keep: Keep = as_it_is,
) -> tuple[Any, ...]:
    """The taps' activations ``[rows, seq, width]`` in the order of ``taps``, each through ``keep`` once it exists.

    ``positions`` are those within a token's own sample, ``segments`` say which tokens of a row are one sample. Without
    them each row is one sample from position 0, padded on the right, where a causal mask hides the padding.
    """
    drawn = Drawn(taps, keep)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
    x = embed(params, tokens, places, config, drawn.at(None))
    with jax.named_scope("rope"):
        angles = rope.per_layer(config, places)
    attend_within = ATTENTIONS[attention] if isinstance(attention, str) else attention
    mix = MIXTURES[mixture] if isinstance(mixture, str) else mixture

    @functools.cache
    def traced(window: int | None, sites: frozenset[Site]) -> Any:
        """A layer of this kind, traced once whatever their number: tracing is the interpreter's time, and long."""

        def run(x: Hidden, layer: Layer, angles: Angles | None, segments: Array | None) -> Any:
            found: dict[Site, Array] = {}

            def attend(q: Array, k: Array, v: Array) -> Array:
                return attend_within(q, k, v, segments, window=window, softcap=config.attention_softcap)

            def look(site: Site, value: Array) -> None:
                if site in sites:
                    found[site] = value

            return block(x, layer, angles, config, attend, look, mix), found

        return jax.jit(run)

    for index in range(layers_needed(taps, config.n_layers)):
        window = config.windows[index]
        narrow = window if window is not None and window < tokens.shape[1] else None
        with jax.named_scope(f"layer.{index}"):
            sites = frozenset(tap.site for tap in taps if tap.layer == index)
            x, found = traced(narrow, sites)(x, params.layers[index], angles[index], segments)
            for site, value in found.items():
                drawn.at(index)(site, value)
    if head_needed(taps):
        look_after_layers(x, tokens, segments, params, config, taps, drawn.at(None))
    return drawn.all()


def embed(params: Params, tokens: Int[Array, "rows seq"], positions: Array, config: ModelConfig, look: Look) -> Hidden:
    """What the first layer reads."""
    with jax.named_scope("embed"):
        x = jnp.take(params.embed, tokens, axis=0, mode="clip")
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        look("embed", x)
        if params.positions is not None:
            x = x + jnp.take(params.positions, positions, axis=0, mode="clip")
    return x


def block(
    x: Hidden,
    layer: Layer,
    angles: Angles | None,
    config: ModelConfig,
    attend: Attend,
    look: Look,
    mixture: Mixture = MIXTURES["blocks"],
) -> Hidden:
    """One layer. What nobody looks at is dropped by the compiler, the last layer's MLP too."""
    look("resid_pre", x)
    with jax.named_scope("attn"):
        normed = norm(x, layer.attn_norm, layer.attn_norm_bias, config)
        look("attn_in", normed)
        added = norm(_attention(normed, layer, angles, config, attend, look), layer.attn_post_norm, None, config)
    look("attn", added)
    with jax.named_scope("mlp"):
        middle = x + added
        look("resid_mid", middle)
        normed = norm(x if config.parallel else middle, layer.mlp_norm, layer.mlp_norm_bias, config)
        look("mlp_in", normed)
        if layer.router is None:
            out = mlp(normed, layer, config, look)
        else:
            out = routed_mlp(normed, layer, config, look, mixture)
        added = norm(out, layer.mlp_post_norm, None, config)
    look("mlp", added)
    with jax.named_scope("residual"):
        x = middle + added
    look("residual", x)
    return x


def _attention(
    x: Hidden, layer: Layer, angles: Angles | None, config: ModelConfig, attend: Attend, look: Look
) -> Hidden:
    """Project, norm the heads if the family does, rotate, attend, project back."""
    rows, length, _ = x.shape

    def heads(site: Site, weight: Array, bias: Array | None, count: int) -> Array:
        out = linear(x, weight, bias).reshape(rows, length, count, config.head_dim)
        look(site, out)
        return out

    q = heads("q", layer.q, layer.q_bias, config.n_heads)
    k = heads("k", layer.k, layer.k_bias, config.n_kv_heads)
    v = heads("v", layer.v, layer.v_bias, config.n_kv_heads)
    if layer.q_norm is not None:
        q, k = _head_norm(q, layer.q_norm, config), _head_norm(k, layer.k_norm, config)
    if config.attention_scale is not None:  # attention itself divides by √head_dim
        q = q * jnp.asarray(config.attention_scale * config.head_dim**0.5, q.dtype)
    if angles is not None:
        q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
    out = attend(q, k, v)
    look("z", out)
    return linear(out.reshape(rows, length, config.n_heads * config.head_dim), layer.o, layer.o_bias)


def _head_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """Over each head, or over all of them together."""
    if not config.flat_qk_norm:
        return rms_norm(x, weight, config)
    return rms_norm(x.reshape(*x.shape[:2], -1), weight, config).reshape(x.shape)
