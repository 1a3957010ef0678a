"""The tensors that a family's files hold, written out by hand: names are under test too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spile.models.architecture import ModelConfig

__all__ = ["shapes"]

Shapes = dict[str, tuple[int, ...]]


def shapes(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    """Name → shape, for a config."""
    return _FAMILIES.get(raw["model_type"], _plain)(raw, about)


def _plain(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    d = about.d_model
    found: Shapes = {"model.embed_tokens.weight": (about.vocab_size, d), "model.norm.weight": (d,)}
    if not about.tied:
        found["lm_head.weight"] = (about.vocab_size, d)
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        found |= {f"{at}.input_layernorm.weight": (d,), f"{at}.post_attention_layernorm.weight": (d,)}
        found |= _attention(raw, about, at) | _gated(raw, about, at)
    return found


def _attention(raw: dict[str, Any], about: ModelConfig, at: str) -> Shapes:
    d, q, kv = about.d_model, about.n_heads * about.head_dim, about.n_kv_heads * about.head_dim
    bias = raw["model_type"] == "qwen2" or raw.get("attention_bias")
    found: Shapes = {}
    for name, outer in {"q": q, "k": kv, "v": kv}.items():
        found[f"{at}.self_attn.{name}_proj.weight"] = (outer, d)
        if bias:
            found[f"{at}.self_attn.{name}_proj.bias"] = (outer,)
    found[f"{at}.self_attn.o_proj.weight"] = (d, q)
    if raw.get("attention_bias"):
        found[f"{at}.self_attn.o_proj.bias"] = (d,)
    if raw["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text", "gemma3"):
        found |= {f"{at}.self_attn.{name}_norm.weight": (about.head_dim,) for name in "qk"}
    return found


def _gated(raw: dict[str, Any], about: ModelConfig, at: str, ff: int | None = None) -> Shapes:
    d, ff = about.d_model, ff or about.d_ff
    found: Shapes = {}
    for name, shape in {"gate": (ff, d), "up": (ff, d), "down": (d, ff)}.items():
        found[f"{at}.mlp.{name}_proj.weight"] = shape
        if raw.get("mlp_bias"):
            found[f"{at}.mlp.{name}_proj.bias"] = shape[:1]
    return found


def _sandwich(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    found = _plain(raw, about)
    for layer in range(about.n_layers):
        for name in ("pre_feedforward", "post_feedforward"):
            found[f"model.layers.{layer}.{name}_layernorm.weight"] = (about.d_model,)
    return found


def _gemma3(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    """With a vision tower, as in the hub's files; its tensors are not needed."""
    text = {f"language_model.{name}": shape for name, shape in _sandwich(raw, about).items()}
    return {**text, "vision_tower.vision_model.embeddings.position_embedding.weight": (4, 4)}


def _phi3(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    found = _plain(raw, about)
    d, heads, ff = about.d_model, about.n_heads + 2 * about.n_kv_heads, about.d_ff
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            del found[f"{at}.{name}.weight"]
        found[f"{at}.self_attn.qkv_proj.weight"] = (heads * about.head_dim, d)
        found[f"{at}.mlp.gate_up_proj.weight"] = (2 * ff, d)
    return found


def _gpt2(_raw: dict[str, Any], about: ModelConfig) -> Shapes:
    d, ff = about.d_model, about.d_ff
    found: Shapes = {
        "transformer.wte.weight": (about.vocab_size, d),
        "transformer.wpe.weight": (about.learned_positions or 0, d),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
    }
    for at in (f"transformer.h.{layer}" for layer in range(about.n_layers)):
        for name in ("ln_1", "ln_2"):
            found |= {f"{at}.{name}.weight": (d,), f"{at}.{name}.bias": (d,)}
        matrices = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, ff), "mlp.c_proj": (ff, d)}
        for name, shape in matrices.items():
            found |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[1:]}
    return found


