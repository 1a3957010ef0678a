"""Qwen 3 with routed experts."""

from __future__ import annotations

from spile.models.architecture import Experts, ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder, extend, layer_count, uniform_windows


def _read(fields: ConfigFields) -> ModelConfig:
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


FAMILY = Family(
    model_types=("qwen3_moe",),
    models="Qwen 3 MoE (30B-A3B, 235B-A22B)",
    differs="as `qwen3`, with routed experts in all layers except `mlp_only_layers` and those that "
    "`decoder_sparse_step` skips",
    example=("Qwen/Qwen3-30B-A3B", {"num_hidden_layers": 48, "head_dim": 128}),
    read=_read,
    names=extend(
        {
            "mlp.gate.weight": "router",
            "mlp.experts.{e}.gate_proj.weight": "gate",
            "mlp.experts.{e}.up_proj.weight": "up",
            "mlp.experts.{e}.down_proj.weight": "down",
        }
    ),
)
