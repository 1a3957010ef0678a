"""Gemma 1 to 3: scaled embeddings, and norm weights that are stored less 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spile.models.architecture import ModelConfig
from spile.models.families.base import (
    PLAIN,
    SANDWICH,
    VISION_PREFIX,
    ConfigFields,
    Family,
    alternating_windows,
    decoder,
    extend,
    read_rope,
)


def _read_gemma1(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    # The first releases say gelu and mean its tanh approximation.
    exact = fields.activation("hidden_act") == "gelu"
    return decoder(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        norm="rms_plus_one",
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        activation_is="gelu_tanh" if exact else None,
    )


GEMMA = Family(
    model_types=("gemma",),
    models="Gemma 1",
    differs="embeddings times √d_model; norm weights are stored less 1",
    example=(
        "google/gemma-2b",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "intermediate_size": 16_384,
        },
    ),
    read=_read_gemma1,
)


def _read_gemma(fields: ConfigFields, pattern: int, **options: Any) -> ModelConfig:
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


def _read_gemma2(fields: ConfigFields) -> ModelConfig:
    return _read_gemma(fields, 2)


GEMMA2 = Family(
    model_types=("gemma2",),
    models="Gemma 2, the models of Gemma Scope",
    differs="as `gemma`; norms after attention and MLP too, soft caps on scores and logits, a window in every other "
    "layer",
    example=("google/gemma-2-2b", {}),
    read=_read_gemma2,
    names=extend(SANDWICH),
)


def _read_gemma3(fields: ConfigFields) -> ModelConfig:
    pattern = fields.integer("sliding_window_pattern", 6)
    local, _ = read_rope(fields, "sliding_attention", theta="rope_local_base_freq")
    return _read_gemma(fields, pattern, qk_norm=True, rope=read_rope(fields, "full_attention"), local_rope=local)


GEMMA3 = Family(
    model_types=("gemma3_text", "gemma3"),
    models="Gemma 3: the text models, and the text part of 4B, 12B and 27B",
    differs="as `gemma2`, with a norm over the queries and keys of each head, and another rope in layers with a "
    "window, which are five of six",
    example=(
        "google/gemma-3-1b-pt",
        {
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 6912,
            "vocab_size": 262_144,
            "sliding_window": 512,
        },
    ),
    read=_read_gemma3,
    names=replace(
        extend(SANDWICH),
        prefix=VISION_PREFIX,
        unused=(*PLAIN.unused, r"vision_tower\..*", r"multi_modal_projector\..*"),
    ),
)
