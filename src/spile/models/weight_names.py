"""What the files call each tensor: a table per family. A name that none matches is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

__all__ = ["NAMES", "Fused", "Match", "Names", "Order"]

Order = Literal["rows", "columns", "heads"]
"""How a file's tensor holds those of the tree: one above the other; transposed and side by side; head by head."""


@dataclass(frozen=True)
class Fused:
    """One tensor of the file that is several of the tree, or one that lies otherwise than the tree's."""

    fields: tuple[str, ...]
    order: Order = "rows"


@dataclass(frozen=True)
class Match:
    """What a file's tensor is: names in the tree, none for one that is known and not needed."""

    names: tuple[str, ...] = ()
    order: Order = "rows"
    expert: int | None = None
    """Which of the stacked experts."""


@dataclass(frozen=True)
class Names:
    """A family's tensors: what the files call those of the tree, and those that are known and not needed."""

    prefix: str = r"(?:model\.)?"
    """What stands before every name but the head's, as a pattern."""
    written: str = "model."
    """The same as most files have it, for errors."""
    once: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({"embed": "embed_tokens.weight", "final_norm": "norm.weight"})
    )
    """Field of :class:`spile.models.params.Params` → name."""
    head: str = "lm_head.weight"
    layers: str = "layers"
    layer: Mapping[str, str | Fused] = field(default_factory=dict)
    """Suffix below a layer's number → field of :class:`Layer`; {e} stands for an expert's number."""
    unused: tuple[str, ...] = (r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    """Patterns below the prefix."""

    def match(self, name: str) -> Match | None:
        """What a file's tensor is; None: unknown."""
        if name == self.head:
            return Match(("head",))
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
        """What a file would call a tree's tensor: for errors."""
        if name == "head":
            return self.head
        layer, _, field_name = name.rpartition(".")
        if not layer:
            return self.written + self.once[name]
        holding = (
            (suffix, target.fields if isinstance(target, Fused) else (target,)) for suffix, target in self.layer.items()
        )
        suffix = next(suffix for suffix, fields in holding if field_name in fields)
        return f"{self.written}{self.layers}.{layer}.{suffix}"


_PLAIN = Names(
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
"""Most families write these; which of them a model must have follows from its config."""

_SANDWICH = {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}


def _with(more: Mapping[str, str | Fused], base: Names = _PLAIN) -> Names:
    return replace(base, layer=MappingProxyType({**base.layer, **more}))


_OLMO2 = {
    "post_attention_layernorm.weight": "attn_post_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}

_GEMMA3 = replace(
    _with(_SANDWICH),
    prefix=r"(?:(?:language_model\.)?model\.(?:language_model\.)?)?",
    unused=(*_PLAIN.unused, r"vision_tower\..*", r"multi_modal_projector\..*"),
)

_GPT2 = Names(
    prefix=r"(?:transformer\.)?",
    written="transformer.",
    once=MappingProxyType(
        {
            "embed": "wte.weight",
            "positions": "wpe.weight",
            "final_norm": "ln_f.weight",
            "final_norm_bias": "ln_f.bias",
        }
    ),
    layers="h",
    layer=MappingProxyType(
        {
            "ln_1.weight": "attn_norm",
            "ln_1.bias": "attn_norm_bias",
            "attn.c_attn.weight": Fused(("q", "k", "v"), "columns"),
            "attn.c_attn.bias": Fused(("q_bias", "k_bias", "v_bias")),
            "attn.c_proj.weight": Fused(("o",), "columns"),
            "attn.c_proj.bias": "o_bias",
            "ln_2.weight": "mlp_norm",
            "ln_2.bias": "mlp_norm_bias",
            "mlp.c_fc.weight": Fused(("up",), "columns"),
            "mlp.c_fc.bias": "up_bias",
            "mlp.c_proj.weight": Fused(("down",), "columns"),
            "mlp.c_proj.bias": "down_bias",
        }
    ),
    unused=(r"h\.\d+\.attn\.(?:masked_)?bias",),
)

_GPT_NEOX = Names(
    prefix=r"(?:gpt_neox\.)?",
    written="gpt_neox.",
    once=MappingProxyType(
        {
            "embed": "embed_in.weight",
            "final_norm": "final_layer_norm.weight",
            "final_norm_bias": "final_layer_norm.bias",
        }
    ),
    head="embed_out.weight",
    layer=MappingProxyType(
        {
            "input_layernorm.weight": "attn_norm",
            "input_layernorm.bias": "attn_norm_bias",
            "attention.query_key_value.weight": Fused(("q", "k", "v"), "heads"),
            "attention.query_key_value.bias": Fused(("q_bias", "k_bias", "v_bias"), "heads"),
            "attention.dense.weight": "o",
            "attention.dense.bias": "o_bias",
            "post_attention_layernorm.weight": "mlp_norm",
            "post_attention_layernorm.bias": "mlp_norm_bias",
            "mlp.dense_h_to_4h.weight": "up",
            "mlp.dense_h_to_4h.bias": "up_bias",
            "mlp.dense_4h_to_h.weight": "down",
            "mlp.dense_4h_to_h.bias": "down_bias",
        }
    ),
    unused=(r"layers\.\d+\.attention\.(?:rotary_emb\.inv_freq|bias|masked_bias)",),
)

_PHI3 = Names(
    layer=MappingProxyType(
        {
            "input_layernorm.weight": "attn_norm",
            "self_attn.qkv_proj.weight": Fused(("q", "k", "v")),
            "self_attn.o_proj.weight": "o",
            "post_attention_layernorm.weight": "mlp_norm",
            "mlp.gate_up_proj.weight": Fused(("gate", "up")),
            "mlp.down_proj.weight": "down",
        }
    )
)

_QWEN3_MOE = _with(
    {
        "mlp.gate.weight": "router",
        "mlp.experts.{e}.gate_proj.weight": "gate",
        "mlp.experts.{e}.up_proj.weight": "up",
        "mlp.experts.{e}.down_proj.weight": "down",
    }
)

_MIXTRAL = _with(
    {
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.{e}.w1.weight": "gate",
        "block_sparse_moe.experts.{e}.w3.weight": "up",
        "block_sparse_moe.experts.{e}.w2.weight": "down",
    }
)

NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "qwen2": _PLAIN,
        "qwen3": _PLAIN,
        "llama": _PLAIN,
        "mistral": _PLAIN,
        "gemma": _PLAIN,
        "gemma2": _with(_SANDWICH),
        "gemma3_text": _GEMMA3,
        "gemma3": _GEMMA3,
        "phi3": _PHI3,
        "gpt2": _GPT2,
        "gpt_neox": _GPT_NEOX,
        "olmo2": _with(_OLMO2),
        "qwen3_moe": _QWEN3_MOE,
        "mixtral": _MIXTRAL,
    }
)
"""By the ``model_type`` of config.json."""
