"""The model families that spile computes itself: one module each, and the table of all of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spile.errors import ModelError, UnsupportedModel
from spile.models.architecture import ModelConfig
from spile.models.families import (
    gemma,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    smollm3,
)
from spile.models.families.base import ConfigFields, Family, declared_fields

__all__ = ["FAMILIES", "Family", "read_config", "refuse_quantized"]

_log = logging.getLogger("spile.models")

_ALL = (
    qwen.QWEN2,
    qwen.QWEN3,
    llama.FAMILY,
    mistral.MISTRAL,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi.PHI3,
    phi.PHI,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    olmo.OLMO2,
    olmo.OLMO3,
    smollm3.FAMILY,
    granite.FAMILY,
    glm4.GLM,
    glm4.GLM4,
    qwen.QWEN3_MOE,
    mistral.MIXTRAL,
    gpt_oss.FAMILY,
)

FAMILIES: Mapping[str, Family] = {name: family for family in _ALL for name in family.model_types}
"""By the ``model_type`` of config.json."""

_QUANTIZED_FIX = "give the model's 16-bit original; its name is usually this one without -GPTQ, -AWQ, -bnb-4bit or -FP8"
_TOWERS = ("text_config", "vision_config", "audio_config")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the content of a ``config.json``.

    Raises:
        UnsupportedModel: The family is unknown, or a field changes the numbers in a way that spile does not implement.
        ModelError: A field makes no sense, or the weights are quantized.

    """
    name = raw.get("model_type")
    known = f"one of {', '.join(FAMILIES)}"
    if not isinstance(name, str):
        found = repr(name) if name is not None else "a config.json without model_type"
        raise ModelError("unknown architecture", expected=known, found=found)
    refuse_quantized(raw)
    if name not in FAMILIES:
        fix = "use --backend torch with spile extract or infer, which runs any model of transformers"
        raise UnsupportedModel("unknown architecture", expected=known, found=repr(name), fix=fix)
    family = FAMILIES[name]
    if isinstance(nested := raw.get("text_config"), Mapping):  # the decoder of a model with a vision tower
        outer = {key: value for key, value in raw.items() if key not in _TOWERS}
        raw = {**outer, **nested, "model_type": name}
    fields = ConfigFields(raw, declared_fields()[family.model_types[0]])
    config = replace(family.read(fields, **family.options), positions=fields.positions())
    _report(fields.ignored(name))
    return config


@functools.lru_cache(maxsize=64)
def _report(ignored: tuple[str, ...]) -> None:
    """Log the ignored fields, once per process: a config is read several times."""
    if ignored:
        _log.info("config.json: ignored fields that do not change the model: %s", ", ".join(ignored))


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raise a ModelError that names the quantization method, if the weights are quantized."""
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else "unnamed"
        raise ModelError(
            "quantized weights", expected="float32, float16 or bfloat16", found=f"{method}", fix=_QUANTIZED_FIX
        )
