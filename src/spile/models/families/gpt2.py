"""GPT-2: learned positions, a plain MLP, and matrices that are stored transposed."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, Fused, Names, decoder


def _read(fields: ConfigFields) -> ModelConfig:
    return decoder(
        fields,
        d_ff=fields.integer("n_inner", 4 * fields.integer("hidden_size")),
        learned_positions=fields.integer("max_position_embeddings"),
        attention_scale=None if fields.flag("scale_attn_weights") else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm="layer",
        gated=False,
    )


FAMILY = Family(
    model_types=("gpt2",),
    models="GPT-2, DistilGPT-2 and models built like them",
    differs="LayerNorm, learned positions, a plain MLP, matrices stored transposed",
    example=("openai-community/gpt2", {}),
    read=_read,
    names=Names(
        prefix=r"(?:transformer\.)?",
        written="transformer.",
        once={
            "wte.weight": "embed",
            "wpe.weight": "positions",
            "ln_f.weight": "final_norm",
            "ln_f.bias": "final_norm_bias",
        },
        layers="h",
        layer={
            "ln_1.weight": "attn_norm",
            "ln_1.bias": "attn_norm_bias",
            "attn.c_attn.weight": Fused(("q", "k", "v"), "columns"),
            "attn.c_attn.bias": Fused(("q_bias", "k_bias", "v_bias")),
            "attn.c_proj.weight": Fused(("o",), "columns"),
            "attn.c_proj.bias": "o_bias",
            "ln_2.weight": "mlp_norm",
            "ln_2.bias": "mlp_norm_bias",
            "mlp.c_fc.weight": Fused(("up",), "columns"),
            "mlp.c_fc.bias": "up_bias",
            "mlp.c_proj.weight": Fused(("down",), "columns"),
            "mlp.c_proj.bias": "down_bias",
        },
        unused=(r"h\.\d+\.attn\.(?:masked_)?bias",),
    ),
)
