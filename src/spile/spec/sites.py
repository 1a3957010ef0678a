"""The tap table: every kind of place in a model that rows are drawn from, one row each.

The first three keep their order for ever: it is the order of the tensors in shards that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["MODULE", "SITES", "SiteSpec", "Size"]

Size = Literal["d_model", "d_mid", "d_ff", "heads", "kv_heads", "head_dim", "experts", "top", "1"]
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
        "embed": SiteSpec(
            ("d_model",),
            "The token's embedding, scaled where the family scales it; learned positions are not added yet.",
            "hook_embed",
            "model.embed_tokens.output",
            "model.embed_tokens (output)",
            layered=False,
        ),
        "resid_pre": SiteSpec(
            ("d_model",),
            "The residual stream before the layer.",
            "blocks.{i}.hook_resid_pre",
            "model.layers[i].input",
            f"{_LAYER} (input); `hidden_states[i]`",
        ),
        "resid_mid": SiteSpec(
            ("d_mid",),
            "The residual stream between attention and MLP; absent where both read the same one (GPT-NeoX).",
            "blocks.{i}.hook_resid_mid",
            "model.layers[i].post_attention_layernorm.input",
            f"{_LAYER}.post_attention_layernorm (input)",
        ),
        "attn_in": SiteSpec(
            ("d_model",),
            "What attention reads: the residual stream after the layer's first norm.",
            "blocks.{i}.ln1.hook_out",
            "model.layers[i].input_layernorm.output",
            f"{_LAYER}.input_layernorm (output)",
        ),
        "mlp_in": SiteSpec(
            ("d_model",),
            "What the MLP, the router and the experts read: the residual stream after the norm before them.",
            "blocks.{i}.ln2.hook_out",
            "model.layers[i].post_attention_layernorm.output",
            f"{_LAYER}.mlp (input)",
        ),
        "mlp_hidden": SiteSpec(
            ("d_ff",),
            "The MLP's neurons: after the activation, times the gated branch where there is one.",
            "blocks.{i}.mlp.hook_post",
            "model.layers[i].mlp.down_proj.input",
            f"{_LAYER}.mlp.down_proj (input)",
        ),
        "q": SiteSpec(
            ("heads", "head_dim"),
            "Each head's query as projected, with its bias: before any norm of it and before its rotation.",
            "blocks.{i}.attn.hook_q",
            "model.layers[i].self_attn.q_proj.output",
            f"{_LAYER}.self_attn.q_proj (output)",
        ),
        "k": SiteSpec(
            ("kv_heads", "head_dim"),
            "Each key/value head's key as projected, likewise.",
            "blocks.{i}.attn.hook_k",
            "model.layers[i].self_attn.k_proj.output",
            f"{_LAYER}.self_attn.k_proj (output)",
        ),
        "v": SiteSpec(
            ("kv_heads", "head_dim"),
            "Each key/value head's value.",
            "blocks.{i}.attn.hook_v",
            "model.layers[i].self_attn.v_proj.output",
            f"{_LAYER}.self_attn.v_proj (output)",
        ),
        "z": SiteSpec(
            ("heads", "head_dim"),
            "Each head's mix of values: what the output projection reads.",
            "blocks.{i}.attn.hook_z",
            "model.layers[i].self_attn.o_proj.input",
            f"{_LAYER}.self_attn.o_proj (input)",
        ),
        "router": SiteSpec(
            ("experts",),
            "The router's logit for each expert, before the softmax; models with experts only.",
            "blocks.{i}.mlp.hook_router_logits",
            "model.layers[i].mlp.gate.output",
            f"{_LAYER}.mlp.gate (output)",
        ),
        "final_norm": SiteSpec(
            ("d_model",),
            "The last residual after the model's final norm: what the LM head reads.",
            "ln_final.hook_out",
            "model.norm.output",
            "model.norm (output); `hidden_states[-1]`",
            layered=False,
        ),
        "loss": SiteSpec(
            ("1",),
            "How surprising the sample's next token is, in nats; 0 for its last token. Comes with `logits`.",
            "`model(tokens, return_type='loss', loss_per_token=True)`",
            "computed from model.lm_head.output",
            "computed from `logits`",
            layered=False,
            dtype="float32",
        ),
        "logits_ids": SiteSpec(
            ("top",),
            "The tokens with the --top-k largest logits, the largest first. Comes with `logits`.",
            "computed from unembed's output",
            "computed from model.lm_head.output",
            "`logits.topk(k).indices`",
            layered=False,
            dtype="int32",
        ),
        "logits": SiteSpec(
            ("top",),
            "The --top-k largest logits, the largest first.",
            "computed from unembed's output",
            "computed from model.lm_head.output",
            "`logits.topk(k).values`",
            layered=False,
        ),
    }
)
"""By the name that ``--taps`` takes and that begins a tensor's name in a shard."""
