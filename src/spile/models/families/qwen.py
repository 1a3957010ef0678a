"""Qwen 1.5 to 3, dense and with routed experts."""

from __future__ import annotations

from spile.models.families.base import Family, extend, sizes

QWEN2 = Family(
    model_types=("qwen2",),
    models="Qwen 1.5, 2 and 2.5, QwQ, DeepSeek R1 distilled into Qwen",
    differs="biases on queries, keys and values; an attention window from `max_window_layers` on, or by `layer_types`, "
    "if `use_sliding_window`",
    example=("Qwen/Qwen2.5-0.5B", sizes(896, 24, 14, 2, 4864, tie_word_embeddings=True)),
    options={"qkv_bias": True},
)

QWEN3 = Family(
    model_types=("qwen3",),
    models="Qwen 3 (dense), Qwen 3 Embedding",
    differs="an RMS norm over the queries and keys of each head; attention windows as `qwen2`",
    example=("Qwen/Qwen3-8B", sizes(4096, 36, 32, 8, 12_288)),
    options={"qk_norm": True},
)

QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    models="Qwen 3 MoE (30B-A3B, 235B-A22B)",
    differs="as `qwen3`, with routed experts in all layers except `mlp_only_layers` and those that "
    "`decoder_sparse_step` skips",
    example=("Qwen/Qwen3-30B-A3B", {"num_hidden_layers": 48, "head_dim": 128}),
    names=extend(
        {
            "mlp.gate": "router",
            "mlp.experts.{e}.gate_proj": "gate",
            "mlp.experts.{e}.up_proj": "up",
            "mlp.experts.{e}.down_proj": "down",
        }
    ),
    options={"qk_norm": True},
)
