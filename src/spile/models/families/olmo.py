"""OLMo 2 and 3: norms after attention and MLP instead of before, and one over the queries and keys of all heads."""

from __future__ import annotations

from typing import Any

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, alternating_windows, decoder, extend, read_rope

_NAMES = extend(
    {
        "post_attention_layernorm.weight": "attn_post_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
    }
)


def _read_olmo(fields: ConfigFields, **options: Any) -> ModelConfig:
    """Read what OLMo 2 and 3 have in common."""
    bias = fields.flag("attention_bias")
    return decoder(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, flat_qk_norm=True, norm_place="post", **options)


OLMO2 = Family(
    model_types=("olmo2",),
    models="OLMo 2",
    differs="norms after attention and MLP instead of before, and one over the queries and keys of all heads together",
    example=("allenai/OLMo-2-1124-7B", {"vocab_size": 100_352}),
    read=_read_olmo,
    names=_NAMES,
)


def _read_olmo3(fields: ConfigFields) -> ModelConfig:
    # transformers gives a top-level rope_theta to the layers without a window only.
    local, _ = read_rope(fields, "sliding_attention", theta=None)
    return _read_olmo(
        fields, rope=read_rope(fields, "full_attention"), local_rope=local, windows=alternating_windows(fields, 4)
    )


OLMO3 = Family(
    model_types=("olmo3",),
    models="OLMo 3 and 3.1",
    differs="as `olmo2`, with an attention window in three of four layers, and another rope in these",
    example=("allenai/Olmo-3-1025-7B", {"vocab_size": 100_278}),
    read=_read_olmo3,
    names=_NAMES,
)
