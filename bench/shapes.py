"""Create models of real shapes with random weights for benchmarks: ``python -m bench.shapes qwen2.5-0.5b FOLDER``."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import spile.models
from spile.models import families
from spile.models.architecture import ModelConfig, layer_tensors, model_tensors
from spile.models.families import read_config

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "small": {
        "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 1024, "vocab_size": 8192, "tie_word_embeddings": True,
    },
    "speck": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32, "vocab_size": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip

_COMMON = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "use_sliding_window": False, "dtype": "bfloat16",
}  # fmt: skip

_SMALL = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 1024, "vocab_size": 8192, "max_position_embeddings": 4096, "head_dim": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
_NO_HEADS = {name: value for name, value in _SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
_GPT2 = {
    "n_embd": 256, "n_layer": 8, "n_head": 8, "n_positions": 4096, "vocab_size": 8192, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "small-qwen2": {"model_type": "qwen2", **_SMALL},
    "small-qwen3": {"model_type": "qwen3", **_SMALL},
    "small-llama": {"model_type": "llama", **_SMALL},
    "small-mistral": {"model_type": "mistral", **_SMALL, "sliding_window": 512},
    "small-gemma": {"model_type": "gemma", **_SMALL},
    "small-gemma2": {"model_type": "gemma2", **_SMALL, "query_pre_attn_scalar": 32, "sliding_window": 512},
    "small-gemma3": {"model_type": "gemma3_text", **_SMALL, "query_pre_attn_scalar": 32, "sliding_window": 512},
    "small-phi3": {"model_type": "phi3", **_NO_HEADS, "num_key_value_heads": 2},
    "small-gpt2": {"model_type": "gpt2", **_GPT2},
    "small-pythia": {"model_type": "gpt_neox", **_NO_HEADS},
    "small-olmo2": {"model_type": "olmo2", **_SMALL},
    "small-qwen3-moe": {
        "model_type": "qwen3_moe", **_SMALL, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "norm_topk_prob": True,
    },
    "small-mixtral": {"model_type": "mixtral", **_SMALL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma2-2b": {
        "model_type": "gemma2", **_SMALL, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 32768,
        "query_pre_attn_scalar": 256, "sliding_window": 4096,
    },
    "pythia-1.4b": {
        "model_type": "gpt_neox", **_NO_HEADS, "hidden_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 8192, "vocab_size": 50304,
    },
    "moe-3b": {
        "model_type": "qwen3_moe", **_SMALL, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "norm_topk_prob": True,
    },
}  # fmt: skip
"""One small model of each family, and one of each kind at a size that people use (Gemma 2 has a smaller vocabulary,
because its head is not computed)."""
SHAPES |= {name: {"tie_word_embeddings": True, **about} for name, about in FAMILIES.items()}


def make_model(shape: str, folder: Path) -> Path:
    """Write a model folder with a config, random weights and the tokenizer of the embedded model."""
    config = SHAPES[shape] if "model_type" in SHAPES[shape] else {**_COMMON, **SHAPES[shape]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    embedded = Path(spile.models.__file__).parent / "embedded"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder / name)
    save_file(_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a family's files by their names."""
    names, shapes = families.FAMILIES[config.architecture].names, {}
    for name, tensor in model_tensors(config, head=True).items():
        shapes[names.file_name(name)] = tensor.shape
    for layer in range(config.n_layers):
        tensors = layer_tensors(config, layer)
        for suffix, fused in names.layer.items():
            parts = [tensors[name].shape for name in fused.names if name in tensors]
            stacked = "{e}" in suffix
            if not parts or any((len(part) == 3) != stacked for part in parts):
                continue
            inner = [part[1:] if stacked else part for part in parts]
            shape = (sum(part[0] for part in inner), *inner[0][1:])
            at = names.file_name(f"{layer}.{fused.names[0]}").split(f".{layer}.")[0]
            for expert in range(parts[0][0] if stacked else 1):
                own = f"{at}.{layer}.{suffix.replace('{e}', str(expert))}"
                shapes[own] = shape[::-1] if fused.order == "columns" else shape
    return shapes


def _tensors(config: dict[str, Any]) -> dict[str, Any]:
    shapes = _file_shapes(read_config(config))
    # Drawing billions of weights would take minutes, so each tensor is a slice of one pool of random numbers.
    pool = np.random.default_rng(0).standard_normal((1 << 24) + 4099, np.float32)
    scaled = {std: (pool * std).astype(ml_dtypes.bfloat16) for std in {_std(name, s) for name, s in shapes.items()}}
    return {
        name: np.full(shape, name.endswith("weight") and "gemma" not in config["model_type"], ml_dtypes.bfloat16)
        if len(shape) == 1
        else _filled(scaled[_std(name, shape)][place * 7919 % 4096 :], shape)
        for place, (name, shape) in enumerate(shapes.items())
    }


def _filled(values: Any, shape: tuple[int, ...]) -> Any:
    """Return this many values, repeated if needed. ``np.resize`` would copy all of them."""
    return np.resize(values[: math.prod(shape)], shape)


def _std(name: str, shape: tuple[int, ...]) -> float:
    return 1.0 if "embed" in name or ".wte" in name or ".wpe" in name else float(shape[-1] ** -0.5)


if __name__ == "__main__":
    print(make_model(sys.argv[1], Path(sys.argv[2])))
