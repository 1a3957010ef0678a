"""The decoder: one block function with options for all families, and what follows the last layer.

A batch has rows of one length. A row contains one sample or several, each a segment with its own positions. Only the
layers up to the last tapped one are computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from spile.models import rope
from spile.models.architecture import ModelConfig
from spile.models.attention import ATTENTIONS, Attention, AttentionOptions, largest_weights, precision, softcap
from spile.models.experts import MIXTURES, Mixture, routed_mlp
from spile.models.layers import Hidden, Hook, linear, mlp, norm, rms_norm
from spile.models.params import Layer, LayerRun, Params, one_run_per_layer, tap_groups
from spile.models.rope import Angles
from spile.spec.taps import SteerKind, Tap, tap_rows

_CHUNK = 256
"""The number of tokens whose logits exist at once; those of all tokens would not fit into memory."""


def logits(params: Params, x: Float[Array, "rows d_model"], config: ModelConfig) -> Float32[Array, "rows vocab"]:
    """Return the logits of the next token in float32. The weights must be loaded with ``head``."""
    with jax.named_scope("head"):
        return _head(params, norm(x, params.final_norm, params.final_norm_bias, config), config)


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
    segments: Int[Array, "rows seq"],
    params: Params,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    hook: Hook,
) -> Array | None:
    """Report the final norm, the largest logits with their tokens, and the loss of the next token; return the loss."""
    x = hook("final_norm", norm(x, params.final_norm, params.final_norm_bias, config))
    tops = {tap.top for tap in taps if tap.top is not None and tap.layer is None}
    if not tops and not any(tap.kind == "loss" or tap.gradient for tap in taps):
        return None
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
    hook("logits", values)
    hook("logits_ids", ids)
    last = _is_last(segments)[..., None]
    return hook("loss", jnp.where(last, jnp.float32(0), loss))


def _loss(all_logits: Float32[Array, "tokens vocab"], token: Int[Array, " tokens"]) -> Float32[Array, " tokens"]:
    chosen_logit = jnp.take_along_axis(all_logits, token[:, None], axis=1, mode="clip")[:, 0]
    return jax.nn.logsumexp(all_logits, axis=-1) - chosen_logit


def _is_last(segments: Int[Array, "rows seq"]) -> Array:
    """Return whether each token is the last of its sample."""
    end = jnp.ones_like(segments[:, :1], bool)
    return jnp.concatenate([segments[:, 1:] != segments[:, :-1], end], axis=1)


Attend = Callable[[Array, Array, Array], Array]
"""A layer's attention: takes rotated queries, rotated keys and values, and returns the output of the heads."""
Keep = Callable[[Tap, Array], Any]

_AFTER_LAYERS = frozenset({"final_norm", "loss", "logits_ids", "logits"})


def keep_unchanged(_tap: Tap, x: Array) -> Array:
    """Return a tap's value unchanged."""
    return x


# -- edits of taps ----------------------------------------------------------------------------------------------------


class TokenInfo(NamedTuple):
    """The tokens whose rows are edited; each array has one entry per row."""

    ids: Any
    positions: Any
    """The position of each token in its sample."""
    last: Any = None
    """Whether each token is the last of its sample; None while an answer is generated."""


Edit = Callable[[Array, TokenInfo], Array]
"""Returns the new rows of a tap, of the same shape: ``edit(rows[tokens, width], info)``."""

