"""Generation over slots: a cache of keys and values, a program that reads prompts and one that generates tokens.

A slot holds one sample from its first token to its last. Prompts are read in chunks, many at once and several of one
prompt too. Then all slots whose prompt was read generate tokens, a fixed number (the stride) per call. Key ``j`` of a
slot belongs to position ``j`` of the prompt or the answer, so an attention window is a distance. The keys of an earlier
sample are overwritten before they are used.

Every token is fed once, also the last one: its activations come from the step in which it was fed, and the token after
it from the logits of the same step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spile.errors import ModelError
from spile.models import rope
from spile.models.architecture import ModelConfig
from spile.models.attention import (
    AttentionOptions,
    cudnn_masked,
    masked_attention,
    masked_weights,
    precision,
    scale_scores,
)
from spile.models.decoder import (
    Keep,
    Layers,
    StatefulAttention,
    TapCollector,
    TokenInfo,
    bind_edits,
    embed,
    keep_unchanged,
    logits,
)
from spile.models.experts import MIXTURES, Mixture
from spile.models.layers import Hook
from spile.models.params import Params
from spile.spec.taps import Tap

IDLE, GENERATING, FINISHING = 0, 1, 2
"""The states of a slot: without a sample or reading its prompt; generating; feeding its last token."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is selected; constants of the compiled program."""

    stop: tuple[int, ...]
    max_new: int
    temperature: float = 0.0
    """0: always the most likely token."""
    top_p: float = 1.0
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The state on the devices between two calls; ``groups`` is the data-parallel width."""

    keys: tuple[Any, ...]
    """One array per layer, ``[groups, kv_heads, slots, capacity, head_dim]``.

    The axes that devices share come first, then those that a write selects, then what is written. In another order
    the compiler transposes the whole cache for each write.
    """
    values: tuple[Any, ...]
    token: Any
    """``[groups, slots]``: the token to feed next."""
    position: Any
    generated: Any
    """The number of generated tokens."""
    status: Any
    sample: Any
    """The sample's number in the stream; with the seed and ``generated`` it determines the random numbers."""


class Chunk(NamedTuple):
    """Chunks of prompts to read, ``[groups, rows, …]``."""

    tokens: Any
    """``[groups, rows, chunk]``."""
    slot: Any
    """``[groups, rows]``; the number of slots if a batch row is empty."""
    start: Any
    """The position of the chunk's first token."""
    length: Any
    """The number of its tokens; padding follows them."""
    last: Any
    """Whether the prompt ends with this chunk; then the first token of the answer is selected."""
    sample: Any


class Choices(NamedTuple):
    """Tokens, and the log-probability of each at temperature 1."""

    tokens: Any
    logprobs: Any


def token_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Return the size of one token's keys and values over all layers."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * np.dtype(dtype).itemsize


def empty_slots(config: ModelConfig, groups: int, slots: int, capacity: int, dtype: DTypeLike) -> Slots:
    """Return slots without samples.

    Raises:
        ModelError: The model's positions depend on the length of a sample, and a sample could reach the length at which
            they change.
    """
    if config.rope.kind == "longrope" and capacity > config.rope.original_length:
        raise ModelError(
            "spile infer with longrope",
            expected=f"at most {config.rope.original_length} tokens of prompt and answer",
            found=f"{capacity}",
            fix="use a smaller --max-seq-length or --max-new-tokens; beyond that length all positions would change",
        )
    shape = (groups, config.n_kv_heads, slots, capacity, config.head_dim)
    caches = [tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers)) for _ in range(2)]
    numbers = [jnp.zeros((groups, slots), jnp.int32) for _ in range(5)]
    return Slots(*caches, *numbers)


