"""Generation over slots: a cache of keys and values, one program that reads prompts and one that makes tokens.

A slot holds one sample from its first token to its last. Prompts are read a chunk at a time, a few slots at once; then
all slots whose prompt was read go on a token at a time, a stride of tokens per call. A slot's key ``j`` is that of
position ``j``, prompt or answer, so a window is a distance. What a slot held before is overwritten before it is seen.

Every token is fed once, the last one too: its activations come from the very step in which it was fed, and the token
after it from the same step's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spile.model import rope
from spile.model.attention import masked
from spile.model.decoder import Drawn, Keep, as_it_is, block, embed
from spile.model.experts import MIXTURES, Mixture
from spile.model.logits import logits
from spile.model.params import Params
from spile.spec.architecture import ModelConfig
from spile.spec.taps import Tap

__all__ = ["Choices", "Chunk", "Sampling", "Slots", "empty_slots", "read_prompts", "slot_bytes", "take_steps"]

IDLE, MAKING, CLOSING = 0, 1, 2
"""A slot without a sample, or whose prompt is being read; one that makes tokens; one whose last token is to be fed."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Constants of the program."""

    stop: tuple[int, ...]
    max_new: int
    temperature: float = 0.0
    """0: the likeliest, always."""
    top_p: float = 1.0
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What lies on the devices between two calls; ``groups`` is the data-parallel width."""

    keys: tuple[Any, ...]
    """One array per layer, ``[groups, slots, kv_heads, capacity, head_dim]``."""
    values: tuple[Any, ...]
    token: Any
    """``[groups, slots]``: the token that is fed next."""
    position: Any
    made: Any
    """How many tokens of the answer there are."""
    status: Any
    sample: Any
    """Its number in the stream, which with the seed and ``made`` decides what is drawn."""


class Chunk(NamedTuple):
    """Pieces of prompts to read, ``[groups, rows, …]``."""

    tokens: Any
    """``[groups, rows, chunk]``."""
    slot: Any
    """``[groups, rows]``; the number of slots where a row is empty."""
    start: Any
    """The position of the piece's first token."""
    length: Any
    """Its tokens; padding stands behind them."""
    last: Any
    """Whether the prompt ends here: then the answer's first token is chosen."""
    sample: Any


class Choices(NamedTuple):
    """Tokens and the model's own log-probability of each, at temperature 1."""

    tokens: Any
    logprobs: Any


def slot_bytes(config: ModelConfig, capacity: int, dtype: DTypeLike) -> int:
    """What one slot's cache takes, over all layers."""
    return 2 * config.n_layers * capacity * config.n_kv_heads * config.head_dim * np.dtype(dtype).itemsize


def empty_slots(config: ModelConfig, groups: int, slots: int, capacity: int, dtype: DTypeLike) -> Slots:
    """All idle."""
    shape = (groups, slots, config.n_kv_heads, capacity, config.head_dim)
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
    keep: Keep = as_it_is,
) -> tuple[Slots, Choices, tuple[Any, ...]]:
    """Read a piece of each row's prompt; where it is the last, choose the first token of the answer.

    The kept activations are ``[groups × rows, chunk, …]``.
    """
    groups, _, size = chunk.tokens.shape
    place = chunk.start[..., None] + jnp.arange(size, dtype=jnp.int32)
    keys, values = list(slots.keys), list(slots.values)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        keys[layer] = _written(keys[layer], chunk.slot, place, k)
        values[layer] = _written(values[layer], chunk.slot, place, v)
        return _seen(q, _rows(keys[layer], chunk.slot), _rows(values[layer], chunk.slot), place, config, layer)

    x, kept = _through(params, chunk.tokens, place, attend, config, mixture, Drawn(taps, keep))
    end = jnp.clip(chunk.length - 1, 0, size - 1).reshape(-1)
    last = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
    zero = jnp.zeros_like(chunk.sample)
    chosen = _choose(logits(params, last, config), chunk.sample, zero, sampling)
    status = _status(chosen.tokens, zero + 1, sampling)
    at = jnp.where(chunk.last, chunk.slot, slots.token.shape[1])  # beyond the end: dropped
    fresh = {
        "token": chosen.tokens,
        "position": chunk.start + chunk.length,
        "made": zero + 1,
        "status": status,
        "sample": chunk.sample,
    }
    group = jnp.arange(groups)[:, None]
    changed = {name: getattr(slots, name).at[group, at].set(new, mode="drop") for name, new in fresh.items()}
    return replace(slots, keys=tuple(keys), values=tuple(values), **changed), chosen, kept


