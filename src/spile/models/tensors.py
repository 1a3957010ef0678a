"""The weights before any memory is: names, shapes and logical axes of each, and what follows from their sizes.

Matrices keep the layout ``[out, in]``; experts' have one more dimension before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spile.models.architecture import ModelConfig

__all__ = ["Axes", "Tensor", "flops_per_token", "layer_tensors", "model_tensors", "parameter_count"]

Axes = tuple[str, ...]
"""Logical names of a tensor's dimensions; a table of the runtime maps them to the mesh."""


@dataclass(frozen=True)
class Tensor:
    """What is known of a weight before it is read."""

    shape: tuple[int, ...]
    axes: Axes

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def stacked(self, count: int) -> Tensor:
        """So many of it, one for each of some layers."""
        return Tensor((count, *self.shape), ("layers", *self.axes))


def model_tensors(config: ModelConfig, *, head: bool) -> Mapping[str, Tensor]:
    """What the model has once; ``head``: with its final norm, and the LM head where it is not the embedding."""
    d = config.d_model
    table = Tensor((config.vocab_size, d), ("vocab", "d_model"))
    tensors = {"embed": table}
    if config.learned_positions is not None:
        tensors["positions"] = Tensor((config.learned_positions, d), ("positions", "d_model"))
    if head:
        tensors |= _norm("final_norm", config)
        if not config.tied:
            tensors["head"] = table
    return tensors


def layer_tensors(config: ModelConfig, layer: int) -> Mapping[str, Tensor]:
    """One layer's, by field name; those that the architecture lacks are absent."""
    tensors: dict[str, Tensor] = {}
    if config.norm_place != "post":
        tensors |= _norm("attn_norm", config) | _norm("mlp_norm", config)
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
    return tensors


def _mlp(config: ModelConfig, layer: int) -> dict[str, Tensor]:
    d = config.d_model
    if config.experts is not None and config.has_experts(layer):
        count, ff = config.experts.count, config.experts.d_ff
        inner = Tensor((count, ff, d), ("experts", "d_ff", "d_model"))
        return {
            "router": Tensor((count, d), ("experts", "d_model")),
            "gate": inner,
            "up": inner,
            "down": Tensor((count, d, ff), ("experts", "d_model", "d_ff")),
        }
    inner = Tensor((config.d_ff, d), ("d_ff", "d_model"))
    tensors = {"gate": inner} if config.gated else {}
    tensors |= {"up": inner, "down": Tensor((d, config.d_ff), ("d_model", "d_ff"))}
    if config.mlp_bias:
        tensors |= {"gate_bias": Tensor((config.d_ff,), ("d_ff",))} if config.gated else {}
        tensors |= {"up_bias": Tensor((config.d_ff,), ("d_ff",)), "down_bias": Tensor((d,), ("d_model",))}
    return tensors


def parameter_count(config: ModelConfig) -> int:
    """Every weight of the model, LM head included unless it is tied."""
    layers = (layer_tensors(config, layer) for layer in range(config.n_layers))
    once = model_tensors(config, head=True)
    return sum(tensor.size for tensors in (once, *layers) for tensor in tensors.values())


def _layer_matmuls(config: ModelConfig, layer: int) -> float:
    """Weights of one layer's matrices that a token meets: two FLOPs each. Of the experts, those it is sent to."""
    part = config.experts.per_token / config.experts.count if config.experts is not None else 1.0
    parts = {1: 0.0, 2: 1.0, 3: part}
    return sum(parts[len(tensor.shape)] * tensor.size for tensor in layer_tensors(config, layer).values())


def flops_per_token(config: ModelConfig, seq_len: int, last_layer: int | None = None, *, head: bool = False) -> float:
    """Model FLOPs a token of a sequence of this length needs through ``last_layer`` (None: all), and the LM head's.

    Attention counts the positions a token really sees: half of them on average under a causal mask.
    """
    layers = config.n_layers if last_layer is None else last_layer + 1
    flops = 2.0 * config.vocab_size * config.d_model if head else 0.0
    for layer, window in enumerate(config.windows[:layers]):
        width = min(window or seq_len, seq_len)
        seen = (width * (width + 1) / 2 + (seq_len - width) * width) / max(seq_len, 1)
        flops += 2.0 * _layer_matmuls(config, layer) + 4.0 * config.n_heads * config.head_dim * seen
    return flops