def read_prompts(
    params: Params,
    slots: Slots,
    chunk: Chunk,
    *,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    sampling: Sampling,
    mixture: Mixture = MIXTURES["blocks"],
    attention: str = "xla",
    keep: Keep = keep_unchanged,
) -> tuple[Slots, Choices, tuple[Any, ...]]:
    """Read a chunk of each batch row's prompt; after the last chunk, select the first token of the answer.

    Rows may be pieces of one prompt: at each layer all keys are written before any is looked at. ``attention`` is one
    of :data:`spile.models.attention.ATTENTIONS`. The kept activations are ``[groups × rows, chunk, …]``.
    """
    groups, _, size = chunk.tokens.shape
    place = chunk.start[..., None] + jnp.arange(size, dtype=jnp.int32)

    def attend(
        q: Array, k: Array, v: Array, caches: _Caches, options: AttentionOptions, hook: Hook
    ) -> tuple[Array, _Caches]:
        new = (_cache_layout(k, groups), _cache_layout(v, groups))
        caches = [_write_cache(cache, each, chunk.slot, place) for cache, each in zip(caches, new, strict=True)]
        own = [_slot_caches(cache, chunk.slot) for cache in caches]
        mask = _attention_mask(place, jnp.arange(caches[0].shape[3], dtype=jnp.int32), options.window)
        mask = mask.reshape(len(q), size, -1)
        if options.top:
            weights, positions = masked_weights(q, own[0], mask, options)
            hook("pattern", weights)
            hook("pattern_ids", positions)
        compute = cudnn_masked if attention == "cudnn" else masked_attention  # other kernels take no mask
        return compute(q, own[0], own[1], mask, options), caches

    before = list(zip(slots.keys, slots.values, strict=True))
    x, after, kept = _run_layers(params, chunk.tokens, place, attend, before, config, mixture, taps, keep)
    keys, values = zip(*after, strict=True)
    end = jnp.clip(chunk.length - 1, 0, size - 1).reshape(-1)
    last = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
    zero = jnp.zeros_like(chunk.sample)
    chosen = choose_tokens(logits(params, last, config), chunk.sample, zero, sampling)
    status = _status(chosen.tokens, zero + 1, sampling)
    at = jnp.where(chunk.last, chunk.slot, slots.token.shape[1])  # A slot beyond the end is dropped.
    fresh = {
        "token": chosen.tokens,
        "position": chunk.start + chunk.length,
        "generated": zero + 1,
        "status": status,
        "sample": chunk.sample,
    }
    group = jnp.arange(groups)[:, None]
    changed = {name: getattr(slots, name).at[group, at].set(new, mode="drop") for name, new in fresh.items()}
    return replace(slots, keys=keys, values=values, **changed), chosen, kept


def take_steps(
    params: Params,
    slots: Slots,
    *,
    stride: int,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    sampling: Sampling,
    mixture: Mixture = MIXTURES["blocks"],
    keep: Keep = keep_unchanged,
) -> tuple[Slots, Choices, tuple[Any, ...]]:
    """Feed ``stride`` tokens of each slot one after another, and select the token after each.

    Tokens are ``[stride, groups, slots]``, the kept activations ``[stride, groups × slots, 1, …]``. The output of
    a slot after its last token is meaningless.
    """
    groups, count = slots.token.shape
    first_position = slots.position[..., None]
    shape = (groups, config.n_kv_heads, count, stride, config.head_dim)
    blank = tuple(jnp.zeros(shape, cache.dtype) for cache in slots.keys)
    numbers = jnp.arange(stride, dtype=jnp.int32)

    def step(carry: tuple[Slots, Any], number: Array) -> tuple[tuple[Slots, Any], tuple[Choices, Any]]:
        now, place = carry[0], first_position + number

        def attend(
            q: Array, k: Array, v: Array, caches: _Caches, options: AttentionOptions, hook: Hook
        ) -> tuple[Array, _Caches]:
            old_keys, old_values, *fresh = caches
            keys, values = (_write_step(cache, new, number) for cache, new in zip(fresh, (k, v), strict=True))
            past = jnp.arange(old_keys.shape[3], dtype=jnp.int32)
            old = _attention_mask(place, past, options.window) & (past < first_position[..., None])
            new = _attention_mask(number.reshape(1, 1, 1), numbers, options.window)
            pairs = ((old_keys, old_values, old), (keys, values, jnp.broadcast_to(new, (*old.shape[:3], stride))))
            if options.top:
                _report_cached_weights(q, pairs, first_position, options, hook)
            return _cached_attention(q, pairs, options), (keys, values)

        before = list(zip(slots.keys, slots.values, *carry[1], strict=True))
        x, fresh, kept = _run_layers(params, now.token[..., None], place, attend, before, config, mixture, taps, keep)
        chosen = choose_tokens(logits(params, x[:, 0], config), now.sample, now.generated, sampling)
        generating = now.status == GENERATING
        generated = now.generated + generating
        after = replace(
            now,
            token=jnp.where(generating, chosen.tokens, now.token),
            position=now.position + (now.status != IDLE),
            generated=generated,
            status=jnp.where(generating, _status(chosen.tokens, generated, sampling), IDLE),
        )
        return (after, tuple(zip(*fresh, strict=True))), (chosen, kept)

    # The cache does not change during the stride; the new keys are written to it once, after the last step.
    start = (replace(slots, keys=(), values=()), (blank, blank))
    (after, fresh), (chosen, kept) = jax.lax.scan(step, start, numbers)
    # An idle slot may be in the middle of a prompt, so nothing is written there.
    busy = jnp.where(slots.status == IDLE, count, jnp.arange(count, dtype=jnp.int32))
    write = functools.partial(_write_cache, slot=busy, place=first_position + numbers)
    keys, values = (tuple(map(write, *pair)) for pair in zip((slots.keys, slots.values), fresh, strict=True))
    return replace(after, keys=keys, values=values), chosen, kept


