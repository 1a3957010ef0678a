"""Rotary positions as a config spells them: the base, and how its wavelengths were stretched for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from spile.errors import ModelError
from spile.models.config_fields import ConfigFields

__all__ = [
    "Activation",
    "Experts",
    "ModelConfig",
    "Norm",
    "NormPlace",
    "Rope",
    "RopeKind",
    "read_rope",
]


RopeKind = Literal["default", "linear", "llama3", "yarn"]


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


def read_rope(
    fields: ConfigFields, theta: float = 10_000.0, part: float = 1.0, layers: str | None = None
) -> tuple[Rope, float]:
    """The rope, and the part of each head that it turns. Both spellings: ``rope_parameters``, or ``rope_theta`` beside
    ``rope_scaling``. ``layers``: whose set it is, in a family that has one for each type of layer.
    """
    spelled = _spelled(fields, layers)
    rope = ConfigFields(spelled)
    old, new = rope.get("type"), rope.get("rope_type")
    kind = new or old or "default"
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    part = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", part))
    if kind not in get_args(RopeKind):
        raise ModelError("unsupported rope scaling", expected=f"one of {', '.join(get_args(RopeKind))}", found=kind)
    found = _READERS[kind](fields, rope, theta)
    rope.refuse_unread(f"{kind} rope")
    return found, part


def _spelled(fields: ConfigFields, layers: str | None) -> Mapping[str, object]:
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    spelled = parameters or scaling or {}
    if layers is not None and isinstance(spelled, Mapping) and isinstance(spelled.get(layers), Mapping):
        spelled = spelled[layers]
    if not isinstance(spelled, Mapping) or any(isinstance(value, Mapping) for value in spelled.values()):
        raise ModelError("config.json's rope_parameters", expected="one set for all layers", found=repr(spelled))
    return spelled


def _default(_fields: ConfigFields, rope: ConfigFields, theta: float) -> Rope:
    for name in ("factor", "original_max_position_embeddings"):
        rope.get(name)  # without a type they scale nothing, as in transformers
    return Rope(theta=theta)


def _linear(_fields: ConfigFields, rope: ConfigFields, theta: float) -> Rope:
    return Rope(theta=theta, kind="linear", factor=rope.number("factor"))


def _llama3(fields: ConfigFields, rope: ConfigFields, theta: float) -> Rope:
    return Rope(
        theta,
        "llama3",
        rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_length=_original_length(fields, rope),
    )


def _yarn(fields: ConfigFields, rope: ConfigFields, theta: float) -> Rope:
    """YaRN as transformers reads it: the amplitude comes from the factor unless the config fixes it."""
    original = _original_length(fields, rope)
    factor = rope.number("factor", fields.integer("max_position_embeddings", original) / original)
    amplitude = rope.number("attention_factor", _mscale(factor))
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is None and all(scales):
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


_READERS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _original_length(fields: ConfigFields, rope: ConfigFields) -> int:
    """The config's own field wins over the rope's, as in transformers; then the maximum length."""
    name = "original_max_position_embeddings"
    said = [place.get(name) for place in (fields, rope)]
    if said[0] is None and said[1] is None:
        return fields.integer("max_position_embeddings")
    return (fields if said[0] is not None else rope).integer(name)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "rms_plus_one", "layer"]
"""``rms``: divide by the RMS; ``rms_plus_one``: with weights stored less 1; ``layer``: less the mean, with a bias."""
NormPlace = Literal["pre", "post", "sandwich"]
"""Where a part is normed: what it reads, what it adds, or both."""


@dataclass(frozen=True)
class Experts:
    """MLPs of which a router chooses some for each token."""

    count: int
    per_token: int
    d_ff: int
    normalized: bool
    """The chosen experts' weights are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one plain MLP instead."""


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
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMS norm over each head's queries and keys, before they are rotated."""
    tied: bool = False
    """The LM head is the embedding."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many positions a token sees, itself included; None: all before it."""
    activation: Activation = "silu"
    norm: Norm = "rms"
    norm_place: NormPlace = "pre"
    flat_qk_norm: bool = False
    """The norm of queries and keys is over all heads together, not over each."""
    parallel: bool = False
    """Attention and MLP read the same residual stream, and are added to it together."""
    gated: bool = True
    """The MLP has a gated branch: activation(gate·x) · (up·x). Else activation(up·x)."""
    rotary_dim: int | None = None
    """How many dimensions of each head are rotated; None: all."""
    local_rope: Rope | None = None
    """The rope of layers with a window, where it is another."""
    learned_positions: int | None = None
    """How many positions have a learned embedding, instead of rotations."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 / √head_dim."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    """What tanh bounds the scores, and the logits, by."""
    embedding_scale: float | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name}", expected="at least 1", found=getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                "the model's heads", expected=f"a multiple of its {self.n_kv_heads} key/value heads", found=self.n_heads
            )
        if (self.rotary_dim or self.head_dim) % 2 and self.learned_positions is None:
            raise ModelError("the model's head_dim", expected="an even number", found=self.rotary_dim or self.head_dim)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.n_layers)
        if len(self.windows) != self.n_layers:
            raise ModelError("layer_types", expected=f"one for each of {self.n_layers} layers", found=len(self.windows))
        if self.experts is not None and not 0 < self.experts.per_token <= self.experts.count:
            raise ModelError(
                "config.json's num_experts_per_tok",
                expected=f"1 to its {self.experts.count} experts",
                found=self.experts.per_token,
            )

    def has_experts(self, layer: int | None) -> bool:
        """Whether this layer routes (None: whether any does)."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def sizes(self, layer: int | None = None) -> dict[str, int]:
        """The sizes that taps' rows have at a layer, by the names of the tap table; 0: it has no such thing."""
        routed = self.experts if self.has_experts(layer) else None
        return {
            "d_model": self.d_model,
            "d_mid": 0 if self.parallel else self.d_model,
            "d_ff": 0 if routed else self.d_ff,
            "heads": self.n_heads,
            "kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "experts": routed.count if routed else 0,
            "vocab": self.vocab_size,
        }

    def meaning(self) -> dict[str, Any]:
        """All of it, for a hash; later switches only where they are on, so that older models keep theirs."""
        said = asdict(self)
        names = [each.name for each in fields(self)]
        defaults = {each.name: each.default for each in fields(self)}
        since = names.index("norm")
        return {name: said[name] for name in names if names.index(name) < since or said[name] != defaults[name]}
