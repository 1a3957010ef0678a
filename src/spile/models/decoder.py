"""The decoder: one block function with options for all families, and what follows the last layer.

A batch has rows of one length. A row contains one sample or several, each a segment with its own positions. Only the
layers up to the last tapped one are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from spile.models import rope
from spile.models.architecture import ModelConfig
from spile.models.attention import ATTENTIONS, Attention, precision
from spile.models.experts import MIXTURES, Mixture, routed_mlp
from spile.models.layers import Hidden, Look, linear, mlp, norm, rms_norm, softcap
from spile.models.params import Layer, LayerRun, Params, one_run_per_layer, tap_groups
from spile.models.rope import Angles
from spile.spec.taps import Site, Tap

_CHUNK = 256
"""The number of tokens whose logits exist at once; those of all tokens would not fit into memory."""


def final_norm(x: Float[Array, "... d_model"], params: Params, config: ModelConfig) -> Float[Array, "... d_model"]:
    """Return the input of the LM head."""
    return norm(x, params.final_norm, params.final_norm_bias, config)


def logits(params: Params, x: Float[Array, "rows d_model"], config: ModelConfig) -> Float32[Array, "rows vocab"]:
    """Return the logits of the next token in float32. The weights must be loaded with ``head``."""
    with jax.named_scope("head"):
        return _head(params, final_norm(x, params, config), config)


def _head(params: Params, normed: Float[Array, "rows d_model"], config: ModelConfig) -> Float32[Array, "rows vocab"]:
    """Apply the LM head, which is the embedding if the model has no other."""
    head = params.embed if params.head is None else params.head
    dimensions = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(
        normed, head, dimensions, precision=precision(normed.dtype), preferred_element_type=jnp.float32
    )
    if params.head_bias is not None:
        out = out + params.head_bias.astype(jnp.float32)
    if config.logits_divisor is not None:
        out = out / jnp.float32(config.logits_divisor)
    return softcap(out, config.final_softcap)


def report_head_taps(
    x: Hidden,
    tokens: Int[Array, "rows seq"],
    segments: Int[Array, "rows seq"] | None,
    params: Params,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    look: Look,
) -> None:
    """Report the final norm, the largest logits with their tokens, and the loss of the next token."""
    x = final_norm(x, params, config)
    look("final_norm", x)
    tops = {tap.top for tap in taps if tap.top is not None}
    if not tops and not any(tap.site == "loss" for tap in taps):
        return
    top = max(tops, default=1)
    rows, length, d_model = x.shape
    count = -(-rows * length // _CHUNK)
    padding = count * _CHUNK - rows * length
    following = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    flat = jnp.pad(x.reshape(-1, d_model), [(0, padding), (0, 0)]).reshape(count, _CHUNK, d_model)
    wanted = jnp.pad(following.reshape(-1), [(0, padding)]).reshape(count, _CHUNK)

    def chunk(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, token = part
        all_logits = _head(params, hidden, config)
        values, ids = jax.lax.top_k(all_logits, top)
        return values, ids.astype(jnp.int32), _loss(all_logits, token)

    with jax.named_scope("logits"):
        values, ids, loss = (
            part.reshape(count * _CHUNK, -1)[: rows * length].reshape(rows, length, -1)
            for part in jax.lax.map(chunk, (flat, wanted))
        )
    look("logits", values)
    look("logits_ids", ids)
    last = _is_last(tokens, segments)[..., None]
    look("loss", jnp.where(last, jnp.float32(0), loss))


def _loss(all_logits: Float32[Array, "tokens vocab"], token: Int[Array, " tokens"]) -> Float32[Array, " tokens"]:
    chosen_logit = jnp.take_along_axis(all_logits, token[:, None], axis=1, mode="clip")[:, 0]
    return jax.nn.logsumexp(all_logits, axis=-1) - chosen_logit


def _is_last(tokens: Int[Array, "rows seq"], segments: Int[Array, "rows seq"] | None) -> Array:
    """Return whether each token is the last of its sample."""
    end = jnp.zeros(tokens.shape, bool).at[:, -1].set(True)
    if segments is None:
        return end
    return end | jnp.concatenate([segments[:, 1:] != segments[:, :-1], end[:, -1:]], axis=1)


Attend = Callable[[Array, Array, Array], Array]
"""A layer's attention: takes rotated queries, rotated keys and values, and returns the output of the heads."""
Keep = Callable[[Tap, Array], Any]

_AFTER_LAYERS = frozenset({"final_norm", "loss", "logits_ids", "logits"})


def keep_unchanged(_tap: Tap, x: Array) -> Array:
    """Return a tap's value unchanged."""
    return x