_EditRows = Callable[[Array], Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steering:
    """Edits of taps by vectors. The vectors are inputs of a compiled program, so all vectors share one program."""

    taps: tuple[Tap, ...] = field(metadata={"static": True})
    kinds: tuple[SteerKind, ...] = field(metadata={"static": True})
    values: tuple[Any, ...]
    """For each tap: the vector to add, nothing, the unit vector to project out, or the rows of a sample."""


def _steer(kind: SteerKind, value: Array, rows: Array, info: TokenInfo) -> Array:
    if kind == "zero":
        return jnp.zeros_like(rows)
    wide, value = rows.astype(jnp.float32), value.astype(jnp.float32)
    if kind == "add":
        return (wide + value).astype(rows.dtype)
    if kind == "ablate":
        return (wide - jnp.sum(wide * value, axis=-1, keepdims=True) * value).astype(rows.dtype)
    stored = jnp.take(value, info.positions, axis=0, mode="clip")
    return jnp.where((info.positions < len(value))[:, None], stored, wide).astype(rows.dtype)


def bind_edits(params: Params, edits: Sequence[tuple[Tap, Edit]], info: TokenInfo) -> list[tuple[Tap, _EditRows]]:
    """Return the edits of ``params.steering`` and further ones as functions of rows alone, in this order."""
    flat = TokenInfo(*(None if each is None else each.reshape(-1) for each in info))
    steering: Steering | None = params.steering
    own: list[tuple[Tap, Any]] = []
    if steering is not None:
        each = zip(steering.taps, steering.kinds, steering.values, strict=True)
        own = [(tap, functools.partial(_steer, kind, value)) for tap, kind, value in each]
    return [(tap, functools.partial(edit, info=flat)) for tap, edit in (*own, *edits)]


def _apply_edits(value: Array, kind: str, edits: Sequence[tuple[Tap, _EditRows]]) -> Array:
    """Return a value after the edits of its kind; of values per head, an edit gets those of its tap side by side."""
    for tap, edit in edits:
        if tap.kind == kind:
            heads = None if tap.heads is None else jnp.asarray(tap.heads)
            chosen = value if heads is None else value[:, :, heads]
            rows = chosen.reshape(-1, math.prod(chosen.shape[2:]))
            new = edit(rows).astype(value.dtype).reshape(chosen.shape)
            value = new if heads is None else value.at[:, :, heads].set(new)
    return value


class TapCollector:
    """Edits the values of taps, and keeps those that are requested, each passed through ``keep``."""

    def __init__(
        self, taps: tuple[Tap, ...] = (), keep: Keep = keep_unchanged, edits: Sequence[tuple[Tap, _EditRows]] = ()
    ) -> None:
        self.taps, self.keep, self.edits = taps, keep, edits
        self.kept: dict[Tap, Any] = {}

    def hook(self, kind: str, value: Array) -> Array:
        """Edit and collect a value of the parts that the model has once."""
        value = _apply_edits(value, kind, self.edits_of(None))
        self.collect(None, kind, value)
        return value

    def edits_of(self, layer: int | None) -> tuple[tuple[Tap, _EditRows], ...]:
        return tuple(edit for edit in self.edits if edit[0].layer == layer)

    def collect(self, layer: int | None, kind: str, value: Array) -> None:
        """Keep an edited value for the taps that ask for it."""
        for tap in self.taps:
            if (tap.kind, tap.layer) == (kind, layer) and tap not in self.kept:
                self.kept[tap] = self.keep(tap, _as_rows(value, tap))

    def all(self) -> tuple[Any, ...]:
        """Return the values in the order of the taps."""
        return tuple(self.kept[tap] for tap in self.taps)


def _as_rows(value: Array, tap: Tap) -> Array:
    """Return a value as activation rows; of values per head, the selected heads side by side."""
    if tap.top is not None:
        value = value[..., : tap.top]
    if value.ndim == 3:
        return value
    chosen = value if tap.heads is None else value[:, :, jnp.asarray(tap.heads)]
    return chosen.reshape(*value.shape[:2], -1)


def head_needed(taps: tuple[Tap, ...]) -> bool:
    """Return whether these taps need the final norm and the LM head. Gradients are those of the loss."""
    return any(tap.kind in _AFTER_LAYERS or tap.gradient for tap in taps)


def layers_needed(taps: tuple[Tap, ...], n_layers: int) -> int:
    """Return how many of ``n_layers`` layers must be loaded and computed for these taps: at least one."""
    if any(tap.gradient for tap in taps):
        return n_layers
    depths = (tap.layer if tap.layer is not None else 0 if tap.kind == "embed" else n_layers - 1 for tap in taps)
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
    edits: Sequence[tuple[Tap, Edit]] = (),
) -> tuple[Any, ...]:
    """Return the activations ``[rows, seq, width]`` of the taps, in their order, each passed through ``keep``.

    Args:
        params: The weights.
        tokens: The token ids.
        positions: The position of each token in its sample; None: each batch row is one sample from position 0.
        segments: Which tokens of a batch row belong to one sample; None: all of them.
        config: The model.
        taps: The taps.
        attention: The implementation of attention.
        mixture: The implementation of routed experts.
        keep: A function of each tap and its value, such as a conversion to the stored dtype.
        runs: How the layers of ``params`` are stacked, if they are. Each run is then a scan, and there is one result
            for each of :func:`~spile.models.params.tap_groups`, with one more dimension in front for the steps.
        edits: Functions that change taps, applied after those of ``params.steering``. A tap has the edited value.
    """
    runs = one_run_per_layer(layers_needed(taps, config.n_layers)) if runs is None else runs
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segments = jnp.zeros_like(tokens) if segments is None else segments
    info = TokenInfo(tokens, positions, _is_last(segments))
    plain = tuple(tap for tap in taps if not tap.gradient)
    grad_taps = tuple(tap for tap in taps if tap.gradient)

    def compute(keep: Keep, more: Sequence[tuple[Tap, Edit]]) -> tuple[dict[Tap, Any], Array | None]:
        collector = TapCollector(plain, keep, bind_edits(params, [*edits, *more], info))
        x = residual_stream(params, info, segments, config, runs, attention, mixture, collector, remat=bool(grad_taps))
        if not head_needed(taps):
            return collector.kept, None
        return collector.kept, report_head_taps(x, tokens, segments, params, config, taps, collector.hook)

    if grad_taps:
        kept = _with_gradients(compute, grad_taps, config, keep, params, info, segments)
    else:
        kept, _ = compute(keep, ())
    return tuple(kept[taps[group[0]]] for group in tap_groups(taps, runs))


