"""Llama 1 to 3.x and the many models that are built like it."""

from __future__ import annotations

from spile.models.families.base import Family, decoder

FAMILY = Family(
    model_types=("llama",),
    models="Llama 1 to 3.x and models built like it: SmolLM2, TinyLlama, Yi, DeepSeek LLM, Falcon 3",
    differs="optional biases (`attention_bias`, `mlp_bias`)",
    example=(
        "meta-llama/Llama-3.1-8B",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "vocab_size": 128_256,
        },
    ),
    read=decoder,
)
