"""OLMo 3: OLMo 2 with a window in three of four layers, and a rope of their own in these."""

from __future__ import annotations

from spile.models.architecture import ModelConfig
from spile.models.families.base import ConfigFields, Family, alternating_windows, read_rope
from spile.models.families.olmo2 import NAMES, read_olmo


def _read(fields: ConfigFields) -> ModelConfig:
    # transformers gives a top-level rope_theta to the layers without a window only.
    local, _ = read_rope(fields, "sliding_attention", theta=None)
    return read_olmo(
        fields, rope=read_rope(fields, "full_attention"), local_rope=local, windows=alternating_windows(fields, 4)
    )


FAMILY = Family(
    model_types=("olmo3",),
    models="OLMo 3 and 3.1",
    differs="as `olmo2`, with an attention window in three of four layers, and another rope in these",
    example=("allenai/Olmo-3-1025-7B", {"vocab_size": 100_278}),
    read=_read,
    names=NAMES,
)
