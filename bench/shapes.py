"""Models of real shapes with random weights, for measuring: ``python -m bench.shapes qwen2.5-0.5b FOLDER``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import spile.weights

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


def make_model(shape: str, folder: Path) -> Path:
    """A folder as the hub would have it: config, random weights, and the embedded model's tokenizer."""
    config = {**_COMMON, **SHAPES[shape]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    embedded = Path(spile.weights.__file__).parent / "embedded"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder / name)
    save_file(_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(config: dict[str, Any]) -> dict[str, Any]:
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj.weight": (d, d), "self_attn.k_proj.weight": (kv, d), "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, d), "self_attn.q_proj.bias": (d,), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,), "mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f), "input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,),
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    # Fresh normals for billions of weights would take minutes: each tensor is a slice of one pool, from its own place.
    pool = np.random.default_rng(0).standard_normal((1 << 24) + 4099, np.float32)
    scaled = {std: (pool * std).astype(ml_dtypes.bfloat16) for std in {_std(name, s) for name, s in shapes.items()}}
    return {
        name: np.ones(shape, ml_dtypes.bfloat16)
        if "norm" in name
        else np.resize(scaled[_std(name, shape)][place * 7919 % 4096 :], shape)
        for place, (name, shape) in enumerate(shapes.items())
    }


def _std(name: str, shape: tuple[int, ...]) -> float:
    return 1.0 if "embed" in name else float(shape[-1] ** -0.5)


if __name__ == "__main__":
    print(make_model(sys.argv[1], Path(sys.argv[2])))