def _with_gradients(
    compute: Callable[[Keep, Sequence[tuple[Tap, Edit]]], tuple[dict[Tap, Any], Array | None]],
    grad_taps: Sequence[Tap],
    config: ModelConfig,
    keep: Keep,
    params: Params,
    info: TokenInfo,
    segments: Array,
) -> dict[Tap, Any]:
    """Return the kept values of a forward pass, and the gradients of the loss with respect to taps."""
    kept_taps: list[Tap] = []

    def total_loss(zeros: list[Array]) -> tuple[Array, tuple[Any, ...]]:
        """Return the sum of the mean loss of each sample; no sample has an effect on the loss of another one."""
        more = [(tap, functools.partial(_steer, "add", each)) for tap, each in zip(grad_taps, zeros, strict=True)]
        found, loss = compute(lambda tap, x: keep(tap, jax.lax.stop_gradient(x)), more)
        if loss is None:
            raise ValueError("gradients without a loss")
        kept_taps[:] = found
        predicted = jnp.maximum(rope.sample_lengths(info.positions, segments) - 1, 1).astype(jnp.float32)
        return jnp.sum(loss[..., 0] / predicted), tuple(found.values())

    widths = [tap_rows(tap, config.sizes(tap.layer), "float32").width for tap in grad_taps]
    zeros = [jnp.zeros((info.ids.size, width), params.embed.dtype) for width in widths]
    gradients, values = jax.grad(total_loss, has_aux=True)(zeros)
    rows = (each.reshape(*info.ids.shape, -1) for each in gradients)
    kept = {tap: keep(tap, each) for tap, each in zip(grad_taps, rows, strict=True)}
    return dict(zip(kept_taps, values, strict=True)) | kept


def residual_stream(
    params: Params,
    info: TokenInfo,
    segments: Int[Array, "rows seq"],
    config: ModelConfig,
    runs: Sequence[LayerRun],
    attention: str | Attention,
    mixture: str | Mixture,
    collector: TapCollector,
    *,
    remat: bool = False,
) -> Hidden:
    """Return the residual stream after the last layer of these runs; ``collector`` collects the taps.

    ``remat``: a backward pass follows, which computes each layer again instead of keeping its values.
    """
    x = embed(params, info.ids, info.positions, config, collector.hook)
    with jax.named_scope("rope"):
        lengths = rope.sample_lengths(info.positions, segments) if config.rope.kind == "longrope" else None
        angles = rope.per_layer(config, info.positions, lengths)
    compute = ATTENTIONS[attention] if isinstance(attention, str) else attention

    def attend(
        q: Array, k: Array, v: Array, segments: Array, options: AttentionOptions, hook: Hook
    ) -> tuple[Array, None]:
        if options.top:
            weights, columns = largest_weights(q, k, segments, options)
            begins = info.positions - jnp.arange(q.shape[1], dtype=jnp.int32)  # a segment is one piece of its batch row
            hook("pattern", weights)
            hook("pattern_ids", jnp.where(columns < 0, -1, columns + begins[..., None, None]))
        return compute(q, k, v, segments, options), None

    length = info.ids.shape[1]
    windows = [None if window is None or window >= length else window for window in config.windows]
    layers = Layers(config, windows, angles, attend, mixture, remat=remat)
    stacks = iter(params.layers)
    for run in runs:
        weights = tuple(next(stacks) for _ in range(run.period))
        if run.steps > 1:
            x = _scan(x, run, weights, layers, segments, collector)
        else:
            x, _ = layers.run(x, run.first, weights[0], segments, collector)
    return x


