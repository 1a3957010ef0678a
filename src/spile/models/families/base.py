"""A model family: how its config.json is read, and the helpers that family modules share.

The reference is transformers. ``config_fields.json`` (made by ``scripts/make_config_fields.py``) has the fields that
each config class of transformers declares, with their defaults:

- a field that the class does not declare cannot change its numbers and is ignored;
- a declared field that spile does not read is refused unless it has its default value;
- a missing field has the default of the class.

``Names`` maps the tensors of the files to those of the model. A tensor that matches no entry is an error, so a model
that is built differently is never loaded by accident.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from types import UnionType
from typing import Any, Literal, get_args

from spile.errors import ModelError, UnsupportedModel
from spile.models.architecture import Activation, Experts, ModelConfig, Rope, RopeKind

Order = Literal["rows", "columns", "heads", "interleaved"]
"""How a tensor of a file contains tensors of the model:

- ``rows``: one above the other;
- ``columns``: transposed, side by side;
- ``heads``: head by head;
- ``interleaved``: transposed, with the columns of two tensors in alternation.
"""


@dataclass(frozen=True)
class FileTensor:
    """What a tensor of a file contains: several tensors of the model, or one in another layout."""

    names: tuple[str, ...]
    order: Order = "rows"
    expert: int | None = None
    """The number of the expert, if the file has one tensor per expert."""


def _tensors(modules: Mapping[str, str | FileTensor]) -> dict[str, FileTensor]:
    """Return what the weights and biases of these modules contain."""
    found = {}
    for module, target in modules.items():
        weight = FileTensor((target,)) if isinstance(target, str) else target
        found[f"{module}.weight"] = weight
        found[f"{module}.bias"] = replace(weight, names=tuple(f"{name}_bias" for name in weight.names))
    return found


@dataclass(frozen=True)
class Names:
    """The names of modules and tensors in the files of a family.

    A module is mapped to the field of its weight; its bias is the field with ``_bias`` behind the name.
    """

    prefix: str = "model."
    """The text before every name except the LM head's, in most files."""
    prefixes: str = ""
    """Pattern of all such texts, if there are others; the prefix is always optional."""
    once: Mapping[str, str] = field(default_factory=lambda: {"embed_tokens": "embed", "norm": "final_norm"})
    """Module → field of :class:`spile.models.params.Params`."""
    head: str = "lm_head"
    layers: str = "layers"
    modules: Mapping[str, str | FileTensor] = field(default_factory=dict)
    """Module below a layer's number → field of :class:`spile.models.params.Layer`; ``{e}`` is an expert's number."""
    tensors: Mapping[str, FileTensor] = field(default_factory=dict)
    """Tensors below a layer's number that are not the weight or the bias of a module."""
    unused: tuple[str, ...] = (r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    """Patterns, below the prefix, of tensors that are not needed."""

    @functools.cached_property
    def layer(self) -> dict[str, FileTensor]:
        """What each tensor below a layer's number contains."""
        return {**_tensors(self.modules), **self.tensors}

    def match(self, name: str) -> FileTensor | None:
        """Return what a tensor of a file contains, or None if the name is unknown; no names: it is not needed."""
        below = re.sub(f"^(?:{self.prefixes or re.escape(self.prefix)})", "", name)
        once = _tensors({self.head: "head"}).get(name) or _tensors(self.once).get(below)
        if once is not None:
            return once
        if any(re.fullmatch(pattern, below) for pattern in self.unused):
            return FileTensor(())
        found = re.fullmatch(rf"{self.layers}\.(\d{{1,6}})\.(.+)", below)
        if found is None:
            return None
        layer, suffix = int(found[1]), found[2]
        expert = re.search(r"\.experts\.(\d{1,6})\.", suffix)
        fused = self.layer.get(suffix if expert is None else suffix.replace(expert[0], ".experts.{e}."))
        if fused is None:
            return None
        names = tuple(f"{layer}.{name}" for name in fused.names)
        return FileTensor(names, fused.order, int(expert[1]) if expert else None)

    def file_name(self, name: str) -> str:
        """Return the name that a file would use for a tensor of the model; for error messages."""
        layer, _, own = name.rpartition(".")
        if layer:
            before, table = f"{self.prefix}{self.layers}.{layer}.", self.layer
        elif own in ("head", "head_bias"):
            before, table = "", _tensors({self.head: "head"})
        else:
            before, table = self.prefix, _tensors(self.once)
        return before + next(file for file in reversed(table) if own in table[file].names)


LLAMA_NAMES = Names(
    modules={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    },
)
"""The names of Llama, which most families use. The config decides which tensors a model must have."""


def extend(more: Mapping[str, str | FileTensor], base: Names = LLAMA_NAMES) -> Names:
    """Return ``base`` with these modules of a layer added or replaced."""
    return replace(base, modules={**base.modules, **more})


_USE_TORCH = "use --backend torch, which runs the model's own code"
_ORIGINAL = "original_max_position_embeddings"
_IN_CONFIG = ("rope_theta", "partial_rotary_factor")
"""Rotary parameters whose defaults hold even if a config gives others."""
_LAYERS = 10_000
"""No model has more layers; a config with more would only exhaust the memory."""

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

# fmt: off
_HARMLESS = frozenset({
    "initializer_range", "use_cache", "attention_dropout", "hidden_dropout", "classifier_dropout", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings",
    "n_positions", "original_max_position_embeddings", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "pretraining_tp", "is_decoder", "reorder_and_upcast_attn", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "is_causal",
})
"""Declared fields that no activation depends on: training, generation, lengths."""
_BOOKKEEPING = frozenset({
    "_name_or_path", "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version",
    "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "chunk_size_feed_forward",
    "is_encoder_decoder",
})
"""Fields that do not concern the model's computation; they are not reported as ignored."""
# fmt: on


@dataclass(frozen=True)
class Declared:
    """The fields of a config class of transformers."""

    fields: Mapping[str, Any]
    """Each declared field with its default."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Other spellings: general name → the class's own name."""
    also: Sequence[str] = ()
    """Fields that the class or the model reads without declaring them."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The rotary parameters of a config that gives none."""

    def knows(self, name: str) -> bool:
        """Return whether the field can change the model."""
        return name in self.fields or name in self.names or name in self.also


@functools.cache
def declared_fields() -> Mapping[str, Declared]:
    """Return the fields of each config class, by its ``model_type``."""
    content = (resources.files(__package__) / "config_fields.json").read_text()
    return {name: Declared(**about) for name, about in json.loads(content)["classes"].items()}


class Fields:
    """Typed access to the fields of a JSON object."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, name: str) -> Any:
        """Return the field, or None if it is missing."""
        return self.raw.get(name)

    def _checked(self, name: str, default: Any, kinds: type | UnionType, expected: str) -> Any:
        value = self.get(name)
        value = default if value is None else value
        is_kind = isinstance(value, kinds) and isinstance(value, bool) == (kinds is bool)
        if not is_kind or (isinstance(value, float) and not math.isfinite(value)):
            raise ModelError(f"config.json's {name}", expected=expected, found=repr(value))
        return value

    def integer(self, name: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        """Return a whole number that is not negative; ``default`` if the field is null or missing."""
        value: int = self._checked(name, default, int, "a whole number")
        if not 0 <= value <= most:
            raise ModelError(f"config.json's {name}", expected=f"0 to {most:,}", found=repr(value)[:80])
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; ``default`` if the field is null or missing."""
        return float(self._checked(name, default, int | float, "a number"))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false; ``default`` if the field is null or missing."""
        return bool(self._checked(name, default, bool, "true or false"))


class ConfigFields(Fields):
    """Typed access to a config.json, which records the fields that were read.

    A field that the class of transformers does not declare is missing; a missing field has the default of the class.
    """

    def __init__(self, raw: Mapping[str, Any], declared: Declared) -> None:
        super().__init__(raw)
        self.declared = declared
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the field, or the class's default if the config does not have it. An explicit null is None."""
        own = self.declared.names.get(name, name)
        self._read |= {own, name}
        if not self.declared.knows(name):
            return None
        return self.raw.get(own, self.raw.get(name, self.declared.fields.get(own)))

    def optional(self, name: str) -> float | None:
        """Return a number, or None if the field is null or missing without a default."""
        return None if self.get(name) is None else self.number(name)

    def spelling(self, *names: str) -> str:
        """Return the first of these names that the class knows. It does not read the others."""
        self._read |= {*names}
        return next(name for name in names if self.declared.knows(name))

    def activation(self, *names: str) -> Activation:
        name = self.spelling(*names)
        value = self.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UnsupportedModel(f"config.json's {name}", expected=f"one of {known}", found=repr(value))
        return ACTIVATIONS[value]

    def positions(self) -> int | None:
        """Return the longest sample that the model was made for, in tokens; None if the config does not state it."""
        value = self.get("max_position_embeddings")
        return value if type(value) is int and value > 0 else None

    def ignored(self, family: str) -> tuple[str, ...]:
        """Return the fields that cannot change the model's numbers.

        Raises:
            UnsupportedModel: A field that can change them was not read and does not have its default value.

        """
        rest = sorted(set(self.raw) - self._read - _HARMLESS - _BOOKKEEPING)
        for name in rest:
            own = self.declared.names.get(name, name)
            value, default = self.raw[name], self.declared.fields.get(own)
            if self.declared.knows(name) and value != default and (value or default):
                raise UnsupportedModel(
                    f"config.json's {name}",
                    expected=f"{default!r}: spile does not implement another value for {family}",
                    found=repr(value)[:80],
                    fix=_USE_TORCH,
                )
        return tuple(name for name in rest if not self.declared.knows(name))


def sizes(d_model: int, layers: int, heads: int, kv_heads: int | None, d_ff: int, **more: Any) -> Mapping[str, Any]:
    """Return the fields of a config.json with these sizes."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {**dict(zip(names, (d_model, layers, heads, kv_heads, d_ff), strict=True)), **more}


_NUMBERS = {
    "attention_scale": "attention_multiplier",
    "attention_softcap": "attn_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "final_softcap": "final_logit_softcapping",
    "logits_divisor": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "swiglu_alpha": "swiglu_alpha",
    "swiglu_limit": "swiglu_limit",
}
"""Options of :class:`ModelConfig` and the fields that have them, in the few classes that declare these."""


def decoder(
    fields: ConfigFields,
    *,
    slides: Callable[[int], object] | None = None,
    rope_kinds: Mapping[str, str] | None = None,
    **options: Any,
) -> ModelConfig:
    """Read a config.json. Fields that the class of the family does not declare have no effect.

    Args:
        fields: The config.json.
        slides: Returns whether a layer has an attention window, for configs without ``layer_types``.
        rope_kinds: Other names of kinds of rotary scaling.
        options: Further fields of :class:`ModelConfig`; they replace what is read here.

    """
    if not fields.raw.get("is_causal", True):  # no class declares it, but the masks of transformers depend on it
        raise UnsupportedModel("config.json's is_causal", expected="true", found=repr(fields.raw["is_causal"]))
    d_model, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", d_model // max(n_heads, 1))
    bias = fields.flag("attention_bias")
    found = {
        "n_layers": layer_count(fields),
        "n_kv_heads": fields.integer("num_key_value_heads", n_heads),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": fields.number(fields.spelling("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")),
        "tied": fields.flag("tie_word_embeddings"),
        "activation": fields.activation("hidden_act", "hidden_activation", "activation_function"),
        "windows": _windows(fields, slides),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": fields.flag("mlp_bias"),
        "parallel": fields.flag("use_parallel_residual"),
        "experts": _experts(fields),
    }
    numbers = {option: fields.optional(name) for option, name in _NUMBERS.items()}
    found |= {option: number for option, number in numbers.items() if number is not None}
    if fields.declared.rope:
        found |= _ropes(fields, head_dim, rope_kinds or {})
    if "d_ff" not in options:
        found["d_ff"] = fields.integer("intermediate_size")
    architecture = str(fields.raw["model_type"])
    return ModelConfig(architecture, d_model, n_heads=n_heads, head_dim=head_dim, **{**found, **options})


@dataclass(frozen=True)
class Family:
    """Everything that spile knows about a family of models."""

    model_types: tuple[str, ...]
    """The values of ``model_type`` in config.json. The first is the config class of the decoder itself."""
    models: str
    """The models of the family, for people."""
    differs: str
    """What it computes differently from Llama, for people."""
    example: tuple[str, Mapping[str, Any]]
    """A well-known model, and the fields of its config.json that are not the class's defaults."""
    names: Names = LLAMA_NAMES
    """What its files call each tensor."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``read`` for all configs of the family."""
    read: Callable[..., ModelConfig] = decoder
    """The function that reads a config.json."""


def layer_count(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers", most=_LAYERS)


def _experts(fields: ConfigFields) -> Experts | None:
    if not fields.declared.knows("num_local_experts"):
        return None
    count, step = layer_count(fields), fields.integer("decoder_sparse_step", 1)
    dense_only = fields.get("mlp_only_layers") or ()
    dense = tuple(layer for layer in range(count) if layer in dense_only or (layer + 1) % step)
    experts = Experts(
        count=fields.integer("num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        d_ff=fields.integer("moe_intermediate_size", fields.integer("intermediate_size")),
        normalized=fields.flag("norm_topk_prob") if fields.declared.knows("norm_topk_prob") else True,
        dense_layers=dense,
    )
    return experts if len(dense) < count else None


def _windows(fields: ConfigFields, slides: Callable[[int], object] | None) -> tuple[int | None, ...]:
    """Return the attention window of each layer; None: no window."""
    used = fields.get("sliding_window") is not None
    if fields.declared.knows("use_sliding_window"):
        used = fields.flag("use_sliding_window") and used
    window = fields.integer("sliding_window") if used else None
    types, first = fields.get("layer_types"), fields.integer("max_window_layers", 0)
    if types is None:
        has_window = slides or (lambda layer: layer >= first)
        return tuple(window if has_window(layer) else None for layer in range(layer_count(fields)))
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            "config.json's layer_types", expected="full_attention or sliding_attention", found=", ".join(unknown)
        )
    if "sliding_attention" in types and window is None:
        raise ModelError("config.json's sliding_window", expected="a window for sliding_attention", found="none")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


# -- rotary positions -------------------------------------------------------------------------------------------------


def _ropes(fields: ConfigFields, head_dim: int, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of :class:`ModelConfig` for rotary positions.

    Both spellings are understood: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``. In a family whose
    layers with a window have another rope, ``rope_parameters`` has one set per layer type.
    """
    default = fields.declared.rope
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        raise ModelError("config.json's rope_parameters", expected="an object", found=repr(parameters or scaling)[:80])
    by_type = "full_attention" in default
    if parameters and by_type != any(isinstance(value, Mapping) for value in parameters.values()):
        expected = "one set per layer type" if by_type else "one set for all layers"
        raise ModelError("config.json's rope_parameters", expected=expected, found=repr(parameters)[:80])
    common = {
        "rope_theta": fields.get(fields.spelling("rotary_emb_base", "rope_theta")),
        "partial_rotary_factor": fields.get(fields.spelling("rotary_pct", "partial_rotary_factor")),
    }
    local = None
    if by_type:
        own = {"rope_theta": fields.get("rope_local_base_freq")}
        local = _rope(_merged(default["sliding_attention"], own, parameters.get("sliding_attention")), fields, kinds)
        default, scaling = default["full_attention"], {**parameters.get("full_attention", {}), **scaling}
    merged = _merged(default, common, scaling or parameters)
    rotated = merged.number("partial_rotary_factor", 1.0)
    if rotated != 1.0 and "partial_rotary_factor" not in default:
        raise UnsupportedModel("config.json's partial_rotary_factor", expected="1.0", found=repr(rotated))
    rotary_dim = None if rotated == 1.0 else int(head_dim * rotated)
    return {"rope": _rope(merged, fields, kinds), "local_rope": local, "rotary_dim": rotary_dim}


def _merged(default: Mapping[str, Any], common: Mapping[str, Any], given: Mapping[str, Any] | None) -> Fields:
    """Return rotary parameters: the defaults of the class, fields of the config itself, and the object with others."""
    kept = {key: value for key, value in default.items() if not given or key in _IN_CONFIG}
    return Fields({**kept, **{key: value for key, value in common.items() if value is not None}, **(given or {})})


def _rope(rope: Fields, fields: ConfigFields, kinds: Mapping[str, str]) -> Rope:
    kind: Any = rope.get("rope_type") or rope.get("type") or "default"
    kind = kinds.get(str(kind), kind)
    if kind not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise UnsupportedModel(
            "config.json's rope scaling", expected=f"one of {known}", found=repr(kind), fix=_USE_TORCH
        )
    theta = rope.number("rope_theta")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, rope.number("factor"))
    longest = fields.integer("max_position_embeddings")
    # The config's own field has priority over the rope's, as in transformers.
    original = Fields(fields.raw).integer(_ORIGINAL, rope.integer(_ORIGINAL, longest))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return Rope(theta, kind, rope.number("factor"), low, high, original)
    factor = rope.number("factor", longest / original)
    if kind == "longrope":
        scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return Rope(
            theta,
            kind,
            factor,
            original_length=original,
            amplitude=rope.number("attention_factor", scaled),
            short_factors=_factors(rope, "short_factor"),
            long_factors=_factors(rope, "long_factor"),
        )
    amplitude = rope.number("attention_factor", _mscale(factor))
    if rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        amplitude = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return Rope(
        theta,
        kind,
        factor,
        original_length=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        amplitude=amplitude,
    )


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"config.json's rope scaling {name}", expected="a list of numbers", found=repr(values)[:80])
    return tuple(float(value) for value in values)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
