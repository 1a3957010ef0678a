"""The tap table: every kind of place in a model that rows are drawn from, one row each.

The first three keep their order for ever: it is the order of the tensors in shards that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["MODULE", "SITES", "SiteSpec", "Size"]

Size = Literal["d_model", "d_ff", "heads", "kv_heads", "head_dim", "experts", "top", "1"]
"""A dimension of one token's row, by the name of the model's size that it has."""

MODULE = "module:"
"""What a site begins with that is a module of a PyTorch model: ``module:model.layers.3.mlp.act_fn``."""


@dataclass(frozen=True)
class SiteSpec:
    """One kind of place: the shape of a token's row there, what it is, and what others call it."""

    shape: tuple[Size, ...]
    definition: str
    lens: str
    """TransformerLens' hook; {i} stands for the layer."""
    nnsight: str
    hugging_face: str
    """The module of a Llama whose output (or input) it is."""
    layered: bool = True
    """False: the model has it once, and its tap has no layer."""
    dtype: str | None = None
    """What it is stored as; None: the run's --store-dtype."""

    @property
    def per_head(self) -> bool:
        """Whether ``--heads`` chooses among it."""
        return self.shape[0] in ("heads", "kv_heads")


_LAYER = "model.layers.{i}"

SITES: Mapping[str, SiteSpec] = MappingProxyType(
    {
        "residual": SiteSpec(
            ("d_model",),
            "The residual stream after the layer: after both of its additions.",
            "blocks.{i}.hook_resid_post",
            "model.layers[i].output",
            f"{_LAYER} (output); `hidden_states[i+1]` but for the last layer, which is normed there",
        ),
        "attn": SiteSpec(
            ("d_model",),
            "What attention adds to the residual stream: after its output norm in families that have one.",
            "blocks.{i}.hook_attn_out",
            "model.layers[i].self_attn.output[0]",
            f"{_LAYER}.self_attn (output); Gemma 2 and 3, OLMo 2: post_attention_layernorm (output)",
        ),
        "mlp": SiteSpec(
            ("d_model",),
            "What the MLP, or the experts together, add to the residual stream: after its output norm likewise.",
            "blocks.{i}.hook_mlp_out",
            "model.layers[i].mlp.output",
            f"{_LAYER}.mlp (output); Gemma 2 and 3, OLMo 2: post_feedforward_layernorm (output)",
        ),
    }
)
"""By the name that ``--taps`` takes and that begins a tensor's name in a shard."""
