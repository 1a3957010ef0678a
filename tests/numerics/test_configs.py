"""A config.json means to us what it means to transformers, which reads it without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from numerics import cases
from spile.errors import ModelError
from spile.models.families import _ACTIVATIONS, ARCHITECTURES, read_config

_BARE = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 50,
    "max_position_embeddings": 512,
}

_GPT2_BARE = {"n_embd": 256, "n_layer": 30, "n_head": 32, "vocab_size": 50}

RAW: dict[str, dict[str, Any]] = {
    **cases.CASES,
    **{f"bare {name}": {**_BARE, "model_type": name} for name in ARCHITECTURES if name not in ("gpt2", "gemma3")},
    "bare gpt2": {**_GPT2_BARE, "model_type": "gpt2"},
    **{f"windows of {name}": {**_BARE, "model_type": name, "use_sliding_window": True} for name in ("qwen2", "qwen3")},
    "null window": {**_BARE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
    "null heads": {**_BARE, "model_type": "llama", "num_key_value_heads": None, "head_dim": None},
}


def windows(config: Any) -> tuple[int | None, ...]:
    if config.model_type in ("llama", "gemma", "gpt2", "gpt_neox", "olmo2"):
        return (None,) * config.num_hidden_layers
    if config.model_type in ("mistral", "phi3", "qwen3_moe", "mixtral"):
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def either(config: Any, *names: str) -> Any:
    """The first of these fields that a family's config has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


@pytest.mark.parametrize("name", RAW)
def test_the_same_model(name: str) -> None:
    raw = {key: value for key, value in RAW[name].items() if key != "model_type"}
    theirs = AutoConfig.for_model(RAW[name]["model_type"], **raw)
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
    assert ours.activation == _ACTIVATIONS[activation]
    caps = either(theirs, "attn_logit_softcapping"), either(theirs, "final_logit_softcapping")
    assert (ours.attention_softcap, ours.final_softcap) == caps
    assert ours.parallel == bool(either(theirs, "use_parallel_residual"))
    assert read_config(theirs.to_dict()) == ours  # as transformers writes it today
    if ours.experts is not None:
        wanted = either(theirs, "num_experts", "num_local_experts"), theirs.num_experts_per_tok
        assert (ours.experts.count, ours.experts.per_token) == wanted
        assert ours.experts.d_ff == either(theirs, "moe_intermediate_size", "intermediate_size")
        assert ours.experts.normalized == getattr(theirs, "norm_topk_prob", True)


REFUSED = {
    "an unknown rope": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling.*dynamic"),
    "longrope": ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope scaling.*longrope"),
    "a rope's own field": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}}, "alpha"),
    "gptq": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized.*gptq.*16-bit original"),
    "awq": ("qwen2", {"quantization_config": {"quant_method": "awq"}}, "quantized.*awq"),
    "bitsandbytes": ("gemma2", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized.*bitsandbytes"),
    "a field of tomorrow": ("llama", {"attention_sinks": 4}, "attention_sinks.*--backend torch"),
    "both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "mrope": ("qwen2", {"use_mrope": True}, "use_mrope"),
    "layers of another kind": ("qwen3", {"layer_types": ["linear_attention"] * 30}, "linear_attention"),
    "inverse layer scale": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "shared experts": ("mixtral", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
    "more experts than there are": ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "an unknown activation": ("gpt2", {"activation_function": "mish"}, "hidden_act.*mish"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    family, more, said = REFUSED[name]
    bare = _GPT2_BARE if family == "gpt2" else _BARE
    with pytest.raises(ModelError, match=said):
        read_config({**bare, "model_type": family, **more})


def test_switches_that_are_off_and_bookkeeping_are_not() -> None:
    more = {"use_mrope": False, "clip_qkv": None, "torch_dtype": "bfloat16", "transformers_version": "4.1", "alibi": 0}
    assert read_config({**_BARE, "model_type": "llama", **more}) == read_config({**_BARE, "model_type": "llama"})


def test_a_decoder_beside_a_vision_tower() -> None:
    text = cases.CASES["gemma3"]
    whole = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 4},
        "mm_tokens_per_image": 256,
    }
    assert read_config(whole) == replace(read_config(text), architecture="gemma3")
