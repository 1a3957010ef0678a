"""Gemma 2: norms before and after attention and MLP, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import Any

from spile.models.architecture import ModelConfig
from spile.models.families.base import SANDWICH, ConfigFields, Family, alternating_windows, decoder, extend


def read_gemma(fields: ConfigFields, pattern: int, **options: Any) -> ModelConfig:
    """Read what Gemma 2 and 3 have in common; all layers except each ``pattern``-th have a window."""
    bias = fields.flag("attention_bias")
    return decoder(
        fields,
        activation="hidden_activation",
        windows=alternating_windows(fields, pattern),
        qkv_bias=bias,
        o_bias=bias,
        norm="rms_plus_one",
        norm_place="sandwich",
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional("attn_logit_softcapping"),
        final_softcap=fields.optional("final_logit_softcapping"),
        **options,
    )


def _read(fields: ConfigFields) -> ModelConfig:
    return read_gemma(fields, 2)


FAMILY = Family(
    model_types=("gemma2",),
    models="Gemma 2, the models of Gemma Scope",
    differs="as `gemma`; norms after attention and MLP too, soft caps on scores and logits, a window in every other "
    "layer",
    example=("google/gemma-2-2b", {}),
    read=_read,
    names=extend(SANDWICH),
)