StatefulAttention = Callable[[Array, Array, Array, Any, AttentionOptions, Hook], tuple[Array, Any]]
"""The attention of any layer: takes rotated queries, rotated keys, values, a state, the layer's options and a function
for taps; returns the output of the heads and the new state."""


class Layers:
    """The layers of one forward pass, with everything they need besides their weights."""

    def __init__(
        self,
        config: ModelConfig,
        windows: Sequence[int | None],
        angles: Sequence[Angles | None],
        attend: StatefulAttention,
        mixture: str | Mixture,
        *,
        remat: bool = False,
    ) -> None:
        self._config, self._windows, self._angles, self._attend, self._remat = config, windows, angles, attend, remat
        self._mixture = MIXTURES[mixture] if isinstance(mixture, str) else mixture
        self._traced = functools.cache(self._trace)

    def run(self, x: Hidden, index: int, weights: Layer, state: Any, collector: TapCollector) -> tuple[Hidden, Any]:
        """Compute one layer; return its output and the state that its attention returned."""
        taps = [tap for tap in collector.taps if tap.layer == index]
        kinds, top = frozenset(tap.kind for tap in taps), max((tap.top or 0 for tap in taps), default=0)
        with jax.named_scope(f"layer.{index}"):
            layer = self._traced(self._windows[index], kinds, top, collector.edits_of(index))
            x, state, found = layer(x, weights, self._angles[index], state)
            for kind, value in found.items():
                collector.collect(index, kind, value)
        return x, state

    def _trace(
        self, window: int | None, kinds: frozenset[str], top: int, edits: tuple[tuple[Tap, _EditRows], ...]
    ) -> Any:
        """Return a jitted layer of one kind. Tracing takes long, so equal layers share one trace."""

        def run(x: Hidden, layer: Layer, angles: Angles | None, state: Any) -> tuple[Hidden, Any, dict[str, Array]]:
            found: dict[str, Array] = {}

            def hook(kind: str, value: Array) -> Array:
                value = _apply_edits(value, kind, edits)
                if kind in kinds:
                    found[kind] = value
                return value

            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal state
                options = AttentionOptions(window, self._config.attention_softcap, layer.sinks, top)
                out, state = self._attend(q, k, v, state, options, hook)
                return out

            return block(x, layer, angles, self._config, attend, hook, self._mixture), state, found

        return jax.jit(jax.checkpoint(run) if self._remat else run)


def _scan(
    x: Hidden, run: LayerRun, weights: tuple[Layer, ...], layers: Layers, segments: Array, collector: TapCollector
) -> Hidden:
    """Compute a run of layers as a scan with one period per step. The taps of the first period stand for all."""
    tapped = tuple(tap for tap in collector.taps if tap.layer in range(run.first, run.first + run.period))

    def step(x: Hidden, now: tuple[Array, tuple[Layer, ...]]) -> tuple[Hidden, tuple[Any, ...]]:
        number, weights = now
        here = TapCollector(tapped, collector.keep, _edits_of_step(collector.edits, run, number))
        for index, layer in enumerate(weights, run.first):
            x, _ = layers.run(x, index, layer, segments, here)
        return x, here.all()

    x, kept = jax.lax.scan(step, x, (jnp.arange(run.steps, dtype=jnp.int32), weights))
    collector.kept.update(zip(tapped, kept, strict=True))
    return x


def _edits_of_step(edits: Sequence[tuple[Tap, _EditRows]], run: LayerRun, number: Array) -> list[tuple[Tap, _EditRows]]:
    """Return the edits of a run's layers as edits of the first period, each of which happens in its own step only."""
    found: list[tuple[Tap, _EditRows]] = []
    for tap, edit in edits:
        if tap.layer is not None and run.first <= tap.layer < run.stop:
            step, place = divmod(tap.layer - run.first, run.period)
            here = functools.partial(_edit_in_step, number == step, edit)
            found.append((replace(tap, layer=run.first + place), here))
    return found


