"""GPT-NeoX and Pythia: a plain MLP parallel to attention, and a part of each head rotated."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, Fused, Names, decoder


def _read(fields: ConfigFields) -> ModelConfig:
    for name in ("rope_theta", "partial_rotary_factor"):
        fields.get(name)  # transformers does not read them for this family
    return decoder(
        fields,
        mlp_bias=True,
        norm="layer",
        gated=False,
        parallel=fields.flag("use_parallel_residual"),
    )


FAMILY = Family(
    model_types=("gpt_neox",),
    models="Pythia, GPT-NeoX",
    differs="LayerNorm, a plain MLP parallel to attention (`use_parallel_residual`), a part of each head rotated "
    "(`rotary_pct`)",
    example=(
        "EleutherAI/pythia-1.4b",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 8192,
            "vocab_size": 50_304,
        },
    ),
    read=_read,
    names=Names(
        prefix=r"(?:gpt_neox\.)?",
        written="gpt_neox.",
        once={
            "embed_in.weight": "embed",
            "final_layer_norm.weight": "final_norm",
            "final_layer_norm.bias": "final_norm_bias",
        },
        head="embed_out",
        layer={
            "input_layernorm.weight": "attn_norm",
            "input_layernorm.bias": "attn_norm_bias",
            "attention.query_key_value.weight": Fused(("q", "k", "v"), "heads"),
            "attention.query_key_value.bias": Fused(("q_bias", "k_bias", "v_bias"), "heads"),
            "attention.dense.weight": "o",
            "attention.dense.bias": "o_bias",
            "post_attention_layernorm.weight": "mlp_norm",
            "post_attention_layernorm.bias": "mlp_norm_bias",
            "mlp.dense_h_to_4h.weight": "up",
            "mlp.dense_h_to_4h.bias": "up_bias",
            "mlp.dense_4h_to_h.weight": "down",
            "mlp.dense_4h_to_h.bias": "down_bias",
        },
        unused=(r"layers\.\d+\.attention\.(?:rotary_emb\.inv_freq|bias|masked_bias)",),
    ),
)
