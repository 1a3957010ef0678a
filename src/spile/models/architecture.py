"""The sizes and options of a decoder, which the one block function implements for all families, and its tensors.

Matrices have the layout ``[out, in]``; those of experts have one more dimension in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from spile.errors import ModelError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "rms_plus_one", "layer"]
"""``rms``: divide by the RMS; ``rms_plus_one``: the same, with weights that are stored minus 1; ``layer``: subtract the
mean first, and add a bias."""
NormPlace = Literal["pre", "post", "sandwich"]
"""Whether the input of attention and MLP is normed, their output, or both."""
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

WEIGHTS_FRACTION = 0.4
"""The fraction of a device's memory that weights may take before they are divided over more devices."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how the wavelengths were stretched for longer contexts."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    """The length of the context before it was stretched (llama3, yarn, longrope)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """A factor on cosines and sines (yarn, longrope); transformers calls it the attention factor."""
    short_factors: tuple[float, ...] = ()
    """longrope: by how much each wavelength is stretched in samples of at most ``original_length`` tokens."""
    long_factors: tuple[float, ...] = ()
    """The same in longer samples."""


@dataclass(frozen=True)
class Experts:
    """MLPs of which a router selects some for each token."""

    count: int
    per_token: int
    d_ff: int
    normalized: bool
    """Whether the weights of the selected experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP instead of experts."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and options of a decoder: everything besides the weights that its numbers depend on."""

    architecture: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMS norm over each head's queries and keys, before they are rotated."""
    tied: bool = False
    """The LM head is the embedding."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many positions a token attends to, including its own; None: all up to its own."""
    activation: Activation = "silu"
    norm: Norm = "rms"
    norm_place: NormPlace = "pre"
    flat_qk_norm: bool = False
    """Whether the norm of queries and keys is over all heads together instead of over each."""
    parallel: bool = False
    """Whether attention and MLP read the same residual stream and are added to it together."""
    gated: bool = True
    """The MLP has a gated branch: activation(gate·x) · (up·x). Else activation(up·x)."""
    rotary_dim: int | None = None
    """The number of rotated dimensions of each head; None: all."""
    local_rope: Rope | None = None
    """The rope of layers with a window, if it differs."""
    learned_positions: int | None = None
    """The number of positions with a learned embedding, if the family has these instead of rotations."""
    positions: int | None = None
    """The longest sample that the model was made for, in tokens; None if its config does not state it."""
    attention_scale: float | None = None
    """The factor on the scores; None: 1 / √head_dim."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    """The bound that tanh puts on the scores, and on the logits."""
    embedding_scale: float | None = None
    """A factor on the embeddings."""
    experts: Experts | None = None
    no_rope: tuple[int, ...] = ()
    """Layers without rotary positions."""
    rope_interleaved: bool = False
    """Whether the rotated pairs are neighbours (0, 1), (2, 3), … instead of (0, half), (1, half + 1), …"""
    residual_scale: float | None = None
    """A factor on the outputs of attention and MLP before they are added to the residual stream."""
    logits_divisor: float | None = None
    head_bias: bool = False
    shared_norm: bool = False
    """Whether attention and MLP read the output of the same norm."""
    sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax and belongs to no token."""
    expert_biases: bool = False
    """Whether the router and the experts have biases."""
    swiglu_limit: float | None = None
    """The clamp of gate and up in experts that compute (up + 1) · gate · sigmoid(alpha · gate)."""
    swiglu_alpha: float = 1.0

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name}", expected="at least 1", found=getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                "the model's heads", expected=f"a multiple of its {self.n_kv_heads} key/value heads", found=self.n_heads
            )
        if (self.rotary_dim or self.head_dim) % 2 and self.learned_positions is None:
            raise ModelError("the model's head_dim", expected="an even number", found=self.rotary_dim or self.head_dim)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.n_layers)
        if len(self.windows) != self.n_layers:
            raise ModelError("layer_types", expected=f"one for each of {self.n_layers} layers", found=len(self.windows))
        if self.experts is not None and not 0 < self.experts.per_token <= self.experts.count:
            raise ModelError(
                "config.json's num_experts_per_tok",
                expected=f"1 to its {self.experts.count} experts",
                found=self.experts.per_token,
            )

    def has_experts(self, layer: int | None) -> bool:
        """Return whether this layer has routed experts (None: whether any layer has)."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def sizes(self, layer: int | None = None) -> dict[str, int]:
        """Return the sizes of activation rows at a layer, by the names in the tap table; 0: it has no such tap."""
        routed = self.experts if self.has_experts(layer) else None
        return {
            "d_model": self.d_model,
            "d_mid": 0 if self.parallel else self.d_model,
            "d_ff": 0 if routed else self.d_ff,
            "heads": self.n_heads,
            "kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "experts": routed.count if routed else 0,
            "vocab": self.vocab_size,
        }

    def hashed_fields(self) -> dict[str, Any]:
        """Return everything for a hash; options from ``norm`` on only if they differ from their default."""
        values = asdict(self)
        for rope in (values["rope"], values["local_rope"] or {}):
            for name in ("short_factors", "long_factors"):
                if not rope.get(name):
                    rope.pop(name, None)
        names = [each.name for each in fields(self)]
        defaults = {each.name: each.default for each in fields(self)}
        since = names.index("norm")
        return {name: values[name] for name in names if names.index(name) < since or values[name] != defaults[name]}


Axes = tuple[str, ...]
"""Logical names of a tensor's dimensions; the worker maps them to the mesh."""


