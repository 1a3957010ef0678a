"""Mixtral: Mistral with routed experts."""

from __future__ import annotations

from dataclasses import replace

from spile.models.architecture import Experts, ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder, extend, uniform_windows


def _read(fields: ConfigFields) -> ModelConfig:
    config = decoder(fields, windows=uniform_windows(fields))
    count, chosen = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
    return replace(config, experts=Experts(count, chosen, config.d_ff, normalized=True))


FAMILY = Family(
    model_types=("mixtral",),
    models="Mixtral 8x7B, 8x22B",
    differs="as `mistral`, with routed experts whose weights sum to 1",
    example=("mistralai/Mixtral-8x7B-v0.1", {}),
    read=_read,
    names=extend(
        {
            "block_sparse_moe.gate.weight": "router",
            "block_sparse_moe.experts.{e}.w1.weight": "gate",
            "block_sparse_moe.experts.{e}.w3.weight": "up",
            "block_sparse_moe.experts.{e}.w2.weight": "down",
        }
    ),
)
