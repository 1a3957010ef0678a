"""Phi-1 and 2, whose attention and MLP read the same normed residual stream, and Phi-3 and 4, with fused matrices."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, Fused, Names, decoder


def _read_phi(fields: ConfigFields) -> ModelConfig:
    return decoder(
        fields,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        norm="layer",
        gated=False,
        parallel=True,
        shared_norm=True,
    )


PHI = Family(
    model_types=("phi",),
    models="Phi-1, Phi-1.5, Phi-2",
    differs="LayerNorm, one for attention and MLP together, which both read the same residual stream; a plain MLP; a "
    "bias on the LM head; a part of each head rotated",
    example=("microsoft/phi-2", {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 10_240}),
    read=_read_phi,
    names=Names(
        once={
            "embed_tokens.weight": "embed",
            "final_layernorm.weight": "final_norm",
            "final_layernorm.bias": "final_norm_bias",
        },
        layer={
            "input_layernorm.weight": "attn_norm",
            "input_layernorm.bias": "attn_norm_bias",
            "self_attn.q_proj.weight": "q",
            "self_attn.k_proj.weight": "k",
            "self_attn.v_proj.weight": "v",
            "self_attn.dense.weight": "o",
            "self_attn.q_proj.bias": "q_bias",
            "self_attn.k_proj.bias": "k_bias",
            "self_attn.v_proj.bias": "v_bias",
            "self_attn.dense.bias": "o_bias",
            "mlp.fc1.weight": "up",
            "mlp.fc1.bias": "up_bias",
            "mlp.fc2.weight": "down",
            "mlp.fc2.bias": "down_bias",
        },
    ),
)


def _read_phi3(fields: ConfigFields) -> ModelConfig:
    return decoder(fields, rope_kinds={"su": "longrope", "yarn": "longrope"})


PHI3 = Family(
    model_types=("phi3",),
    models="Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, with longrope too",
    differs="queries, keys and values in one matrix, gate and up in another; one attention window for all layers",
    example=("microsoft/Phi-3-mini-4k-instruct", {}),
    read=_read_phi3,
    names=Names(
        layer={
            "input_layernorm.weight": "attn_norm",
            "self_attn.qkv_proj.weight": Fused(("q", "k", "v")),
            "self_attn.o_proj.weight": "o",
            "post_attention_layernorm.weight": "mlp_norm",
            "mlp.gate_up_proj.weight": Fused(("gate", "up")),
            "mlp.down_proj.weight": "down",
        }
    ),
)
