"""SmolLM3: every fourth layer has no rotary positions."""

from __future__ import annotations

from spile.errors import ModelError
from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder, layer_count, windows_by_type


def _read(fields: ConfigFields) -> ModelConfig:
    count, bias = layer_count(fields), fields.flag("attention_bias")
    interval, rotated = fields.integer("no_rope_layer_interval"), fields.get("no_rope_layers")
    if rotated is None:  # despite its name, the field is 1 for layers with rotary positions
        rotated = [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count:
        raise ModelError("config.json's no_rope_layers", expected=f"{count} numbers", found=repr(rotated)[:80])
    without = tuple(layer for layer in range(count) if not rotated[layer])
    window = fields.get("sliding_window")
    window = window if fields.flag("use_sliding_window") else None
    types = fields.get("layer_types")
    if types is None:
        types = ["sliding_attention" if window and layer in without else "full_attention" for layer in range(count)]
    windows = windows_by_type(types, window) if window else (None,) * count
    return decoder(
        fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"), windows=windows, no_rope=without
    )


FAMILY = Family(
    model_types=("smollm3",),
    models="SmolLM3",
    differs="as `llama`; layers in `no_rope_layers` have no rotary positions",
    example=("HuggingFaceTB/SmolLM3-3B", {}),
    read=_read,
)
