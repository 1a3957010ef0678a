"""Mistral 7B, Nemo and Ministral: one attention window for all layers."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder, uniform_windows


def _read(fields: ConfigFields) -> ModelConfig:
    return decoder(fields, windows=uniform_windows(fields))


FAMILY = Family(
    model_types=("mistral",),
    models="Mistral 7B, Nemo, Ministral 8B",
    differs="one attention window for all layers (`sliding_window`)",
    example=("mistralai/Mistral-7B-v0.1", {"num_key_value_heads": 8, "intermediate_size": 14_336}),
    read=_read,
)
