"""gpt-oss, unpacked to 16 bits: attention sinks, and routed experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from spile.models.families.base import Family, FileTensor, extend

FAMILY = Family(
    model_types=("gpt_oss",),
    models="gpt-oss, unpacked to 16 bits (the published weights are packed in 4 bits and refused)",
    differs="a learned sink in the softmax of each head, a window in every other layer, routed experts with biases "
    "and a clamped gate",
    example=("openai/gpt-oss-20b", {"num_hidden_layers": 24, "num_local_experts": 32}),
    names=replace(
        extend({"mlp.router": "router"}),
        tensors={
            "self_attn.sinks": FileTensor(("sinks",)),
            "mlp.experts.gate_up_proj": FileTensor(("gate", "up"), "interleaved"),
            "mlp.experts.gate_up_proj_bias": FileTensor(("gate_bias", "up_bias"), "interleaved"),
            "mlp.experts.down_proj": FileTensor(("down",), "columns"),
            "mlp.experts.down_proj_bias": FileTensor(("down_bias",)),
        },
    ),
    options={"slides": lambda layer: (layer + 1) % 2, "sinks": True, "expert_biases": True},
)
