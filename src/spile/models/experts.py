"""Routed experts: each token passes through the experts that its router selects; no token is dropped.

Tokens are sorted by expert and cut into blocks of one expert each; an expert's last block is filled up with zeros. The
number of blocks is bounded beforehand, so shapes are fixed and there is no capacity to run over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from spile.models.architecture import Experts, ModelConfig
from spile.models.attention import precision
from spile.models.layers import Hidden, Hook, gate, linear
from spile.models.params import Layer


class ExpertWeights(NamedTuple):
    """The weights of all experts."""

    gate: Float[Array, "experts d_ff d_model"]
    up: Float[Array, "experts d_ff d_model"]
    down: Float[Array, "experts d_model d_ff"]
    gate_bias: Float[Array, "experts d_ff"] | None = None
    up_bias: Float[Array, "experts d_ff"] | None = None
    down_bias: Float[Array, "experts d_model"] | None = None


Mixture = Callable[[Array, Array, Array, ExpertWeights, ModelConfig], Array]
"""Tokens, the experts selected for each, their weights, the weights of all experts → what the experts add."""


def routed_mlp(x: Hidden, layer: Layer, config: ModelConfig, hook: Hook, mixture: Mixture) -> Hidden:
    """Route each token and add the outputs of its experts."""
    experts = config.experts
    if experts is None:
        raise ValueError("a router in a model without experts")
    chosen, weights = route(hook("router", linear(x, layer.router, layer.router_bias)), experts)
    expert_weights = ExpertWeights(layer.gate, layer.up, layer.down, layer.gate_bias, layer.up_bias, layer.down_bias)
    return mixture(x, chosen, weights, expert_weights, config)


def route(
    logits: Float[Array, "rows seq experts"], experts: Experts
) -> tuple[Int[Array, "rows seq chosen"], Float[Array, "rows seq chosen"]]:
    """Return the experts of each token and their weights: the largest of a softmax over all, in float32."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if experts.normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights.astype(logits.dtype)


class _Pairs(NamedTuple):
    """Token–expert pairs, sorted by expert."""

    pair: Int[Array, " pairs"]
    """The number of each pair among tokens × selected experts."""
    token: Int[Array, " pairs"]
    expert: Int[Array, " pairs"]
    sizes: Int[Array, " experts"]
    """The number of pairs of each expert."""


