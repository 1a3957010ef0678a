"""Phi-1 and 2, whose attention and MLP read the same normed residual stream, and Phi-3 and 4, with fused matrices."""

from __future__ import annotations

from dataclasses import replace

from spile.models.families.base import Family, FileTensor, extend

PHI = Family(
    model_types=("phi",),
    models="Phi-1, Phi-1.5, Phi-2",
    differs="LayerNorm, one for attention and MLP together, which both read the same residual stream; a plain MLP; a "
    "bias on the LM head; a part of each head rotated",
    example=("microsoft/phi-2", {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 10_240}),
    names=replace(
        extend({"self_attn.dense": "o", "mlp.fc1": "up", "mlp.fc2": "down"}),
        once={"embed_tokens": "embed", "final_layernorm": "final_norm"},
    ),
    options={
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "norm": "layer",
        "gated": False,
        "parallel": True,
        "shared_norm": True,
    },
)

PHI3 = Family(
    model_types=("phi3",),
    models="Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, with longrope too",
    differs="queries, keys and values in one matrix, gate and up in another; one attention window for all layers",
    example=("microsoft/Phi-3-mini-4k-instruct", {}),
    names=extend({"self_attn.qkv_proj": FileTensor(("q", "k", "v")), "mlp.gate_up_proj": FileTensor(("gate", "up"))}),
    options={"rope_kinds": {"su": "longrope", "yarn": "longrope"}},
)
