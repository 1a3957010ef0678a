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
from typing import Any, Literal, get_args

from spile.errors import ModelError, UnsupportedModel
from spile.models.architecture import Activation, ModelConfig, Rope, RopeKind

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
        default_factory=lambda: {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
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
    return replace(base, layer={**base.layer, **more})


PLAIN = Names(
    layer={
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
    },
)
"""The names of Llama, which most families use. The config decides which of them a model must have."""

SANDWICH: Mapping[str, str | Fused] = {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}
"""The norms of Gemma 2 and 3, before and after attention and MLP."""

VISION_PREFIX = r"(?:(?:language_model\.)?model\.(?:language_model\.)?)?"
"""The prefix of decoders that are part of a model with a vision tower."""


Windows = tuple[int | None, ...]
"""For each layer, its attention window; None: no window."""

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
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
})
"""Declared fields that no activation depends on: training, generation, lengths."""
_BOOKKEEPING = frozenset({
    "_name_or_path", "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version",
    "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "chunk_size_feed_forward",
    "is_encoder_decoder",
})
"""Fields that say nothing about the model's computation; they are not reported as ignored."""
# fmt: on


@dataclass(frozen=True)
class Declared:
    """The fields of a config class of transformers."""

    fields: Mapping[str, Any] = field(default_factory=dict)
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


class ConfigFields:
    """Typed access to a config.json, which records the fields that were read."""

    def __init__(self, raw: Mapping[str, Any], declared: Declared | None = None) -> None:
        self.raw = raw
        self.declared = Declared() if declared is None else declared
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the field, or the class's default if the config does not have it. An explicit null is None."""
        own = self.declared.names.get(name, name)
        self._read |= {own, name}
        return self.raw.get(own, self.raw.get(name, self.declared.fields.get(own)))

    def has(self, name: str) -> bool:
        """Return whether the config has the field, even if its value is null."""
        return self.declared.names.get(name, name) in self.raw or name in self.raw

    def integer(self, name: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        """Return a positive whole number; ``default`` if neither the config nor its class has one."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"config.json's {name}", expected="a whole number", found=repr(value))
        if value > most:
            raise ModelError(f"config.json's {name}", expected=f"at most {most:,}", found=repr(value)[:80])
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; ``default`` if neither the config nor its class has one."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"config.json's {name}", expected="a number", found=repr(value))
        return float(value)

    def optional(self, name: str) -> float | None:
        """Return a number, or None if the field is null or missing without a default."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false; ``default`` if neither the config nor its class says."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json's {name}", expected="true or false", found=repr(value))
        return value

    def activation(self, name: str) -> Activation:
        value = self.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UnsupportedModel(f"config.json's {name}", expected=f"one of {known}", found=repr(value))
        return ACTIVATIONS[value]

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
                    fix="use --backend torch, which runs the model's own code",
                )
        return tuple(name for name in rest if not self.declared.knows(name))


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
    read: Callable[[ConfigFields], ModelConfig]
    """Read a config.json."""
    names: Names = PLAIN
    """What its files call each tensor."""

    @property
    def declared(self) -> str:
        """The ``model_type`` of the config class that has the decoder's fields."""
        return self.model_types[0]


def decoder(
    fields: ConfigFields,
    *,
    eps: str = "rms_norm_eps",
    activation: str = "hidden_act",
    rope: tuple[Rope, float] | None = None,
    partial_rotary: bool = False,
    **options: Any,
) -> ModelConfig:
    """Read the fields that all families have.

    Args:
        fields: The config.json.
        eps: The name of the field with the norms' epsilon.
        activation: The name of the field with the MLP's activation function.
        rope: The rotary positions and the rotated fraction of each head; None: read them from the usual fields.
        partial_rotary: Whether the family can rotate a part of each head.
        options: Further fields of :class:`ModelConfig`.

    """
    # No class declares this field, but the masks of transformers depend on it: GTE-Qwen2 has it.
    if fields.has("is_causal") and not fields.get("is_causal"):
        raise UnsupportedModel("config.json's is_causal", expected="true", found=repr(fields.get("is_causal")))
    d_model, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", d_model // max(n_heads, 1))
    found, part = read_rope(fields) if rope is None else rope
    if part != 1.0 and not partial_rotary:
        raise UnsupportedModel("config.json's partial_rotary_factor", expected="1.0", found=repr(part))
    return ModelConfig(
        architecture=str(fields.raw["model_type"]),
        d_model=d_model,
        n_layers=layer_count(fields),
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        d_ff=options.pop("d_ff", None) or fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number(eps),
        rope=found,
        tied=fields.flag("tie_word_embeddings"),
        activation=options.pop("activation_is", None) or fields.activation(activation),
        rotary_dim=None if part == 1.0 else int(head_dim * part),
        **options,
    )


