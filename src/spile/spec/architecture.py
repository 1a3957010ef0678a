"""The architectures: one table row a family, and the sizes and switches read from a model's ``config.json``.

A family is what it does where the others do something else. Everything absent from a config takes the default that
transformers gives that family, so that the same file means the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spile.errors import ModelError

__all__ = [
    "ARCHITECTURES",
    "Activation",
    "Architecture",
    "ModelConfig",
    "Rope",
    "flops_per_token",
    "parameter_count",
    "read_config",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how its wavelengths were stretched for longer contexts."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    """The context the model was trained on before it was stretched (llama3, yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """What cosines and sines are multiplied by (yarn); transformers calls it the attention factor."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes and switches: all that the numbers depend on besides the weights."""

    architecture: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMS norm over each head's queries and keys, before they are rotated."""
    tied: bool = False
    """The LM head is the embedding. Kept for counting: the head is never computed."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many positions a token sees, itself included; None: all before it."""
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name}", expected="at least 1", found=getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                "the model's heads", expected=f"a multiple of its {self.n_kv_heads} key/value heads", found=self.n_heads
            )
        if self.head_dim % 2:
            raise ModelError("the model's head_dim", expected="an even number", found=self.head_dim)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.n_layers)
        if len(self.windows) != self.n_layers:
            raise ModelError("layer_types", expected=f"one for each of {self.n_layers} layers", found=len(self.windows))

    def sizes(self) -> dict[str, int]:
        """The sizes that taps' rows have, by the names of the tap table; 0: it has no such thing."""
        return {
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "heads": self.n_heads,
            "kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "experts": 0,
            "vocab": self.vocab_size,
        }


Windows = Callable[["_Fields", int], tuple[int | None, ...]]


@dataclass(frozen=True)
class Architecture:
    """What a family does where others do something else. A new family is a row of these and its weights' names."""

    windows: Windows
    qkv_bias: bool | None = None
    """None: the config's ``attention_bias`` says."""
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    """Where the config has none; None: d_model / heads."""
    kv_heads: int | None = None
    """Where the config has none; None: as many as heads."""


class _Fields:
    """A raw config whose reads are typed and whose complaints name the field."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {name}", fix="check that the folder holds a whole model")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"config.json's {name}", expected="a whole number", found=repr(value))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"config.json's {name}", expected="a number", found=repr(value))
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json's {name}", expected="true or false", found=repr(value))
        return value


def _no_windows(_fields: _Fields, n_layers: int) -> tuple[int | None, ...]:
    return (None,) * n_layers


def _every_layer(fields: _Fields, n_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for all layers; an absent one is 4096, an explicit null is none."""
    window = fields.raw.get("sliding_window", 4096)
    return (None if window is None else fields.integer("sliding_window", 4096),) * n_layers


def _layer_types(fields: _Fields, n_layers: int) -> tuple[int | None, ...]:
    """Qwen: ``layer_types``, or the layers from ``max_window_layers`` on; neither without ``use_sliding_window``."""
    use = fields.flag("use_sliding_window") and fields.raw.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if use else None
    types = fields.raw.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(n_layers))
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            "config.json's layer_types", expected="full_attention or sliding_attention", found=", ".join(unknown)
        )
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "config.json's layer_types", expected="a sliding_window for sliding_attention", found="none in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2": Architecture(windows=_layer_types, qkv_bias=True, o_bias=False, mlp_bias=False, kv_heads=32),
    "qwen3": Architecture(windows=_layer_types, mlp_bias=False, qk_norm=True, head_dim=128, kv_heads=32),
    "llama": Architecture(windows=_no_windows),
    "mistral": Architecture(windows=_every_layer, qkv_bias=False, o_bias=False, mlp_bias=False, kv_heads=8),
}
"""By the ``model_type`` of config.json."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The content of a ``config.json`` → the config, or a ModelError that names what is not understood."""
    fields = _Fields(raw)
    name = raw.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        found = repr(name) if name is not None else "a config.json without model_type"
        raise ModelError("unknown architecture", expected=f"one of {known}", found=found)
    if raw.get("quantization_config"):
        raise ModelError("quantized weights", expected="float32, float16 or bfloat16", found="a quantization_config")
    family = ARCHITECTURES[name]
    d_model, n_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    n_heads = fields.integer("num_attention_heads")
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        architecture=name,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(fields, family, n_heads),
        head_dim=fields.integer("head_dim", family.head_dim or d_model // max(n_heads, 1)),
        d_ff=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_read_rope(fields),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied=fields.flag("tie_word_embeddings"),
        windows=family.windows(fields, n_layers),
        activation=_activation(raw.get("hidden_act", "silu")),
    )


