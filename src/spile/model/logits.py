"""After the last layer: the final norm, and what is kept of the logits, which are too wide to be kept whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from spile.model.attention import precision
from spile.model.layers import Hidden, Look, norm, softcap
from spile.model.params import Params
from spile.spec.architecture import ModelConfig
from spile.spec.taps import Tap

__all__ = ["logits", "look_after_layers"]

_CHUNK = 256
"""Tokens whose logits exist at once."""


def final_norm(x: Float[Array, "... d_model"], params: Params, config: ModelConfig) -> Float[Array, "... d_model"]:
    """What the LM head reads."""
    return norm(x, params.final_norm, params.final_norm_bias, config)


def logits(params: Params, x: Float[Array, "rows d_model"], config: ModelConfig) -> Float32[Array, "rows vocab"]:
    """After the last layer: the scores of the next token, in float32. Needs weights loaded with their head."""
    with jax.named_scope("head"):
        return _head(params, final_norm(x, params, config), config)


def _head(params: Params, normed: Float[Array, "rows d_model"], config: ModelConfig) -> Float32[Array, "rows vocab"]:
    """The head is the embedding where the model has no other."""
    head = params.embed if params.head is None else params.head
    dimensions = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(
        normed, head, dimensions, precision=precision(normed.dtype), preferred_element_type=jnp.float32
    )
    return softcap(out, config.final_softcap)


def look_after_layers(
    x: Hidden,
    tokens: Int[Array, "rows seq"],
    segments: Int[Array, "rows seq"] | None,
    params: Params,
    config: ModelConfig,
    taps: tuple[Tap, ...],
    look: Look,
) -> None:
    """The final norm, the largest logits with their tokens, and the loss of the next token, a chunk at a time."""
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
    said = jnp.take_along_axis(all_logits, token[:, None], axis=1, mode="clip")[:, 0]
    return jax.nn.logsumexp(all_logits, axis=-1) - said


def _is_last(tokens: Int[Array, "rows seq"], segments: Int[Array, "rows seq"] | None) -> Array:
    """Whether no token of the same sample follows."""
    end = jnp.zeros(tokens.shape, bool).at[:, -1].set(True)
    if segments is None:
        return end
    return end | jnp.concatenate([segments[:, 1:] != segments[:, :-1], end[:, -1:]], axis=1)