# -- parts ------------------------------------------------------------------------------------------------------------


_Caches = Sequence[Array]
"""Keys and values of one layer."""


def _run_layers(
    params: Params,
    tokens: Int[Array, "groups rows seq"],
    place: Int[Array, "groups rows seq"],
    attend: StatefulAttention,
    caches: Sequence[_Caches],
    config: ModelConfig,
    mixture: Mixture,
    taps: tuple[Tap, ...],
    keep: Keep,
) -> tuple[Float[Array, "all seq d_model"], list[_Caches], tuple[Any, ...]]:
    """Compute all layers for any taps, because the next token needs the last layer.

    ``attend`` gets the caches of its layer and returns the changed ones; so do all layers together.
    """
    flat = (-1, tokens.shape[-1])
    positions = place.reshape(flat)
    collector = TapCollector(taps, keep, bind_edits(params, (), TokenInfo(tokens, place)))
    x = embed(params, tokens.reshape(flat), positions, config, collector.hook)
    layers = Layers(config, config.windows, rope.per_layer(config, positions), attend, mixture)
    changed = []
    for index, layer in enumerate(params.layers):
        x, after = layers.run(x, index, layer, caches[index], collector)
        changed.append(after)
    return x, changed, collector.all()


def _cache_layout(new: Array, groups: int) -> Array:
    """Transpose keys or values ``[groups × rows, seq, kv_heads, head_dim]`` to the layout of the cache."""
    return new.reshape(groups, -1, *new.shape[1:]).transpose(0, 3, 1, 2, 4)


def _write_cache(cache: Array, new: Array, slot: Array, place: Array) -> Array:
    """Write keys or values ``[groups, kv_heads, rows, seq, head_dim]`` at their slots; others are dropped."""

    def write(old: Array, x: Array, at: Array, where: Array) -> Array:
        return old.at[at[:, None], where].set(x.astype(old.dtype), mode="drop")

    by_head = jax.vmap(write, in_axes=(0, 0, None, None))
    out: Array = jax.vmap(by_head)(cache, new, slot, place)
    return out


def _write_step(cache: Array, new: Array, number: Array) -> Array:
    """Write the keys or values of step ``number`` to those of the stride."""
    new = _cache_layout(new, cache.shape[0]).astype(cache.dtype)
    return jax.lax.dynamic_update_slice_in_dim(cache, new, number, axis=3)


def _slot_caches(cache: Array, slot: Array) -> Array:
    """Return the caches of some slots, ``[groups × rows, capacity, kv_heads, head_dim]``."""
    rows: Array = jax.vmap(lambda old, at: jnp.take(old, at, axis=1, mode="clip"))(cache, slot)
    return rows.transpose(0, 2, 3, 1, 4).reshape(-1, *rows.shape[3:4], rows.shape[1], rows.shape[4])


