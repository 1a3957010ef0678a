"""GPT-NeoX and Pythia: a plain MLP parallel to attention, and a part of each head rotated."""

from __future__ import annotations

from spile.models.families.base import Family, FileTensor, Names, sizes

FAMILY = Family(
    model_types=("gpt_neox",),
    models="Pythia, GPT-NeoX",
    differs="LayerNorm, a plain MLP parallel to attention (`use_parallel_residual`), a part of each head rotated "
    "(`rotary_pct`)",
    example=("EleutherAI/pythia-1.4b", sizes(2048, 24, 16, None, 8192, vocab_size=50_304)),
    names=Names(
        prefix="gpt_neox.",
        once={"embed_in": "embed", "final_layer_norm": "final_norm"},
        head="embed_out",
        modules={
            "input_layernorm": "attn_norm",
            "attention.query_key_value": FileTensor(("q", "k", "v"), "heads"),
            "attention.dense": "o",
            "post_attention_layernorm": "mlp_norm",
            "mlp.dense_h_to_4h": "up",
            "mlp.dense_4h_to_h": "down",
        },
        unused=(r"layers\.\d+\.attention\.(?:rotary_emb\.inv_freq|bias|masked_bias)",),
    ),
    options={"mlp_bias": True, "norm": "layer", "gated": False},
)