@dataclass(frozen=True)
class Tensor:
    """The shape of a weight."""

    shape: tuple[int, ...]
    axes: Axes

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stacked(self, count: int) -> Tensor:
        """Return the tensor that holds ``count`` of these, one per layer."""
        return Tensor((count, *self.shape), ("layers", *self.axes))


def _shaped(axes: Mapping[str, Axes], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    return {name: Tensor(tuple(sizes[axis] for axis in each), each) for name, each in axes.items()}


def model_tensors(config: ModelConfig, *, head: bool) -> Mapping[str, Tensor]:
    """Return the tensors that the model has once; with ``head``, the final norm and the LM head too."""
    axes: dict[str, Axes] = {"embed": ("vocab", "d_model")}
    if config.learned_positions is not None:
        axes["positions"] = ("positions", "d_model")
    if head:
        axes |= _norm("final_norm", config)
        axes |= {} if config.tied else {"head": ("vocab", "d_model")}
        axes |= {"head_bias": ("vocab",)} if config.head_bias else {}
    sizes = {"vocab": config.vocab_size, "d_model": config.d_model, "positions": config.learned_positions or 0}
    return _shaped(axes, sizes)


def layer_tensors(config: ModelConfig, layer: int) -> Mapping[str, Tensor]:
    """Return the tensors of one layer by field name, as far as the model has them."""
    routed = config.experts if config.has_experts(layer) else None
    axes = _attention(config) | _mlp(config, ("experts",) if routed else ())
    if config.norm_place != "post":
        axes |= _norm("attn_norm", config) | ({} if config.shared_norm else _norm("mlp_norm", config))
    if config.norm_place != "pre":
        axes |= _norm("attn_post_norm", config) | _norm("mlp_post_norm", config)
    sizes = {
        "d_model": config.d_model,
        "heads": config.n_heads * config.head_dim,
        "kv_heads": config.n_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "d_ff": routed.d_ff if routed else config.d_ff,
        "experts": routed.count if routed else 0,
    }
    return _shaped(axes, sizes) | ({"sinks": Tensor((config.n_heads,), ("heads",))} if config.sinks else {})


def _norm(name: str, config: ModelConfig) -> dict[str, Axes]:
    return {name: ("d_model",), f"{name}_bias": ("d_model",)} if config.norm == "layer" else {name: ("d_model",)}


def _attention(config: ModelConfig) -> dict[str, Axes]:
    outputs = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    axes: dict[str, Axes] = {name: (axis, "d_model") for name, axis in outputs.items()}
    axes["o"] = ("d_model", "heads")
    if config.qkv_bias:
        axes |= {f"{name}_bias": (axis,) for name, axis in outputs.items()}
    if config.o_bias:
        axes["o_bias"] = ("d_model",)
    if config.qk_norm:
        axes |= {f"{name}_norm": (outputs[name] if config.flat_qk_norm else "head_dim",) for name in ("q", "k")}
    return axes


def _mlp(config: ModelConfig, stacked: Axes) -> dict[str, Axes]:
    """Return the axes of one MLP, or of all experts."""
    inner = ("gate", "up") if config.gated or stacked else ("up",)
    axes: dict[str, Axes] = dict.fromkeys(inner, (*stacked, "d_ff", "d_model"))
    axes["down"] = (*stacked, "d_model", "d_ff")
    if config.expert_biases if stacked else config.mlp_bias:
        axes |= {f"{name}_bias": (*stacked, "d_ff") for name in inner}
        axes["down_bias"] = (*stacked, "d_model")
    if stacked:
        axes["router"] = (*stacked, "d_model")
        axes |= {"router_bias": stacked} if config.expert_biases else {}
    return axes


def parameter_count(config: ModelConfig) -> int:
    """Return the number of weights of the model, with the LM head unless it is the embedding."""
    layers = (layer_tensors(config, layer) for layer in range(config.n_layers))
    once = model_tensors(config, head=True)
    return sum(tensor.size for tensors in (once, *layers) for tensor in tensors.values())


def _layer_matmuls(config: ModelConfig, layer: int) -> float:
    """Return how many weights of one layer's matrices a token is multiplied with; of the experts, the selected ones."""
    part = config.experts.per_token / config.experts.count if config.experts is not None else 1.0
    parts = {1: 0.0, 2: 1.0, 3: part}
    tensors = layer_tensors(config, layer).items()
    return sum(parts[len(tensor.shape)] * tensor.size for name, tensor in tensors if not name.endswith("_bias"))


def flops_per_token(config: ModelConfig, seq_len: int, last_layer: int | None = None, *, head: bool = False) -> float:
    """Return the FLOPs per token of a sequence of this length through ``last_layer`` (None: all), and the LM head's.

    Attention counts the positions that a token attends to: half of them on average under a causal mask.
    """
    layers = config.n_layers if last_layer is None else last_layer + 1
    flops = 2.0 * config.vocab_size * config.d_model if head else 0.0
    for layer, window in enumerate(config.windows[:layers]):
        width = min(window or seq_len, seq_len)
        seen = (width * (width + 1) / 2 + (seq_len - width) * width) / max(seq_len, 1)
        flops += 2.0 * _layer_matmuls(config, layer) + 4.0 * config.n_heads * config.head_dim * seen
    return flops