def _kv_heads(fields: _Fields, family: Architecture, n_heads: int) -> int:
    """Absent: the family's default. An explicit null: as many as heads."""
    if "num_key_value_heads" in fields.raw:
        return fields.integer("num_key_value_heads", n_heads)
    return family.kv_heads or n_heads


def _activation(name: object) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError("config.json's hidden_act", expected=f"one of {', '.join(_ACTIVATIONS)}", found=repr(name))
    return _ACTIVATIONS[name]


def _read_rope(fields: _Fields) -> Rope:
    """Both spellings: ``rope_parameters``, or ``rope_theta`` beside ``rope_scaling``."""
    raw = fields.raw
    spelled = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(spelled, Mapping) or any(isinstance(value, Mapping) for value in spelled.values()):
        raise ModelError("config.json's rope_parameters", expected="one set for all layers", found=repr(spelled))
    rope = _Fields(spelled)
    kind = spelled.get("rope_type") or spelled.get("type") or "default"
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json's partial_rotary_factor", expected="1.0", found="a part of each head")
    if kind not in get_args(RopeKind):
        raise ModelError("unsupported rope scaling", expected=f"one of {', '.join(get_args(RopeKind))}", found=kind)
    if kind == "default":
        return Rope(theta=theta)
    factor = rope.number("factor", 1.0 if kind == "yarn" else None)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    original = _original_length(fields, rope)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return Rope(theta, "llama3", factor, low_freq_factor=low, high_freq_factor=high, original_length=original)
    return _read_yarn(fields, rope, theta, original)


def _original_length(fields: _Fields, rope: _Fields) -> int:
    """The config's own field wins over the rope's, as in transformers; then the maximum length."""
    for place in (fields, rope):
        if place.raw.get("original_max_position_embeddings") is not None:
            return place.integer("original_max_position_embeddings")
    return fields.integer("max_position_embeddings")


def _read_yarn(fields: _Fields, rope: _Fields, theta: float, original: int) -> Rope:
    """YaRN as transformers reads it: the amplitude comes from the factor unless the config fixes it."""
    factor = rope.number("factor", fields.integer("max_position_embeddings", original) / original)
    amplitude = rope.number("attention_factor", _mscale(factor))
    if rope.raw.get("attention_factor") is None and rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        amplitude = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return Rope(
        theta,
        "yarn",
        factor,
        original_length=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        amplitude=amplitude,
    )


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _layer_matmuls(config: ModelConfig) -> int:
    """Weights of one layer's matrices, biases and norms left out: two FLOPs each a token."""
    heads = config.n_heads * config.head_dim
    keys = config.n_kv_heads * config.head_dim
    return config.d_model * (2 * heads + 2 * keys + 3 * config.d_ff)


def parameter_count(config: ModelConfig) -> int:
    """Every weight of the model, LM head included unless it is tied."""
    heads, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = _layer_matmuls(config) + 2 * config.d_model
    layer += config.qkv_bias * (heads + 2 * keys) + config.o_bias * config.d_model
    layer += config.mlp_bias * (2 * config.d_ff + config.d_model) + config.qk_norm * 2 * config.head_dim
    embedding = config.vocab_size * config.d_model
    return config.n_layers * layer + embedding * (1 if config.tied else 2) + config.d_model


def flops_per_token(config: ModelConfig, seq_len: int, last_layer: int | None = None) -> float:
    """Model FLOPs a token of a sequence of this length needs through ``last_layer`` (None: all), without the LM head.

    Attention counts the positions a token really sees: half of them on average under a causal mask.
    """
    layers = config.n_layers if last_layer is None else last_layer + 1
    flops = 2.0 * layers * _layer_matmuls(config)
    for window in config.windows[:layers]:
        width = min(window or seq_len, seq_len)
        seen = (width * (width + 1) / 2 + (seq_len - width) * width) / max(seq_len, 1)
        flops += 4.0 * config.n_heads * config.head_dim * seen
    return flops
