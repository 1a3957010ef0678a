"""What the files of a family call each tensor.

A tensor of a file that matches no entry is an error, so a model that is built differently is never loaded by accident.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

Order = Literal["rows", "columns", "heads", "interleaved"]
"""How a tensor of a file contains tensors of the model:

- ``rows``: one above the other;
- ``columns``: transposed, side by side;
- ``heads``: head by head;
- ``interleaved``: transposed, with the columns of two tensors in alternation.
"""


@dataclass(frozen=True)
class Fused:
    """A tensor of a file that contains several tensors of the model, or one in another layout."""

    fields: tuple[str, ...]
    order: Order = "rows"


@dataclass(frozen=True)
class Match:
    """The tensors of the model that a tensor of a file contains; none if it is known but not needed."""

    names: tuple[str, ...] = ()
    order: Order = "rows"
    expert: int | None = None
    """The number of the expert, if the file has one tensor per expert."""


@dataclass(frozen=True)
class Names:
    """The tensor names of a family."""

    prefix: str = r"(?:model\.)?"
    """Pattern of the optional text before every name except the LM head's."""
    written: str = "model."
    """The prefix that most files have; error messages use it."""
    once: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({"embed": "embed_tokens.weight", "final_norm": "norm.weight"})
    )
    """Field of :class:`spile.models.params.Params` → name in the file."""
    head: str = "lm_head.weight"
    layers: str = "layers"
    layer: Mapping[str, str | Fused] = field(default_factory=dict)
    """Name below a layer's number → field of :class:`spile.models.params.Layer`; ``{e}`` is an expert's number."""
    unused: tuple[str, ...] = (r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    """Patterns, below the prefix, of tensors that are not needed."""

    def match(self, name: str) -> Match | None:
        """Return what a tensor of a file contains, or None if the name is unknown."""
        if name == self.head:
            return Match(("head",))
        if name == self.head.removesuffix("weight") + "bias":
            return Match(("head_bias",))
        below = re.sub(f"^{self.prefix}", "", name)
        for once, own in self.once.items():
            if below == own:
                return Match((once,))
        if any(re.fullmatch(pattern, below) for pattern in self.unused):
            return Match()
        found = re.match(rf"{self.layers}\.(\d{{1,6}})\.", below)
        return self._in_layer(int(found[1]), below[found.end() :]) if found else None

    def _in_layer(self, layer: int, suffix: str) -> Match | None:
        expert = re.search(r"\.experts\.(\d{1,6})\.", suffix)
        if expert:
            suffix = suffix.replace(expert[0], ".experts.{e}.")
        target = self.layer.get(suffix)
        if target is None:
            return None
        fused = Fused((target,)) if isinstance(target, str) else target
        names = tuple(f"{layer}.{name}" for name in fused.fields)
        return Match(names, fused.order, int(expert[1]) if expert else None)

    def file_name(self, name: str) -> str:
        """Return the name that a file would use for a tensor of the model; for error messages."""
        if name in ("head", "head_bias"):
            return self.head if name == "head" else self.head.removesuffix("weight") + "bias"
        layer, _, field_name = name.rpartition(".")
        if not layer:
            return self.written + self.once[name]
        candidates = (
            (suffix, target.fields if isinstance(target, Fused) else (target,)) for suffix, target in self.layer.items()
        )
        suffix = next(suffix for suffix, fields in candidates if field_name in fields)
        return f"{self.written}{self.layers}.{layer}.{suffix}"


def extend(more: Mapping[str, str | Fused], base: Names | None = None) -> Names:
    """Return ``base`` (by default :data:`PLAIN`) with these layer tensors added or replaced."""
    base = PLAIN if base is None else base
    return replace(base, layer=MappingProxyType({**base.layer, **more}))


PLAIN = Names(
    layer=MappingProxyType(
        {
            "input_layernorm.weight": "attn_norm",
            "self_attn.q_proj.weight": "q",
            "self_attn.k_proj.weight": "k",
            "self_attn.v_proj.weight": "v",
            "self_attn.o_proj.weight": "o",
            "self_attn.q_proj.bias": "q_bias",
            "self_attn.k_proj.bias": "k_bias",
            "self_attn.v_proj.bias": "v_bias",
            "self_attn.o_proj.bias": "o_bias",
            "self_attn.q_norm.weight": "q_norm",
            "self_attn.k_norm.weight": "k_norm",
            "post_attention_layernorm.weight": "mlp_norm",
            "mlp.gate_proj.weight": "gate",
            "mlp.up_proj.weight": "up",
            "mlp.down_proj.weight": "down",
            "mlp.gate_proj.bias": "gate_bias",
            "mlp.up_proj.bias": "up_bias",
            "mlp.down_proj.bias": "down_bias",
        }
    ),
)
"""The names of Llama, which most families use. The config decides which of them a model must have."""

SANDWICH: Mapping[str, str | Fused] = MappingProxyType(
    {
        "post_attention_layernorm.weight": "attn_post_norm",
        "pre_feedforward_layernorm.weight": "mlp_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
    }
)
"""The norms of Gemma 2 and 3, before and after attention and MLP."""

VISION_PREFIX = r"(?:(?:language_model\.)?model\.(?:language_model\.)?)?"
"""The prefix of decoders that are part of a model with a vision tower."""
