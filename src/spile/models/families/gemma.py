"""Gemma 1 to 3: scaled embeddings, and norm weights that are stored minus 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spile.models.architecture import ModelConfig
from spile.models.families.base import LLAMA_NAMES, ConfigFields, Family, decoder, extend, sizes


def _read_gemma1(fields: ConfigFields) -> ModelConfig:
    scale = fields.integer("hidden_size") ** 0.5
    config = decoder(fields, norm="rms_plus_one", embedding_scale=scale)
    # The configs of the first releases name gelu although the model uses its tanh approximation.
    return replace(config, activation="gelu_tanh") if config.activation == "gelu" else config


GEMMA = Family(
    model_types=("gemma",),
    models="Gemma 1",
    differs="embeddings times √d_model; norm weights are stored minus 1",
    example=("google/gemma-2b", sizes(2048, 18, 8, 1, 16_384)),
    read=_read_gemma1,
)


def _read_gemma2(fields: ConfigFields, pattern: int = 2, **options: Any) -> ModelConfig:
    """Read Gemma 2, or what Gemma 3 has in common with it; all layers except each ``pattern``-th have a window."""
    return decoder(
        fields,
        slides=lambda layer: (layer + 1) % pattern,
        norm="rms_plus_one",
        norm_place="sandwich",
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        **options,
    )


_NAMES = extend(
    {
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
)

GEMMA2 = Family(
    model_types=("gemma2",),
    models="Gemma 2, the models of Gemma Scope",
    differs="as `gemma`; norms after attention and MLP too, soft caps on scores and logits, a window in every other "
    "layer",
    example=("google/gemma-2-2b", {}),
    read=_read_gemma2,
    names=_NAMES,
)


def _read_gemma3(fields: ConfigFields) -> ModelConfig:
    return _read_gemma2(fields, fields.integer("sliding_window_pattern", 6), qk_norm=True)


GEMMA3 = Family(
    model_types=("gemma3_text", "gemma3"),
    models="Gemma 3: the text models, and the text part of 4B, 12B and 27B",
    differs="as `gemma2`, with a norm over the queries and keys of each head, and another rope in layers with a "
    "window, which are five of six",
    example=("google/gemma-3-1b-pt", sizes(1152, 26, 4, 1, 6912, vocab_size=262_144, sliding_window=512)),
    read=_read_gemma3,
    names=replace(
        _NAMES,
        prefixes=r"(?:language_model\.)?model\.(?:language_model\.)?",  # of a model with a vision tower
        unused=(*LLAMA_NAMES.unused, r"vision_tower\..*", r"multi_modal_projector\..*"),
    ),
)
