"""GPT-2: learned positions, a plain MLP, and matrices that are stored transposed."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, FileTensor, Names, decoder


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
        prefix="transformer.",
        once={"wte": "embed", "wpe": "positions", "ln_f": "final_norm"},
        layers="h",
        modules={
            "ln_1": "attn_norm",
            "attn.c_attn": FileTensor(("q", "k", "v"), "columns"),
            "attn.c_proj": FileTensor(("o",), "columns"),
            "ln_2": "mlp_norm",
            "mlp.c_fc": FileTensor(("up",), "columns"),
            "mlp.c_proj": FileTensor(("down",), "columns"),
        },
        unused=(r"h\.\d+\.attn\.(?:masked_)?bias",),
    ),
)
