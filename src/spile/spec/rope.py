"""Rotary positions as a config spells them: the base, and how its wavelengths were stretched for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from spile.errors import ModelError
from spile.spec.config_fields import ConfigFields

__all__ = ["Rope", "RopeKind", "read_rope"]

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
