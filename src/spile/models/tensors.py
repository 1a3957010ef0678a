"""The names, shapes and logical axes of all weights, known before any is read.

Matrices have the layout ``[out, in]``; those of experts have one more dimension in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spile.models.architecture import ModelConfig

Axes = tuple[str, ...]
"""Logical names of a tensor's dimensions; the worker maps them to the mesh."""


@dataclass(frozen=True)
class Tensor:
    """The shape of a weight."""

    shape: tuple[int, ...]
    axes: Axes

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def stacked(self, count: int) -> Tensor:
        """Return the tensor that holds ``count`` of these, one per layer."""
        return Tensor((count, *self.shape), ("layers", *self.axes))


def model_tensors(config: ModelConfig, *, head: bool) -> Mapping[str, Tensor]:
    """Return the tensors that the model has once; with ``head``, the final norm and the LM head too."""
    d = config.d_model
    table = Tensor((config.vocab_size, d), ("vocab", "d_model"))
    tensors = {"embed": table}
    if config.learned_positions is not None:
        tensors["positions"] = Tensor((config.learned_positions, d), ("positions", "d_model"))
    if head:
        tensors |= _norm("final_norm", config)
        if not config.tied:
            tensors["head"] = table
        if config.head_bias:
            tensors["head_bias"] = Tensor((config.vocab_size,), ("vocab",))
    return tensors


def layer_tensors(config: ModelConfig, layer: int) -> Mapping[str, Tensor]:
    """Return the tensors of one layer by field name, as far as the model has them."""
    tensors: dict[str, Tensor] = {}
    if config.norm_place != "post":
        tensors |= _norm("attn_norm", config) | ({} if config.shared_norm else _norm("mlp_norm", config))
    if config.norm_place != "pre":
        tensors |= _norm("attn_post_norm", config) | _norm("mlp_post_norm", config)
    return {**tensors, **_attention(config), **_mlp(config, layer)}


def _norm(name: str, config: ModelConfig) -> dict[str, Tensor]:
    weight = Tensor((config.d_model,), ("d_model",))
    return {name: weight, f"{name}_bias": weight} if config.norm == "layer" else {name: weight}


def _attention(config: ModelConfig) -> dict[str, Tensor]:
    d, heads, keys = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    tensors = {
        "q": Tensor((heads, d), ("heads", "d_model")),
        "k": Tensor((keys, d), ("kv_heads", "d_model")),
        "v": Tensor((keys, d), ("kv_heads", "d_model")),
        "o": Tensor((d, heads), ("d_model", "heads")),
    }
    if config.qkv_bias:
        tensors["q_bias"] = Tensor((heads,), ("heads",))
        tensors["k_bias"] = tensors["v_bias"] = Tensor((keys,), ("kv_heads",))
    if config.o_bias:
        tensors["o_bias"] = Tensor((d,), ("d_model",))
    if config.qk_norm and config.flat_qk_norm:
        tensors["q_norm"], tensors["k_norm"] = Tensor((heads,), ("heads",)), Tensor((keys,), ("kv_heads",))
    elif config.qk_norm:
        tensors["q_norm"] = tensors["k_norm"] = Tensor((config.head_dim,), ("head_dim",))
    if config.sinks:
        tensors["sinks"] = Tensor((config.n_heads,), ("heads",))
    return tensors


def _mlp(config: ModelConfig, layer: int) -> dict[str, Tensor]:
    d = config.d_model
    if config.experts is not None and config.has_experts(layer):
        count, ff = config.experts.count, config.experts.d_ff
        inner = Tensor((count, ff, d), ("experts", "d_ff", "d_model"))
        routed = {
            "router": Tensor((count, d), ("experts", "d_model")),
            "gate": inner,
            "up": inner,
            "down": Tensor((count, d, ff), ("experts", "d_model", "d_ff")),
        }
        if config.expert_biases:
            routed["router_bias"] = Tensor((count,), ("experts",))
            routed["gate_bias"] = routed["up_bias"] = Tensor((count, ff), ("experts", "d_ff"))
            routed["down_bias"] = Tensor((count, d), ("experts", "d_model"))
        return routed
    inner = Tensor((config.d_ff, d), ("d_ff", "d_model"))
    tensors = {"gate": inner} if config.gated else {}
    tensors |= {"up": inner, "down": Tensor((d, config.d_ff), ("d_model", "d_ff"))}
    if config.mlp_bias:
        tensors |= {"gate_bias": Tensor((config.d_ff,), ("d_ff",))} if config.gated else {}
        tensors |= {"up_bias": Tensor((config.d_ff,), ("d_ff",)), "down_bias": Tensor((d,), ("d_model",))}
    return tensors


def parameter_count(config: ModelConfig) -> int:
    """Return the number of weights of the model, with the LM head unless it is the embedding."""
    layers = (layer_tensors(config, layer) for layer in range(config.n_layers))
    once = model_tensors(config, head=True)
    return sum(tensor.size for tensors in (once, *layers) for tensor in tensors.values())


def _layer_matmuls(config: ModelConfig, layer: int) -> float:
    """Return how many weights of one layer's matrices a token is multiplied with; of the experts, the selected ones."""
    part = config.experts.per_token / config.experts.count if config.experts is not None else 1.0
    parts = {1: 0.0, 2: 1.0, 3: part}
    tensors = layer_tensors(config, layer).items()
    return sum(parts[len(tensor.shape)] * tensor.size for name, tensor in tensors if not name.endswith("_bias"))


def flops_per_token(config: ModelConfig, seq_len: int, last_layer: int | None = None, *, head: bool = False) -> float:
    """Return the FLOPs per token of a sequence of this length through ``last_layer`` (None: all), and the LM head's.

    Attention counts the positions that a token attends to: half of them on average under a causal mask.
    """
    layers = config.n_layers if last_layer is None else last_layer + 1
    flops = 2.0 * config.vocab_size * config.d_model if head else 0.0
    for layer, window in enumerate(config.windows[:layers]):
        width = min(window or seq_len, seq_len)
        seen = (width * (width + 1) / 2 + (seq_len - width) * width) / max(seq_len, 1)
        flops += 2.0 * _layer_matmuls(config, layer) + 4.0 * config.n_heads * config.head_dim * seen
    return flops
