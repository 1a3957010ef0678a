"""What the files call each tensor: a table of patterns a family. A name that none matches is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["NAMES", "Names"]


@dataclass(frozen=True)
class Names:
    """A family's tensors: patterns to a tree's field names, and those that are known and not needed."""

    embed: str
    layer: Mapping[str, str]
    """Suffix below a layer's number → field of :class:`spile.model.params.Layer`."""
    layer_prefix: str
    unused: tuple[str, ...]
    final_norm: str = r"(?:model\.)?norm\.weight"
    head: str = r"lm_head\.weight"

    def match(self, name: str) -> str | None:
        """``embed``, ``3.q_bias``, an empty string for one that is never needed, None for an unknown one."""
        single = {"embed": self.embed, "final_norm": self.final_norm, "head": self.head}
        whole = next((part for part, pattern in single.items() if re.fullmatch(pattern, name)), None)
        if whole is not None:
            return whole
        if any(re.fullmatch(pattern, name) for pattern in self.unused):
            return ""
        found = re.match(self.layer_prefix, name)
        field = self.layer.get(name[found.end() :]) if found else None
        return f"{int(found[1])}.{field}" if found and field else None


_PLAIN = Names(
    embed=r"(?:model\.)?embed_tokens\.weight",
    layer_prefix=r"(?:model\.)?layers\.(\d{1,6})\.",
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
    unused=(r"(?:model\.)?(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)
"""Four families write the same names; which of these a model must have follows from its config."""

NAMES: Mapping[str, Names] = MappingProxyType({"qwen2": _PLAIN, "qwen3": _PLAIN, "llama": _PLAIN, "mistral": _PLAIN})