def layer_count(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers", most=_LAYERS)


# -- attention windows ------------------------------------------------------------------------------------------------


def uniform_windows(fields: ConfigFields) -> Windows:
    """Return one window for all layers; none if ``sliding_window`` is null."""
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return (window,) * layer_count(fields)


def windows_by_type(types: Sequence[object], window: object) -> Windows:
    """Return the window for each ``sliding_attention`` in ``layer_types``, and None for each ``full_attention``."""
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            "config.json's layer_types", expected="full_attention or sliding_attention", found=", ".join(unknown)
        )
    if "sliding_attention" in types and (isinstance(window, bool) or not isinstance(window, int)):
        raise ModelError("config.json's sliding_window", expected="a whole number", found=repr(window))
    return tuple(window if kind == "sliding_attention" and isinstance(window, int) else None for kind in types)


def alternating_windows(fields: ConfigFields, pattern: int) -> Windows:
    """Return windows by ``layer_types``, or in all layers except each ``pattern``-th."""
    types = fields.get("layer_types")
    if types is None:
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[bool((layer + 1) % pattern)] for layer in range(layer_count(fields))]
    return windows_by_type(types, fields.get("sliding_window"))


# -- rotary positions -------------------------------------------------------------------------------------------------


def read_rope(
    fields: ConfigFields,
    layers: str | None = None,
    *,
    theta: str | None = "rope_theta",
    part: str = "partial_rotary_factor",
    kinds: Mapping[str, str] | None = None,
) -> tuple[Rope, float]:
    """Read the rotary positions and the fraction of each head that they rotate.

    Both spellings are understood: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.

    Args:
        fields: The config.json.
        layers: The layer type, in a family with one set of parameters per layer type.
        theta: The name of the field with the base; None: only the parameters themselves have it.
        part: The name of the field with the rotated fraction.
        kinds: Other names of kinds of scaling.

    """
    given = _given_rope(fields, layers)
    default = fields.declared.rope if layers is None else fields.declared.rope.get(layers, {})
    kept = (
        default
        if not given
        else {key: default[key] for key in ("rope_theta", "partial_rotary_factor") if key in default}
    )
    own = {"rope_theta": theta, "partial_rotary_factor": part}
    legacy = {key: fields.get(name) for key, name in own.items() if name is not None and fields.has(name)}
    rope = ConfigFields({**kept, **{key: value for key, value in legacy.items() if value is not None}, **given})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = (kinds or {}).get(str(kind), kind)
    if kind not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise UnsupportedModel(
            "config.json's rope scaling",
            expected=f"one of {known}",
            found=repr(kind),
            fix="use --backend torch, which runs the model's own code",
        )
    return _ROPES[kind](fields, rope), rope.number("partial_rotary_factor", 1.0)


def _given_rope(fields: ConfigFields, layers: str | None) -> Mapping[str, Any]:
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        raise ModelError("config.json's rope_parameters", expected="an object", found=repr(parameters or scaling)[:80])
    if layers is not None:
        nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
        if bool(nested) != bool(parameters):
            raise ModelError(
                "config.json's rope_parameters", expected="one set per layer type", found=repr(parameters)[:80]
            )
        return {**nested.get(layers, {}), **(scaling if layers == "full_attention" else {})}
    given = scaling or parameters
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("config.json's rope_parameters", expected="one set for all layers", found=repr(given)[:80])
    return given


def _default_rope(_fields: ConfigFields, rope: ConfigFields) -> Rope:
    return Rope(theta=rope.number("rope_theta"))


def _linear(_fields: ConfigFields, rope: ConfigFields) -> Rope:
    return Rope(theta=rope.number("rope_theta"), kind="linear", factor=rope.number("factor"))


def _llama3(fields: ConfigFields, rope: ConfigFields) -> Rope:
    return Rope(
        rope.number("rope_theta"),
        "llama3",
        rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_length=_original_length(fields, rope),
    )


def _yarn(fields: ConfigFields, rope: ConfigFields) -> Rope:
    original = _original_length(fields, rope)
    factor = rope.number("factor", fields.integer("max_position_embeddings", original) / original)
    amplitude = rope.number("attention_factor", _mscale(factor))
    if rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        amplitude = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return Rope(
        rope.number("rope_theta"),
        "yarn",
        factor,
        original_length=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        amplitude=amplitude,
    )


def _longrope(fields: ConfigFields, rope: ConfigFields) -> Rope:
    original = _original_length(fields, rope)
    factor = rope.number("factor", fields.integer("max_position_embeddings", original) / original)
    scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        rope.number("rope_theta"),
        "longrope",
        factor,
        original_length=original,
        amplitude=rope.number("attention_factor", scaled),
        short_factors=_factors(rope, "short_factor"),
        long_factors=_factors(rope, "long_factor"),
    )


def _factors(rope: ConfigFields, name: str) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"config.json's rope scaling {name}", expected="a list of numbers", found=repr(values)[:80])
    return tuple(float(value) for value in values)


_ROPES: Mapping[str, Callable[[ConfigFields, ConfigFields], Rope]] = {
    "default": _default_rope,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _original_length(fields: ConfigFields, rope: ConfigFields) -> int:
    """The config's own field has priority over the rope's, as in transformers; then the maximum length."""
    name = "original_max_position_embeddings"
    if fields.get(name) is not None:
        return fields.integer(name)
    return rope.integer(name) if rope.get(name) is not None else fields.integer("max_position_embeddings")


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
