"""Qwen 2 and 2.5: biases on queries, keys and values, and attention windows in the later layers."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, Windows, decoder, layer_count, windows_by_type


def qwen_windows(fields: ConfigFields) -> Windows:
    """Return windows by ``layer_types``, or from layer ``max_window_layers`` on, if ``use_sliding_window``."""
    window = fields.get("sliding_window")
    window = window if fields.flag("use_sliding_window") else None
    first, types = fields.integer("max_window_layers"), fields.get("layer_types")
    if types is None:
        late = "full_attention" if window is None else "sliding_attention"
        types = ["full_attention" if layer < first else late for layer in range(layer_count(fields))]
    return windows_by_type(types, window)


def _read(fields: ConfigFields) -> ModelConfig:
    return decoder(fields, qkv_bias=True, windows=qwen_windows(fields))


FAMILY = Family(
    model_types=("qwen2",),
    models="Qwen 1.5, 2 and 2.5, QwQ, DeepSeek R1 distilled into Qwen",
    differs="biases on queries, keys and values; an attention window from `max_window_layers` on, or by `layer_types`, "
    "if `use_sliding_window`",
    example=(
        "Qwen/Qwen2.5-0.5B",
        {
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "tie_word_embeddings": True,
        },
    ),
    read=_read,
)
