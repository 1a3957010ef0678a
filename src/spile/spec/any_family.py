"""Models of any family, as far as their sizes go: for who runs them with their own code."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spile.errors import ModelError
from spile.spec.architecture import ModelConfig
from spile.spec.config_fields import ConfigFields
from spile.spec.families import read_config, refuse_quantized

__all__ = ["read_any_config"]


def read_any_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The sizes of a model of any family, for who runs it with its own code: no switch of it is ours to honour."""
    name = raw.get("model_type")
    if not isinstance(name, str):
        raise ModelError("config.json has no model_type", fix="check that the folder holds a whole model")
    refuse_quantized(raw)
    with suppress(ModelError):  # the same meaning, and hash, as for who honours all of it
        return read_config(raw)
    nested = raw.get("text_config")
    fields = ConfigFields({**raw, **nested} if isinstance(nested, Mapping) else raw)

    def first(*names: str) -> int:
        return fields.integer(next((each for each in names if fields.has(each)), names[0]))

    heads = first("num_attention_heads", "n_head", "n_heads", "num_heads")
    d_model = first("hidden_size", "n_embd", "d_model", "dim")
    n_layers = first("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    head_dim = max(2, 2 * (d_model // max(heads, 1) // 2))
    return ModelConfig(name, d_model, n_layers, heads, heads, head_dim, 4 * d_model, first("vocab_size"))