def _mix(
    compute: Callable[[Array, _Pairs, ExpertWeights, ModelConfig], Array],
    x: Hidden,
    chosen: Array,
    weights: Array,
    expert_weights: ExpertWeights,
    config: ModelConfig,
) -> Hidden:
    """Sort the tokens by expert, compute the output of each pair, and add the weighted outputs at their tokens."""
    per_token, flat = chosen.shape[-1], chosen.reshape(-1)
    pair = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(flat, length=expert_weights.gate.shape[0]).astype(jnp.int32)
    order = _Pairs(pair, pair // per_token, flat[pair], sizes)
    out = compute(x.reshape(-1, x.shape[-1]), order, expert_weights, config)
    parts = out[jnp.argsort(pair)].reshape(-1, per_token, x.shape[-1]) * weights.reshape(-1, per_token)[..., None]
    return jnp.sum(parts, axis=1).astype(x.dtype).reshape(x.shape)


def _expert_mlp(rows: Array, own: ExpertWeights, product: Callable[..., Array], config: ModelConfig) -> Array:
    hidden = gate(product(rows, own.gate, own.gate_bias), product(rows, own.up, own.up_bias), config)
    return product(hidden, own.down, own.down_bias)


def _blocks(tokens: Array, order: _Pairs, expert_weights: ExpertWeights, config: ModelConfig) -> Array:
    """Compute the experts in a loop over blocks of one expert's tokens: the fewest products on a CPU."""
    experts, pairs = len(order.sizes), len(order.pair)
    size = max(8, min(128, 1 << (pairs // experts).bit_length()))
    count = pairs // size + min(experts, pairs)
    of_expert = -(-order.sizes // size)
    last = jnp.cumsum(of_expert)
    begin = jnp.cumsum(order.sizes) - order.sizes
    slot = (last - of_expert)[order.expert] * size + jnp.arange(pairs, dtype=jnp.int32) - begin[order.expert]
    no_token = len(tokens)
    source = jnp.full((count * size,), no_token, jnp.int32).at[slot].set(order.token)
    filled = jnp.concatenate([tokens, jnp.zeros((1, tokens.shape[1]), tokens.dtype)])[source].reshape(count, size, -1)
    expert = jnp.clip(jnp.searchsorted(last, jnp.arange(count, dtype=jnp.int32), side="right"), 0, experts - 1)
    used = jnp.arange(count, dtype=jnp.int32) < last[-1]

    def block(part: tuple[Array, Array, Array]) -> Array:
        rows, number, is_used = part

        def compute(rows: Array) -> Array:
            own = jax.tree.map(lambda each: jax.lax.dynamic_index_in_dim(each, number, keepdims=False), expert_weights)
            return _expert_mlp(rows, own, linear, config)

        out: Array = jax.lax.cond(is_used, compute, jnp.zeros_like, rows)
        return out

    out: Array = jax.lax.map(block, (filled, expert, used))
    return out.reshape(count * size, -1)[slot]


def _ragged(tokens: Array, order: _Pairs, expert_weights: ExpertWeights, config: ModelConfig) -> Array:
    """Compute the experts with the grouped matrix product of accelerators: one call for all experts."""

    def grouped(x: Array, weight: Array, bias: Array | None) -> Array:
        out = jax.lax.ragged_dot(x, weight.transpose(0, 2, 1), order.sizes, precision=precision(x.dtype))
        return out if bias is None else out + bias[order.expert]

    return _expert_mlp(tokens[order.token], expert_weights, grouped, config)


MIXTURES: Mapping[str, Mixture] = {
    "blocks": functools.partial(_mix, _blocks),
    "ragged": functools.partial(_mix, _ragged),
}


def choose_mixture(platform: str) -> str:
    """Return the faster implementation: on a CPU, the grouped product computes every expert for every token."""
    return "blocks" if platform == "cpu" else "ragged"


def mixture_over_mesh(name: str, mesh: Mesh, *, replicated: bool) -> Mixture:
    """Sort and compute on each device its own batch rows and its own part of each expert; the parts are added.

    ``replicated``: the experts' width does not divide, and every device has all of it.
    """
    model = None if replicated else "model"
    rows = PartitionSpec("data", None, None)
    outer, biases = PartitionSpec(None, model, None), PartitionSpec(None, model)
    every = [outer, outer, PartitionSpec(None, None, model), biases, biases, PartitionSpec(None, None)]

    def mixture(x: Array, chosen: Array, weights: Array, expert_weights: ExpertWeights, config: ModelConfig) -> Array:
        def own(x: Array, chosen: Array, weights: Array, expert_weights: ExpertWeights) -> Array:
            if not replicated and expert_weights.down_bias is not None:
                # The parts are added, so only one device may add the bias.
                first = (jax.lax.axis_index("model") == 0).astype(expert_weights.down_bias.dtype)
                expert_weights = expert_weights._replace(down_bias=expert_weights.down_bias * first)
            out = MIXTURES[name](x, chosen, weights, expert_weights, config)
            return out if replicated else jax.lax.psum(out, "model")

        specs: list[Any] = [None if each is None else spec for spec, each in zip(every, expert_weights, strict=True)]
        parts = ExpertWeights(*specs)
        spread = jax.shard_map(own, mesh=mesh, in_specs=(rows, rows, rows, parts), out_specs=rows, check_vma=False)
        out: Array = spread(x, chosen, weights, expert_weights)
        return out

    return mixture