def _gpt_neox(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    d, ff = about.d_model, about.d_ff
    found: Shapes = {
        "gpt_neox.embed_in.weight": (about.vocab_size, d),
        "gpt_neox.final_layer_norm.weight": (d,),
        "gpt_neox.final_layer_norm.bias": (d,),
        "embed_out.weight": (about.vocab_size, d),
    }
    attention = {"attention.query_key_value": (3 * d, d), "attention.dense": (d, d)}
    for at in (f"gpt_neox.layers.{layer}" for layer in range(about.n_layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= {f"{at}.{name}.weight": (d,), f"{at}.{name}.bias": (d,)}
        for name, shape in {**attention, "mlp.dense_h_to_4h": (ff, d), "mlp.dense_4h_to_h": (d, ff)}.items():
            found[f"{at}.{name}.weight"] = shape
            if name not in attention or raw.get("attention_bias", True):
                found[f"{at}.{name}.bias"] = shape[:1]
    return found


def _olmo2(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    found = _plain(raw, about)
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        del found[f"{at}.input_layernorm.weight"]
        found[f"{at}.post_feedforward_layernorm.weight"] = (about.d_model,)
        found[f"{at}.self_attn.q_norm.weight"] = (about.n_heads * about.head_dim,)
        found[f"{at}.self_attn.k_norm.weight"] = (about.n_kv_heads * about.head_dim,)
    return found


def _phi(_raw: dict[str, Any], about: ModelConfig) -> Shapes:
    d, ff = about.d_model, about.d_ff
    q, kv = about.n_heads * about.head_dim, about.n_kv_heads * about.head_dim
    found: Shapes = {
        "model.embed_tokens.weight": (about.vocab_size, d),
        "model.final_layernorm.weight": (d,),
        "model.final_layernorm.bias": (d,),
        "lm_head.weight": (about.vocab_size, d),
        "lm_head.bias": (about.vocab_size,),
    }
    matrices = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.dense": (d, q), "mlp.fc1": (ff, d), "mlp.fc2": (d, ff),
    }  # fmt: skip
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        found |= {f"{at}.input_layernorm.weight": (d,), f"{at}.input_layernorm.bias": (d,)}
        for name, shape in matrices.items():
            found |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
    return found


def _glm(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    found = _plain(raw, about)
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        del found[f"{at}.self_attn.o_proj.bias"], found[f"{at}.mlp.gate_proj.weight"], found[f"{at}.mlp.up_proj.weight"]
        found[f"{at}.mlp.gate_up_proj.weight"] = (2 * about.d_ff, about.d_model)
        if raw["model_type"] == "glm4":
            found[f"{at}.post_self_attn_layernorm.weight"] = (about.d_model,)
            found[f"{at}.post_mlp_layernorm.weight"] = (about.d_model,)
    return found


def _gpt_oss(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    found = _plain({**raw, "attention_bias": True}, about)
    assert about.experts is not None
    count, d, ff = about.experts.count, about.d_model, about.experts.d_ff
    for at in (f"model.layers.{layer}" for layer in range(about.n_layers)):
        for name in ("gate", "up", "down"):
            del found[f"{at}.mlp.{name}_proj.weight"]
        found |= {
            f"{at}.self_attn.sinks": (about.n_heads,),
            f"{at}.mlp.router.weight": (count, d),
            f"{at}.mlp.router.bias": (count,),
            f"{at}.mlp.experts.gate_up_proj": (count, d, 2 * ff),
            f"{at}.mlp.experts.gate_up_proj_bias": (count, 2 * ff),
            f"{at}.mlp.experts.down_proj": (count, ff, d),
            f"{at}.mlp.experts.down_proj_bias": (count, d),
        }
    return found


def _moe(raw: dict[str, Any], about: ModelConfig) -> Shapes:
    found = _plain(raw, about)
    mixtral = raw["model_type"] == "mixtral"
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {n: f"{n}_proj" for n in ("gate", "up", "down")}
    for layer in range(about.n_layers):
        if not about.has_experts(layer) or about.experts is None:
            continue
        at, d, ff = f"model.layers.{layer}", about.d_model, about.experts.d_ff
        for name in ("gate", "up", "down"):
            del found[f"{at}.mlp.{name}_proj.weight"]
        mlp = f"{at}.{'block_sparse_moe' if mixtral else 'mlp'}"
        found[f"{mlp}.gate.weight"] = (about.experts.count, d)
        for expert in range(about.experts.count):
            for name, shape in {"gate": (ff, d), "up": (ff, d), "down": (d, ff)}.items():
                found[f"{mlp}.experts.{expert}.{names[name]}.weight"] = shape
    return found


_FAMILIES: dict[str, Callable[[dict[str, Any], ModelConfig], Shapes]] = {
    "gemma2": _sandwich,
    "gemma3_text": _sandwich,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "phi": _phi,
    "glm": _glm,
    "glm4": _glm,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _moe,
    "mixtral": _moe,
}
