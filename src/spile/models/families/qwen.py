"""Qwen 1.5 to 3, dense and with routed experts."""

from __future__ import annotations

from spile.models.architecture import Experts, ModelConfig
from spile.models.families.base import (
    ConfigFields,
    Family,
    Windows,
    decoder,
    extend,
    layer_count,
    uniform_windows,
    windows_by_type,
)


def _windows(fields: ConfigFields) -> Windows:
    """Return windows by ``layer_types``, or from layer ``max_window_layers`` on, if ``use_sliding_window``."""
    window = fields.get("sliding_window")
    window = window if fields.flag("use_sliding_window") else None
    first, types = fields.integer("max_window_layers"), fields.get("layer_types")
    if types is None:
        late = "full_attention" if window is None else "sliding_attention"
        types = ["full_attention" if layer < first else late for layer in range(layer_count(fields))]
    return windows_by_type(types, window)


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    return decoder(fields, qkv_bias=True, windows=_windows(fields))


QWEN2 = Family(
    model_types=("qwen2",),
    models="Qwen 1.5, 2 and 2.5, QwQ, DeepSeek R1 distilled into Qwen",
    differs="biases on queries, keys and values; an attention window from `max_window_layers` on, or by `layer_types`, "
    "if `use_sliding_window`",
    example=(
        "Qwen/Qwen2.5-0.5B",
        {
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "tie_word_embeddings": True,
        },
    ),
    read=_read_qwen2,
)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return decoder(fields, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=_windows(fields))


QWEN3 = Family(
    model_types=("qwen3",),
    models="Qwen 3 (dense), Qwen 3 Embedding",
    differs="an RMS norm over the queries and keys of each head; attention windows as `qwen2`",
    example=(
        "Qwen/Qwen3-8B",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12_288,
        },
    ),
    read=_read_qwen3,
)


def _read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    count, bias = layer_count(fields), fields.flag("attention_bias")
    windows = uniform_windows(fields) if fields.flag("use_sliding_window") else (None,) * count
    fields.get("sliding_window")
    step, dense_only = fields.integer("decoder_sparse_step"), fields.get("mlp_only_layers") or ()
    dense = tuple(layer for layer in range(count) if layer in dense_only or (layer + 1) % step)
    experts = Experts(
        count=fields.integer("num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        d_ff=fields.integer("moe_intermediate_size"),
        normalized=fields.flag("norm_topk_prob"),
        dense_layers=dense,
    )
    return decoder(
        fields,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        windows=windows,
        experts=experts if len(dense) < count else None,
    )


QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    models="Qwen 3 MoE (30B-A3B, 235B-A22B)",
    differs="as `qwen3`, with routed experts in all layers except `mlp_only_layers` and those that "
    "`decoder_sparse_step` skips",
    example=("Qwen/Qwen3-30B-A3B", {"num_hidden_layers": 48, "head_dim": 128}),
    read=_read_qwen3_moe,
    names=extend(
        {
            "mlp.gate.weight": "router",
            "mlp.experts.{e}.gate_proj.weight": "gate",
            "mlp.experts.{e}.up_proj.weight": "up",
            "mlp.experts.{e}.down_proj.weight": "down",
        }
    ),
)