def take_steps(
    params: Params,
    slots: Slots,
    *,
    stride: int,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    sampling: Sampling,
    mixture: Mixture = MIXTURES["blocks"],
    keep: Keep = as_it_is,
) -> tuple[Slots, Choices, tuple[Any, ...]]:
    """Feed ``stride`` tokens of each slot one after another, and choose the one after each.

    Tokens are ``[stride, groups, slots]``, the kept activations ``[stride, groups × slots, 1, …]``. What a slot gives
    after its last token is noise.
    """

    def step(slots: Slots, _: None) -> tuple[Slots, tuple[Choices, tuple[Any, ...]]]:
        keys, values = list(slots.keys), list(slots.values)
        place = slots.position[..., None]
        count = slots.token.shape[1]
        # An idle slot may be in the middle of a prompt: nothing is written there.
        busy = jnp.where(slots.status == IDLE, count, jnp.arange(count, dtype=jnp.int32))

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            keys[layer] = _written(keys[layer], busy, place, k)
            values[layer] = _written(values[layer], busy, place, v)
            flat = (-1, *keys[layer].shape[2:])
            return _seen(q, keys[layer].reshape(flat), values[layer].reshape(flat), place, config, layer)

        x, kept = _through(params, slots.token[..., None], place, attend, config, mixture, Drawn(taps, keep))
        chosen = _choose(logits(params, x[:, 0], config), slots.sample, slots.made, sampling)
        making = slots.status == MAKING
        made = slots.made + making
        after = replace(
            slots,
            keys=tuple(keys),
            values=tuple(values),
            token=jnp.where(making, chosen.tokens, slots.token),
            position=slots.position + (slots.status != IDLE),
            made=made,
            status=jnp.where(making, _status(chosen.tokens, made, sampling), IDLE),
        )
        return after, (chosen, kept)

    slots, (chosen, kept) = jax.lax.scan(step, slots, None, length=stride)
    return slots, chosen, kept


# -- parts ------------------------------------------------------------------------------------------------------------


def _through(
    params: Params,
    tokens: Int[Array, "groups rows seq"],
    place: Int[Array, "groups rows seq"],
    attend: Callable[[int, Array, Array, Array], Array],
    config: ModelConfig,
    mixture: Mixture,
    drawn: Drawn,
) -> tuple[Float[Array, "all seq d_model"], tuple[Any, ...]]:
    """All layers, whatever is tapped: the next token needs the last one."""
    flat = (-1, tokens.shape[-1])
    positions = place.reshape(flat)
    x = embed(params, tokens.reshape(flat), positions, config, drawn.at(None))
    angles = rope.per_layer(config, positions)
    for index, layer in enumerate(params.layers):

        def attend_here(q: Array, k: Array, v: Array, index: int = index) -> Array:
            return attend(index, q, k, v)

        with jax.named_scope(f"layer.{index}"):
            x = block(x, layer, angles[index], config, attend_here, drawn.at(index), mixture)
    return x, drawn.all()


def _written(cache: Array, slot: Array, place: Array, new: Array) -> Array:
    """New keys or values ``[groups × rows, seq, kv_heads, head_dim]`` at their slots and positions; beyond, dropped."""
    new = new.reshape(*place.shape, *new.shape[2:]).astype(cache.dtype)

    def write(old: Array, at: Array, where: Array, x: Array) -> Array:
        return old.at[at[:, None], :, where].set(x, mode="drop")

    out: Array = jax.vmap(write)(cache, slot, place, new)
    return out


def _rows(cache: Array, slot: Array) -> Array:
    """The caches of some slots, ``[groups × rows, kv_heads, capacity, head_dim]``."""
    rows: Array = jax.vmap(lambda old, at: jnp.take(old, at, axis=0, mode="clip"))(cache, slot)
    return rows.reshape(-1, *rows.shape[2:])


def _seen(q: Array, keys: Array, values: Array, place: Array, config: ModelConfig, layer: int) -> Array:
    """Attention over a slot's own past."""
    ahead = place.reshape(len(q), -1, 1) - jnp.arange(keys.shape[2], dtype=jnp.int32)
    window = config.windows[layer]
    seen = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
    turned = (0, 2, 1, 3)
    return masked(q, keys.transpose(turned), values.transpose(turned), seen, config.attention_softcap)


def _status(token: Array, made: Array, sampling: Sampling) -> Array:
    """Of a slot that has just made this token, its ``made``-th."""
    ends = made >= sampling.max_new
    for stop in sampling.stop:
        ends |= token == stop
    return jnp.where(ends, CLOSING, MAKING).astype(jnp.int32)


def _choose(
    scores: Float[Array, "all vocab"], sample: Int[Array, "groups rows"], made: Int[Array, "groups rows"], how: Sampling
) -> Choices:
    """The next token of each row, by its sample's own random numbers: neighbours and batches do not matter."""
    likely = jax.nn.log_softmax(scores, axis=-1)
    if how.temperature == 0:
        token = jnp.argmax(scores, axis=-1)
    else:
        shaped = _nucleus(scores / how.temperature, how.top_p)

        def noise(sample: Array, made: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(how.seed % (1 << 32)), sample), made)
            return jax.random.gumbel(key, scores.shape[-1:], jnp.float32)

        token = jnp.argmax(shaped + jax.vmap(noise)(sample.reshape(-1), made.reshape(-1)), axis=-1)
    each = jnp.take_along_axis(likely, token[:, None], axis=-1)[:, 0]
    return Choices(token.astype(jnp.int32).reshape(sample.shape), each.reshape(sample.shape))


def _nucleus(scores: Float[Array, "all vocab"], top_p: float) -> Float[Array, "all vocab"]:
    """Without the tail: the likeliest tokens, until they reach ``top_p`` together, and all as likely as the last."""
    if top_p >= 1:
        return scores
    ordered = jnp.sort(jax.nn.softmax(scores, axis=-1), axis=-1)[:, ::-1]
    before = jnp.cumsum(ordered, axis=-1) - ordered
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(jax.nn.softmax(scores, axis=-1) >= least, scores, -jnp.inf)
