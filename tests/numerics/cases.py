"""The tiny models that must equal transformers: one table for the goldens, the live tests and their weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from spile.spec.architecture import ModelConfig, read_config
from spile.spec.taps import SITES, Tap, select_taps

__all__ = ["CASES", "GOLDENS", "error", "golden_path", "taps", "tokens", "write_model"]

GOLDENS = Path(__file__).parent / "goldens"

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}

_DIFFERENCES: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2-window": {"model_type": "qwen2", "rope_theta": 1e4, **_QWEN_WINDOW},
    "qwen2-window-off": {"model_type": "qwen2", "rope_theta": 1e4, **_QWEN_WINDOW, "use_sliding_window": False},
    "qwen2-layer-types": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2-yarn": {"model_type": "qwen2", "rope_theta": 1e4, "rope_scaling": _YARN, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "rope_theta": 1e6},
    "qwen3-tied-bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3-window-yarn": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {**_YARN, "rope_theta": 1e4, "beta_fast": 16, "attention_factor": 1.3},
        **_QWEN_WINDOW,
    },
    "llama-1": {"model_type": "llama", "num_key_value_heads": None, "rms_norm_eps": 1e-5},
    "llama-linear": {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-3": {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "llama-3-new": {"model_type": "llama", "rope_parameters": {**_LLAMA3, "rope_theta": 5e5}, "head_dim": 24},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama-gelu": {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5, "rope_theta": 1e4},
    "mistral-full": {"model_type": "mistral", "sliding_window": None, "head_dim": 20, "rope_theta": 1e6},
}

CASES: dict[str, dict[str, Any]] = {name: {**_SIZES, **about} for name, about in _DIFFERENCES.items()}
"""Case → the content of its config.json."""


def golden_path(case: str) -> Path:
    """Where a case's reference is committed."""
    return GOLDENS / f"{case}.safetensors"


def config(case: str) -> ModelConfig:
    """A case's config as we read it."""
    return read_config(CASES[case])


def taps(case: str) -> tuple[Tap, ...]:
    """Every site at every layer."""
    return select_taps(SITES, None, CASES[case]["num_hidden_layers"])


def tokens(case: str, batch: int = 2, length: int = 28) -> NDArray[np.int32]:
    """Random tokens, the same for ever."""
    draw = np.random.Generator(np.random.Philox(len(case) * 1000 + batch + length))
    return draw.integers(3, CASES[case]["vocab_size"], (batch, length)).astype(np.int32)


def shapes(case: str) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers would save for a case, written out by hand: names are under test too."""
    raw, about = CASES[case], config(case)
    d, ff, head = about.d_model, about.d_ff, about.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (about.vocab_size, d), "model.norm.weight": (d,)}
    if not raw["tie_word_embeddings"]:
        found["lm_head.weight"] = (about.vocab_size, d)
    biased = {"q": raw.get("attention_bias"), "o": raw.get("attention_bias"), "mlp": raw.get("mlp_bias")}
    if raw["model_type"] == "qwen2":
        biased = {"q": True, "o": False, "mlp": False}
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        found |= {f"{at}.input_layernorm.weight": (d,), f"{at}.post_attention_layernorm.weight": (d,)}
        matrices = {
            "self_attn.q_proj": (about.n_heads * head, d, biased["q"]),
            "self_attn.k_proj": (about.n_kv_heads * head, d, biased["q"]),
            "self_attn.v_proj": (about.n_kv_heads * head, d, biased["q"]),
            "self_attn.o_proj": (d, about.n_heads * head, biased["o"]),
            "mlp.gate_proj": (ff, d, biased["mlp"]),
            "mlp.up_proj": (ff, d, biased["mlp"]),
            "mlp.down_proj": (d, ff, biased["mlp"]),
        }
        for name, (outer, inner, bias) in matrices.items():
            found[f"{at}.{name}.weight"] = (outer, inner)
            if bias:
                found[f"{at}.{name}.bias"] = (outer,)
        if raw["model_type"] == "qwen3":
            found |= {f"{at}.self_attn.q_norm.weight": (head,), f"{at}.self_attn.k_norm.weight": (head,)}
    return found


def weights(case: str) -> dict[str, NDArray[np.float32]]:
    """Seeded weights, large enough that every switch shows in the numbers."""
    draw = np.random.Generator(np.random.Philox(7))

    def one(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = draw.standard_normal(shape)
        if "norm" in name:
            return (1.0 + 0.2 * values).astype(np.float32)
        std = 0.3 if name.endswith("bias") else 1.0 if "embed" in name else 2.0 / math.sqrt(shape[-1])
        return (std * values).astype(np.float32)

    return {name: one(name, shape) for name, shape in sorted(shapes(case).items())}


def write_model(case: str, folder: Path) -> Path:
    """A case as a folder that both spile and transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CASES[case]))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the tap's RMS: what must not exceed 1e-4."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(expected**2)))
