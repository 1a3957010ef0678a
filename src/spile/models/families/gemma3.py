"""The text part of Gemma 3: Gemma 2 with a norm over queries and keys, and another rope in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from spile.models.architecture import ModelConfig
from spile.models.families.base import PLAIN, SANDWICH, VISION_PREFIX, ConfigFields, Family, extend, read_rope
from spile.models.families.gemma2 import read_gemma

_PATTERN = 6


def _read(fields: ConfigFields) -> ModelConfig:
    pattern = fields.integer("sliding_window_pattern", _PATTERN)
    local, _ = read_rope(fields, "sliding_attention", theta="rope_local_base_freq")
    return read_gemma(fields, pattern, qk_norm=True, rope=read_rope(fields, "full_attention"), local_rope=local)


FAMILY = Family(
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
    read=_read,
    names=replace(
        extend(SANDWICH),
        prefix=VISION_PREFIX,
        unused=(*PLAIN.unused, r"vision_tower\..*", r"multi_modal_projector\..*"),
    ),
)
