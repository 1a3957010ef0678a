"""gpt-oss, unpacked to 16 bits: attention sinks, and routed experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from spile.models.architecture import Experts, ModelConfig
from spile.models.families.base import ConfigFields, Family, Fused, alternating_windows, decoder, extend


def _read(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    config = decoder(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        windows=alternating_windows(fields, 2),
        sinks=True,
        expert_biases=True,
        swiglu_limit=fields.number("swiglu_limit"),
        swiglu_alpha=fields.number("swiglu_alpha"),
    )
    count, chosen = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
    return replace(config, experts=Experts(count, chosen, config.d_ff, normalized=True))


FAMILY = Family(
    model_types=("gpt_oss",),
    models="gpt-oss, unpacked to 16 bits (the published weights are packed in 4 bits and refused)",
    differs="a learned sink in the softmax of each head, a window in every other layer, routed experts with biases "
    "and a clamped gate",
    example=("openai/gpt-oss-20b", {"num_hidden_layers": 24, "num_local_experts": 32}),
    read=_read,
    names=extend(
        {
            "self_attn.sinks": "sinks",
            "mlp.router.weight": "router",
            "mlp.router.bias": "router_bias",
            "mlp.experts.gate_up_proj": Fused(("gate", "up"), "interleaved"),
            "mlp.experts.gate_up_proj_bias": Fused(("gate_bias", "up_bias"), "interleaved"),
            "mlp.experts.down_proj": Fused(("down",), "columns"),
            "mlp.experts.down_proj_bias": "down_bias",
        }
    ),
)
