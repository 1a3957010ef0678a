"""OLMo 2: norms after attention and MLP instead of before, and one over the queries and keys of all heads."""

from __future__ import annotations

from typing import Any

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder, extend

NAMES = extend(
    {
        "post_attention_layernorm.weight": "attn_post_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
    }
)


def read_olmo(fields: ConfigFields, **options: Any) -> ModelConfig:
    """Read what OLMo 2 and 3 have in common."""
    bias = fields.flag("attention_bias")
    return decoder(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, flat_qk_norm=True, norm_place="post", **options)


FAMILY = Family(
    model_types=("olmo2",),
    models="OLMo 2",
    differs="norms after attention and MLP instead of before, and one over the queries and keys of all heads together",
    example=("allenai/OLMo-2-1124-7B", {"vocab_size": 100_352}),
    read=read_olmo,
    names=NAMES,
)
