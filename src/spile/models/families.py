"""How single families read what is theirs alone: their layers' windows, and fields that no other config has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from spile.errors import ModelError
from spile.models.architecture import Activation, Experts, ModelConfig, Norm, NormPlace, Rope, read_rope
from spile.models.config_fields import ConfigFields

__all__ = [
    "ARCHITECTURES",
    "EXAMPLES",
    "Architecture",
    "ExampleModel",
    "Switches",
    "Windows",
    "all_or_none",
    "alternating",
    "by_type",
    "every_layer",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "layer_types",
    "mixtral",
    "no_windows",
    "olmo2",
    "qwen3_moe",
    "read_any_config",
    "read_config",
    "refuse_quantized",
]


Windows = tuple[int | None, ...]
Switches = dict[str, Any]
"""Fields of :class:`ModelConfig` that a family reads in a way of its own."""


def no_windows(_fields: ConfigFields, n_layers: int) -> Windows:
    return (None,) * n_layers


def every_layer(default: int | None) -> Callable[[ConfigFields, int], Windows]:
    """One window for all layers; an explicit null is none."""

    def windows(fields: ConfigFields, n_layers: int) -> Windows:
        window = fields.get("sliding_window", default)
        return (None if window is None else fields.integer("sliding_window", default),) * n_layers

    return windows


def layer_types(fields: ConfigFields, n_layers: int) -> Windows:
    """Qwen: ``layer_types``, or the layers from ``max_window_layers`` on; neither without ``use_sliding_window``."""
    said = fields.get("sliding_window", 4096)
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") and said is not None else None
    first = fields.integer("max_window_layers", 28)
    types = fields.get("layer_types")
    if types is None:
        return tuple(window if layer >= first else None for layer in range(n_layers))
    return by_type(types, window)


def by_type(types: Sequence[object], window: int | None) -> Windows:
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            "config.json's layer_types", expected="full_attention or sliding_attention", found=", ".join(unknown)
        )
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "config.json's layer_types", expected="a sliding_window for sliding_attention", found="none in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def all_or_none(fields: ConfigFields, n_layers: int) -> Windows:
    """Qwen3-MoE: one window for all layers, if ``use_sliding_window``."""
    fields.get("max_window_layers")
    window = fields.get("sliding_window", 4096)
    return (window if fields.flag("use_sliding_window") else None,) * n_layers


def alternating(pattern: int) -> Callable[[ConfigFields, int], Windows]:
    """Gemma: windows but for every so manieth layer, or as ``layer_types`` says."""

    def windows(fields: ConfigFields, n_layers: int) -> Windows:
        window = fields.get("sliding_window", 4096)
        every = fields.integer("sliding_window_pattern", pattern)
        fields.get("_sliding_window_pattern")
        types = fields.get("layer_types")
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[bool((layer + 1) % every)] for layer in range(n_layers)] if types is None else types
        return by_type(types, window)

    return windows


def gemma(fields: ConfigFields, config: ModelConfig) -> Switches:
    fields.get("hidden_activation")
    exact = config.activation == "gelu"  # the first releases said gelu and meant its approximation
    return {"embedding_scale": config.d_model**0.5, "activation": "gelu_tanh" if exact else config.activation}


def gemma2(fields: ConfigFields, config: ModelConfig) -> Switches:
    fields.get("hidden_act")
    return {
        "embedding_scale": config.d_model**0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": fields.optional("attn_logit_softcapping", 50.0),
        "final_softcap": fields.optional("final_logit_softcapping", 30.0),
    }


def gemma3(fields: ConfigFields, config: ModelConfig) -> Switches:
    fields.get("hidden_act")
    local = fields.number("rope_local_base_freq", 10_000.0)
    spelled = fields.get("rope_parameters") or {}
    nested = isinstance(spelled, Mapping) and "sliding_attention" in spelled
    return {
        "embedding_scale": config.d_model**0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": fields.optional("attn_logit_softcapping"),
        "final_softcap": fields.optional("final_logit_softcapping"),
        "local_rope": read_rope(fields, local, layers="sliding_attention")[0] if nested else Rope(theta=local),
    }


def gpt2(fields: ConfigFields, _config: ModelConfig) -> Switches:
    scaled = fields.flag("scale_attn_weights", True)
    if fields.flag("scale_attn_by_inverse_layer_idx"):
        raise ModelError("config.json's scale_attn_by_inverse_layer_idx", expected="false", found="true")
    return {
        "learned_positions": fields.integer("max_position_embeddings", 1024),
        "attention_scale": None if scaled else 1.0,
    }


def gpt_neox(fields: ConfigFields, _config: ModelConfig) -> Switches:
    return {"parallel": fields.flag("use_parallel_residual", True)}


def olmo2(_fields: ConfigFields, _config: ModelConfig) -> Switches:
    """One norm over all heads."""
    return {"flat_qk_norm": True}


def qwen3_moe(fields: ConfigFields, config: ModelConfig) -> Switches:
    step, plain = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    dense = [layer for layer in range(config.n_layers) if layer in plain or (layer + 1) % step]
    experts = Experts(
        count=fields.integer("num_local_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 8),
        d_ff=fields.integer("moe_intermediate_size", 768),
        normalized=fields.flag("norm_topk_prob"),
        dense_layers=tuple(dense),
    )
    return {"experts": experts if len(dense) < config.n_layers else None}


def mixtral(fields: ConfigFields, config: ModelConfig) -> Switches:
    count, chosen = fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2)
    return {"experts": Experts(count, chosen, config.d_ff, normalized=True)}


_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Architecture:
    """What a family does where others do something else. A new family is a row of these and its weights' names."""

    models: str
    """Whom it stands for, for people."""
    differs: str
    """What it does where others do not, for people."""
    windows: Callable[[ConfigFields, int], Windows]
    qkv_bias: bool | None = None
    """None: the config's ``attention_bias`` says."""
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    """Where the config has none; None: d_model / heads."""
    kv_heads: int | None = None
    """Where the config has none; None: as many as heads."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Our name of a config's field → its own."""
    switches: Callable[[ConfigFields, ModelConfig], Switches] = lambda _fields, _config: {}
    norm: Norm = "rms"
    norm_place: NormPlace = "pre"
    norm_eps: float = 1e-6
    gated: bool = True
    wide_mlp: bool = False
    """Where the config has no MLP width, it is 4 × d_model."""
    activation: str = "silu"
    rotary: tuple[float, float] = (10_000.0, 1.0)
    """Where the config has none: the rope's base, and the part of each head that it turns."""
    partial_rotary: bool = False
    """Whether its configs may say that another part is turned."""
    rope_by_type: bool = False
    """Whether layers with a window have a rope of their own."""
    tied: bool = False
    """Whether the LM head is the embedding, where the config does not say."""
    attention_bias: bool = False
    """Where the config does not say."""


