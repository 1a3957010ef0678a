"""How single families read what is theirs alone: their layers' windows, and fields that no other config has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spile.errors import ModelError
from spile.spec.architecture import Experts, ModelConfig
from spile.spec.config_fields import ConfigFields
from spile.spec.rope import Rope, read_rope

__all__ = [
    "Switches",
    "Windows",
    "all_or_none",
    "alternating",
    "by_type",
    "every_layer",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "layer_types",
    "mixtral",
    "no_windows",
    "olmo2",
    "qwen3_moe",
]

Windows = tuple[int | None, ...]
Switches = dict[str, Any]
"""Fields of :class:`ModelConfig` that a family reads in a way of its own."""


def no_windows(_fields: ConfigFields, n_layers: int) -> Windows:
    return (None,) * n_layers


def every_layer(default: int | None) -> Callable[[ConfigFields, int], Windows]:
    """One window for all layers; an explicit null is none."""

    def windows(fields: ConfigFields, n_layers: int) -> Windows:
        window = fields.get("sliding_window", default)
        return (None if window is None else fields.integer("sliding_window", default),) * n_layers

    return windows


def layer_types(fields: ConfigFields, n_layers: int) -> Windows:
    """Qwen: ``layer_types``, or the layers from ``max_window_layers`` on; neither without ``use_sliding_window``."""
    said = fields.get("sliding_window", 4096)
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") and said is not None else None
    first = fields.integer("max_window_layers", 28)
    types = fields.get("layer_types")
    if types is None:
        return tuple(window if layer >= first else None for layer in range(n_layers))
    return by_type(types, window)


def by_type(types: Sequence[object], window: int | None) -> Windows:
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            "config.json's layer_types", expected="full_attention or sliding_attention", found=", ".join(unknown)
        )
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "config.json's layer_types", expected="a sliding_window for sliding_attention", found="none in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def all_or_none(fields: ConfigFields, n_layers: int) -> Windows:
    """Qwen3-MoE: one window for all layers, if ``use_sliding_window``."""
    fields.get("max_window_layers")
    window = fields.get("sliding_window", 4096)
    return (window if fields.flag("use_sliding_window") else None,) * n_layers


def alternating(pattern: int) -> Callable[[ConfigFields, int], Windows]:
    """Gemma: windows but for every so manieth layer, or as ``layer_types`` says."""

    def windows(fields: ConfigFields, n_layers: int) -> Windows:
        window = fields.get("sliding_window", 4096)
        every = fields.integer("sliding_window_pattern", pattern)
        fields.get("_sliding_window_pattern")
        types = fields.get("layer_types")
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[bool((layer + 1) % every)] for layer in range(n_layers)] if types is None else types
        return by_type(types, window)

    return windows


def gemma(fields: ConfigFields, config: ModelConfig) -> Switches:
    fields.get("hidden_activation")
    exact = config.activation == "gelu"  # the first releases said gelu and meant its approximation
    return {"embedding_scale": config.d_model**0.5, "activation": "gelu_tanh" if exact else config.activation}


def gemma2(fields: ConfigFields, config: ModelConfig) -> Switches:
    fields.get("hidden_act")
    return {
        "embedding_scale": config.d_model**0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": fields.optional("attn_logit_softcapping", 50.0),
        "final_softcap": fields.optional("final_logit_softcapping", 30.0),
    }


def gemma3(fields: ConfigFields, config: ModelConfig) -> Switches:
    fields.get("hidden_act")
    local = fields.number("rope_local_base_freq", 10_000.0)
    spelled = fields.get("rope_parameters") or {}
    nested = isinstance(spelled, Mapping) and "sliding_attention" in spelled
    return {
        "embedding_scale": config.d_model**0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": fields.optional("attn_logit_softcapping"),
        "final_softcap": fields.optional("final_logit_softcapping"),
        "local_rope": read_rope(fields, local, layers="sliding_attention")[0] if nested else Rope(theta=local),
    }


def gpt2(fields: ConfigFields, _config: ModelConfig) -> Switches:
    scaled = fields.flag("scale_attn_weights", True)
    if fields.flag("scale_attn_by_inverse_layer_idx"):
        raise ModelError("config.json's scale_attn_by_inverse_layer_idx", expected="false", found="true")
    return {
        "learned_positions": fields.integer("max_position_embeddings", 1024),
        "attention_scale": None if scaled else 1.0,
    }


def gpt_neox(fields: ConfigFields, _config: ModelConfig) -> Switches:
    return {"parallel": fields.flag("use_parallel_residual", True)}


def olmo2(_fields: ConfigFields, _config: ModelConfig) -> Switches:
    """One norm over all heads."""
    return {"flat_qk_norm": True}


def qwen3_moe(fields: ConfigFields, config: ModelConfig) -> Switches:
    step, plain = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    dense = [layer for layer in range(config.n_layers) if layer in plain or (layer + 1) % step]
    experts = Experts(
        count=fields.integer("num_local_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 8),
        d_ff=fields.integer("moe_intermediate_size", 768),
        normalized=fields.flag("norm_topk_prob"),
        dense_layers=tuple(dense),
    )
    return {"experts": experts if len(dense) < config.n_layers else None}


def mixtral(fields: ConfigFields, config: ModelConfig) -> Switches:
    count, chosen = fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2)
    return {"experts": Experts(count, chosen, config.d_ff, normalized=True)}
