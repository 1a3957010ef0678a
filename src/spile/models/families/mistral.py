"""Mistral, with one attention window for all layers, and Mixtral, with routed experts."""

from __future__ import annotations

from spile.models.families.base import Family, extend

MISTRAL = Family(
    model_types=("mistral",),
    models="Mistral 7B, Nemo, Ministral 8B",
    differs="one attention window for all layers (`sliding_window`)",
    example=("mistralai/Mistral-7B-v0.1", {"num_key_value_heads": 8, "intermediate_size": 14_336}),
)

MIXTRAL = Family(
    model_types=("mixtral",),
    models="Mixtral 8x7B, 8x22B",
    differs="as `mistral`, with routed experts whose weights sum to 1",
    example=("mistralai/Mixtral-8x7B-v0.1", {}),
    names=extend(
        {
            "block_sparse_moe.gate": "router",
            "block_sparse_moe.experts.{e}.w1": "gate",
            "block_sparse_moe.experts.{e}.w3": "up",
            "block_sparse_moe.experts.{e}.w2": "down",
        }
    ),
)