_GEMMA3 = Architecture(
    "Gemma 3, its text part",
    "as `gemma2`, with a norm over each head's queries and keys, another rope in layers with a window, five of six",
    windows=alternating(6),
    mlp_bias=False,
    qk_norm=True,
    head_dim=256,
    kv_heads=4,
    names={"hidden_act": "hidden_activation"},
    switches=gemma3,
    norm="rms_plus_one",
    norm_place="sandwich",
    activation="gelu_pytorch_tanh",
    rotary=(1_000_000.0, 1.0),
    rope_by_type=True,
    tied=True,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2": Architecture(
        "Qwen2, Qwen2.5, QwQ",
        "biases on queries, keys and values; a sliding window from `max_window_layers` on, or by `layer_types`, "
        "if `use_sliding_window`",
        windows=layer_types,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        kv_heads=32,
    ),
    "qwen3": Architecture(
        "Qwen3 (dense)",
        "an RMS norm over each head's queries and keys; `head_dim` 128 unless the config says; windows as `qwen2`",
        windows=layer_types,
        mlp_bias=False,
        qk_norm=True,
        head_dim=128,
        kv_heads=32,
    ),
    "llama": Architecture(
        "Llama 1 to 3.x and what is built like it",
        "optional biases (`attention_bias`, `mlp_bias`); no window",
        windows=no_windows,
    ),
    "mistral": Architecture(
        "Mistral 7B, Nemo and kin",
        "one sliding window for all layers (`sliding_window`)",
        windows=every_layer(4096),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        kv_heads=8,
    ),
    "gemma": Architecture(
        "Gemma 1",
        "embeddings times √d_model; norm weights stored less 1",
        windows=no_windows,
        mlp_bias=False,
        head_dim=256,
        kv_heads=16,
        switches=gemma,
        norm="rms_plus_one",
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    "gemma2": Architecture(
        "Gemma 2, Gemma Scope's models",
        "as `gemma`; norms after attention and MLP too, soft caps on scores and logits, a window in every other layer",
        windows=alternating(2),
        mlp_bias=False,
        head_dim=256,
        kv_heads=4,
        names={"hidden_act": "hidden_activation"},
        switches=gemma2,
        norm="rms_plus_one",
        norm_place="sandwich",
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Architecture(
        "Phi-3, Phi-3.5, Phi-4 (without longrope)",
        "queries, keys and values in one matrix, gate and up in another; one sliding window for all layers",
        windows=every_layer(None),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        norm_eps=1e-5,
        partial_rotary=True,
    ),
    "gpt2": Architecture(
        "GPT-2 and what is built like it",
        "LayerNorm, learned positions, a plain MLP, matrices stored transposed",
        windows=no_windows,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        switches=gpt2,
        norm="layer",
        norm_eps=1e-5,
        gated=False,
        wide_mlp=True,
        activation="gelu_new",
        tied=True,
    ),
    "gpt_neox": Architecture(
        "Pythia, GPT-NeoX",
        "LayerNorm, a plain MLP beside attention (`use_parallel_residual`), a part of each head rotated (`rotary_pct`)",
        windows=no_windows,
        mlp_bias=True,
        names={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        switches=gpt_neox,
        norm="layer",
        norm_eps=1e-5,
        gated=False,
        activation="gelu",
        rotary=(10_000.0, 0.25),
        partial_rotary=True,
        attention_bias=True,
    ),
    "olmo2": Architecture(
        "OLMo 2",
        "norms after attention and MLP instead of before, and one over all heads' queries and keys together",
        windows=no_windows,
        mlp_bias=False,
        qk_norm=True,
        switches=olmo2,
        norm_place="post",
        norm_eps=1e-5,
    ),
    "qwen3_moe": Architecture(
        "Qwen3 MoE (30B-A3B, 235B-A22B)",
        "as `qwen3`, with routed experts in all layers but `mlp_only_layers` and those off `decoder_sparse_step`",
        windows=all_or_none,
        mlp_bias=False,
        qk_norm=True,
        kv_heads=4,
        names={"num_local_experts": "num_experts"},
        switches=qwen3_moe,
    ),
    "mixtral": Architecture(
        "Mixtral 8x7B, 8x22B",
        "as `mistral`, with routed experts whose weights sum to 1",
        windows=every_layer(None),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        kv_heads=8,
        norm_eps=1e-5,
        switches=mixtral,
        rotary=(1_000_000.0, 1.0),
    ),
}
"""By the ``model_type`` of config.json."""

_QUANTIZED_FIX = "give the model's 16-bit original: its name is usually this one without -GPTQ, -AWQ, -bnb-4bit or -FP8"


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The content of a ``config.json`` → the config, or a ModelError that names what is not understood."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        found = repr(name) if name is not None else "a config.json without model_type"
        known = ", ".join(ARCHITECTURES)
        fix = "use --backend torch, which runs any Hugging Face causal model" if name is not None else None
        raise ModelError("unknown architecture", expected=f"one of {known}", found=found, fix=fix)
    refuse_quantized(raw)
    family = ARCHITECTURES[name]
    if isinstance(nested := raw.get("text_config"), Mapping):  # a model with a vision tower beside its decoder
        raw = {**{key: value for key, value in raw.items() if key not in ("text_config", "vision_config")}, **nested}
    fields = ConfigFields(raw, family.names)
    config = _read(name, family, fields)
    config = replace(config, **family.switches(fields, config))
    fields.refuse_unread(name)
    return config


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """GPTQ, AWQ, bitsandbytes and their kin, by name."""
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else "unnamed"
        raise ModelError(
            "quantized weights", expected="float32, float16 or bfloat16", found=f"{method}", fix=_QUANTIZED_FIX
        )


_LAYERS = 10_000
"""No model has so many; a config that says more would fill the memory with them."""


def _read(name: str, family: Architecture, fields: ConfigFields) -> ModelConfig:
    """What all families have."""
    d_model, n_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers", most=_LAYERS)
    n_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", family.head_dim or d_model // max(n_heads, 1))
    rope, part = read_rope(fields, *family.rotary, layers="full_attention" if family.rope_by_type else None)
    if part != 1.0 and not family.partial_rotary:
        raise ModelError("config.json's partial_rotary_factor", expected="1.0", found="a part of each head")
    biased = family.qkv_bias is None or family.o_bias is None
    attention_bias = fields.flag("attention_bias", family.attention_bias) if biased else False
    return ModelConfig(
        architecture=name,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(fields, family, n_heads),
        head_dim=head_dim,
        d_ff=fields.integer("intermediate_size", 4 * d_model if family.wide_mlp else None),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        rope=rope,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied=fields.flag("tie_word_embeddings", family.tied),
        windows=family.windows(fields, n_layers),
        activation=_activation(fields.get("hidden_act") or family.activation),
        norm=family.norm,
        norm_place=family.norm_place,
        gated=family.gated,
        rotary_dim=None if part == 1.0 else int(head_dim * part),
    )


def _kv_heads(fields: ConfigFields, family: Architecture, n_heads: int) -> int:
    """Absent: the family's default. An explicit null: as many as heads."""
    if fields.has("num_key_value_heads"):
        return fields.integer("num_key_value_heads", n_heads)
    return family.kv_heads or n_heads


def _activation(name: object) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError("config.json's hidden_act", expected=f"one of {', '.join(_ACTIVATIONS)}", found=repr(name))
    return _ACTIVATIONS[name]


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


@dataclass(frozen=True)
class ExampleModel:
    """A model on the hub."""

    name: str
    config: Mapping[str, Any]
    """Of its config.json, what is not its family's default."""


def _sizes(
    d_model: int, layers: int, heads: int, kv_heads: int, d_ff: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": d_ff,
        "vocab_size": vocabulary,
        **more,
    }


_GEMMA3_model_examples = ExampleModel("google/gemma-3-1b-pt", _sizes(1152, 26, 4, 1, 6912, 262_144, sliding_window=512))
_NEOX = {name: value for name, value in _sizes(2048, 24, 16, 16, 8192, 50_304).items() if name != "num_key_value_heads"}

EXAMPLES: Mapping[str, ExampleModel] = {
    "qwen2": ExampleModel("Qwen/Qwen2.5-0.5B", _sizes(896, 24, 14, 2, 4864, 151_936, tie_word_embeddings=True)),
    "qwen3": ExampleModel("Qwen/Qwen3-8B", _sizes(4096, 36, 32, 8, 12_288, 151_936)),
    "llama": ExampleModel("meta-llama/Llama-3.1-8B", _sizes(4096, 32, 32, 8, 14_336, 128_256)),
    "mistral": ExampleModel("mistralai/Mistral-7B-v0.1", _sizes(4096, 32, 32, 8, 14_336, 32_000)),
    "gemma": ExampleModel("google/gemma-2b", _sizes(2048, 18, 8, 1, 16_384, 256_000)),
    "gemma2": ExampleModel("google/gemma-2-2b", _sizes(2304, 26, 8, 4, 9216, 256_000)),
    "gemma3_text": _GEMMA3_model_examples,
    "gemma3": _GEMMA3_model_examples,
    "phi3": ExampleModel("microsoft/Phi-3-mini-4k-instruct", _sizes(3072, 32, 32, 32, 8192, 32_064)),
    "gpt2": ExampleModel("openai-community/gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257}),
    "gpt_neox": ExampleModel("EleutherAI/pythia-1.4b", _NEOX),
    "olmo2": ExampleModel("allenai/OLMo-2-1124-7B", _sizes(4096, 32, 32, 32, 11_008, 100_352)),
    "qwen3_moe": ExampleModel("Qwen/Qwen3-30B-A3B", _sizes(2048, 48, 32, 4, 6144, 151_936, head_dim=128)),
    "mixtral": ExampleModel("mistralai/Mixtral-8x7B-v0.1", _sizes(4096, 32, 32, 8, 14_336, 32_000)),
}
"""By family."""
