"""OLMo 2 and 3: norms after attention and MLP instead of before, and one over the queries and keys of all heads."""

from __future__ import annotations

from spile.models.families.base import Family, extend

_NAMES = extend({"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "mlp_post_norm"})
_OPTIONS = {"qk_norm": True, "flat_qk_norm": True, "norm_place": "post"}

OLMO2 = Family(
    model_types=("olmo2",),
    models="OLMo 2",
    differs="norms after attention and MLP instead of before, and one over the queries and keys of all heads together",
    example=("allenai/OLMo-2-1124-7B", {"vocab_size": 100_352}),
    names=_NAMES,
    options=_OPTIONS,
)

OLMO3 = Family(
    model_types=("olmo3",),
    models="OLMo 3 and 3.1",
    differs="as `olmo2`, with an attention window in three of four layers, and another rope in these",
    example=("allenai/Olmo-3-1025-7B", {"vocab_size": 100_278}),
    names=_NAMES,
    options={**_OPTIONS, "slides": lambda layer: (layer + 1) % 4},
)