def _attention_mask(place: Array, keys: Array, window: int | None) -> Array:
    """Return which keys, by position, a token at ``place`` attends to; one more axis than ``place``."""
    ahead = place[..., None] - keys
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def _cached_attention(q: Array, pairs: Sequence[tuple[Array, Array, Array]], options: AttentionOptions) -> Array:
    """Compute attention of one query per slot over keys and values in several arrays, each with its mask.

    The softmax is computed in float32. Keys are not repeated for their groups of heads, as in
    :func:`spile.models.attention.masked_attention`.
    """
    groups, kv_heads, count, _, head_dim = pairs[0][0].shape
    shape = (groups, count, kv_heads, -1, head_dim)
    grouped = q.reshape(shape).transpose(0, 2, 1, 3, 4)
    product = functools.partial(jnp.matmul, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    scores = []
    for keys, _, mask in pairs:
        products = scale_scores(product(grouped, keys.swapaxes(3, 4)), head_dim, options.softcap)
        scores.append(jnp.where(mask[:, None], products, -jnp.inf))
    highest = functools.reduce(jnp.maximum, (each.max(axis=-1, keepdims=True) for each in scores))
    if options.sinks is not None:
        sink = options.sinks.astype(jnp.float32).reshape(1, kv_heads, 1, -1, 1)
        highest = jnp.maximum(highest, sink)
    weights = [jnp.exp(each - highest) for each in scores]
    total = functools.reduce(jnp.add, (each.sum(axis=-1, keepdims=True) for each in weights))
    total = total if options.sinks is None else total + jnp.exp(sink - highest)
    parts = (product(each.astype(q.dtype), values) for each, (_, values, _) in zip(weights, pairs, strict=True))
    return (functools.reduce(jnp.add, parts) / total).astype(q.dtype).transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _report_cached_weights(
    q: Array, pairs: Sequence[tuple[Array, Array, Array]], first_position: Array, options: AttentionOptions, hook: Hook
) -> None:
    """Report the largest attention weights of :func:`_cached_attention` and the positions of their keys."""
    capacity = pairs[0][0].shape[3]
    keys = jnp.concatenate([keys for keys, _, _ in pairs], axis=3).transpose(0, 2, 3, 1, 4)
    mask = jnp.concatenate([mask for _, _, mask in pairs], axis=-1)
    rows = (len(q), -1, *keys.shape[3:])
    weights, places = masked_weights(q, keys.reshape(rows), mask.reshape(len(q), 1, -1), options)
    fresh = first_position.reshape(-1, 1, 1, 1) + places - capacity
    hook("pattern", weights)
    hook("pattern_ids", jnp.where(places < capacity, places, fresh))


def _status(token: Array, generated: Array, sampling: Sampling) -> Array:
    """Return the state of a slot that has just generated this token, its ``generated``-th."""
    ends = generated >= sampling.max_new
    ends |= jnp.isin(token, np.array(sampling.stop, np.int32))
    return jnp.where(ends, FINISHING, GENERATING).astype(jnp.int32)


def choose_tokens(
    scores: Float[Array, "all vocab"],
    sample: Int[Array, "groups rows"],
    generated: Int[Array, "groups rows"],
    sampling: Sampling,
) -> Choices:
    """Select the next token of each batch row. Its random numbers depend on its sample and not on the batch."""
    logprobs = jax.nn.log_softmax(scores, axis=-1)
    if sampling.temperature == 0:
        token = jnp.argmax(scores, axis=-1)
    else:
        shaped = _nucleus(scores / sampling.temperature, sampling.top_p)

        def noise(sample: Array, generated: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed % (1 << 32)), sample), generated)
            return jax.random.gumbel(key, scores.shape[-1:], jnp.float32)

        token = jnp.argmax(shaped + jax.vmap(noise)(sample.reshape(-1), generated.reshape(-1)), axis=-1)
    each = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    return Choices(token.astype(jnp.int32).reshape(sample.shape), each.reshape(sample.shape))


def _nucleus(scores: Float[Array, "all vocab"], top_p: float) -> Float[Array, "all vocab"]:
    """Mask all tokens except the most likely ones that together reach ``top_p``, and those equal to the last."""
    if top_p >= 1:
        return scores
    ordered = jnp.sort(jax.nn.softmax(scores, axis=-1), axis=-1)[:, ::-1]
    before = jnp.cumsum(ordered, axis=-1) - ordered
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(jax.nn.softmax(scores, axis=-1) >= least, scores, -jnp.inf)
