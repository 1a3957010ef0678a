"""The tiny models that must equal transformers: one table for the goldens, the live tests and their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from numerics.shapes import shapes as family_shapes
from spile.errors import SpecError
from spile.models.architecture import ModelConfig
from spile.models.families import read_config
from spile.spec.taps import TAP_KINDS, Tap, parse_tap_words, select_taps, tap_rows

__all__ = [
    "CASES",
    "EACH_OPTION",
    "FIRST_KINDS",
    "GOLDENS",
    "LIVE",
    "contract",
    "distance",
    "error",
    "golden_path",
    "own_distances",
    "ratios",
    "taps",
    "tokens",
    "write_model",
]

GOLDENS = Path(__file__).parent / "goldens"

MEAN, WORST = 2.0, 3.0
"""The numeric contract: how far a tap may be from float64, relative to transformers in float32."""
EXACT = 1e-9
"""Distances below this are of values that were only rounded to float32 for the golden."""

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

_SMALL = {
    **_SIZES,
    "hidden_size": 24,
    "intermediate_size": 40,
    "head_dim": 8,
    "sliding_window": None,
}
_GEMMA = {**_SMALL, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5, "tie_word_embeddings": True}
_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": 40,
    "n_positions": 160,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {
    "model_type": "gpt_neox",
    **{name: value for name, value in _SIZES.items() if name not in ("num_key_value_heads", "rms_norm_eps")},
    "hidden_size": 32,
    "intermediate_size": 40,
    "hidden_act": "gelu",
    "num_attention_heads": 2,
}
_PHI3 = {
    **{name: value for name, value in _SMALL.items() if name != "head_dim"},
    "model_type": "phi3",
    "pad_token_id": 0,
}
_QWEN3_MOE = {
    **_SMALL,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

_EVERY_KIND: dict[str, dict[str, Any]] = {
    "qwen2-sites": {**_SMALL, "model_type": "qwen2"},
    "qwen3-sites": {**_SMALL, "model_type": "qwen3"},
    "llama-sites": {**_SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral-sites": {**_SMALL, "model_type": "mistral", "sliding_window": 5},
    "gemma": {**_SMALL, "model_type": "gemma", "hidden_act": "gelu", "tie_word_embeddings": True},
    "gemma2": {**_GEMMA, "model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma2-no-caps": {
        **_GEMMA,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    },
    "gemma3-new": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    },
    "phi3": {**_PHI3, "num_attention_heads": 6, "num_key_value_heads": 2},
    "phi3-window": {
        **_PHI3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "sliding_window": 4,
        "partial_rotary_factor": 0.5,
    },
    "gpt2": _GPT2,
    "gpt2-unscaled": {**_GPT2, "scale_attn_weights": False, "n_inner": None, "activation_function": "gelu"},
    "gpt-neox": {**_NEOX, "rotary_pct": 0.25, "rotary_emb_base": 5000, "use_parallel_residual": True},
    "gpt-neox-serial": {
        **_NEOX,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
    },
    "olmo2": {**_SMALL, "model_type": "olmo2", "head_dim": 6, "rms_norm_eps": 1e-5},
    "qwen3-moe": {**_QWEN3_MOE, "norm_topk_prob": True},
    "qwen3-moe-mixed": {
        **_QWEN3_MOE,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "attention_bias": True,
    },
    "phi3-longrope": {
        **_PHI3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 8,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.5],
            "long_factor": [1.2, 2.0, 4.0, 8.0],
        },
    },
    "phi3-longrope-short": {
        **_PHI3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.5],
            "long_factor": [1.2, 2.0, 4.0, 8.0],
        },
    },
    "phi": {
        **_NEOX,
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
    },
    "olmo3": {
        **_SMALL,
        "model_type": "olmo3",
        "head_dim": 6,
        "sliding_window": 4,
        "rope_theta": 1e4,
        "rope_scaling": _YARN,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {**_SMALL, "model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": 0},
    "granite": {
        **_SMALL,
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
    },
    "glm": {**_SMALL, "model_type": "glm", "attention_bias": True, "pad_token_id": 0},
    "glm4": {**_SMALL, "model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 1.0, "pad_token_id": 0},
    "gpt-oss": {
        **_SMALL,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "swiglu_limit": 1.5,
        "rope_scaling": {**_YARN, "truncate": False},
    },
    "mixtral": {
        **_SMALL,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "tie_word_embeddings": True,
    },
}
"""With every tap kind that they have, so smaller."""

CASES: dict[str, dict[str, Any]] = {name: {**_SIZES, **about} for name, about in _DIFFERENCES.items()} | _EVERY_KIND
"""Case → the content of its config.json."""

FIRST_KINDS = tuple(_DIFFERENCES)
"""Cases of residual, attn and mlp. Those of every kind are in test_packed_rows, whole rows among them."""
_SECOND = ("gemma2-no-caps", "gemma3-new", "phi3-window", "gpt2-unscaled", "gpt-neox-serial", "qwen3-moe-mixed")
_COVERED = (
    *("qwen2-window", "qwen2-window-off", "qwen3-tied-bias", "llama-3-new", "llama-biases", "llama-gelu"),
    *("mistral-full", "qwen2-sites", "mistral-sites", "gemma2-no-caps", "gemma3-new", "qwen3-moe"),
    "phi3-longrope-short",
)
LIVE = [pytest.param(case, marks=pytest.mark.slow) if case in (*_SECOND, *_COVERED) else case for case in CASES]
"""Computed live; where there is time, also second cases of a family and those whose parts other cases have."""
EACH_OPTION = [pytest.param(case, marks=pytest.mark.slow) if case in _COVERED else case for case in CASES]
"""Every option of a block at least once; cases whose options other cases have too are slow."""


_LIVE_ONLY = ("head_out", "pattern", "pattern_ids")
"""Kinds without goldens; test_edits compares them with transformers."""


def golden_path(case: str) -> Path:
    """Where a case's reference is committed."""
    return GOLDENS / f"{case}.safetensors"


