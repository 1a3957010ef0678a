"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused matrices, and rotary positions that depend on a sample's length."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, Fused, Names, decoder, read_rope, uniform_windows


def _read(fields: ConfigFields) -> ModelConfig:
    rope = read_rope(fields, kinds={"su": "longrope", "yarn": "longrope"})
    return decoder(fields, rope=rope, partial_rotary=True, windows=uniform_windows(fields))


FAMILY = Family(
    model_types=("phi3",),
    models="Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, with longrope too",
    differs="queries, keys and values in one matrix, gate and up in another; one attention window for all layers",
    example=("microsoft/Phi-3-mini-4k-instruct", {}),
    read=_read,
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