def _edit_in_step(now: Array, edit: _EditRows, rows: Array) -> Array:
    out: Array = jax.lax.cond(now, lambda x: edit(x).astype(x.dtype), lambda x: x, rows)
    return out


def embed(params: Params, tokens: Int[Array, "rows seq"], positions: Array, config: ModelConfig, hook: Hook) -> Hidden:
    """Return the input of the first layer."""
    with jax.named_scope("embed"):
        x = jnp.take(params.embed, tokens, axis=0, mode="clip")
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        x = hook("embed", x)
        if params.positions is not None:
            x = x + jnp.take(params.positions, positions, axis=0, mode="clip")
    return x


def block(
    x: Hidden,
    layer: Layer,
    angles: Angles | None,
    config: ModelConfig,
    attend: Attend,
    hook: Hook,
    mixture: Mixture,
) -> Hidden:
    """Compute one layer with the values that ``hook`` returns.

    The compiler removes what is not tapped, including the MLP of the last layer.
    """
    x = hook("resid_pre", x)
    with jax.named_scope("attn"):
        normed = norm(x, layer.attn_norm, layer.attn_norm_bias, config)
        out = _attention(hook("attn_in", normed), layer, angles, config, attend, hook)
        added = _scaled(norm(out, layer.attn_post_norm, None, config), config)
    added = hook("attn", added)
    with jax.named_scope("mlp"):
        middle = hook("resid_mid", x + added)
        if not config.shared_norm:
            normed = norm(x if config.parallel else middle, layer.mlp_norm, layer.mlp_norm_bias, config)
        normed = hook("mlp_in", normed)
        if layer.router is None:
            out = mlp(normed, layer, config, hook)
        else:
            out = routed_mlp(normed, layer, config, hook, mixture)
        added = _scaled(norm(out, layer.mlp_post_norm, None, config), config)
    added = hook("mlp", added)
    with jax.named_scope("residual"):
        return hook("residual", middle + added)


def _scaled(out: Array, config: ModelConfig) -> Array:
    """Return what is added to the residual stream. The factor is not rounded to the dtype, as in transformers."""
    if config.residual_scale is None:
        return out
    added: Array = (out.astype(jnp.float32) * jnp.float32(config.residual_scale)).astype(out.dtype)
    return added


def _attention(
    x: Hidden, layer: Layer, angles: Angles | None, config: ModelConfig, attend: Attend, hook: Hook
) -> Hidden:
    """Project, norm queries and keys if the family does, rotate, attend, and project back."""
    rows, length, _ = x.shape

    def heads(kind: str, weight: Array, bias: Array | None, count: int) -> Array:
        return hook(kind, linear(x, weight, bias).reshape(rows, length, count, config.head_dim))

    q = heads("q", layer.q, layer.q_bias, config.n_heads)
    k = heads("k", layer.k, layer.k_bias, config.n_kv_heads)
    v = heads("v", layer.v, layer.v_bias, config.n_kv_heads)
    if layer.q_norm is not None:
        q, k = _head_norm(q, layer.q_norm, config), _head_norm(k, layer.k_norm, config)
    if config.attention_scale is not None:  # The implementations of attention divide by √head_dim.
        q = q * jnp.asarray(config.attention_scale * config.head_dim**0.5, q.dtype)
    if angles is not None:
        q, k = (rope.rotate(each, *angles, interleaved=config.rope_interleaved) for each in (q, k))
    out = hook("z", attend(q, k, v))
    by_head = layer.o.reshape(-1, config.n_heads, config.head_dim)
    hook("head_out", _scaled(jnp.einsum("bshd,mhd->bshm", out, by_head, precision=precision(out.dtype)), config))
    return linear(out.reshape(rows, length, config.n_heads * config.head_dim), layer.o, layer.o_bias)


def _head_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """Norm queries or keys over each head, or over all heads together."""
    if not config.flat_qk_norm:
        return rms_norm(x, weight, config)
    return rms_norm(x.reshape(*x.shape[:2], -1), weight, config).reshape(x.shape)
