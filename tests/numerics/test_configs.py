"""A config.json means to us what it means to transformers, which reads it without torch."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from numerics import cases
from spile.spec.architecture import ARCHITECTURES, read_config

_BARE = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 50,
    "max_position_embeddings": 512,
}

RAW: dict[str, dict[str, Any]] = {
    **cases.CASES,
    **{f"bare {name}": {**_BARE, "model_type": name} for name in ARCHITECTURES},
    **{f"windows of {name}": {**_BARE, "model_type": name, "use_sliding_window": True} for name in ARCHITECTURES},
    "null window": {**_BARE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
    "null heads": {**_BARE, "model_type": "llama", "num_key_value_heads": None, "head_dim": None},
}


def windows(config: Any) -> tuple[int | None, ...]:
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


@pytest.mark.parametrize("name", RAW)
def test_the_same_model(name: str) -> None:
    raw = {key: value for key, value in RAW[name].items() if key != "model_type"}
    theirs = AutoConfig.for_model(RAW[name]["model_type"], **raw)
    ours = read_config(RAW[name])
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.n_heads, ours.n_kv_heads, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    assert (ours.norm_eps, ours.tied, ours.d_ff) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
        theirs.intermediate_size,
    )
    assert (ours.rope.theta, ours.rope.kind) == (
        theirs.rope_parameters["rope_theta"],
        theirs.rope_parameters["rope_type"],
    )
    assert ours.windows == windows(theirs)
