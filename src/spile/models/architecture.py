"""The sizes and options of a decoder, which the one block function implements for all families."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from spile.errors import ModelError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "rms_plus_one", "layer"]
"""``rms``: divide by the RMS; ``rms_plus_one``: with weights stored less 1; ``layer``: less the mean, with a bias."""
NormPlace = Literal["pre", "post", "sandwich"]
"""Whether the input of attention and MLP is normed, their output, or both."""
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


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
    attention_scale: float | None = None
    """The factor on the scores; None: 1 / √head_dim."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    """The bound that tanh puts on the scores, and on the logits."""
    embedding_scale: float | None = None
    experts: Experts | None = None
    no_rope: tuple[int, ...] = ()
    """Layers without rotary positions."""
    rope_interleaved: bool = False
    """Whether the rotated pairs are neighbours (0, 1), (2, 3), … instead of (0, half), (1, half + 1), …"""
    input_scale: float | None = None
    """A factor on the embeddings that is applied after the `embed` tap, not by the embedding itself."""
    residual_scale: float | None = None
    """A factor on what attention and MLP add to the residual stream."""
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

    def meaning(self) -> dict[str, Any]:
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