class Drawn:
    """Collects the values of the taps, each passed through ``keep``."""

    def __init__(self, taps: tuple[Tap, ...], keep: Keep) -> None:
        self.taps, self.keep = taps, keep
        self._kept: dict[Tap, Any] = {}

    def at(self, layer: int | None) -> Look:
        """Return a function that receives the values of one layer, or of the parts that the model has once."""

        def look(site: Site, value: Array) -> None:
            for tap in self.taps:
                if (tap.site, tap.layer) == (site, layer) and tap not in self._kept:
                    self._kept[tap] = self.keep(tap, _row(value, tap))

        return look

    def put(self, taps: Sequence[Tap], kept: Sequence[Any]) -> None:
        """Add values that were collected elsewhere."""
        self._kept.update(zip(taps, kept, strict=True))

    def all(self, groups: Sequence[Sequence[int]] | None = None) -> tuple[Any, ...]:
        """Return the values in the order of the taps, or one per group of taps: that of its first tap."""
        chosen = self.taps if groups is None else [self.taps[group[0]] for group in groups]
        return tuple(self._kept[tap] for tap in chosen)


def _row(value: Array, tap: Tap) -> Array:
    """Return a value as activation rows; of values per head, the selected heads side by side."""
    if value.ndim == 3:
        return value
    chosen = value if tap.heads is None else value[:, :, jnp.asarray(tap.heads)]
    return chosen.reshape(*value.shape[:2], -1)


def head_needed(taps: tuple[Tap, ...]) -> bool:
    """Return whether these taps need the final norm and the LM head."""
    return any(tap.site in _AFTER_LAYERS for tap in taps)


def layers_needed(taps: tuple[Tap, ...], n_layers: int) -> int:
    """Return how many of ``n_layers`` layers must be loaded and computed for these taps: at least one."""
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
    keep: Keep = keep_unchanged,
    runs: Sequence[LayerRun] | None = None,
) -> tuple[Any, ...]:
    """Return the activations ``[rows, seq, width]`` of the taps, in their order, each passed through ``keep``.

    Args:
        params: The weights.
        tokens: The token ids.
        positions: The position of each token in its sample; None: each batch row is one sample from position 0.
        segments: Which tokens of a batch row belong to one sample; None: all of them. Padding must be on the right,
            where the causal mask hides it.
        config: The model.
        taps: The taps.
        attention: The implementation of attention.
        mixture: The implementation of routed experts.
        keep: A function of each tap and its value, such as a conversion to the stored dtype.
        runs: How the layers of ``params`` are stacked, if they are. Each run is then a scan, and there is one result
            for each of :func:`~spile.models.params.tap_groups`, with one more dimension in front for the steps.
    """
    runs = one_run_per_layer(layers_needed(taps, config.n_layers)) if runs is None else runs
    drawn = Drawn(taps, keep)
    x = hidden(params, tokens, positions, segments, config, runs, attention, mixture, drawn)
    if head_needed(taps):
        report_head_taps(x, tokens, segments, params, config, taps, drawn.at(None))
    return drawn.all(tap_groups(taps, runs))


