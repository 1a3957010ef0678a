"""Qwen 3, dense: a norm over the queries and keys of each head."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder
from spile.models.families.qwen2 import qwen_windows


def _read(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return decoder(fields, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=qwen_windows(fields))


FAMILY = Family(
    model_types=("qwen3",),
    models="Qwen 3 (dense), Qwen 3 Embedding",
    differs="an RMS norm over the queries and keys of each head; attention windows as `qwen2`",
    example=(
        "Qwen/Qwen3-8B",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12_288,
        },
    ),
    read=_read,
)
