"""GLM-4: rotated pairs of neighbouring dimensions, and in the 0414 models norms after attention and MLP too."""

from __future__ import annotations

from spile.models.families.base import Family, FileTensor, extend

_FUSED = extend({"mlp.gate_up_proj": FileTensor(("gate", "up"))})

GLM = Family(
    model_types=("glm",),
    models="GLM-4-9B, GLM-Edge",
    differs="as `llama`; half of each head rotated, in pairs that lie side by side; biases on queries, keys and "
    "values; gate and up in one matrix",
    example=("zai-org/glm-4-9b-hf", {}),
    names=_FUSED,
    options={"o_bias": False, "rope_interleaved": True},
)

GLM4 = Family(
    model_types=("glm4",),
    models="GLM-4-0414, GLM-Z1",
    differs="as `glm`, with norms after attention and MLP too",
    example=("zai-org/GLM-4-9B-0414", {}),
    names=extend({"post_self_attn_layernorm": "attn_post_norm", "post_mlp_layernorm": "mlp_post_norm"}, _FUSED),
    options={"o_bias": False, "rope_interleaved": True, "norm_place": "sandwich"},
)
