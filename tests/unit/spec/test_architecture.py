"""A raw config.json means what transformers takes it to mean; what is not understood is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spile.errors import ModelError
from spile.models.architecture import ModelConfig, Rope, flops_per_token, parameter_count
from spile.models.families import read_config

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}

QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "max_window_layers": 24,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def read(model_type: str, **more: Any) -> ModelConfig:
    return read_config({**BASE, "model_type": model_type, **more})


def without(name: str, model_type: str, **more: Any) -> ModelConfig:
    return read_config(
        {key: value for key, value in {**BASE, **more}.items() if key != name} | {"model_type": model_type}
    )


def test_a_real_config() -> None:
    config = read_config(QWEN25_05B)
    assert (config.head_dim, config.n_kv_heads, config.qkv_bias, config.o_bias, config.tied) == (
        64,
        2,
        True,
        False,
        True,
    )
    assert config.rope == Rope(theta=1e6)
    assert config.windows == (None,) * 24
    assert parameter_count(config) == 494_032_768


def test_an_unknown_architecture_is_named_with_those_known() -> None:
    output = r"unknown architecture: expected one of qwen2, qwen3, llama, .*, found 'x'. Use --backend torch"
    with pytest.raises(ModelError, match=output):
        read("x")
    with pytest.raises(ModelError, match=r"found a config\.json without model_type"):
        read_config(BASE)


def test_defaults_of_absent_fields_are_the_familys() -> None:
    assert without("num_key_value_heads", "llama").n_kv_heads == 8
    assert without("num_key_value_heads", "mistral").n_kv_heads == 8
    assert without("num_key_value_heads", "qwen2", num_attention_heads=32).n_kv_heads == 32
    assert read("qwen2", num_key_value_heads=None).n_kv_heads == 8
    assert [read(name).head_dim for name in ("qwen2", "qwen3", "llama", "mistral", "gemma")] == [8, 128, 8, 8, 256]
    assert read("qwen2", head_dim=None).head_dim == 8
    assert read("llama").norm_eps == 1e-6


def test_biases() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(read("qwen2", attention_bias=False)) == (True, False, False)
    assert biases(read("qwen3", attention_bias=True)) == (True, True, False)
    assert biases(read("llama", attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(read("mistral", attention_bias=False)) == (False, False, False)


def test_windows() -> None:
    off: dict[str, Any] = {"sliding_window": 16, "max_window_layers": 1}
    assert read("qwen2", **off).windows == (None,) * 4
    assert read("qwen2", **off, use_sliding_window=True).windows == (None, 16, 16, 16)
    assert read("qwen3", use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 4096)
    types = ["full_attention", "sliding_attention"] * 2
    assert read("qwen2", **off, use_sliding_window=True, layer_types=types).windows == (None, 16) * 2
    assert read("mistral").windows == (4096,) * 4
    assert read("mistral", sliding_window=None).windows == (None,) * 4
    assert read("mistral", sliding_window=16).windows == (16,) * 4


def test_both_spellings_of_rope() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    expected = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    assert read("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}).rope == expected
    assert read("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **llama3}).rope == expected
    assert read("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **llama3}).rope == expected
    assert read("llama", rope_scaling={"type": "linear", "factor": 2}).rope == Rope(kind="linear", factor=2.0)
    assert read("llama", rope_scaling=None).rope == Rope()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_size": ({"hidden_size": None}, "config.json's hidden_size: expected a whole number, found None"),
    "text": ({"hidden_size": "64"}, "config.json's hidden_size: expected a whole number, found '64'"),
    "zero": ({"num_hidden_layers": 0}, "the model's n_layers: expected at least 1, found 0"),
    "groups": ({"num_key_value_heads": 3}, "the model's heads: expected a multiple of its 3 key/value heads, found 8"),
    "odd": ({"head_dim": 7}, "the model's head_dim: expected an even number, found 7"),
    "activation": ({"hidden_act": "mish"}, "config.json's hidden_act: expected one of silu, .*, found 'mish'"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "config.json's rope scaling: .*, found 'dynamic'"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "config.json's factor: expected a number, found None"),
    "nested": ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: expected one set for all layers"),
    "partial": ({"partial_rotary_factor": 0.5}, "config.json's partial_rotary_factor: expected 1.0"),
    "types": (
        {"layer_types": ["chunked"] * 4},
        "layer_types: expected full_attention or sliding_attention, found chunked",
    ),
    "no window": (
        {"layer_types": ["sliding_attention"] * 4},
        "sliding_window: expected a window for sliding_attention",
    ),
    "count": ({"layer_types": ["full_attention"] * 3}, "layer_types: expected one for each of 4 layers, found 3"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized weights: expected float32, float16 or bfloat16"),
    "flag": ({"tie_word_embeddings": "yes"}, "config.json's tie_word_embeddings: expected true or false, found 'yes'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_understood_is_one_line(case: str) -> None:
    changed, line = BAD[case]
    with pytest.raises(ModelError, match=line) as caught:
        read("qwen2", **changed)
    assert "\n" not in str(caught.value)


def test_flops() -> None:
    config = replace(read("llama"), tied=False)
    matmuls = 64 * (2 * 64 + 2 * 16 + 3 * 128)
    assert flops_per_token(config, 1, 0) == 2 * matmuls + 4 * 64
    assert flops_per_token(config, 9, 0) == 2 * matmuls + 4 * 64 * 5
    assert flops_per_token(config, 9) == 4 * flops_per_token(config, 9, 0)
    windowed = replace(config, windows=(2,) * 4)
    assert flops_per_token(windowed, 4, 0) == 2 * matmuls + 4 * 64 * (1 + 2 + 2 + 2) / 4