def hidden(
    params: Params,
    tokens: Int[Array, "rows seq"],
    positions: Int[Array, "rows seq"] | None,
    segments: Int[Array, "rows seq"] | None,
    config: ModelConfig,
    runs: Sequence[LayerRun],
    attention: str | Attention,
    mixture: str | Mixture,
    drawn: Drawn,
) -> Hidden:
    """Return the residual stream after the last layer of these runs; ``drawn`` collects the taps."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
    x = embed(params, tokens, places, config, drawn.at(None))
    with jax.named_scope("rope"):
        lengths = rope.sample_lengths(places, segments) if config.rope.kind == "longrope" else None
        angles = rope.per_layer(config, places, lengths)
    layers = _Layers(
        config,
        ATTENTIONS[attention] if isinstance(attention, str) else attention,
        MIXTURES[mixture] if isinstance(mixture, str) else mixture,
        angles,
        segments,
    )
    stacks = iter(params.layers)
    for run in runs:
        weights = tuple(next(stacks) for _ in range(run.period))
        x = layers.scan(x, run, weights, drawn) if run.steps > 1 else layers.one(x, run.first, weights[0], drawn)
    return x


class _Layers:
    """The layers of one forward pass, with everything they need besides their weights."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        mixture: Mixture,
        angles: Sequence[Angles | None],
        segments: Array | None,
    ) -> None:
        self._config, self._attention, self._mixture = config, attention, mixture
        self._angles, self._segments = angles, segments
        self._traced = functools.cache(self._trace)

    def _trace(self, window: int | None, sites: frozenset[Site]) -> Any:
        """Return a jitted layer of one kind. Tracing takes long, so equal layers share one trace."""

        def run(x: Hidden, layer: Layer, angles: Angles | None, segments: Array | None) -> Any:
            found: dict[Site, Array] = {}

            def attend(q: Array, k: Array, v: Array) -> Array:
                more = {} if layer.sinks is None else {"sinks": layer.sinks}
                return self._attention(q, k, v, segments, window=window, softcap=self._config.attention_softcap, **more)

            def look(site: Site, value: Array) -> None:
                if site in sites:
                    found[site] = value

            return block(x, layer, angles, self._config, attend, look, self._mixture), found

        return jax.jit(run)

    def one(self, x: Hidden, index: int, weights: Layer, drawn: Drawn) -> Hidden:
        """Compute one layer."""
        window = self._config.windows[index]
        narrow = window if window is not None and window < x.shape[1] else None
        sites = frozenset(tap.site for tap in drawn.taps if tap.layer == index)
        with jax.named_scope(f"layer.{index}"):
            x, found = self._traced(narrow, sites)(x, weights, self._angles[index], self._segments)
            for site, value in found.items():
                drawn.at(index)(site, value)
        return x

    def scan(self, x: Hidden, run: LayerRun, weights: tuple[Layer, ...], drawn: Drawn) -> Hidden:
        """Compute a run of layers as a scan with one period per step. The taps of the first period stand for all."""
        turn = tuple(tap for tap in drawn.taps if tap.layer in range(run.first, run.first + run.period))

        def step(x: Hidden, weights: tuple[Layer, ...]) -> tuple[Hidden, tuple[Any, ...]]:
            here = Drawn(turn, drawn.keep)
            for index, layer in enumerate(weights, run.first):
                x = self.one(x, index, layer, here)
            return x, here.all()

        x, kept = jax.lax.scan(step, x, weights)
        drawn.put(turn, kept)
        return x


def embed(params: Params, tokens: Int[Array, "rows seq"], positions: Array, config: ModelConfig, look: Look) -> Hidden:
    """Return the input of the first layer."""
    with jax.named_scope("embed"):
        x = jnp.take(params.embed, tokens, axis=0, mode="clip")
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        look("embed", x)
        if config.input_scale is not None:
            x = x * jnp.asarray(config.input_scale, x.dtype)
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
    """Compute one layer. The compiler removes what is not tapped, including the MLP of the last layer."""
    look("resid_pre", x)
    with jax.named_scope("attn"):
        normed = norm(x, layer.attn_norm, layer.attn_norm_bias, config)
        look("attn_in", normed)
        added = norm(_attention(normed, layer, angles, config, attend, look), layer.attn_post_norm, None, config)
    look("attn", added)
    with jax.named_scope("mlp"):
        middle = x + _scaled(added, config)
        look("resid_mid", middle)
        if not config.shared_norm:
            normed = norm(x if config.parallel else middle, layer.mlp_norm, layer.mlp_norm_bias, config)
        look("mlp_in", normed)
        if layer.router is None:
            out = mlp(normed, layer, config, look)
        else:
            out = routed_mlp(normed, layer, config, look, mixture)
        added = norm(out, layer.mlp_post_norm, None, config)
    look("mlp", added)
    with jax.named_scope("residual"):
        x = middle + _scaled(added, config)
    look("residual", x)
    return x


def _scaled(added: Hidden, config: ModelConfig) -> Hidden:
    return added if config.residual_scale is None else added * jnp.asarray(config.residual_scale, added.dtype)


def _attention(
    x: Hidden, layer: Layer, angles: Angles | None, config: ModelConfig, attend: Attend, look: Look
) -> Hidden:
    """Project, norm queries and keys if the family does, rotate, attend, and project back."""
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
    if config.attention_scale is not None:  # The implementations of attention divide by √head_dim.
        q = q * jnp.asarray(config.attention_scale * config.head_dim**0.5, q.dtype)
    if angles is not None:
        q, k = (rope.rotate(each, *angles, interleaved=config.rope_interleaved) for each in (q, k))
    out = attend(q, k, v)
    look("z", out)
    return linear(out.reshape(rows, length, config.n_heads * config.head_dim), layer.o, layer.o_bias)


def _head_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """Norm queries or keys over each head, or over all heads together."""
    if not config.flat_qk_norm:
        return rms_norm(x, weight, config)
    return rms_norm(x.reshape(*x.shape[:2], -1), weight, config).reshape(x.shape)