def config(case: str) -> ModelConfig:
    """A case's config as we read it."""
    return read_config(CASES[case])


def taps(case: str) -> tuple[Tap, ...]:
    """Every kind at every layer, where a model has it."""
    about = config(case)
    words = (
        [kind for kind in TAP_KINDS if kind not in _LIVE_ONLY] if case in _EVERY_KIND else ["residual", "attn", "mlp"]
    )
    every = select_taps(parse_tap_words(words), None, about.n_layers, top=5)
    return tuple(tap for tap in every if _exists(tap, about))


def _exists(tap: Tap, about: ModelConfig) -> bool:
    try:
        tap_rows(tap, about.sizes(tap.layer), "float32")
    except SpecError:
        return False
    return True


def tokens(case: str, batch: int = 2, length: int | None = None) -> NDArray[np.int32]:
    """Return random tokens with a fixed seed."""
    length = length or (9 if case in _EVERY_KIND else 28)
    draw = np.random.Generator(np.random.Philox(len(case) * 1000 + batch + length))
    return draw.integers(3, CASES[case]["vocab_size"], (batch, length)).astype(np.int32)


def shapes(case: str) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers would save for a case."""
    return family_shapes(CASES[case], config(case))


def weights(case: str) -> dict[str, NDArray[np.float32]]:
    """Seeded weights, large enough that every switch shows in the numbers."""
    draw = np.random.Generator(np.random.Philox(7))
    stored_less_one = config(case).norm == "rms_plus_one"

    def one(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = draw.standard_normal(shape)
        if ("norm" in name or ".ln_" in name) and not name.endswith("bias"):
            return ((0.0 if stored_less_one else 1.0) + 0.2 * values).astype(np.float32)
        table = "embed" in name or name.endswith(("wte.weight", "wpe.weight"))
        std = 0.3 if name.endswith("bias") else 1.0 if table else 2.0 / math.sqrt(shape[-1])
        return (std * values).astype(np.float32)

    return {name: one(name, shape) for name, shape in sorted(shapes(case).items())}


def write_model(case: str, folder: Path) -> Path:
    """A case as a folder that both spile and transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CASES[case]))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def distance(found: Any, reference: Any) -> float:
    """Return the distance from the reference relative to each row's norm, as the RMS over the rows.

    A tap with one number per token, such as the loss, is one row per sample. Rows of zeros are left out.
    """
    found, reference = np.asarray(found, np.float64), np.asarray(reference, np.float64)
    if reference.shape[-1] == 1:
        found, reference = found[..., 0], reference[..., 0]
    norm = np.linalg.norm(reference, axis=-1)
    off = np.linalg.norm(found - reference, axis=-1)
    return float(np.sqrt(np.mean(np.square(off[norm > 0] / norm[norm > 0]))))


def ratios(found: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """Return each tap's distance from float64 relative to that of transformers in float32.

    Taps that both compute without rounding have the ratio 1.
    """
    return {tap: found[tap] / own[tap] if own[tap] > EXACT else 1.0 + found[tap] / EXACT for tap in own}


def contract(found: Mapping[str, float], own: Mapping[str, float]) -> str:
    """Return what breaks the numeric contract of docs/models.md, or an empty string."""
    each = ratios(found, own)
    mean, tap = float(np.mean(list(each.values()))), max(each, key=lambda name: each[name])
    broken = mean > MEAN or each[tap] > WORST
    return f"mean {mean:.2f}, worst {each[tap]:.2f} at {tap}" if broken else ""


def own_distances(golden: Mapping[str, NDArray[Any]], case: str) -> dict[str, float]:
    """Return how far transformers' float32 is from float64 at each tap of a golden."""
    names = [str(tap) for tap in taps(case) if tap.kind != "logits_ids"]
    return dict(zip(names, golden["own_distance"].tolist(), strict=True))


def error(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the tap's RMS."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(expected**2)))
