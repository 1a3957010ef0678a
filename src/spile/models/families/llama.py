"""Llama 1 to 3.x and the many models that are built like it."""

from __future__ import annotations

from spile.models.families.base import Family, sizes

FAMILY = Family(
    model_types=("llama",),
    models="Llama 1 to 3.x and models built like it: SmolLM2, TinyLlama, Yi, DeepSeek LLM, Falcon 3",
    differs="optional biases (`attention_bias`, `mlp_bias`)",
    example=("meta-llama/Llama-3.1-8B", sizes(4096, 32, 32, 8, 14_336, vocab_size=128_256)),
)
