"""SmolLM3: every fourth layer has no rotary positions."""

from __future__ import annotations

from spile.errors import ModelError
from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, decoder, layer_count


def _read(fields: ConfigFields) -> ModelConfig:
    count, interval = layer_count(fields), fields.integer("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers")
    if rotated is None:  # despite its name, the field is 1 for layers with rotary positions
        rotated = [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count:
        raise ModelError("config.json's no_rope_layers", expected=f"{count} numbers", found=repr(rotated)[:80])
    without = tuple(layer for layer in range(count) if not rotated[layer])
    return decoder(fields, slides=lambda layer: layer in without, no_rope=without)


FAMILY = Family(
    model_types=("smollm3",),
    models="SmolLM3",
    differs="as `llama`; layers in `no_rope_layers` have no rotary positions",
    example=("HuggingFaceTB/SmolLM3-3B", {}),
    read=_read,
)
