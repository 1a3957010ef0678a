"""A config.json means to us what it means to transformers, which reads it without torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from numerics import cases
from spile.errors import ModelError
from spile.models.families import FAMILIES, _report, read_config
from spile.models.families.base import ACTIVATIONS

_BARE = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 50,
    "max_position_embeddings": 512,
}

_LINEAR = {"rope_type": "linear", "factor": 2.0}

_GPT2_BARE = {"n_embd": 256, "n_layer": 30, "n_head": 32, "vocab_size": 50}

RAW: dict[str, dict[str, Any]] = {
    **cases.CASES,
    **{f"bare {name}": {**_BARE, "model_type": name} for name in FAMILIES if name not in ("gpt2", "gemma3")},
    "bare gpt2": {**_GPT2_BARE, "model_type": "gpt2"},
    **{f"windows of {name}": {**_BARE, "model_type": name, "use_sliding_window": True} for name in ("qwen2", "qwen3")},
    **{
        f"scaled {name} without a rotated fraction": {**_BARE, "model_type": name, "rope_scaling": _LINEAR}
        for name in ("gpt_neox", "phi", "glm")
    },
    "null window": {**_BARE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
    "null heads": {**_BARE, "model_type": "llama", "num_key_value_heads": None, "head_dim": None},
}


def windows(config: Any) -> tuple[int | None, ...]:
    if types := getattr(config, "layer_types", None):
        return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)
    everywhere = config.model_type in ("mistral", "phi3", "qwen3_moe", "mixtral")
    return (config.sliding_window if everywhere else None,) * config.num_hidden_layers


def either(config: Any, *names: str) -> Any:
    """The first of these fields that a family's config has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


@pytest.mark.parametrize("name", RAW)
def test_the_same_model(name: str) -> None:
    from transformers import AutoConfig

    raw = {key: value for key, value in RAW[name].items() if key != "model_type"}
    theirs = AutoConfig.for_model(RAW[name]["model_type"], **copy.deepcopy(raw))  # it changes nested objects
    ours = read_config(RAW[name])
    heads = theirs.num_attention_heads
    head_dim = either(theirs, "head_dim") or theirs.hidden_size // heads
    kv_heads = either(theirs, "num_key_value_heads") or heads
    assert (ours.n_heads, ours.n_kv_heads, ours.head_dim) == (heads, kv_heads, head_dim)
    width = either(theirs, "intermediate_size", "n_inner") or 4 * theirs.hidden_size
    eps = either(theirs, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    assert (ours.norm_eps, ours.tied, ours.d_ff) == (eps, theirs.tie_word_embeddings, width)
    assert ours.windows == windows(theirs)
    if ours.learned_positions is None:
        rope = theirs.rope_parameters
        full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
        assert (ours.rope.theta, ours.rope.kind) == (full["rope_theta"], full["rope_type"])
        assert (ours.rotary_dim or head_dim) == int(head_dim * full.get("partial_rotary_factor", 1.0))
        assert (ours.local_rope and ours.local_rope.theta) == (local and local["rope_theta"])
    activation = either(theirs, "hidden_activation", "hidden_act", "activation_function")
    assert ours.activation == ACTIVATIONS[activation]
    caps = either(theirs, "attn_logit_softcapping"), either(theirs, "final_logit_softcapping")
    assert (ours.attention_softcap, ours.final_softcap) == caps
    assert ours.parallel == (theirs.model_type == "phi" or bool(either(theirs, "use_parallel_residual")))
    assert read_config(theirs.to_dict()) == ours  # as transformers writes it today
    if ours.experts is not None:
        wanted = either(theirs, "num_experts", "num_local_experts"), theirs.num_experts_per_tok
        assert (ours.experts.count, ours.experts.per_token) == wanted
        assert ours.experts.d_ff == either(theirs, "moe_intermediate_size", "intermediate_size")
        assert ours.experts.normalized == getattr(theirs, "norm_topk_prob", True)


REFUSED = {
    "an unknown rope": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling.*dynamic"),
    "longrope without factors": ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor"),
    "gptq": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized.*gptq.*16-bit original"),
    "awq": ("qwen2", {"quantization_config": {"quant_method": "awq"}}, "quantized.*awq"),
    "bitsandbytes": ("gemma2", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized.*bitsandbytes"),
    "both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention.*--backend torch"),
    "attention in both directions": ("qwen2", {"is_causal": False}, "is_causal"),
    "norms of queries and keys": ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    "a part of each head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "layers of another kind": ("qwen3", {"layer_types": ["linear_attention"] * 30}, "linear_attention"),
    "inverse layer scale": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "more experts than there are": ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "an unknown activation": ("gpt2", {"activation_function": "mish"}, "activation_function.*mish"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    family, more, output = REFUSED[name]
    bare = _GPT2_BARE if family == "gpt2" else _BARE
    with pytest.raises(ModelError, match=output):
        read_config({**bare, "model_type": family, **more})


def test_fields_that_the_class_does_not_declare_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    more = {"is_llama_config": True, "rope_interleaved": False, "alibi": 1, "torch_dtype": "bfloat16", "mlp_bias": None}
    _report.cache_clear()
    with caplog.at_level("INFO", logger="spile.models"):
        assert read_config({**_BARE, "model_type": "llama", **more}) == read_config({**_BARE, "model_type": "llama"})
    assert [record.message for record in caplog.records] == [
        "config.json: ignored fields that do not change the model: alibi, is_llama_config, rope_interleaved"
    ]


def test_a_decoder_with_a_vision_tower() -> None:
    text = cases.CASES["gemma3"]
    whole = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 4},
        "mm_tokens_per_image": 256,
    }
    assert read_config(whole) == replace(read_config(text), architecture="gemma3")
