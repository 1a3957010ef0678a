"""Gemma 1: scaled embeddings, and norm weights that are stored less 1."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder


def _read(fields: ConfigFields) -> ModelConfig:
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


FAMILY = Family(
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
    read=_read,
)
